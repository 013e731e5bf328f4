package workload

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forkIdle forks the process and returns the id of the child, which shares all
// memory by copy on write and does nothing. It lives until the plan is closed or
// this process dies.
func (p *plan) forkIdle() (int, error) {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return 0, fmt.Errorf("opening a pipe: %w", err)
	}
	pid, err := forkReader(pipe[0], pipe[1])
	err = errors.Join(err, unix.Close(pipe[0]))
	if pid <= 0 {
		return 0, errors.Join(err, unix.Close(pipe[1]))
	}
	p.onClose(func() error {
		if err := unix.Close(pipe[1]); err != nil { // the child reads the end of file and exits
			return fmt.Errorf("releasing child %d: %w", pid, err)
		}
		for {
			_, err := unix.Wait4(pid, nil, 0, nil)
			switch {
			case err == nil:
				return nil
			case !errors.Is(err, unix.EINTR):
				return fmt.Errorf("waiting for child %d: %w", pid, err)
			}
		}
	})
	return pid, err
}

// forkReader forks on a thread that is thrown away afterwards: its signals are
// blocked so that no handler of the Go runtime runs in the child.
func forkReader(r, w int) (pid int, err error) {
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // never unlocked, the thread ends with the goroutine
		if err = blockSignals(); err != nil {
			return
		}
		// As os/exec does, so that no other fork is half way.
		syscall.ForkLock.Lock()
		defer syscall.ForkLock.Unlock()
		id, errno := rawFork(r, w)
		if errno != 0 {
			err = fmt.Errorf("forking: %w", errno)
		}
		pid = int(id)
	})
	wg.Wait()
	return pid, err
}

// rawFork forks as fork(2) does. The child has one thread of a Go program and no
// runtime, so it may only make raw system calls: nothing here may allocate, grow
// the stack or be instrumented. Compare forkAndExecInChild in package syscall.
//
//go:noinline
//go:norace
//go:nosplit
func rawFork(r, w int) (uintptr, unix.Errno) {
	var buf [1]byte
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	// The child's own copy of the writing end would keep the pipe open.
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(w), 0, 0)
	unix.RawSyscall(unix.SYS_READ, uintptr(r), uintptr(unsafe.Pointer(&buf)), 1)
	for {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
}
