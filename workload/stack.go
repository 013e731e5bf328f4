package workload

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// stack is a thread with a stack and a TLS base as pthread_create gives them. Threads of
// Go have theirs in its heap.
type stack struct{ pageCount }

func stackFlags(fs *pflag.FlagSet) program {
	s := &stack{}
	s.declare(fs, 64)
	return s
}

// stackGap is how many pages stay unused between the stack and what is below it: more
// than any thread might touch beyond its stack pointer.
const stackGap = 16

func (s *stack) lay(p *plan) error {
	size := s.pages * p.pageSize
	var mappings [2][]byte // to work on and to rehearse on
	for i := range mappings {
		b, err := p.mapAnon(2*size + (stackGap+1)*p.pageSize)
		if err != nil {
			return err
		}
		// The word at the TLS base is its own address, by the psABI of x86-64.
		tls := b[len(b)-p.pageSize/2:]
		*(*Address)(unsafe.Pointer(unsafe.SliceData(tls))) = addressOf(tls)
		mappings[i] = b
	}
	shared, err := p.mapAnon((int(unsafe.Sizeof(stackThread{})) + p.pageSize - 1) &^ (p.pageSize - 1))
	if err != nil {
		return err
	}
	touchPages(shared, p.pageSize)
	r := &stackRunner{
		thread: (*stackThread)(unsafe.Pointer(unsafe.SliceData(shared))),
		pages:  s.pages, pageSize: p.pageSize,
	}
	b := mappings[0]
	j := &job{
		ranges: []Range{
			wholeRange(b[len(b)-p.pageSize-size:len(b)-p.pageSize], fault.Write, fault.Anon, p.pageSize),
			wholeRange(b[:size], fault.Write, fault.Anon, p.pageSize),
		},
		memory: mappings[:1], rehearsal: mappings[1:], toucher: r,
		counted: r.counted, taker: r.taker,
	}
	j.check = func() error {
		if r.failed != 0 {
			return fmt.Errorf("starting a thread: %w", r.failed)
		}
		j.ranges[0].Label = fmt.Sprintf("[stack:%d]", r.tid)
		j.ranges[1].Label = "[anon]"
		return nil
	}
	return p.addJob(j)
}

// stackThread is what the thread is told and what it tells.
type stackThread struct {
	top, tls      Address // the stack pointer at first, and the TLS base
	other         Address // the first page elsewhere
	pages, stride uintptr // of each
	before, after unix.Rusage
	running       uint32 // cleared by the kernel when it has ended
}

// cloneOnStack calls clone(2) with the stack, the TLS base and the word running of t and
// returns what that returns. The new thread pushes its stack down by a page and writes
// there, then writes to a page elsewhere, and so on until all pages are touched; it
// reads its usage before and after, and exits. It has no g: nothing of Go must run on it.
//
//go:noescape
func cloneOnStack(t *stackThread, flags uintptr) int

// stackRunner starts the thread and waits for its end.
type stackRunner struct {
	thread          *stackThread // resident
	pages, pageSize int
	rehearsed       bool
	tid             int
	failed          unix.Errno
}

//go:norace
//go:nosplit
func (r *stackRunner) touch(memory [][]byte) {
	t, b := r.thread, memory[0]
	t.other = addressOf(b)
	t.top = t.other + Address(len(b)-r.pageSize)
	t.tls = t.top + Address(r.pageSize/2)
	t.pages, t.stride = uintptr(r.pages), uintptr(r.pageSize)
	t.running = 1
	// All signals are blocked (setUp), and are so in the new thread.
	tid := cloneOnStack(t, unix.CLONE_VM|unix.CLONE_FS|unix.CLONE_FILES|unix.CLONE_SIGHAND|unix.CLONE_THREAD|
		unix.CLONE_SYSVSEM|unix.CLONE_SETTLS|unix.CLONE_CHILD_CLEARTID)
	if tid < 0 {
		r.failed = unix.Errno(-tid)
		return
	}
	for atomic.LoadUint32(&t.running) != 0 {
		const wait = 0 // FUTEX_WAIT
		unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&t.running)), wait, 1, 0, 0, 0)
	}
	if r.rehearsed {
		r.tid = tid
	}
	r.rehearsed = true
}

func (r *stackRunner) taker() int { return r.tid }

func (r *stackRunner) counted() Counted {
	return growth(&r.thread.before, &r.thread.after)
}
