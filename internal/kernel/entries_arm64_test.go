package kernel

// Page-table entries as arch/arm64/include/asm/pgtable-hwdef.h and pgtable-prot.h
// build them, since Linux 6.10. A frame is a physical address.

func mapped(frame uint64, writable bool) uint64 {
	const validPageUserAccessed, readOnly, write = 1<<0 | 1<<1 | 1<<6 | 1<<10, 1 << 7, 1 << 51
	if writable {
		return frame | validPageUserAccessed | write
	}
	return frame | validPageUserAccessed | readOnly
}

func dirty(e uint64) uint64   { return e | 1<<55 }
func special(e uint64) uint64 { return e | 1<<56 }
func uffdWP(e uint64) uint64  { return e | 1<<58 }
func huge(e uint64) uint64    { return e &^ (1 << 1) }

// noAccess is what NUMA balancing makes of an entry.
func noAccess(e uint64) uint64 { return e&^1 | 1<<11 }

func swapped(kind, offset uint64) uint64 { return kind<<6 | offset<<12 }
