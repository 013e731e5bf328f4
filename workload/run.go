package workload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// Run takes the faults and writes one line of JSON, a [Report], to w, and before it
// the early one of --hold. Cancelling ctx ends the waiting and a storm, but no other
// touching. The flags must be valid.
func (c *Command) Run(ctx context.Context, w io.Writer) (err error) {
	defer quietRuntime()()
	p := newPlan()
	defer func() { err = errors.Join(err, p.close()) }()
	if err := c.program.lay(p); err != nil {
		return fmt.Errorf("preparing workload %s: %w", c.kind.Name, err)
	}
	return c.execute(ctx, p, w)
}

// quietRuntime keeps the garbage collector from running until the returned
// function is called.
func quietRuntime() func() {
	percent := debug.SetGCPercent(-1)
	runtime.GC() // ends a collection that is under way
	return func() { debug.SetGCPercent(percent) }
}

func (c *Command) execute(ctx context.Context, p *plan, w io.Writer) error {
	// A thread in a page fault keeps its P: let the others run all the same.
	old := runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), min(len(p.jobs), runtime.NumCPU())+2))
	defer runtime.GOMAXPROCS(old)

	// Only the end of this function sends threads home: all of them pass a gate or none.
	working, dismiss := context.WithCancel(context.WithoutCancel(ctx))
	defer dismiss()
	crew := newCrew(p, c.name)
	if err := crew.assemble(working); err != nil {
		return err
	}
	if c.hold > 0 {
		early := c.report(p, crew)
		early.Ready = true
		if err := early.write(w); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("holding: %w", context.Cause(ctx))
		case <-time.After(c.hold):
		}
	}
	if p.start != nil {
		p.start(ctx)
	}
	if err := crew.work(); err != nil {
		return fmt.Errorf("taking the faults of workload %s: %w", c.kind.Name, err)
	}
	final := c.report(p, crew)
	final.total()
	if err := final.write(w); err != nil {
		return err
	}
	return crew.finish()
}

func (c *Command) report(p *plan, crew *crew) *Report {
	r := &Report{
		Type: reportType, Kind: c.kind.Name, PID: os.Getpid(), Target: p.target, File: p.file,
		PageSize: p.faultSize, Mode: p.mode.String(),
	}
	if p.pid != 0 {
		r.PID = p.pid
	}
	for _, t := range crew.threads {
		if p.pid != 0 {
			t.tid = p.pid
		}
		if t.job.taker != nil {
			t.tid = t.job.taker()
		}
		r.Threads = append(r.Threads, Thread{TID: t.tid, Comm: t.comm.String(), Ranges: t.job.ranges, Counted: t.counted()})
	}
	r.total()
	return r
}

// crew is the threads of a plan. They pass three gates together.
type crew struct {
	threads               []*thread
	assembled, done, gone chan error
	start, end            chan struct{}
}

// thread is one locked operating-system thread.
type thread struct {
	job           *job
	name          string
	tid           int
	comm          fault.Comm
	before, after unix.Rusage
}

func newCrew(p *plan, name string) *crew {
	c := &crew{
		assembled: make(chan error), done: make(chan error), gone: make(chan error),
		start: make(chan struct{}), end: make(chan struct{}),
	}
	for _, j := range p.jobs {
		c.threads = append(c.threads, &thread{job: j, name: name})
	}
	return c
}

// assemble starts the threads and returns when all have rehearsed. They end when
// ctx does, or after finish.
func (c *crew) assemble(ctx context.Context) error {
	for _, t := range c.threads {
		go c.run(ctx, t)
	}
	return c.gather(c.assembled)
}

// work lets the threads touch their memory.
func (c *crew) work() error {
	close(c.start)
	return c.gather(c.done)
}

// finish lets them do what comes after the report.
func (c *crew) finish() error {
	close(c.end)
	return c.gather(c.gone)
}

func (c *crew) gather(gate <-chan error) error {
	var errs []error
	for range c.threads {
		errs = append(errs, <-gate)
	}
	return errors.Join(errs...)
}

func (c *crew) run(ctx context.Context, t *thread) {
	// Never unlocked: so the thread ends with the goroutine, and its name, signal
	// mask and CPU with it.
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread's name and id are those of the process: it stays idle.
		worker := make(chan struct{})
		go func() {
			defer close(worker)
			c.run(ctx, t)
		}()
		<-worker
		return
	}
	err := t.setUp()
	if err == nil {
		t.count(t.job.rehearsal)
		t.before, t.after = unix.Rusage{}, unix.Rusage{}
	}
	c.assembled <- err
	select {
	case <-ctx.Done():
		return
	case <-c.start:
	}
	t.count(t.job.memory)
	if t.job.check != nil {
		err = t.job.check()
	}
	c.done <- err
	select {
	case <-ctx.Done():
		return
	case <-c.end:
	}
	if t.job.last != nil {
		t.job.last()
	}
	c.gone <- nil
}

// setUp gives the thread its name and CPU and blocks all signals, so that neither
// the runtime's preemption nor anything else runs a handler on it. A signal that a
// fault of its own forces on it then kills the process: the kernel resets a blocked
// one to the default action (force_sig_info_to_task in kernel/signal.c).
func (t *thread) setUp() error {
	t.tid = unix.Gettid()
	if t.name != "" {
		name := fault.MakeComm(t.name)
		if err := unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name)), 0, 0, 0); err != nil {
			return fmt.Errorf("naming the thread: %w", err)
		}
	}
	if err := unix.Prctl(unix.PR_GET_NAME, uintptr(unsafe.Pointer(&t.comm)), 0, 0, 0); err != nil {
		return fmt.Errorf("reading the thread's name: %w", err)
	}
	if t.job.pinned {
		var set unix.CPUSet
		set.Set(t.job.cpu)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			return fmt.Errorf("pinning a thread to CPU %d: %w", t.job.cpu, err)
		}
	}
	return blockSignals()
}

// blockSignals blocks all signals for the calling thread.
func blockSignals() error {
	var all unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &all, nil); err != nil {
		return fmt.Errorf("blocking signals: %w", err)
	}
	return nil
}

// count touches memory between two readings of the thread's fault counters. In
// between there must be no entry of a function that checks the stack: there the
// scheduler, when the goroutine has run for 10 ms, runs another on this thread, and
// after a fork even its own data faults.
//
//go:noinline
//go:norace
//go:nosplit
func (t *thread) count(memory [][]byte) {
	// The first reading only makes the place for the result of the last one resident.
	readUsage(&t.after)
	readUsage(&t.before)
	t.job.toucher.touch(memory)
	readUsage(&t.after)
}

// readUsage is getrusage(RUSAGE_THREAD), which only fails for a bad argument.
//
//go:norace
//go:nosplit
func readUsage(u *unix.Rusage) {
	unix.RawSyscall(unix.SYS_GETRUSAGE, unix.RUSAGE_THREAD, uintptr(unsafe.Pointer(u)), 0)
}

func (t *thread) counted() Counted {
	if t.job.counted != nil {
		return t.job.counted()
	}
	return growth(&t.before, &t.after)
}

// growth is what was counted between two readings.
func growth(before, after *unix.Rusage) Counted {
	return Counted{Minflt: after.Minflt - before.Minflt, Majflt: after.Majflt - before.Majflt}
}
