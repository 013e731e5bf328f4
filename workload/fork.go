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

// forkIdle is [forkIdle] with a child that lives until the plan is closed.
func (p *plan) forkIdle() (int, error) {
	pid, release, err := forkIdle()
	p.onClose(release)
	return pid, err
}

// forkIdle forks the process and returns the id of the child, which shares all
// memory by copy on write and does nothing. It lives until release is called, which
// the caller must do in any case, or this process dies.
func forkIdle() (pid int, release func() error, err error) {
	nothing := func() error { return nil }
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return 0, nothing, fmt.Errorf("opening a pipe: %w", err)
	}
	pid, err = forkReader(pipe[0], pipe[1])
	err = errors.Join(err, unix.Close(pipe[0]))
	if pid <= 0 {
		return 0, nothing, errors.Join(err, unix.Close(pipe[1]))
	}
	return pid, func() error {
		if err := unix.Close(pipe[1]); err != nil { // the child reads the end of file and exits
			return fmt.Errorf("releasing child %d: %w", pid, err)
		}
		return reap(pid)
	}, err
}

// reap waits for the end of a child.
func reap(pid int) error {
	for {
		_, err := unix.Wait4(pid, nil, 0, nil)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("waiting for child %d: %w", pid, err)
		}
	}
}

// anyCPU is one that this process may run on.
func anyCPU() (int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, fmt.Errorf("asking for CPUs: %w", err)
	}
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			return cpu, nil
		}
	}
	return 0, errors.New("asking for CPUs: none is allowed")
}

// onCPU calls f on a thread that stays on one CPU and is thrown away afterwards.
func onCPU(cpu int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		var set unix.CPUSet
		set.Set(cpu)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			done <- fmt.Errorf("pinning a thread to CPU %d: %w", cpu, err)
			return
		}
		done <- f()
	}()
	return <-done
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
