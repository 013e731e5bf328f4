package workload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// device is the reading of a page that the kernel maps by a fault handler of its own:
// the code that it lends to every process, [vdso] (special_mapping_fault in mm/mmap.c).
// Pages of drivers come the same way, but no driver that has such a handler is in every
// machine.
type device struct{ pageCount }

func deviceFlags(fs *pflag.FlagSet) program {
	d := &device{}
	d.declare(fs, 256)
	return d
}

func (d *device) lay(p *plan) error {
	page, err := vdsoPage(p.pageSize)
	if err != nil {
		return err
	}
	result, err := p.mapMemory(p.pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS, -1, 0)
	if err != nil {
		return err
	}
	other, err := p.mapAnon(p.pageSize)
	if err != nil {
		return err
	}
	c := &vdsoChild{page: page, other: other, rounds: d.pages, usage: (*[2]unix.Rusage)(unsafe.Pointer(unsafe.SliceData(result)))}
	r := wholeRange(page, fault.Read, fault.Device, p.pageSize)
	r.Faults = int64(d.pages)
	r.Minor = r.Faults
	if err := p.addJob(&job{
		ranges: []Range{r}, memory: [][]byte{page}, toucher: c, check: c.check, counted: c.counted,
	}); err != nil {
		return err
	}
	// In a child, whose only thread does not ask for the time meanwhile.
	err = c.start()
	p.onClose(c.end)
	p.pid = c.pid
	return err
}

// vdsoPage is the first page of [vdso], which the kernel tells by AT_SYSINFO_EHDR.
func vdsoPage(pageSize int) ([]byte, error) {
	const sysinfoEHDR = 33
	aux, err := os.ReadFile("/proc/self/auxv")
	if err != nil {
		return nil, fmt.Errorf("looking for [vdso]: %w", err)
	}
	for ; len(aux) >= 16; aux = aux[16:] {
		if binary.NativeEndian.Uint64(aux) == sysinfoEHDR {
			at := uintptr(binary.NativeEndian.Uint64(aux[8:]))
			return unsafe.Slice((*byte)(unsafe.Add(nil, at)), pageSize), nil
		}
	}
	return nil, errors.New("looking for [vdso]: this kernel has none (vdso=0)")
}

// vdsoChild is a forked process that drops and reads the page when it is told to.
type vdsoChild struct {
	page       []byte
	other      []byte // for the rehearsal
	rounds     int
	usage      *[2]unix.Rusage // before and after, shared with the child
	pid        int
	tell, told [2]int // pipes
	failed     unix.Errno
}

func (c *vdsoChild) start() (err error) {
	for _, pipe := range []*[2]int{&c.tell, &c.told} {
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("opening a pipe: %w", err)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		runtime.LockOSThread() // never unlocked, the thread ends with the goroutine
		if err = blockSignals(); err != nil {
			return
		}
		syscall.ForkLock.Lock()
		defer syscall.ForkLock.Unlock()
		pid, errno := c.fork()
		if errno != 0 {
			err = fmt.Errorf("forking: %w", errno)
		}
		c.pid = int(pid)
	})
	wg.Wait()
	return err
}

// fork makes the child; what it does is subject to the rules of [rawFork].
//
//go:noinline
//go:norace
//go:nosplit
func (c *vdsoChild) fork() (uintptr, unix.Errno) {
	var buf [1]byte
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(c.tell[1]), 0, 0)
	unix.RawSyscall(unix.SYS_READ, uintptr(c.tell[0]), uintptr(unsafe.Pointer(&buf)), 1)
	// Once before, so that all else is resident: the child copies what it writes to.
	dropAndRead(c.other)
	readUsage(&c.usage[0])
	for range c.rounds {
		dropAndRead(c.page)
	}
	readUsage(&c.usage[1])
	unix.RawSyscall(unix.SYS_WRITE, uintptr(c.told[1]), uintptr(unsafe.Pointer(&buf)), 1)
	unix.RawSyscall(unix.SYS_READ, uintptr(c.tell[0]), uintptr(unsafe.Pointer(&buf)), 1)
	for {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
}

//go:norace
//go:nosplit
func dropAndRead(page []byte) {
	dropPages(page)
	readPages(page, len(page))
}

//go:norace
//go:nosplit
func (c *vdsoChild) touch(memory [][]byte) {
	if unsafe.SliceData(memory[0]) != unsafe.SliceData(c.page) {
		return // the rehearsal
	}
	var buf [1]byte
	_, _, c.failed = unix.RawSyscall(unix.SYS_WRITE, uintptr(c.tell[1]), uintptr(unsafe.Pointer(&buf)), 1)
	if c.failed == 0 {
		_, _, c.failed = unix.RawSyscall(unix.SYS_READ, uintptr(c.told[0]), uintptr(unsafe.Pointer(&buf)), 1)
	}
}

func (c *vdsoChild) check() error {
	if c.failed != 0 {
		return fmt.Errorf("waiting for child %d: %w", c.pid, c.failed)
	}
	return nil
}

func (c *vdsoChild) counted() Counted {
	return growth(&c.usage[0], &c.usage[1])
}

// end lets the child exit and gives everything back.
func (c *vdsoChild) end() error {
	var errs []error
	for _, fd := range []int{c.tell[1], c.tell[0], c.told[0], c.told[1]} {
		if fd > 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	if c.pid > 0 {
		errs = append(errs, reap(c.pid))
	}
	return errors.Join(errs...)
}
