package kernel

// Page-table entries as arch/x86/include/asm/pgtable_types.h builds them. A frame is
// a physical address.

func mapped(frame uint64, writable bool) uint64 {
	const presentUserAccessed = 1<<0 | 1<<2 | 1<<5
	e := frame | presentUserAccessed
	if writable {
		e |= 1 << 1
	}
	return e
}

func dirty(e uint64) uint64   { return e | 1<<6 }
func special(e uint64) uint64 { return e | 1<<9 }
func uffdWP(e uint64) uint64  { return e | 1<<10 }
func huge(e uint64) uint64    { return e | 1<<7 }

// noAccess is what NUMA balancing makes of an entry: not present, PROTNONE, the frame
// inverted.
func noAccess(e uint64) uint64 {
	const frame = 0x000ffffffffff000
	return (e&^1 | 1<<8) ^ frame
}

func swapped(kind, offset uint64) uint64 { return kind<<59 | ^offset<<9&(1<<59-1)&^(1<<9-1) }
