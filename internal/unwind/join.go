package unwind

import (
	"cmp"
	"slices"
	"time"

	"faultsnoop/internal/fault"
)

// Joined is a fault with its stack, nil if none was asked for or none has come.
type Joined struct {
	Fault fault.Fault
	Stack *fault.Stack
}

// JoinCounts say what a Joiner has done.
type JoinCounts struct {
	// Faults have been given out, With a stack; and Early of them before the stack that was
	// asked for had come, as more waited than MaxFaults.
	Faults, With, Early uint64
	// Traces have been added, and Unjoined of them belong to no fault that was added: it was
	// filtered or lost, or the trace came too late.
	Traces, Unjoined uint64
}

// Joiner gives each fault the trace that was taken of it. A fault says when one was asked for: with
// AtEnd it is the next that its thread took, with AtBegin the last before the fault began. Faults
// and traces may be added in any order, and the result depends on it only through lateness: a
// fault is decided when Hold has passed since its end, so that a trace that is added by then is
// never missed. One that comes later is counted.
type Joiner struct {
	// When is at which moment of faults traces are taken.
	When When
	// Hold is how long a fault waits for its trace, at least Delay. With AtEnd a trace is taken
	// in half of that.
	Hold time.Duration
	// Unordered gives faults out as soon as their traces are there, and not in the order of their end.
	Unordered bool
	// Keep is how long a trace waits for its fault: it may be taken at the beginning of a long
	// one.
	Keep time.Duration
	// MaxFaults and MaxTraces bound what waits. The oldest go first.
	MaxFaults, MaxTraces int

	faults  []fault.Fault      // by End
	sorted  bool               // false while faults has to be sorted
	traces  map[uint32][]Trace // by thread and Time
	waiting int                // of traces
	counts  JoinCounts
}

// straggle is how late a record may be: it waits for those before it in the buffer, which other
// CPUs may be about to write.
const straggle = 20 * time.Millisecond

// NewJoiner makes one for a tracer whose stacks are taken at when. The limits suit
// a machine with 100,000 faults a second.
func NewJoiner(when When) *Joiner {
	j := &Joiner{
		When: when, Hold: 2 * Delay, Keep: 4 * Delay, MaxFaults: 65536, MaxTraces: 32768,
		sorted: true, traces: map[uint32][]Trace{},
	}
	if when == AtBegin {
		j.Keep = time.Minute
	}
	return j
}

// AddFault takes a fault, which is copied.
func (j *Joiner) AddFault(f *fault.Fault) {
	last := len(j.faults) - 1
	j.sorted = j.sorted && (last < 0 || j.faults[last].End <= f.End)
	j.faults = append(j.faults, *f)
}

// AddTrace takes a stack.
func (j *Joiner) AddTrace(t Trace) {
	j.counts.Traces++
	of := j.traces[t.TID]
	j.traces[t.TID] = slices.Insert(of, from(of, t.Time+1), t)
	if j.waiting++; j.waiting > j.MaxTraces {
		j.dropOldest()
	}
}

// from is the first trace that was not taken before a time.
func from(traces []Trace, time uint64) int {
	i, _ := slices.BinarySearchFunc(traces, time, func(t Trace, time uint64) int { return cmp.Compare(t.Time, time) })
	return i
}

// dropOldest makes room for as many traces as a quarter of the limit.
func (j *Joiner) dropOldest() {
	times := make([]uint64, 0, j.waiting)
	for _, of := range j.traces {
		for _, t := range of {
			times = append(times, t.Time)
		}
	}
	slices.Sort(times)
	j.forget(times[max(1, len(times)/4)-1])
}

// forget drops the traces up to a time, which belong to no fault.
func (j *Joiner) forget(until uint64) {
	for tid, of := range j.traces {
		n := from(of, until+1)
		j.counts.Unjoined += uint64(n)
		j.remove(tid, n)
	}
}

