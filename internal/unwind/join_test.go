package unwind

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

// asked is a fault whose stack was asked for at its end, in microseconds.
func asked(tid uint32, begin, end uint64) fault.Fault {
	f := spell(tid, begin, end)
	f.Sampled = f.End
	return f
}

// early is a fault whose stack was asked for before it began.
func early(tid uint32, sampled, begin, end uint64) fault.Fault {
	f := spell(tid, begin, end)
	f.Sampled = sampled * 1000
	return f
}

// spell is a fault whose stack was not asked for.
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
		"at its end":     {faults: []fault.Fault{asked(1, 100, 110)}, traces: []Trace{at(1, 110)}, want: []uint32{110}},
		"behind it":      {faults: []fault.Fault{asked(1, 100, 110)}, traces: []Trace{at(1, 5000)}, want: []uint32{5000}},
		"before it":      {faults: []fault.Fault{asked(1, 100, 110)}, traces: []Trace{at(1, 109)}, want: []uint32{0}, unjoined: 1},
		"too late":       {faults: []fault.Fault{asked(1, 100, 110)}, traces: []Trace{at(1, 110+100000)}, want: []uint32{0}, unjoined: 1},
		"not asked for":  {faults: []fault.Fault{spell(1, 100, 110)}, traces: []Trace{at(1, 110)}, want: []uint32{0}, unjoined: 1},
		"another thread": {faults: []fault.Fault{asked(1, 100, 110)}, traces: []Trace{at(2, 110)}, want: []uint32{0}, unjoined: 1},
		"each its own": {
			faults: []fault.Fault{asked(1, 100, 110), asked(1, 112, 120)}, traces: []Trace{at(1, 111), at(1, 121)}, want: []uint32{111, 121},
		},
		"the first has none": {
			faults: []fault.Fault{asked(1, 100, 110), asked(1, 111, 120)}, traces: []Trace{at(1, 121)}, want: []uint32{0, 121},
		},
		"the second has none": {
			faults: []fault.Fault{asked(1, 100, 110), asked(1, 111, 120)}, traces: []Trace{at(1, 112)}, want: []uint32{112, 0},
		},
		"one between them was not asked for": {
			faults: []fault.Fault{asked(1, 100, 110), spell(1, 111, 120), asked(1, 121, 130)}, traces: []Trace{at(1, 110), at(1, 131)}, want: []uint32{110, 0, 131},
		},
		"another thread's next does not matter": {
			faults: []fault.Fault{asked(1, 100, 110), asked(2, 101, 111)}, traces: []Trace{at(1, 112), at(2, 112)}, want: []uint32{112, 112},
		},
		"faults out of order": {
			faults: []fault.Fault{asked(1, 111, 120), asked(1, 100, 110)}, traces: []Trace{at(1, 120), at(1, 110)}, want: []uint32{110, 120},
		},
		"at the beginning": {
			when: AtBegin, faults: []fault.Fault{early(1, 97, 100, 110)}, traces: []Trace{at(1, 98)}, want: []uint32{98},
		},
		"at the beginning, the last before it": { // those before it were of faults that are left out
			when: AtBegin, faults: []fault.Fault{early(1, 197, 200, 300)},
			traces: []Trace{at(1, 100), at(1, 110), at(1, 120), at(1, 199)}, want: []uint32{199}, unjoined: 3,
		},
		"at the beginning, inside it": {
			when: AtBegin, faults: []fault.Fault{early(1, 97, 100, 110)}, traces: []Trace{at(1, 101)}, want: []uint32{0}, unjoined: 1,
		},
		"at the beginning, of one that was left out": {
			when: AtBegin, faults: []fault.Fault{early(1, 97, 100, 110), early(1, 115, 117, 120)},
			traces: []Trace{at(1, 98), at(1, 112)}, want: []uint32{98, 0}, unjoined: 1,
		},
		"at the beginning of a long one": {
			when: AtBegin, faults: []fault.Fault{early(1, 97, 100, 5000000)}, traces: []Trace{at(1, 98)}, want: []uint32{98},
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
	f := asked(1, 1000, 1010)
	j.AddFault(&f)
	if got := j.Take((1010+hold)*1000-1, nil); got != nil {
		t.Fatalf("given out before its time: %v", lines(got))
	}
	j.AddTrace(at(1, 1011))
	if got := lines(j.Take((1010+hold)*1000, nil)); !slices.Equal(got, []uint32{1011}) {
		t.Fatalf("given out with %v, want the trace", got)
	}
	j.AddTrace(at(1, 1012))
	j.Take((1012+uint64(j.Keep.Microseconds()))*1000, nil)
	if c := j.Counts(); c.Unjoined != 1 || c.With != 1 {
		t.Errorf("counts are %+v, want one with its trace and one late trace", c)
	}
}

