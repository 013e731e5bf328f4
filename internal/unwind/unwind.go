// Package unwind takes stacks of programs in any language at their page faults, by the
// unwinder of the OpenTelemetry eBPF profiler, which needs no frame pointers and reads
// the stacks of interpreters. It is the only package that knows that library.
package unwind

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"go.opentelemetry.io/ebpf-profiler/interpreter/interpreterconfig"
	"go.opentelemetry.io/ebpf-profiler/libpf"
	profilerlog "go.opentelemetry.io/ebpf-profiler/log"
	"go.opentelemetry.io/ebpf-profiler/times"
	"go.opentelemetry.io/ebpf-profiler/tracer"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// When says at which moment of a fault its stack is taken.
type When uint8

const (
	// AtEnd is where the kernel accounts a fault, so that only resolved ones have a stack. Where hook
	// tracepoint completes a record the stack is taken after that, outside of the latency.
	AtEnd When = iota
	// AtBegin is before handle_mm_fault, outside of the latency that hooks fentry and kprobe
	// measure.
	AtBegin
)

// Options are what Open can be told.
type Options struct {
	When When
	// Every takes the stack of one fault in so many, chosen by chance; 0 adapts the number to
	// how fast faults come.
	Every uint32
	// PerSecond is how many stacks an adapted rate aims at, of all CPUs together; 0 is
	// DefaultPerSecond.
	PerSecond uint32
}

// DefaultPerSecond keeps user space below half a CPU with stacks of 100 frames.
const DefaultPerSecond = 2000

const (
	// pollInterval is how often the library reads its ring buffer.
	pollInterval = 20 * time.Millisecond
	// window is how long an adapted rate stays; see bpf/rendezvous.h.
	window = 500 * time.Millisecond
	// ringBytes is the size of the ring buffer of stacks, which take 0.5 to 24 KiB.
	ringBytes = 16 << 20
)

// Delay is how much later than a fault its stack may come, unless the machine is
// overloaded.
const Delay = 5 * pollInterval

// Trace is the stack of one page fault.
type Trace struct {
	// Time is when it was taken, in nanoseconds of CLOCK_MONOTONIC.
	Time uint64
	// PID and TID in the observer's pid namespace, which is the initial one.
	PID, TID, CPU uint32
	Comm          fault.Comm
	// Stack is shared by traces with the same frames. Func, File and Line are known of
	// interpreted and Go code, and Func of the kernel's; native frames have Module, Offset and BuildID.
	Stack *fault.Stack
}

// Counts are sums since Open.
type Counts struct {
	// Taken is how often a stack was begun. With AtBegin some of them are of faults that do not
	// match the filters.
	Taken uint64
	// Got have come as a Trace, and of these Aborted could not be unwound to the end, since
	// the library did not know the process or its code (yet).
	Got, Aborted uint64
	// Dropped did not fit into the ring buffer.
	Dropped uint64
	// Every is the present rate: one fault in so many.
	Every uint64
}

// Missing is how many of the taken stacks did not come, other than Dropped: the process
// was not known to the library yet, or had ended when it came to know it. Until Stop has
// drained it counts those on their way.
func (c Counts) Missing() uint64 { return c.Taken - min(c.Taken, c.Got+c.Dropped) }

// Unwinder takes stacks. Its methods may be called from any goroutine.
type Unwinder struct {
	tracer      *tracer.Tracer
	sampler     *sampler
	traces      chan Trace
	raw         chan *libpf.EbpfTrace
	stacks      *interner
	pythonLines *pythonLines

	// current is what the library is naming: it calls back without the raw trace.
	current      *libpf.EbpfTrace
	got, aborted atomic.Uint64

	stop, closeOnce sync.Once
	stopping        chan struct{}
	done            chan struct{} // closed with the goroutine that names traces
	closing         context.Context
	cancel          context.CancelFunc // everything but what follows
	cancelSync      context.CancelFunc // the library's look at processes
	hotplug         sync.WaitGroup
}

// intervals are how often the library does what.
type intervals struct{}

func (intervals) MonitorInterval() time.Duration       { return 100 * time.Millisecond }
func (intervals) TracePollInterval() time.Duration     { return pollInterval }
func (intervals) PIDCleanupInterval() time.Duration    { return time.Minute }
func (intervals) ExecutableUnloadDelay() time.Duration { return 5 * time.Minute }

// Open loads the unwinder, which takes the stacks that the programs which share
// [Unwinder.Shared] ask for. It takes a second or two. The error is one line that says why
// this machine cannot: the caller falls back to stacks by frame pointers.
func Open(o Options) (*Unwinder, error) {
	if err := Supported(); err != nil {
		return nil, err
	}
	if o.PerSecond == 0 {
		o.PerSecond = DefaultPerSecond
	}
	profilerlog.SetLogger(*slog.New(slog.DiscardHandler))
	cpus, err := process.OnlineCPUs()
	if err != nil {
		return nil, err
	}

	u := &Unwinder{
		traces:   make(chan Trace, 1024),
		raw:      make(chan *libpf.EbpfTrace, 64),
		stacks:   newInterner(),
		stopping: make(chan struct{}),
		done:     make(chan struct{}),
	}
	u.closing, u.cancel = context.WithCancel(context.Background())
	syncing, cancelSync := context.WithCancel(context.Background())
	u.cancelSync = cancelSync
	times.StartRealtimeSync(u.closing, 0)
	u.tracer, err = tracer.NewTracer(u.closing, &tracer.Config{
		TraceReporter:      u,
		ExecutableReporter: u.stacks,
		Intervals:          intervals{},
		InterpretersConfig: interpreterconfig.AllInterpreters(),
		SamplesPerSecond:   samplesPerSecond(),
		KernelVersionCheck: true,
		LoadProbe:          true,
	})
	if err != nil {
		u.cancel()
		u.cancelSync()
		return nil, loadError(err)
	}
	u.sampler = &sampler{options: o, cpus: cpus}
	err = u.start(syncing)
	if err != nil {
		u.Close()
		return nil, loadError(err)
	}
	return u, nil
}

