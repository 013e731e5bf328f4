// Package view turns faults into bytes: text for people, CSV and JSON lines for
// programs. It is pure: nothing is read, written or started here, and all that
// is shown comes from [Columns]. Names that a traced process chose are escaped.
package view

import (
	"bytes"
	"encoding/csv"
	"slices"
	"time"

	"faultsnoop/internal/fault"
)

// Format is the notation of an [Encoder].
type Format uint8

const (
	Text Format = iota
	CSV
	JSON
)

// Options choose what an [Encoder] writes.
type Options struct {
	Format Format
	// Columns to show; nil is the preset default in text and everything else
	// elsewhere.
	Columns []Column
	// Width cuts the last text column, if it is a name, so that lines fit that
	// many terminal columns. 0 does not cut.
	Width int
	// Color marks major faults with terminal attributes.
	Color bool
	// Stacks adds the stack of each record.
	Stacks bool
	// StackDepth is how many frames of a stack are in text, the innermost; 0 is all. CSV and
	// JSON have all of them.
	StackDepth int
	// Mappers adds the stack of the call that has mapped the memory.
	Mappers bool
	// Location of the clock in text; nil is the local one.
	Location *time.Location
}

// Encoder writes the records of one session. It keeps caches and is not safe for
// concurrent use.
type Encoder struct {
	session *fault.Session
	opts    Options
	columns []Column
	fields  []field // JSON

	rows  bytes.Buffer // CSV
	csv   *csv.Writer
	cells []string

	// second is the one that clock and rfc3339 show.
	second  int64
	clock   []byte // 15:04:05
	rfc3339 []byte // 2006-01-02T15:04:05
}

// NewEncoder returns an encoder for the faults of s.
func NewEncoder(s *fault.Session, o Options) *Encoder {
	if o.Location == nil {
		o.Location = time.Local
	}
	e := &Encoder{session: s, opts: o, columns: o.Columns}
	if e.columns == nil {
		name := "wide"
		if o.Format == Text {
			name = "default"
		}
		e.columns, _ = lookup(name)
	}
	switch o.Format {
	case CSV:
		e.columns = spell(e.columns)
		e.csv = csv.NewWriter(&e.rows)
		e.cells = make([]string, len(e.columns))
	case JSON:
		e.fields = makeFields(spell(e.columns))
	}
	e.setSecond(s.Started.Unix())
	return e
}

// Shows reports whether the column of that name is shown.
func (e *Encoder) Shows(name string) bool {
	return slices.ContainsFunc(e.columns, func(c Column) bool { return c.Name == name })
}

// AppendHeader appends what comes before the first fault.
func (e *Encoder) AppendHeader(b []byte) []byte {
	switch e.opts.Format {
	case CSV:
		return e.appendCSVHeader(b)
	case JSON:
		return e.appendJSONHeader(b)
	}
	return e.appendTitles(b)
}

// AppendFault appends one record.
func (e *Encoder) AppendFault(b []byte, f *fault.Fault) []byte {
	switch e.opts.Format {
	case CSV:
		return e.appendCSV(b, f)
	case JSON:
		return e.appendJSON(b, f)
	}
	return e.appendText(b, f)
}

// AppendLost appends a loss where the format has room for one: in JSON.
func (e *Encoder) AppendLost(b []byte, l fault.Loss) []byte {
	if e.opts.Format != JSON {
		return b
	}
	b = append(b, `{"type":"lost","count":`...)
	b = appendUint(b, l.Count)
	b = append(b, `,"where":`...)
	b, _ = appendJSONString(b, l.Where)
	return append(b, "}\n"...)
}

// AppendSummary appends the last line where the format has one: in JSON.
func (e *Encoder) AppendSummary(b []byte, s *Summary) []byte {
	if e.opts.Format != JSON {
		return b
	}
	return s.appendJSON(b)
}

// wall splits a CLOCK_MONOTONIC reading into second and nanosecond of the wall clock.
func (e *Encoder) wall(mono uint64) (sec, nsec int64) {
	ns := e.session.Wall(mono).UnixNano()
	sec, nsec = ns/int64(time.Second), ns%int64(time.Second)
	if nsec < 0 {
		sec, nsec = sec-1, nsec+int64(time.Second)
	}
	if sec != e.second {
		e.setSecond(sec)
	}
	return sec, nsec
}

func (e *Encoder) setSecond(sec int64) {
	t := time.Unix(sec, 0)
	e.second = sec
	e.clock = t.In(e.opts.Location).AppendFormat(e.clock[:0], time.TimeOnly)
	e.rfc3339 = t.UTC().AppendFormat(e.rfc3339[:0], "2006-01-02T15:04:05")
}

// appendClock appends the local time to the microsecond.
func (e *Encoder) appendClock(b []byte, f *fault.Fault) []byte {
	_, nsec := e.wall(f.End)
	return appendFraction(append(b, e.clock...), nsec/1000, 6)
}

// appendRFC3339 appends the time in UTC to the nanosecond.
func (e *Encoder) appendRFC3339(b []byte, f *fault.Fault) []byte {
	_, nsec := e.wall(f.End)
	return append(appendFraction(append(b, e.rfc3339...), nsec, 9), 'Z')
}

// appendFraction appends a point and v with leading zeroes.
func appendFraction(b []byte, v int64, digits int) []byte {
	const room = ".000000000"
	n := len(b)
	b = append(b, room[:digits+1]...)
	for i := n + digits; v > 0 && i > n; i-- {
		b[i] = byte('0' + v%10)
		v /= 10
	}
	return b
}
