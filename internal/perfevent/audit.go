package perfevent

import "faultsnoop/internal/fault"

// Where faults are lost. The kernel counts every fault that the events were open for,
// whether or not its record found room, so the difference is exact. It is taken
// before the filters: which of the lost faults they would have kept nobody knows.
const (
	ringFull = "perf ring full"
	// unrecorded are faults that were counted though no record of them or of a loss was
	// ever written: one in about 100,000 when all CPUs are watched under load (seen on
	// Linux 6.18).
	unrecorded = "not recorded by perf"
)

// auditEvery is how often lost faults are counted while records are being lost, since
// reading all counters takes one system call each.
const auditEvery = 1e9

// audit finds out how many completions of faults have no record.
type audit struct {
	// wanted: records have been lost since the last audit.
	wanted bool
	// full: records have been lost since the events were opened.
	full bool
	// running: the counters were read before the rings were.
	running bool
	last    uint64
	total   [2]uint64 // minor and major, as the kernel counted them
	lost    [2]uint64 // as reported so far
}

// before reads the kernel's counters if an audit is due. All that they count has its
// record in a ring by then, or none.
func (a *audit) before(s *Session) error {
	a.running = s.stopped || a.wanted && s.now-a.last > auditEvery
	if !a.running {
		return nil
	}
	a.last = s.now
	var err error
	a.total, err = s.totals()
	return err
}

// after compares with what has been read. While the events run more may have been
// read than was counted before, so what is reported is at least the truth only at the
// end, and never more than it.
func (a *audit) after(s *Session) {
	if !a.running || s.behind {
		return
	}
	a.wanted = false
	where := unrecorded
	if a.full {
		where = ringFull
	}
	for k, name := range [...]string{minor: "minor", major: "major"} {
		got := s.decoder.got[k]
		if a.total[k] <= got+a.lost[k] {
			continue
		}
		l := fault.Loss{Where: name + ", " + where, Count: a.total[k] - got - a.lost[k]}
		if s.filtering() {
			l.Where += fault.Unfiltered
		}
		a.lost[k] += l.Count
		s.batch.Lost = append(s.batch.Lost, l)
	}
}