func (u *Unwinder) start(syncing context.Context) error {
	// It reads what Enable finds, so it begins after that, and always: Close waits for it.
	defer func() { go u.name() }()
	u.tracer.StartPIDEventProcessor(syncing)
	if err := u.tracer.AttachSchedMonitor(); err != nil {
		return err
	}
	if err := u.tracer.Enable(u.closing, u.sampler); err != nil {
		return err
	}
	u.pythonLines = newPythonLines(u.sampler.pythons)
	if err := u.tracer.StartMapMonitors(u.closing, u.raw); err != nil {
		return err
	}
	u.hotplug.Go(u.followCPUs)
	return nil
}

// followCPUs attaches to CPUs that come online.
func (u *Unwinder) followCPUs() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-u.stopping:
			return
		case <-u.closing.Done():
			return
		case <-tick.C:
			u.sampler.update()
		}
	}
}

// Supported says in one line what the library would find missing, or would say less well. It
// loads nothing, so that Open may fail nevertheless. The error is [unix.EPERM] where
// RLIMIT_MEMLOCK is in the way.
func Supported() error {
	if os.Geteuid() != 0 {
		return errors.New("needs root")
	}
	if ino, err := pidNamespace(); err == nil && ino != initialPIDNamespace {
		return errors.New("needs the initial pid namespace, since the kernel's process ids are not those of /proc here")
	}
	// The library insists on raising it for each program and map, also where the kernel
	// (since 5.11) does not ask for it.
	var before unix.Rlimit
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &unlimited, &before); err != nil {
		return fmt.Errorf("raising RLIMIT_MEMLOCK: %w: needs CAP_SYS_RESOURCE, or ulimit -l unlimited", err)
	}
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &before, nil); err != nil {
		return fmt.Errorf("restoring RLIMIT_MEMLOCK: %w", err)
	}
	return nil
}

// initialPIDNamespace is PROC_PID_INIT_INO in include/linux/proc_ns.h.
const initialPIDNamespace = 0xEFFFFFFC

func pidNamespace() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0, err
	}
	return st.Ino, nil
}

// loadError is the library's first line: it may add the verifier's log.
func loadError(err error) error {
	text, _, _ := strings.Cut(err.Error(), "\n")
	return fmt.Errorf("loading the unwinder: %s", text)
}

// Shared are the maps in which the unwinder and the programs that record faults meet, by the
// names of bpf/rendezvous.h. They belong to the unwinder.
func (u *Unwinder) Shared() map[string]*ebpf.Map { return u.sampler.shared() }

// Traces has the stacks, roughly in the order in which they were taken. A reader that is too slow
// makes the kernel drop stacks, which is counted. It is closed by Stop or Close.
func (u *Unwinder) Traces() <-chan Trace { return u.traces }

// Counts reads what has been counted.
func (u *Unwinder) Counts() (Counts, error) {
	c, err := u.sampler.counts()
	c.Got, c.Aborted = u.got.Load(), u.aborted.Load()
	return c, err
}

// Stop takes no more stacks. Traces is closed when those taken have been delivered, or
// after Close.
func (u *Unwinder) Stop() {
	u.stop.Do(func() {
		close(u.stopping)
		u.hotplug.Wait()
		u.sampler.detach()
	})
}

// syncGrace is how long the library may still look at processes that it was about to.
const syncGrace = 5 * time.Second

// Close ends everything. Traces that have not been read are lost. One goroutine, which
// waits for the library to finish with processes, ends up to 5 s later.
func (u *Unwinder) Close() error {
	u.closeOnce.Do(func() {
		u.Stop()
		u.cancel()
		// The library's reader looks at its context once in a poll, and may be about to
		// send until then.
		<-u.done
		for quiet := time.After(3 * pollInterval); ; {
			select {
			case <-u.raw:
				continue
			case <-quiet:
			}
			break
		}
		// It sends processes to look at without looking at its context, so the receiver
		// has to outlive it, and it cannot be asked.
		time.AfterFunc(syncGrace, u.cancelSync)
		u.tracer.Close()
		u.sampler.close()
	})
	return nil
}

// name has the library name the frames of traces, which calls ReportTraceEvent.
func (u *Unwinder) name() {
	defer close(u.done)
	defer close(u.traces)
	stopping := u.stopping
	var drained <-chan time.Time
	prepare := time.NewTicker(intervals{}.MonitorInterval())
	defer prepare.Stop()
	for {
		select {
		case <-prepare.C:
			if u.pythonLines != nil { // nil if the start has failed
				u.pythonLines.prepare()
			}
		case t := <-u.raw:
			if t == nil {
				continue // the end of a batch
			}
			u.current = t
			u.tracer.HandleTrace(t)
			u.current = nil
			if drained != nil {
				drained = time.After(3 * pollInterval)
			}
		case <-stopping:
			stopping = nil
			drained = time.After(3 * pollInterval)
		case <-drained:
			return
		case <-u.closing.Done():
			return
		}
	}
}
