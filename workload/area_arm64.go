package workload

// OwnArea is above the Go heap, which begins at random in the lower half of the address
// space (randomizeHeapBase in runtime/malloc.go, Go 1.26), which is twice that of amd64.
const OwnArea = 0xae0000000000
