// Package memlock lets tests load the unwinder of any language where root may not raise
// RLIMIT_MEMLOCK, which it insists on and no kernel since 5.11 asks for.
package memlock

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Allow answers attempts of this process and its children to set RLIMIT_MEMLOCK
// with success, by a seccomp filter, if the kernel refuses them. Reading limits passes.
func Allow() error {
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	var before unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &unlimited, &before); err == nil {
		return unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &before, nil)
	}
	// Offsets in struct seccomp_data (include/uapi/linux/seccomp.h): nr, and the low halves
	// of the second and third argument.
	const nr, resource, limit = 0, 24, 32
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	equal := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	answer := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	filter := []unix.SockFilter{
		load(nr),
		equal(unix.SYS_PRLIMIT64, 0, 6),
		load(resource),
		equal(unix.RLIMIT_MEMLOCK, 0, 4),
		load(limit),
		equal(0, 0, 1),
		load(limit + 4), // the pointer's other half
		equal(0, 0, 1),
		answer(unix.SECCOMP_RET_ALLOW),
		answer(unix.SECCOMP_RET_ERRNO), // of errno 0
	}
	// The jumps of the first three tests end at ALLOW; a pointer that is not nil at ERRNO.
	filter[5] = equal(0, 0, 3)
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return fmt.Errorf("installing a seccomp filter: %w", errno)
	}
	return nil
}
