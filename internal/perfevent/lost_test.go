package perfevent

import (
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

// TestLost compares a session whose reader sleeps with one that loses nothing: its rings
// hold all, however late they are read.
func TestLost(t *testing.T) {
	c := startChild(t, true, "touch", "5000")
	full := open(t, Options{CommandPID: c.pid()})
	small := open(t, Options{CommandPID: c.pid(), BufferPages: 4})
	done := make(chan struct{})
	var reports []report
	go func() {
		defer close(done)
		c.release()
		reports = c.wait()
	}()
	_, truth := collect(t, full, done)
	faults, got := collect(t, small, done)
	if truth.LostTotal() != 0 {
		t.Fatalf("the control lost faults: %+v", truth)
	}
	if got.LostTotal() == 0 || !strings.Contains(got.Lost[0].Where, ringFull) {
		t.Fatalf("nothing was lost because the ring was full: %+v", got)
	}
	if got.Minor+got.Major+got.LostTotal() != truth.Minor+truth.Major {
		t.Errorf("seen %d + lost %d, want %d", got.Seen, got.LostTotal(), truth.Seen)
	}
	if len(faults) == 0 || len(reports) != 1 {
		t.Errorf("%d faults, %d reports", len(faults), len(reports))
	}
	if n := count(faults, func(f *fault.Fault) bool { return !f.Is(fault.HasResult) }); n > 0 {
		t.Errorf("%d faults were called failed because records are missing", n)
	}
}

// TestLostFork lets a process start another while nobody reads and all rings are full.
// Whose child that is nobody has heard then; its faults count all the same.
func TestLostFork(t *testing.T) {
	c := startChild(t, true, "stall", "2000", "200")
	opt := Options{CommandPID: c.pid(), Filter: fault.Filter{Children: true}}
	full := open(t, opt)
	opt.BufferPages = 16 // room for 1500 records, and so for the 200 faults that follow
	small := open(t, opt)
	c.release()
	for c.line() != "ready" {
		// the reports of those that touch before the fork
	}
	if err := small.readRings(); err != nil {
		t.Fatal(err)
	}
	for _, r := range small.rings {
		for _, rec := range r.queue {
			if rec.kind == forked && rec.pid != rec.side.parentPID {
				t.Fatalf("the ring of CPU %d had room for the fork of process %d", r.cpu, rec.pid)
			}
		}
	}
	done := make(chan struct{})
	var reports []report
	go func() {
		defer close(done)
		c.release()
		reports = c.wait()
	}()
	faults, got := collect(t, small, done)
	_, truth := collect(t, full, done)
	if truth.LostTotal() != 0 || truth.Filtered != 0 {
		t.Fatalf("the control lost faults: %+v", truth)
	}
	if got.Filtered != 0 || got.LostTotal() == 0 || got.Minor+got.Major+got.LostTotal() != truth.Minor+truth.Major {
		t.Errorf("counters %+v, want seen + lost = %d", got, truth.Minor+truth.Major)
	}
	if len(reports) != 1 {
		t.Fatalf("%d reports", len(reports))
	}
	r := reports[0]
	n := count(faults, func(f *fault.Fault) bool { return in(r)(f) && f.PID == uint32(r.PID) })
	if r.PID == c.pid() || n != 200 {
		t.Errorf("%d faults of process %d, the child of %d, want 200", n, r.PID, c.pid())
	}
}

// TestCountersMeanwhile asks for the counters from another goroutine until the session
// is closed; the race detector sees what must not be shared.
func TestCountersMeanwhile(t *testing.T) {
	c := startChild(t, true, "touch", "20000")
	s := open(t, Options{CommandPID: c.pid(), BufferPages: 4})
	var closed atomic.Bool
	last := make(chan fault.Counters, 1)
	go func() {
		var now fault.Counters
		for end := false; !end; time.Sleep(time.Millisecond) {
			end = closed.Load()
			before := now
			var err error
			if now, err = s.Counters(); err != nil || now.Seen < before.Seen || now.LostTotal() < before.LostTotal() {
				t.Errorf("counters %+v, %v, before that %+v", now, err, before)
			}
		}
		last <- now
	}()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.release()
		c.wait()
	}()
	_, want := collect(t, s, done)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	closed.Store(true)
	if got := <-last; !reflect.DeepEqual(got, want) || got.Seen == 0 {
		t.Errorf("at the end %+v, want %+v", got, want)
	}
}
