package workload

// OwnArea is above the Go heap, which begins at random in the lower half of the address
// space (randomizeHeapBase in runtime/malloc.go, Go 1.26).
const OwnArea = 0x6e0000000000
