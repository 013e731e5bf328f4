package kernel

// frameBits are those of a page-table entry that say where a page is, or was: ENTRY_FRAME
// of bpf/pagetable.h.
const frameBits = 0x000ffffffffff000

// Programs on the exceptions tracepoints, which of the two architectures only
// x86 has had since 5.10.
var (
	tracepointEntries = []string{faultProgEnterPageFaultUser, faultProgEnterPageFaultKernel}
	announceKernel    = []string{faultProgAnnouncePageFaultKernel}
)

// present says that an entry maps something, as entry_present of bpf/pagetable.h.
func present(entry uint64) bool { return entry&1 != 0 }
