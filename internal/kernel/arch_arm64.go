package kernel

// frameBits are those of a page-table entry that say where a page is, or was: ENTRY_FRAME
// of bpf/pagetable.h.
const frameBits = 0x0003fffffffff000

// The arm64 object has no programs on the exceptions tracepoints: the
// architecture raises none of them.
var tracepointEntries, announceKernel []string

// present says that an entry maps something, as entry_present of bpf/pagetable.h.
func present(entry uint64) bool { return entry&1 != 0 }
