package perfevent

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/process"
)

// checkCPUs is how often the list of online CPUs is read. Netlink would tell at once
// but is not allowed in every container.
const checkCPUs = 100e6

// followCPUs opens events on CPUs that have come online.
func (s *Session) followCPUs() error {
	if s.now < s.nextCPUs {
		return nil
	}
	s.nextCPUs = s.now + checkCPUs
	cpus, err := process.OnlineCPUs()
	if err != nil {
		return err
	}
	for _, r := range s.rings {
		r.offline = r.offline || !slices.Contains(cpus, r.cpu)
	}
	for _, cpu := range cpus {
		i := slices.IndexFunc(s.rings, func(r *ring) bool { return r.cpu == cpu })
		switch {
		case i < 0:
			err = s.startCPU(cpu)
		case s.rings[i].offline:
			err = s.restartCPU(s.rings[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// startCPU opens the ring of a new CPU and the events of all that is traced.
func (s *Session) startCPU(cpu int) error {
	r, err := s.addCPU(cpu)
	if r == nil || err != nil {
		return err
	}
	r.through, r.last = s.now, s.now
	return s.openOn(r)
}

// restartCPU opens the events of a CPU again that was offline. Those of threads stay
// in place meanwhile; those of the whole CPU have been removed by the kernel
// (perf_event_exit_cpu in kernel/events/core.c) and keep only their counts.
func (s *Session) restartCPU(r *ring) error {
	r.offline = false
	if s.scope == taskScope {
		return nil
	}
	if err := s.retire(r.cpu); err != nil {
		return err
	}
	return s.openOn(r)
}

// retire closes the events of a CPU and keeps their counts.
func (s *Session) retire(cpu int) error {
	var errs []error
	s.events = slices.DeleteFunc(s.events, func(ev event) bool {
		if ev.cpu != cpu {
			return false
		}
		if ev.kind == minor || ev.kind == major {
			c, err := ev.ReadCount()
			errs = append(errs, err)
			s.retired[ev.kind] += c.Value
		}
		errs = append(errs, ev.Close())
		return true
	})
	return errors.Join(errs...)
}

// openOn opens and starts events on one CPU for all that is traced. Threads that were
// started by traced ones have inherited events on the older CPUs only, so each needs
// its own.
func (s *Session) openOn(r *ring) error {
	if s.scope != taskScope {
		id := -1
		if s.scope == cgroupScope {
			id = s.cgroupFD
		}
		return s.startSet(r, id)
	}
	for tid, t := range s.tasks.threads {
		if len(s.onlyTIDs) > 0 && !s.onlyTIDs[tid] || len(s.onlyTIDs) == 0 && !t.proc.listed {
			continue
		}
		// A thread may end at any time.
		if err := s.startSet(r, int(tid)); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

// startSet opens and enables events on one CPU. A command that has not been started
// yet is counted from its exec on.
func (s *Session) startSet(r *ring, id int) error {
	first := len(s.events)
	onExec := s.scope == taskScope && id == s.opt.CommandPID && !s.started
	err := s.openSet(r, id, onExec)
	switch {
	case errors.Is(err, unix.ENODEV):
		r.offline = true
		return nil
	case err != nil:
		return s.explain(err, id)
	case onExec:
		return nil
	}
	return s.enable(first)
}
