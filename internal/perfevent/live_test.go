package perfevent

import (
	"context"
	"errors"
	"io"
	"runtime/debug"
	"testing"

	"faultsnoop/internal/fault"
)

func setPanicOnFault() (undo func()) {
	old := debug.SetPanicOnFault(true)
	return func() { debug.SetPanicOnFault(old) }
}

// open opens a session and closes it at the end of the test.
func open(t *testing.T, opt Options) *Session {
	t.Helper()
	s, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// collect reads until the channel is closed, stops, and returns all faults.
func collect(t *testing.T, s *Session, until <-chan struct{}) ([]fault.Fault, fault.Counters) {
	t.Helper()
	var all []fault.Fault
	for {
		select {
		case <-until:
			if err := s.Stop(); err != nil {
				t.Error(err)
			}
			until = nil
		default:
		}
		b, err := s.Next(context.Background())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b.Faults...)
	}
	c, err := s.Counters()
	if err != nil {
		t.Fatal(err)
	}
	return all, c
}

// run starts a child under a session of its own and returns what both have to say.
func run(t *testing.T, opt Options, args ...string) (*Session, []report, []fault.Fault, fault.Counters) {
	t.Helper()
	c := startChild(t, true, args...)
	opt.CommandPID = c.pid()
	s := open(t, opt)
	done := make(chan struct{})
	var reports []report
	go func() {
		defer close(done)
		c.release()
		reports = c.wait()
	}()
	faults, counters := collect(t, s, done)
	return s, reports, faults, counters
}

func in(r report) func(f *fault.Fault) bool {
	return func(f *fault.Fault) bool { return f.Address >= r.Start && f.Address < r.End }
}

func count(faults []fault.Fault, keep func(*fault.Fault) bool) (n int) {
	for i := range faults {
		if keep(&faults[i]) {
			n++
		}
	}
	return n
}

func TestCommand(t *testing.T) {
	const pages = 5000
	s, reports, faults, c := run(t, Options{}, "touch", "5000")
	r := reports[0]
	if r.Min != pages {
		t.Logf("the child counts %d faults for %d pages", r.Min, pages)
	}
	if got := count(faults, in(r)); got != pages {
		t.Errorf("%d faults in the range, want %d", got, pages)
	}
	t.Logf("session %+v", s.Session())
	t.Logf("counters %+v", c)
	var timed, vma, pgoff int
	for i := range faults {
		f := &faults[i]
		if !in(r)(f) {
			if i%50 == 0 {
				t.Logf("%+v", *f)
			}
			continue
		}
		if f.Is(fault.HasLatency) {
			timed++
		}
		if f.Is(fault.HasVMA) {
			vma++
		}
		if f.Is(fault.HasPgOff) {
			pgoff++
		}
	}
	t.Log("timed", timed, "vma", vma, "pgoff", pgoff)
}
