package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

const (
	selfTestTimeout = 2 * time.Second
	selfTestOffset  = 0x123 // in the page; shows that the exact address arrives
)

// selfTest faults one page of the tool's own in and compares what the hook says
// with what is known of it. It runs before the filters are armed.
func (l *Live) selfTest() error {
	mem, err := FreshPages(3)
	if err != nil {
		return err
	}
	defer unix.Munmap(mem)
	return l.selfTestOn(mem)
}

// selfTestOn runs the self-test on the second of three pages, and compares its record with
// what the kernel says of the same fault, where it can be asked.
func (l *Live) selfTestOn(mem []byte) (err error) {
	name := l.plan.PTEFault
	if name == "" {
		_, err := l.takeSelfTest(mem)
		return err
	}
	// It is asked for the faults of this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	w, err := watchVMFault(name, addressOf(mem)+uint64(os.Getpagesize()))
	if err != nil {
		sys := ReadSystem()
		l.compared = fmt.Sprintf("not compared with %s: %s", name, sys.kprobeRefusal("setting kprobes on it", err).Found)
		_, err := l.takeSelfTest(mem)
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	got, err := l.takeSelfTest(mem)
	if err != nil {
		return err
	}
	seen, err := w.seen()
	if err != nil {
		return err
	}
	l.compared, err = compareVMFault(got, &seen, name)
	return err
}

// takeSelfTest writes to the second of three pages and returns the record of it, which
// agrees with what is known of that.
func (l *Live) takeSelfTest(mem []byte) (*fault.Fault, error) {
	page := os.Getpagesize()
	want := addressOf(mem) + uint64(page) + selfTestOffset
	start := want &^ uint64(page-1)
	l.decoder.selftest = nil
	if err := l.setSelfTest(start, start+uint64(page)); err != nil {
		return nil, err
	}
	release, err := holdSignals()
	if err != nil {
		return nil, err
	}
	mem[page+selfTestOffset] = 1
	tid := uint32(unix.Gettid())
	// The tracepoint hook learns of a failed completion only at the next fault.
	release()

	got, err := l.awaitSelfTest()
	if err != nil {
		return nil, err
	}
	if err := l.setSelfTest(0, 0); err != nil {
		return nil, err
	}
	return got, checkSelfTest(got, want, tid, addressOf(mem), addressOf(mem)+uint64(len(mem)))
}

// holdSignals keeps the calling goroutine on its thread and signals of the Go runtime off it,
// until it is released. One that comes while a fault waits for a lock ends it, and the page
// faults again (fault_signal_pending in include/linux/sched/signal.h). Before Linux 6.0 one may
// come between the two attempts of a write to shared memory: the page is there when the
// handler returns, so that the fault is never completed.
func holdSignals() (release func(), err error) {
	runtime.LockOSThread()
	all, old := unix.Sigset_t{}, unix.Sigset_t{}
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &all, &old); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("holding signals back: %w", err)
	}
	return func() {
		// It only fails for a bad argument.
		_ = unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil)
		runtime.UnlockOSThread()
	}, nil
}

// FreshPages maps n pages that no huge page will fill, to be unmapped by the caller. Memory
// that may be touched at once would be merged with a neighbour, the heap of the Go runtime for
// instance, and another thread's fault in that one could fill both.
func FreshPages(n int) ([]byte, error) {
	mem, err := unix.Mmap(-1, 0, n*os.Getpagesize(), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("mapping pages: %w", err)
	}
	// A kernel without huge pages refuses the advice, and needs none.
	_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	if err := unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return nil, errors.Join(fmt.Errorf("opening pages: %w", err), unix.Munmap(mem))
	}
	return mem, nil
}

func (l *Live) setSelfTest(start, end uint64) error {
	err := l.coll.Variables[faultVarSelftestStart].Set(start)
	if err == nil {
		err = l.coll.Variables[faultVarSelftestEnd].Set(end)
	}
	if err != nil {
		return fmt.Errorf("announcing the page: %w", err)
	}
	return nil
}

func (l *Live) awaitSelfTest() (*fault.Fault, error) {
	l.reader.SetDeadline(time.Now().Add(selfTestTimeout))
	for {
		err := l.reader.ReadInto(&l.record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, fmt.Errorf("no record arrived within %v", selfTestTimeout)
		} else if err != nil {
			return nil, fmt.Errorf("reading the ring buffer: %w", err)
		}
		l.decoder.decode(l.record.RawSample)
		if l.decoder.selftest != nil {
			return l.decoder.selftest, nil
		}
	}
}

// checkSelfTest compares a record with a write to address by thread tid in a
// mapping that covers at least [start, end).
func checkSelfTest(f *fault.Fault, address uint64, tid uint32, start, end uint64) error {
	switch {
	case f.Address != address:
		return fmt.Errorf("address %#x instead of %#x", f.Address, address)
	case !f.Is(fault.HasAccess) || f.Access != fault.Write:
		return fmt.Errorf("access %v instead of write", f.Access)
	case f.Mode != fault.User:
		return fmt.Errorf("mode %v instead of user", f.Mode)
	case !f.OK() || f.Major:
		return fmt.Errorf("result %v, major %v instead of a minor fault", f.Result, f.Major)
	case f.TID != tid:
		return fmt.Errorf("tid %d instead of %d", f.TID, tid)
	case !f.Is(fault.HasVMA):
		return errors.New("the mapping is unknown")
	case f.VMA.Start > start || f.VMA.End < end:
		return fmt.Errorf("mapping %#x-%#x does not hold %#x-%#x", f.VMA.Start, f.VMA.End, start, end)
	case f.VMA.Perm() != "rw-p":
		return fmt.Errorf("permissions %s instead of rw-p", f.VMA.Perm())
	}
	return nil
}

// addressOf is where a mapping made by unix.Mmap begins.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&mem[0]))) }