// A trace may come before the record that it belongs to.
func TestJoinKnowsOfLaterFaults(t *testing.T) {
	j := NewJoiner(AtEnd)
	j.MaxFaults = 0
	f := asked(1, 1000, 1010)
	j.AddFault(&f)
	j.AddTrace(at(1, 1020)) // of a fault that ended at 1019
	if got := lines(j.Take(1015*1000, nil)); !slices.Equal(got, []uint32{0}) {
		t.Errorf("given out with %v, want no trace", got)
	}
	f = asked(1, 1012, 1019)
	j.AddFault(&f)
	if got := lines(j.Take(31020*1000, nil)); !slices.Equal(got, []uint32{1020}) {
		t.Errorf("given out with %v, want the trace", got)
	}
}

// Where order does not matter nobody waits for others.
func TestJoinUnordered(t *testing.T) {
	j := NewJoiner(AtEnd)
	j.Unordered, j.Hold, j.MaxFaults = true, 2*time.Second, 3
	for i := range uint64(3) {
		f := asked(uint32(i), 1000, 1010+i)
		j.AddFault(&f)
	}
	j.AddTrace(at(1, 1012))
	if got := lines(j.Take(100000*1000, nil)); !slices.Equal(got, []uint32{1012}) {
		t.Fatalf("given out with %v, want the one whose trace is there", got)
	}
	// Two of a thread, whose traces have come just now.
	j.AddTrace(at(0, 149995))
	f := asked(0, 149990, 149994)
	j.AddFault(&f)
	if got := lines(j.Take(150000*1000, nil)); len(got) != 0 {
		t.Fatalf("given out with %v, though another record may be about to come", got)
	}
	if got := lines(j.Take(170000*1000, nil)); !slices.Equal(got, []uint32{149995}) {
		t.Fatalf("given out with %v, want the one whose trace is there", got)
	}
	j.AddTrace(at(0, 1013))
	if got := lines(j.Take(190000*1000, nil)); !slices.Equal(got, []uint32{1013}) {
		t.Fatalf("given out with %v, want the one whose trace is there", got)
	}
	if got := lines(j.Take(3000000*1000, nil)); !slices.Equal(got, []uint32{0}) {
		t.Fatalf("given out with %v, want the last one without", got)
	}
	if c := j.Counts(); c.Faults != 4 || c.With != 3 || c.Early != 0 || c.Unjoined != 0 {
		t.Errorf("counts are %+v", c)
	}
}

func TestJoinIsBounded(t *testing.T) {
	j := NewJoiner(AtEnd)
	j.MaxFaults, j.MaxTraces = 10, 8
	for i := range uint64(100) {
		f := asked(uint32(i), 1000+i*10, 1005+i*10)
		j.AddFault(&f)
		j.AddTrace(at(uint32(i), 1006+i*10))
	}
	if got := lines(j.Take(0, nil)); len(got) != 90 {
		t.Errorf("%d faults were given out early, want 90", len(got))
	}
	got := lines(j.Flush(nil))
	if want := uint32(1006 + 99*10); len(got) != 10 || got[9] != want {
		t.Errorf("the last faults have %v, want 10 that end in %d", got, want)
	}
	c := j.Counts()
	if c.Early != 90 || c.Unjoined+c.With != 100 {
		t.Errorf("counts are %+v, want 90 early and 100 traces", c)
	}
	if len(j.traces) != 0 || j.waiting != 0 {
		t.Errorf("traces of %d threads are left, %d in all", len(j.traces), j.waiting)
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
			switch taken := now + random.Uint64N(2); random.Uint64N(3) {
			case 0:
				f.Sampled = f.End
				traces = append(traces, at(tid, taken))
				want[uint64(f.CPU)] = uint32(taken)
			case 1: // its trace is lost
				f.Sampled = f.End
			}
			faults = append(faults, f)
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
