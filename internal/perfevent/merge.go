package perfevent

// merge yields the records of all rings in the order of their times.
type merge struct {
	// run is the ring that is read from, up to and including the time until, before
	// the others are looked at again.
	run   *ring
	until uint64
}

// next takes the oldest record that is not younger than bound, or returns nil. The
// record is valid until the rings are read again.
//
// A record may come after younger ones of other threads if the kernel published it
// late, but never after those of its own thread: what a thread did before was
// published before it took the time of the next.
func (m *merge) next(rings []*ring, bound uint64) *record {
	if m.run == nil || !m.run.has(m.until) {
		if m.run = m.choose(rings, bound); m.run == nil {
			return nil
		}
	}
	rec := &m.run.queue[m.run.next]
	m.run.next++
	return rec
}

// choose finds the ring with the oldest record and how far it can be read in one go.
func (m *merge) choose(rings []*ring, bound uint64) *ring {
	var first *ring
	m.until = bound
	for _, r := range rings {
		if !r.has(bound) {
			continue
		}
		t := r.queue[r.next].time
		switch {
		case first == nil:
			first = r
		case t < first.queue[first.next].time:
			m.until = min(m.until, first.queue[first.next].time)
			first = r
		default:
			m.until = min(m.until, t)
		}
	}
	return first
}

// has reports whether the next record is not younger than bound.
func (r *ring) has(bound uint64) bool {
	return r.next < len(r.queue) && r.queue[r.next].time <= bound
}

// readThrough is the time up to which all rings have been read.
func readThrough(rings []*ring) uint64 {
	through := ^uint64(0)
	for _, r := range rings {
		through = min(through, r.through)
	}
	return through
}
