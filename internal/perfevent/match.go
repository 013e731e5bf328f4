package perfevent

import (
	"math"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// matches applies the filter with the rules of bpf/filter.h: what was asked for by pid
// includes the processes it starts, and so does what matches by name if no pid was
// given; all other conditions are on each thread itself.
func (s *Session) matches(t *task, f *fault.Fault) bool {
	flt, p := &s.opt.Filter, t.proc
	switch {
	case f.PID == s.self && !flt.Self,
		len(s.tasks.list) > 0 && !p.listed,
		len(s.onlyTIDs) > 0 && !s.onlyTIDs[f.TID],
		!flt.MatchRecord(f),
		flt.UID != nil && !s.hasUID(p, *flt.UID),
		s.cgroup != "" && s.scope != cgroupScope && !s.inCgroup(p):
		return false
	}
	return len(flt.Comms) == 0 || s.hasName(p, f)
}

// filtering reports whether some of the faults that the events count may not match.
func (s *Session) filtering() bool {
	flt := &s.opt.Filter
	return len(flt.Comms) > 0 || len(s.kinds) > 0 || flt.UID != nil || flt.Major != nil || flt.Mode != nil ||
		flt.AddrEnd != 0 || flt.MinLatency > 0 || len(s.onlyTIDs) > 0 && len(s.tasks.list) > 0 ||
		s.cgroup != "" && s.scope != cgroupScope ||
		s.scope == taskScope && s.inherit && !flt.Children ||
		s.scope != taskScope && !flt.Self
}

func (s *Session) hasName(p *proc, f *fault.Fault) bool {
	flt := &s.opt.Filter
	follow := flt.Children && len(s.tasks.list) == 0
	if follow && p.kin {
		return true
	}
	if !flt.MatchComm(f, func() string { return s.executable(p) }) {
		return false
	}
	p.kin = follow
	return true
}

// executable is the file name of the program, until the next exec.
func (s *Session) executable(p *proc) string {
	name, _ := p.exe.get(s.now, math.MaxUint64, func() (string, error) {
		return process.Executable(int(p.pid))
	})
	return name
}

func (s *Session) hasUID(p *proc, uid uint32) bool {
	st, ok := s.status(p, refreshAfter)
	return ok && st.UID == uid
}

// learnUsers reads the users of processes that have just begun a program, before they
// may end. Whoever starts a program for another user changes the user before.
func (s *Session) learnUsers(r *ring) {
	for i := r.next; i < len(r.queue); i++ {
		rec := &r.queue[i]
		if rec.kind != renamed || !rec.side.exec || rec.side.status.tried || !s.readProc {
			continue
		}
		rec.side.status.get(s.now, math.MaxUint64, func() (process.Status, error) {
			return process.ReadStatus(int(rec.pid))
		})
	}
}

// learnUser makes sure that the user of a process that forks is known, since the
// child has it too.
func (s *Session) learnUser(rec *record) {
	if s.opt.Filter.UID != nil && rec.pid != rec.side.parentPID && rec.side.parentTID != 0 {
		s.status(s.tasks.get(rec.side.parentPID, rec.side.parentTID).proc, refreshAfter)
	}
}

func (s *Session) status(p *proc, maxAge uint64) (process.Status, bool) {
	if !s.readProc || p.pid == 0 {
		return process.Status{}, false
	}
	return p.status.get(s.now, maxAge, func() (process.Status, error) {
		return process.ReadStatus(int(p.pid))
	})
}

func (s *Session) inCgroup(p *proc) bool {
	if !s.readProc || p.pid == 0 {
		return false
	}
	in, ok := p.cgroup.get(s.now, refreshAfter, func() (bool, error) {
		path, err := process.CgroupPath(int(p.pid))
		return process.CgroupHolds(s.cgroup, path), err
	})
	return in && ok
}

// identify fills the ids in other pid namespaces.
func (s *Session) identify(t *task, f *fault.Fault) {
	if f.TID == 0 {
		return
	}
	if s.hostIDs {
		f.Known |= fault.HasIDs
		f.HostPID, f.HostTID = f.PID, f.TID
	}
	st, ok := s.status(t.proc, math.MaxUint64)
	if !ok || !st.Nested {
		return
	}
	if t.innerTID == 0 {
		t.innerTID = st.InnerTID
		if f.TID != f.PID {
			own, err := process.ReadStatus(int(f.TID))
			if err != nil {
				return // it has ended
			}
			t.innerTID = own.InnerTID
		}
	}
	f.Known |= fault.HasInnerIDs
	f.InnerPID, f.InnerTID = st.InnerTGID, t.innerTID
}

const (
	// lookEvery is how often the mappings of one process are read at most.
	lookEvery = 10e6
	// lookShare is the share of time that goes into reading mappings at most, 1/lookShare.
	lookShare = 20
)

// locate fills in the mapping of a fault, and what follows from it, as far as it is
// certain.
func (s *Session) locate(p *proc, f *fault.Fault) {
	if p.pid == 0 {
		return
	}
	s.forgetLost(p)
	m := p.space.Find(f.Address)
	if s.worthLook(p, m, f) {
		s.look(p)
		m = p.space.Find(f.Address)
	}
	if m == nil {
		return
	}
	f.VMA.Label, f.VMA.Deleted = m.Label, m.Deleted
	f.Known |= fault.HasLabel
	if off, ok := m.PgOffAt(f.Address); ok {
		f.PgOff = off
		f.Known |= fault.HasPgOff
	}
	f.VMA.Inode, f.VMA.Dev = m.Inode, m.Dev
	f.VMA.Path, f.VMA.Deleted = process.FilePath(m.Path)
	if m.Inode == 0 {
		f.Continues = continued(p, m)
	}
	if m.HasPgOff && p.space.Exact(m, f.End) {
		f.VMA.Start, f.VMA.End, f.VMA.PgOff, f.VMA.Flags = m.Start, m.End, m.PgOff, m.Flags
		f.Known |= fault.HasVMA
	}
	s.infer(p, m, f)
}

// forgetLost forgets what a process has mapped if changes may be among records that were lost.
func (s *Session) forgetLost(p *proc) {
	if p.losses != s.pairing.losses {
		p.space.Reset()
		p.losses = s.pairing.losses
	}
}

// spaceOf is what a process has mapped. If that is not known it is read, whatever time that
// takes.
func (s *Session) spaceOf(p *proc) *process.Space {
	s.forgetLost(p)
	if s.readProc && (p.looked == 0 || p.space.Confirmed() == 0) {
		s.look(p)
	}
	return &p.space
}

// infer tells the kind of a fault if the mapping leaves no doubt of it. What became of one
// that was not resolved is not known, nor whether it was in that mapping.
func (s *Session) infer(p *proc, m *process.Mapping, f *fault.Fault) {
	if !f.OK() || !p.space.Certain(m, f.End) {
		return
	}
	e := evidence{backing: s.backings.of(m), flags: m.Flags, major: f.Major, written: m.Written, uffd: s.uffd}
	if e.uffd && (e.backing == shmem || e.backing == hugetlb) {
		e.server = s.holdsUserfault(p)
	}
	numa, known := s.numa.get(s.now, refreshAfter, process.BalancesNUMA)
	e.numa = numa || !known
	if kind := e.kind(); kind != fault.KindUnknown {
		f.Kind = kind
		f.Known |= fault.HasKind
	}
}

// holdsUserfault reports whether a process has a userfaultfd, or may have. It is asked as
// often as mappings are read.
func (s *Session) holdsUserfault(p *proc) bool {
	if p.searched < p.looked {
		begin := process.Now()
		holds, err := process.HoldsUserfault(int(p.pid))
		p.userfault = holds || err != nil
		p.searched = process.Now()
		s.nextLook = max(s.nextLook, p.searched+(p.searched-begin)*lookShare)
	}
	return p.userfault
}

// continued is the mapping of a file that anonymous memory begins behind.
func continued(p *proc, m *process.Mapping) *fault.VMA {
	of := p.space.Continued(m)
	if of == nil || !of.HasPgOff {
		return nil
	}
	return of.VMA()
}

// worthLook reports whether to read the process's mappings: when the address is in
// none that is known (nothing tells of mremap, of a stack that has grown, or of what
// was there before the events), or when nobody has looked whether the bounds still hold.
func (s *Session) worthLook(p *proc, m *process.Mapping, f *fault.Fault) bool {
	switch {
	case !s.readProc:
		return false
	case m == nil && p.looked == 0:
		return true
	case m != nil && f.End <= p.space.Confirmed():
		return false
	}
	return s.now > s.nextLook && s.now-p.looked > lookEvery
}

// look compares what is known of a process's mappings with /proc.
func (s *Session) look(p *proc) {
	begin := process.Now()
	maps, err := process.ReadMaps(int(p.pid))
	// A process that is ending has no mappings any more; those that are known stay true
	// for its last faults.
	if err == nil && len(maps) > 0 {
		p.space.Confirm(maps, begin)
	}
	end := process.Now()
	p.looked = end
	s.nextLook = end + (end-begin)*lookShare
}
