package workload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// plan is the work of a kind, laid out and ready to start.
type plan struct {
	mode     fault.Mode
	pageSize int // of the system, bytes
	// faultSize is what one fault maps, in bytes.
	faultSize int
	target    int
	// pid is the process that takes the faults, if it is another one.
	pid  int
	file string
	jobs []*job
	// start, if not nil, is called right before the threads are let go. The context
	// is the one given to Run.
	start   func(context.Context)
	closers []func() error
	mapped  int // bytes of OwnArea
}

// toucher takes the faults. Its method, and what that calls, must be nosplit; see
// [thread.count].
type toucher interface {
	touch(memory [][]byte)
}

// job is the work of one thread.
type job struct {
	ranges []Range
	// memory is what toucher gets when it counts. Before, it is called once with
	// rehearsal, so that its code, its stack and what it reads are resident.
	memory, rehearsal [][]byte
	toucher           toucher
	// pinned keeps the thread on CPU cpu.
	pinned bool
	cpu    int
	// check, if not nil, is called after the touching. It returns what went wrong and
	// may correct ranges.
	check func() error
	// counted, if not nil, is the kernel's count of the faults, if not the thread's.
	counted func() Counted
	// taker, if not nil, is the thread that takes the faults, if it is another one; 0 before.
	taker func() int
	// last, if not nil, is called on the thread when the report is written.
	last func()
}

func newPlan() *plan {
	size := os.Getpagesize()
	return &plan{pageSize: size, faultSize: size}
}

// onClose has f called when the work is over, before what was given earlier.
func (p *plan) onClose(f func() error) { p.closers = append(p.closers, f) }

func (p *plan) close() error {
	var errs []error
	for _, f := range slices.Backward(p.closers) {
		errs = append(errs, f())
	}
	p.closers = nil
	return errors.Join(errs...)
}

// addJob adds a job that faults in memory as ranges say. A job without a rehearsal
// gets a few pages, so that every branch of a loop is taken.
func (p *plan) addJob(j *job) error {
	if j.rehearsal == nil {
		const few = 4
		b, err := p.mapAnon(few * p.pageSize)
		if err != nil {
			return err
		}
		touchPages(b, p.pageSize)
		j.rehearsal = [][]byte{b}
	}
	p.jobs = append(p.jobs, j)
	return nil
}

// writer returns the usual toucher: one write to each page of the system's size.
func (p *plan) writer() toucher { return writeEach{p.pageSize} }

// OwnAreaSize is how many bytes from [OwnArea] on are for the memory that faults are counted
// in, with the fixed addresses of kind where at its end. Neither the kernel nor the Go
// runtime puts anything there of itself, so a tracer that watches the whole life of the
// process sees no other faults at these addresses. Where the address space is smaller the
// kernel chooses another place.
const OwnAreaSize = WhereData - OwnArea + 1<<21

// mapMemory maps n bytes behind the last ones, until the plan is closed.
func (p *plan) mapMemory(n, prot, flags, fd int, offset int64) ([]byte, error) {
	b, err := p.mapAt(unsafe.Add(nil, OwnArea+p.mapped), n, prot, flags, fd, offset)
	p.mapped += n
	return b, err
}

func (p *plan) mapAt(addr unsafe.Pointer, n, prot, flags, fd int, offset int64) ([]byte, error) {
	ptr, err := unix.MmapPtr(fd, offset, addr, uintptr(n), prot, flags)
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes: %w", n, err)
	}
	p.onClose(func() error {
		if err := unix.MunmapPtr(ptr, uintptr(n)); err != nil {
			return fmt.Errorf("unmapping %d bytes: %w", n, err)
		}
		return nil
	})
	return unsafe.Slice((*byte)(ptr), n), nil
}

// mapAnon maps n bytes of private anonymous memory that gets no huge pages.
func (p *plan) mapAnon(n int) ([]byte, error) {
	b, err := p.mapMemory(n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
	if err != nil {
		return nil, err
	}
	return b, noHugePages(b)
}

// mapTouched maps n bytes of memory whose pages all exist, though no fault was
// taken where they are: they were moved there. fill writes to them before.
func (p *plan) mapTouched(n int, fill func([]byte)) ([]byte, error) {
	to, err := p.mapMemory(n, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
	if err != nil {
		return nil, err
	}
	from, err := unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes: %w", n, err)
	}
	b := unsafe.Slice((*byte)(from), n)
	if err := noHugePages(b); err != nil {
		return nil, errors.Join(err, unix.MunmapPtr(from, uintptr(n)))
	}
	fill(b)
	if _, err := unix.MremapPtr(from, uintptr(n), unsafe.Pointer(unsafe.SliceData(to)), uintptr(n),
		unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED); err != nil {
		return nil, errors.Join(fmt.Errorf("moving %d bytes: %w", n, err), unix.MunmapPtr(from, uintptr(n)))
	}
	return to, nil
}

// noHugePages has b backed by pages of the system's size only.
func noHugePages(b []byte) error {
	// EINVAL: the kernel was built without transparent huge pages.
	if err := unix.Madvise(b, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("advising against huge pages: %w", err)
	}
	return nil
}
