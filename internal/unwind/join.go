package unwind

import (
	"cmp"
	"slices"
	"time"

	"faultsnoop/internal/fault"
)

// Joined is a fault with its stack, nil if none was taken or none has come.
type Joined struct {
	Fault fault.Fault
	Stack *fault.Stack
}

// JoinCounts say what a Joiner has done.
type JoinCounts struct {
	// Faults have been given out, With a stack, and Early of them before their time, as more
	// waited than MaxFaults.
	Faults, With, Early uint64
	// Traces have been added, and Unjoined of them belong to no fault that was added: it was filtered
	// or lost, or the trace came too late.
	Traces, Unjoined uint64
}

// Joiner gives each fault the trace that its thread took during it. Faults and traces may be added
// in any order, and the result depends on it only through lateness: a fault is decided
// when Hold has passed since its end, so that a trace that is added by then is
// never missed, whatever was added before or after. One that comes later is counted.
//
// A fault has at most one trace, and a trace belongs to at most one fault.
type Joiner struct {
	// Before and After are how far outside of a fault its trace may be, as
	// programs on the same event run one after the other.
	Before, After time.Duration
	// Hold is how long a fault waits for its trace, at least Delay.
	Hold time.Duration
	// MaxFaults and MaxTraces bound what waits. The oldest go first.
	MaxFaults, MaxTraces int

	faults []fault.Fault // by End
	// sorted is false while faults has to be sorted.
	sorted  bool
	threads map[uint32]*thread
	traces  int
	counts  JoinCounts
}

// thread is what waits of one thread.
type thread struct {
	traces []Trace // by Time
	// faults that wait, and end is that of the last one that was given out.
	faults int
	end    uint64
}

// NewJoiner makes one for a tracer whose stacks are taken at when. The limits suit
// a machine with 100,000 faults a second.
func NewJoiner(when When) *Joiner {
	j := &Joiner{
		After: time.Millisecond, Hold: 2 * Delay,
		MaxFaults: 65536, MaxTraces: 16384,
	}
	if when == AtBegin {
		j.Before, j.After = j.After, 0
	}
	return j
}

// AddFault takes a fault, which is copied.
func (j *Joiner) AddFault(f *fault.Fault) {
	last := len(j.faults) - 1
	j.sorted = last < 0 || j.sorted && j.faults[last].End <= f.End
	j.faults = append(j.faults, *f)
	j.thread(f.TID).faults++
}

// AddTrace takes a stack.
func (j *Joiner) AddTrace(t Trace) {
	j.counts.Traces++
	th := j.thread(t.TID)
	i, _ := slices.BinarySearchFunc(th.traces, t.Time, func(t Trace, at uint64) int {
		if t.Time <= at { // behind its equals
			return -1
		}
		return 1
	})
	th.traces = slices.Insert(th.traces, i, t)
	j.traces++
	if j.traces > j.MaxTraces {
		j.dropOldest()
	}
}

func (j *Joiner) thread(tid uint32) *thread {
	if j.threads == nil {
		j.threads = map[uint32]*thread{}
	}
	th := j.threads[tid]
	if th == nil {
		th = &thread{}
		j.threads[tid] = th
	}
	return th
}

// dropOldest makes room for as many traces as a quarter of the limit.
func (j *Joiner) dropOldest() {
	times := make([]uint64, 0, j.traces)
	for _, th := range j.threads {
		for _, t := range th.traces {
			times = append(times, t.Time)
		}
	}
	slices.Sort(times)
	j.forget(times[max(1, len(times)/4)-1])
}

// forget drops the traces up to the time, and threads of which nothing is left.
func (j *Joiner) forget(until uint64) {
	for tid, th := range j.threads {
		n := 0
		for n < len(th.traces) && th.traces[n].Time <= until {
			n++
		}
		th.traces = slices.Delete(th.traces, 0, n)
		j.traces -= n
		j.counts.Unjoined += uint64(n)
		if th.faults == 0 && len(th.traces) == 0 && th.end+uint64(j.Hold) < until {
			delete(j.threads, tid)
		}
	}
}

// Take appends the faults whose time has come at now, in nanoseconds of CLOCK_MONOTONIC, to dst, in the
// order of their end.
func (j *Joiner) Take(now uint64, dst []Joined) []Joined {
	if !j.sorted {
		slices.SortStableFunc(j.faults, func(a, b fault.Fault) int { return cmp.Compare(a.End, b.End) })
		j.sorted = true
	}
	n := 0
	for n < len(j.faults) && j.faults[n].End+uint64(j.Hold) <= now {
		n++
	}
	if early := len(j.faults) - j.MaxFaults; early > n {
		j.counts.Early += uint64(early - n)
		n = early
	}
	if n > 0 {
		next := j.nextBegins(n)
		for i := range j.faults[:n] {
			dst = append(dst, j.join(&j.faults[i], next[i]))
		}
	}
	j.faults = slices.Delete(j.faults, 0, n)
	if horizon := uint64(j.Hold) * 2; now > horizon {
		j.forget(now - horizon)
	}
	return dst
}

// Flush appends all faults that wait: no more traces will come.
func (j *Joiner) Flush(dst []Joined) []Joined {
	hold := j.Hold
	j.Hold = 0
	defer func() { j.Hold = hold }()
	dst = j.Take(^uint64(0), dst)
	return dst
}

// Counts are sums since the beginning.
func (j *Joiner) Counts() JoinCounts { return j.counts }

// nextBegins are when the next fault of the same thread began, of each of the first n faults.
func (j *Joiner) nextBegins(n int) []uint64 {
	next := make([]uint64, n)
	begins := map[uint32]uint64{}
	for i, f := range slices.Backward(j.faults) {
		if i < n {
			next[i] = ^uint64(0)
			if begin, ok := begins[f.TID]; ok {
				next[i] = begin
			}
		}
		begins[f.TID] = f.End - uint64(f.Latency)
	}
	return next
}

// join finds the trace of f, which is the oldest fault; the next one of its thread began
// at next.
func (j *Joiner) join(f *fault.Fault, next uint64) Joined {
	th := j.threads[f.TID]
	begin := f.End - uint64(f.Latency)
	from := max(begin-min(begin, uint64(j.Before)), th.end+1)
	to := f.End + uint64(j.After)
	out := Joined{Fault: *f}
	th.faults--
	defer func() { th.end = f.End }()
	j.counts.Faults++

	best := -1
	for i, t := range th.traces {
		if t.Time < from {
			continue
		}
		if t.Time > to {
			break
		}
		if t.Time <= f.End && (t.Time >= begin || best < 0) {
			best = i
			if t.Time >= begin {
				break
			}
			continue
		}
		// Behind the end: it is ours unless the thread's next fault had begun.
		if best < 0 && t.Time < next {
			best = i
		}
		break
	}
	if best < 0 {
		return out
	}
	out.Stack = th.traces[best].Stack
	j.counts.With++
	th.traces = slices.Delete(th.traces, best, best+1)
	j.traces--
	return out
}
