package perfevent

import "time"

// flight is a fault whose handling has begun.
type flight struct {
	record
	// up is set while there is one.
	up bool
	// sure is not set if the record of its completion may have been lost.
	sure bool
}

// pairing matches the beginnings of faults with their completions.
type pairing struct {
	// lossy is the time until which records may be missing.
	lossy uint64
	// losses counts the windows of loss.
	losses uint64
}

// lost notes that records may be missing between two times: no fault in flight in
// that window may be called failed or timed, since the record that says otherwise
// may be among them.
func (p *pairing) lost(until uint64) {
	p.lossy = max(p.lossy, until)
	p.losses++
}

// begin notes the beginning of a fault and returns what became of the one before.
func (p *pairing) begin(t *task, rec *record) (before flight) {
	before = p.end(t)
	t.flight = flight{record: *rec, up: true, sure: !rec.askew && rec.time > p.lossy}
	return before
}

// end returns the fault in flight if it has failed. A thread does one fault at a time,
// so the next one, or the thread's exit, says that this one will not complete.
func (p *pairing) end(t *task) (failed flight) {
	f := t.flight
	t.flight.up = false
	// A fault in flight during a loss may have completed unseen.
	f.up = f.up && f.sure && f.time > p.lossy
	return f
}

// complete matches a completion with the beginning. A beginning for another page is
// that of a fault that failed.
func (p *pairing) complete(t *task, rec *record) (latency time.Duration, timed bool, failed flight) {
	f := t.flight
	switch {
	case !f.up:
		return 0, false, flight{}
	case f.addr/pageSize != rec.addr/pageSize || f.kernel != rec.kernel:
		return 0, false, p.end(t)
	}
	t.flight.up = false
	if !f.sure || f.time <= p.lossy || rec.askew || rec.time < f.time {
		return 0, false, flight{}
	}
	return time.Duration(rec.time - f.time), true, flight{}
}