// remove takes away the first n traces of a thread.
func (j *Joiner) remove(tid uint32, n int) {
	j.waiting -= n
	if of := j.traces[tid]; n == len(of) {
		delete(j.traces, tid)
	} else {
		j.traces[tid] = slices.Delete(of, 0, n)
	}
}

// Take appends the faults whose time has come to dst. All faults that ended until seen, in nanoseconds of
// CLOCK_MONOTONIC, have been added.
func (j *Joiner) Take(seen uint64, dst []Joined) []Joined {
	j.sort()
	due := 0
	for due < len(j.faults) && j.faults[due].End+uint64(j.Hold) <= seen {
		due++
	}
	must := max(due, len(j.faults)-j.MaxFaults)
	n := must
	if j.Unordered {
		n = len(j.faults)
	}
	dst = j.give(n, must, due, seen, dst)
	if keep := uint64(j.Keep); seen > keep {
		j.forget(seen - keep)
	}
	return dst
}

// Flush appends all faults that wait: no more traces will come.
func (j *Joiner) Flush(dst []Joined) []Joined {
	const all = 1<<64 - 1
	j.sort()
	n := len(j.faults)
	dst = j.give(n, n, n, all, dst)
	j.forget(all - 1)
	return dst
}

func (j *Joiner) sort() {
	if !j.sorted {
		slices.SortStableFunc(j.faults, func(a, b fault.Fault) int { return cmp.Compare(a.End, b.End) })
		j.sorted = true
	}
}

// give appends the first n faults to dst; from must on only those whose traces have come. From due on
// they have not waited for long.
func (j *Joiner) give(n, must, due int, seen uint64, dst []Joined) []Joined {
	next := j.nextAsked(n)
	kept := 0
	for i := range j.faults[:n] {
		out := Joined{Fault: j.faults[i]}
		if out.Fault.Sampled != 0 {
			out.Stack = j.stackOf(&out.Fault, next[i], seen)
			switch {
			case out.Stack != nil:
				j.counts.With++
			case i >= must:
				j.faults[kept] = out.Fault
				kept++
				continue
			case i >= due:
				j.counts.Early++
			}
		}
		dst = append(dst, out)
	}
	j.counts.Faults += uint64(n - kept)
	j.faults = slices.Delete(j.faults, kept, n)
	return dst
}

// Counts are sums since the beginning.
func (j *Joiner) Counts() JoinCounts { return j.counts }

// nextAsked is when the next stack of the same thread was asked for, of each of the first n
// faults.
func (j *Joiner) nextAsked(n int) []uint64 {
	next := make([]uint64, n)
	asked := map[uint32]uint64{}
	for i, f := range slices.Backward(j.faults) {
		if f.Sampled == 0 {
			continue
		}
		if i < n {
			next[i] = ^uint64(0)
			if at, ok := asked[f.TID]; ok {
				next[i] = at
			}
		}
		asked[f.TID] = f.Sampled
	}
	return next
}

// stackOf finds the stack of f, the oldest fault, nil if it has not come. The next one of its
// thread was asked for at next.
func (j *Joiner) stackOf(f *fault.Fault, next, seen uint64) *fault.Stack {
	of := j.traces[f.TID]
	first := from(of, f.Sampled)
	var i int
	if j.When == AtBegin {
		// What was asked for before handle_mm_fault may have been another fault that did not
		// get there: the last trace before it is its own.
		i = from(of, f.End-uint64(f.Latency)+1) - 1
	} else {
		// A later trace may be of a fault that has not been heard of yet.
		end := min(next, seen-min(seen, uint64(straggle)), f.Sampled+uint64(j.Hold)/2)
		if i = first; i < len(of) && of[i].Time >= end {
			i = -1
		}
	}
	if i < first || i >= len(of) {
		return nil
	}
	s := of[i].Stack
	j.counts.Unjoined += uint64(i)
	j.remove(f.TID, i+1)
	return s
}
