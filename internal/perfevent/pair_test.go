package perfevent

import (
	"testing"
	"time"
)

func at(k kind, time, addr uint64) *record {
	return &record{kind: k, time: time, addr: addr, pid: 1, tid: 1}
}

func TestMergeOrder(t *testing.T) {
	rings := []*ring{fakeRing(0), fakeRing(1), fakeRing(2)}
	for i, times := range [][]uint64{{1, 4, 5, 9}, {2, 3, 10}, {}} {
		for _, tm := range times {
			rings[i].queue = append(rings[i].queue, record{time: tm})
		}
		rings[i].through = 9
	}
	var m merge
	var got []uint64
	for {
		rec := m.next(rings, readThrough(rings))
		if rec == nil {
			break
		}
		got = append(got, rec.time)
	}
	want := []uint64{1, 2, 3, 4, 5, 9}
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
	// What appears after younger ones have been yielded keeps its time.
	rings[2].queue = append(rings[2].queue, record{time: 7})
	for _, want := range []uint64{7, 10} {
		if rec := m.next(rings, 20); rec == nil || rec.time != want {
			t.Errorf("got %+v, want time %d", rec, want)
		}
	}
}

func TestPairing(t *testing.T) {
	const a, b = 0x1000, 0x5000
	type step struct {
		kind   kind
		time   uint64
		addr   uint64
		askew  bool
		failed uint64        // address of the fault that this step shows to have failed
		timed  time.Duration // -1: no latency
	}
	for _, test := range []struct {
		name  string
		steps []step
	}{
		{"pair", []step{{kind: entry, time: 10, addr: a}, {kind: minor, time: 15, addr: a + 4, timed: 5}}},
		{"entry unseen", []step{{kind: minor, time: 15, addr: a, timed: -1}}},
		{"failed, next fault", []step{
			{kind: entry, time: 10, addr: a},
			{kind: entry, time: 20, addr: b, failed: a},
			{kind: major, time: 90, addr: b, timed: 70},
		}},
		{"failed, exit", []step{{kind: entry, time: 10, addr: a}, {kind: exited, time: 11, failed: a}}},
		{"resolved, exit", []step{
			{kind: entry, time: 10, addr: a}, {kind: minor, time: 12, addr: a, timed: 2}, {kind: exited, time: 13},
		}},
		{"other page completes", []step{
			{kind: entry, time: 10, addr: a}, {kind: minor, time: 12, addr: b, timed: -1, failed: a},
		}},
		{"completion lost", []step{
			{kind: entry, time: 10, addr: a},
			{kind: loss, time: 11, addr: 19},
			{kind: entry, time: 20, addr: b},
			{kind: minor, time: 23, addr: b, timed: 3},
		}},
		{"same page again after a loss", []step{
			{kind: entry, time: 10, addr: a},
			{kind: loss, time: 11, addr: 19},
			{kind: minor, time: 20, addr: a, timed: -1},
		}},
		{"entry within the window of a loss", []step{
			{kind: loss, time: 11, addr: 30},
			{kind: entry, time: 20, addr: a},
			{kind: exited, time: 40},
		}},
		{"time of the entry not known", []step{
			{kind: entry, time: 10, addr: a, askew: true}, {kind: minor, time: 15, addr: a, timed: -1},
		}},
	} {
		var p pairing
		var tk task
		for i, st := range test.steps {
			var failed flight
			rec := at(st.kind, st.time, st.addr)
			rec.askew = st.askew
			switch st.kind {
			case entry:
				failed = p.begin(&tk, rec)
			case exited:
				failed = p.end(&tk)
			case loss:
				p.lost(st.addr)
			default:
				var latency time.Duration
				var timed bool
				if latency, timed, failed = p.complete(&tk, rec); !timed {
					latency = -1
				}
				if latency != st.timed {
					t.Errorf("%s, step %d: latency %d, want %d", test.name, i, latency, st.timed)
				}
			}
			if failed.up != (st.failed != 0) || failed.up && failed.addr != st.failed {
				t.Errorf("%s, step %d: failed %v %#x, want %#x", test.name, i, failed.up, failed.addr, st.failed)
			}
		}
	}
}

func TestDuplicate(t *testing.T) {
	var tk task
	for i, test := range []struct {
		time     uint64
		cpu, set uint32
		want     bool
	}{
		{10, 0, 5, false},
		{11, 0, 6, true}, // a second event for the same thread
		{20, 0, 5, false},
		{30, 1, 6, false}, // another CPU has its own events
		{31, 1, 5, true},
		{40, 0, 5, false},
		{50, 0, 0, false}, // ids of another program
		{50, 0, 0, true},
		{60, 0, 0, false},
	} {
		if got := tk.duplicate(&record{kind: minor, time: test.time, cpu: test.cpu, set: test.set}); got != test.want {
			t.Errorf("step %d: %v", i, got)
		}
	}
}
