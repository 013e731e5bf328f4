package kernel

// The arm64 object has no programs on the exceptions tracepoints: the
// architecture raises none of them.
var tracepointEntries, announceKernel []string
