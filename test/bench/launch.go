package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// launch replaces this process by a rival's command line, in an environment in
// which the rival works: tracefs is mounted, in a mount namespace of its own, and
// raising RLIMIT_MEMLOCK seems to succeed. bpftrace 0.17 gives up where it may not
// raise that limit, although kernels since 5.11 do not charge BPF memory to it.
// It returns only on error.
func launch(argv []string) error {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := mountTracefs(); err != nil {
		return err
	}
	if err := answerMemlock(); err != nil {
		return fmt.Errorf("installing the seccomp filter: %w", err)
	}
	return unix.Exec(path, argv, os.Environ())
}

func mountTracefs() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	for _, m := range []struct{ fs, dir string }{
		{"tracefs", "/sys/kernel/tracing"},
		{"debugfs", "/sys/kernel/debug"}, // bpftrace looks for tracefs below it
	} {
		if err := unix.Mount(m.fs, m.dir, m.fs, 0, ""); err != nil && err != unix.EBUSY {
			return fmt.Errorf("mounting %s: %w", m.fs, err)
		}
	}
	return nil
}

// answerMemlock makes prlimit64 with a new RLIMIT_MEMLOCK return success without
// doing anything, for this thread and what it becomes. Reading limits works as ever.
func answerMemlock() error {
	// Offsets in struct seccomp_data; arguments are 64 bits, low word first.
	const nr, resource, newLow, newHigh = 0, 24, 32, 36
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	jumpIf := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no, K: k}
	}
	filter := []unix.SockFilter{
		load(nr), jumpIf(unix.SYS_PRLIMIT64, 0, 7),
		load(resource), jumpIf(unix.RLIMIT_MEMLOCK, 0, 5),
		load(newLow), jumpIf(0, 0, 2),
		load(newHigh), jumpIf(0, 1, 0),
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0)
}
