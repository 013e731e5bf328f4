package unwind

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

// spell makes a fault of a thread from its beginning and end, in microseconds.
func spell(tid uint32, begin, end uint64) fault.Fault {
	return fault.Fault{TID: tid, End: end * 1000, Latency: time.Duration(end-begin) * 1000}
}

func at(tid uint32, us uint64) Trace {
	return Trace{TID: tid, Time: us * 1000, Stack: &fault.Stack{Frames: []fault.Frame{{Line: uint32(us)}}}}
}

// lines are the times of the traces that faults have got, 0 for none.
func lines(joined []Joined) []uint32 {
	var out []uint32
	for _, j := range joined {
		line := uint32(0)
		if j.Stack != nil {
			line = j.Stack.Frames[0].Line
		}
		out = append(out, line)
	}
	return out
}

func TestJoin(t *testing.T) {
	for name, tt := range map[string]struct {
		when     When
		faults   []fault.Fault
		traces   []Trace
		want     []uint32
		unjoined uint64
	}{
		"inside":              {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 105)}, want: []uint32{105}},
		"at its beginning":    {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 100)}, want: []uint32{100}},
		"at its end":          {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 110)}, want: []uint32{110}},
		"just behind its end": {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 112)}, want: []uint32{112}},
		"before":              {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 99)}, want: []uint32{0}, unjoined: 1},
		"long after":          {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 1111)}, want: []uint32{0}, unjoined: 1},
		"another thread":      {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(2, 105)}, want: []uint32{0}, unjoined: 1},
		"two in one":          {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 103), at(1, 105)}, want: []uint32{103}, unjoined: 1},
		"behind the end is in the next": {
			faults: []fault.Fault{spell(1, 100, 110), spell(1, 111, 120)}, traces: []Trace{at(1, 112)}, want: []uint32{0, 112},
		},
		"each its own": {
			faults: []fault.Fault{spell(1, 100, 110), spell(1, 112, 120)}, traces: []Trace{at(1, 111), at(1, 121)}, want: []uint32{111, 121},
		},
		"the next fault of another thread does not matter": {
			faults: []fault.Fault{spell(1, 100, 110), spell(2, 111, 120)}, traces: []Trace{at(1, 112), at(2, 112)}, want: []uint32{112, 112},
		},
		"faults out of order": {
			faults: []fault.Fault{spell(1, 111, 120), spell(1, 100, 110)}, traces: []Trace{at(1, 112), at(1, 105)}, want: []uint32{105, 112},
		},
		"no latency": {faults: []fault.Fault{{TID: 1, End: 100000}}, traces: []Trace{at(1, 101)}, want: []uint32{101}},
		"before it, when taken at the beginning": {
			when: AtBegin, faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 98)}, want: []uint32{98},
		},
		"behind it, when taken at the beginning": {
			when: AtBegin, faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 111)}, want: []uint32{0}, unjoined: 1,
		},
		"inside the one before is not before the next": {
			when: AtBegin, faults: []fault.Fault{spell(1, 100, 110), spell(1, 112, 120)}, traces: []Trace{at(1, 98), at(1, 109)}, want: []uint32{109, 0}, unjoined: 1,
		},
		"nothing": {},
	} {
		t.Run(name, func(t *testing.T) {
			j := NewJoiner(tt.when)
			for _, tr := range tt.traces {
				j.AddTrace(tr)
			}
			for i := range tt.faults {
				j.AddFault(&tt.faults[i])
			}
			got := lines(j.Flush(nil))
			if !slices.Equal(got, tt.want) {
				t.Errorf("faults have the traces %v, want %v", got, tt.want)
			}
			if c := j.Counts(); c.Unjoined != tt.unjoined || c.Faults != uint64(len(tt.faults)) || c.Traces != uint64(len(tt.traces)) {
				t.Errorf("counts are %+v, want %d unjoined", c, tt.unjoined)
			}
		})
	}
}

func TestJoinHolds(t *testing.T) {
	j := NewJoiner(AtEnd)
	hold := uint64(j.Hold.Microseconds())
	f := spell(1, 1000, 1010)
	j.AddFault(&f)
	if got := j.Take((1010+hold)*1000-1, nil); got != nil {
		t.Fatalf("given out before its time: %v", lines(got))
	}
	j.AddTrace(at(1, 1005))
	if got := lines(j.Take((1010+hold)*1000, nil)); !slices.Equal(got, []uint32{1005}) {
		t.Fatalf("given out with %v, want the trace", got)
	}
	j.AddTrace(at(1, 1006))
	j.Take((1010+3*hold)*1000, nil)
	if c := j.Counts(); c.Unjoined != 1 || c.With != 1 {
		t.Errorf("counts are %+v, want one with its trace and one late trace", c)
	}
}

func TestJoinIsBounded(t *testing.T) {
	j := NewJoiner(AtEnd)
	j.MaxFaults, j.MaxTraces = 10, 8
	for i := range uint64(100) {
		f := spell(uint32(i), 1000+i*10, 1005+i*10)
		j.AddFault(&f)
		j.AddTrace(at(uint32(i), 1002+i*10))
	}
	if got := lines(j.Take(0, nil)); len(got) != 90 {
		t.Errorf("%d faults were given out early, want 90", len(got))
	}
	got := lines(j.Flush(nil))
	if want := uint32(1002 + 99*10); len(got) != 10 || got[9] != want {
		t.Errorf("the last faults have %v, want 10 that end in %d", got, want)
	}
	c := j.Counts()
	if c.Early != 90 || c.Unjoined+c.With != 100 {
		t.Errorf("counts are %+v, want 90 early and 100 traces", c)
	}
	if len(j.threads) != 0 || j.traces != 0 {
		t.Errorf("%d threads and %d traces are left", len(j.threads), j.traces)
	}
}

// Whatever comes first, if it comes in time the result is the same.
func TestJoinOrderDoesNotMatter(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var faults []fault.Fault
	var traces []Trace
	want := map[uint64]uint32{}
	for tid := range uint32(5) {
		now := uint64(1000)
		for range 200 {
			begin := now + 1 + random.Uint64N(20)
			now = begin + 1 + random.Uint64N(30)
			f := spell(tid, begin, now)
			f.CPU = uint32(len(faults))
			faults = append(faults, f)
			switch taken := now + random.Uint64N(2); random.Uint64N(3) {
			case 0:
				traces = append(traces, at(tid, taken))
				want[uint64(f.CPU)] = uint32(taken)
			}
			now++
		}
	}
	for range 20 {
		j := NewJoiner(AtEnd)
		random.Shuffle(len(faults), func(a, b int) { faults[a], faults[b] = faults[b], faults[a] })
		random.Shuffle(len(traces), func(a, b int) { traces[a], traces[b] = traces[b], traces[a] })
		for i := range faults {
			j.AddFault(&faults[i])
		}
		for _, tr := range traces {
			j.AddTrace(tr)
		}
		for _, joined := range j.Flush(nil) {
			if got := lines([]Joined{joined})[0]; got != want[uint64(joined.Fault.CPU)] {
				t.Fatalf("fault %d of thread %d has trace %d, want %d", joined.Fault.CPU, joined.Fault.TID, got, want[uint64(joined.Fault.CPU)])
			}
		}
		if c := j.Counts(); c.Unjoined != 0 || c.With != uint64(len(traces)) {
			t.Fatalf("counts are %+v", c)
		}
	}
}
