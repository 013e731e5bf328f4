package perfevent

import (
	"fmt"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// Timeline knows what processes have mapped at a moment that is not long gone, from the
// records of mmap, exec, fork and exit that perf events carry: also of processes that have
// ended since. It serves sources that hear of faults in another way.
type Timeline struct {
	session *Session
	// reached is the time up to which records have been taken up.
	reached uint64
}

// OpenTimeline starts to follow the processes that the filter chooses. The caller closes
// the Timeline.
func OpenTimeline(filter fault.Filter, commandPID int) (*Timeline, error) {
	// A process that matches may be told by more than who it is; that is asked elsewhere.
	who := fault.Filter{PIDs: filter.PIDs, TIDs: filter.TIDs, Cgroup: filter.Cgroup, Children: filter.Children, Self: true}
	s, err := Open(Options{Filter: who, CommandPID: commandPID, NoEntries: true, noFaults: true})
	if err != nil {
		return nil, fmt.Errorf("following mappings: %w", err)
	}
	return &Timeline{session: s}, nil
}

// Close gives back all descriptors and memory.
func (t *Timeline) Close() error { return t.session.Close() }

// Advance reads what has been recorded. It is to be called several times a second, or
// records get lost.
func (t *Timeline) Advance() error {
	s := t.session
	if err := s.readRings(); err != nil {
		return err
	}
	return s.followCPUs()
}

// MappingsOf returns what the process pid had mapped at a time in nanoseconds of
// CLOCK_MONOTONIC, nil if that is not known. Times must not go backwards by more than
// what was unmapped meanwhile may matter: what came after the latest one that was asked for
// is not taken up yet. The result is valid until the next call.
func (t *Timeline) MappingsOf(pid uint32, at uint64) *process.Space {
	s := t.session
	if at > t.reached {
		t.reached = at
		s.consume(at)
	}
	p := s.tasks.procs[pid]
	if p == nil {
		// Nothing was heard of it, so it has been there all the time, or has ended.
		if !s.readProc || !process.Alive(int(pid)) {
			return nil
		}
		p = s.tasks.get(pid, pid).proc
	}
	return s.spaceOf(p)
}
