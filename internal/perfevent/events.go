package perfevent

import (
	"errors"
	"fmt"
	"os"

	perf "github.com/elastic/go-perf"
	"golang.org/x/sys/unix"
)

// scope is whose faults the events count.
type scope uint8

const (
	taskScope   scope = iota // chosen threads and what they start
	cgroupScope              // the tasks of a cgroup
	systemScope              // all
)

// event is one open event.
type event struct {
	*perf.Event
	kind kind
	cpu  int
}

// attr is the configuration that all events share. See decode.go for the layout of
// the records that result.
func (s *Session) attr(counter perf.SoftwareCounter) perf.Attr {
	chain := s.decoder.chains != nil && counter != perf.PageFaults && counter != perf.Dummy
	return perf.Attr{
		Type:   perf.SoftwareEvent,
		Config: uint64(counter),
		SampleFormat: perf.SampleFormat{
			IP: true, Tid: true, Time: true, Addr: true,
			Identifier: s.decoder.sets != nil,
			CPU:        counter != perf.MinorPageFaults || chain,
			Period:     counter == perf.MajorPageFaults || chain,
			StreamID:   counter == perf.MajorPageFaults && chain,
			Callchain:  chain,
		},
		ClockID: unix.CLOCK_MONOTONIC,
		Options: perf.Options{
			Disabled: true, SampleIDAll: true, UseClockID: true,
			ExcludeKernel: s.userOnly, ExcludeHypervisor: s.userOnly,
		},
	}
}

// openOwner opens the event that a CPU's ring belongs to. It never fires and is on a
// task that lives as long as we do: were it a traced task's, the descriptor would
// report a hang-up without end once that task is gone.
func (s *Session) openOwner(cpu int) (*perf.Event, error) {
	a := s.attr(perf.Dummy)
	a.Options.ExcludeKernel, a.Options.ExcludeHypervisor = true, true
	// Wake the reader long before the ring is full, and when who a process is must be
	// read while it lives, soon after it has started.
	watermark := uint32(pageSize) << s.order / 8
	if s.opt.Filter.UID != nil || s.cgroup != "" {
		watermark = min(watermark, 4096)
	}
	a.SetWakeupWatermark(watermark)
	return perf.Open(&a, os.Getpid(), cpu, nil)
}

// mapLargest maps the ring of a CPU with 1 << s.order pages, or with as many as are
// allowed unless the caller has asked for a number.
func (s *Session) mapLargest(owner *perf.Event, cpu int) (*ring, error) {
	for {
		r, err := mapRing(owner, cpu, s.order)
		switch {
		case err == nil:
			return r, nil
		// Other sessions of the same user may have used up some of what may be pinned.
		case !errors.Is(err, unix.EPERM) || s.order == 0 || s.opt.BufferPages != 0:
			return nil, explainMap(err, cpu, 1<<s.order)
		}
		s.order--
	}
}

// counters are the events of one task on one CPU, in the order in which they are
// enabled: a fault that has begun before the completions are counted would look as
// if it had failed.
func (s *Session) counters() []perf.SoftwareCounter {
	if s.opt.noFaults {
		return []perf.SoftwareCounter{perf.Dummy}
	}
	c := []perf.SoftwareCounter{minor: perf.MinorPageFaults, major: perf.MajorPageFaults}
	if s.opt.NoEntries {
		return append(c, perf.Dummy)
	}
	return append(c, perf.PageFaults)
}

// openSet opens all events of one thread (or of a cgroup's folder, or of all threads
// if id is -1) on one CPU. They are disabled, or enabled at the thread's next exec.
// Events that were opened before an error are closed again.
func (s *Session) openSet(r *ring, id int, onExec bool) (err error) {
	first := len(s.events)
	defer func() {
		if err == nil {
			return
		}
		for _, ev := range s.events[first:] {
			err = errors.Join(err, ev.Close())
		}
		s.events = s.events[:first]
	}()
	s.sets++
	for i, counter := range s.counters() {
		a := s.attr(counter)
		if counter != perf.Dummy {
			a.Sample = 1
		}
		a.Options.Inherit = s.inherit
		a.Options.EnableOnExec = onExec
		k := kind(i)
		if i == len(s.counters())-1 {
			// The last one carries the side records too, so that it alone, and not the
			// counts of completions, is out by those that are lost.
			o := &a.Options
			o.Mmap, o.MmapData, o.Mmap2, o.Comm, o.CommExec, o.Task = true, true, true, true, true, true
			if counter == perf.Dummy {
				k = tracker
			}
		}
		flags := 0
		if s.scope == cgroupScope {
			flags = unix.PERF_FLAG_PID_CGROUP
		}
		ev, err := perf.OpenWithFlags(&a, id, r.cpu, nil, flags)
		if err != nil {
			return err
		}
		s.events = append(s.events, event{ev, k, r.cpu})
		if err := ev.SetOutput(r.owner); err != nil {
			return fmt.Errorf("directing a page-fault event to the ring of CPU %d: %w", r.cpu, err)
		}
		if s.decoder.sets == nil {
			continue
		}
		evID, err := ev.ID()
		if err != nil {
			return fmt.Errorf("reading the id of a page-fault event: %w", err)
		}
		s.decoder.sets[evID] = s.sets
	}
	return nil
}

// enable starts the events from an index on.
func (s *Session) enable(from int) error {
	for _, ev := range s.events[from:] {
		if err := ev.Enable(); err != nil {
			return fmt.Errorf("enabling a page-fault event: %w", err)
		}
	}
	return nil
}

// disable stops all events, the beginnings of faults first: see counters.
func (s *Session) disable() error {
	var errs []error
	for _, k := range [...]kind{entry, minor, major, tracker} {
		for _, ev := range s.events {
			if ev.kind == k {
				errs = append(errs, ev.Disable())
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("disabling page-fault events: %w", err)
	}
	return nil
}

// totals reads how many minor and major faults the kernel has counted, with or
// without a record, those of inherited and ended threads included.
func (s *Session) totals() ([2]uint64, error) {
	sum := s.retired
	for _, ev := range s.events {
		if ev.kind != minor && ev.kind != major {
			continue
		}
		c, err := ev.ReadCount()
		if err != nil {
			return sum, fmt.Errorf("reading a page-fault counter: %w", err)
		}
		sum[ev.kind] += c.Value
	}
	return sum, nil
}
