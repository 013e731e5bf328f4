package kernel

// Programs on the exceptions tracepoints, which of the two architectures only
// x86 has had since 5.10.
var (
	tracepointEntries = []string{faultProgEnterPageFaultUser, faultProgEnterPageFaultKernel}
	announceKernel    = []string{faultProgAnnouncePageFaultKernel}
)
