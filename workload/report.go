package workload

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"faultsnoop/internal/fault"
)

// reportType marks a line on stderr as one of this package's.
const reportType = "workload"

// Report is what one thread group did. All counts are numbers of faults.
type Report struct {
	// Type is always "workload": other programs may share the stream.
	Type string `json:"type"`
	// Ready marks the early line of --hold: memory and threads exist, nothing was
	// counted yet.
	Ready bool   `json:"ready,omitempty"`
	Kind  string `json:"kind"`
	// PID is the process that takes the faults.
	PID int `json:"pid"`
	// Target is the process whose memory is written, if it is another one.
	Target int `json:"target_pid,omitempty"`
	// File is the mapped file of kind file.
	File string `json:"file,omitempty"`
	// PageSize is what one fault maps, in bytes; 2 MiB for thp on x86.
	PageSize int `json:"page_size"`
	// Mode is how all faults of the report are taken.
	Mode string `json:"mode"`
	Expectation
	Counted
	// Exact says that Counted is what was expected.
	Exact   bool     `json:"exact"`
	Threads []Thread `json:"threads"`
}

// Expectation is what the kernel is expected to do.
type Expectation struct {
	// Pages is the number of different pages touched, of the report's PageSize.
	Pages int64 `json:"pages"`
	// Faults is the number that the kernel resolves and counts:
	// Minor + Major + Either.
	Faults int64 `json:"faults"`
	Minor  int64 `json:"minor"`
	Major  int64 `json:"major"`
	// Either counts faults that are minor or major depending on the kernel's
	// version or on its read-ahead; they are in neither Minor nor Major.
	Either int64 `json:"either"`
	// Failed is the number of faults that the kernel cannot resolve. It counts them nowhere.
	Failed int64 `json:"failed"`
}

func (e *Expectation) add(other Expectation) {
	e.Pages += other.Pages
	e.Faults += other.Faults
	e.Minor += other.Minor
	e.Major += other.Major
	e.Either += other.Either
	e.Failed += other.Failed
}

// Counted is the growth of ru_minflt and ru_majflt of getrusage(2) around the touching.
type Counted struct {
	Minflt int64 `json:"minflt"`
	Majflt int64 `json:"majflt"`
}

// matches reports whether the kernel counted what was expected.
func (e *Expectation) matches(c Counted) bool {
	return c.Minflt >= e.Minor && c.Majflt >= e.Major && c.Minflt+c.Majflt == e.Faults
}

// Thread is one thread that took faults.
type Thread struct {
	TID    int     `json:"tid"`
	Comm   string  `json:"comm"`
	Ranges []Range `json:"ranges"`
	Counted
}

// Range is the part of an address space that a thread, and nobody else, touched.
type Range struct {
	Start Address `json:"start"`
	End   Address `json:"end"` // exclusive
	Expectation
	// Access is how its pages were touched, empty if in several ways.
	Access string `json:"access,omitempty"`
	// FaultKind is the [fault.Kind] of all its faults, empty if there are several.
	FaultKind string `json:"fault_kind,omitempty"`
	// PgOff is the offset in the mapped file of the page at Start, in pages. It is
	// present for kind file only.
	PgOff *int64 `json:"pgoff,omitempty"`
	// Section is the section of the program that the range is in, and Symbol the object
	// there, if they are known. SymbolOffset is how far behind its beginning the range
	// begins, in bytes.
	Section      string `json:"section,omitempty"`
	Symbol       string `json:"symbol,omitempty"`
	SymbolOffset int64  `json:"symbol_offset,omitempty"`
	// Label is that of the mapping as tracers show it, where it is told.
	Label string `json:"label,omitempty"`
	// Touches are the exact addresses where they are not the start of each page.
	Touches []Touch `json:"touches,omitempty"`
}

// Touch is one access that faults.
type Touch struct {
	Address Address `json:"address"`
	Access  string  `json:"access"`
}

// Address is a virtual address; in JSON a string like "0x7e0000001234", since
// a number there is exact to 53 bits only.
type Address uint64

// MarshalText implements [encoding.TextMarshaler].
func (a Address) MarshalText() ([]byte, error) {
	return fmt.Appendf(nil, "%#x", uint64(a)), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler].
func (a *Address) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 0, 64)
	*a = Address(v)
	return err
}

// Contains reports whether addr is inside one of the report's ranges.
func (r *Report) Contains(addr uint64) bool {
	for _, t := range r.Threads {
		for _, rg := range t.Ranges {
			if Address(addr) >= rg.Start && Address(addr) < rg.End {
				return true
			}
		}
	}
	return false
}

// total fills the sums over the threads.
func (r *Report) total() {
	r.Expectation, r.Counted = Expectation{}, Counted{}
	for _, t := range r.Threads {
		for _, rg := range t.Ranges {
			r.Expectation.add(rg.Expectation)
		}
		r.Minflt += t.Minflt
		r.Majflt += t.Majflt
	}
	r.Exact = r.matches(r.Counted)
}

func (r *Report) write(w io.Writer) error {
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encoding the report of workload %s: %w", r.Kind, err)
	}
	if _, err := w.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("writing the report of workload %s: %w", r.Kind, err)
	}
	return nil
}

// ErrNoReport is returned by [Decode] and [Decoder.Next] when the stream ended
// without another report.
var ErrNoReport = errors.New("no workload report")

// Decode returns the final report among the lines of r and skips all other lines.
func Decode(r io.Reader) (*Report, error) {
	d := NewDecoder(r)
	for {
		rep, err := d.Next()
		if err != nil || !rep.Ready {
			return rep, err
		}
	}
}

// Decoder reads reports off the stderr of a running workload.
type Decoder struct {
	r *bufio.Reader
}

// NewDecoder reads from r, ahead of what it returns.
func NewDecoder(r io.Reader) *Decoder {
	return &Decoder{bufio.NewReader(r)}
}

// Next returns the next report, the early one of --hold included, as soon as its
// line is complete.
func (d *Decoder) Next() (*Report, error) {
	for {
		line, err := d.r.ReadBytes('\n')
		if bytes.HasPrefix(line, []byte("{")) {
			var rep Report
			if json.Unmarshal(line, &rep) == nil && rep.Type == reportType {
				return &rep, nil
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil, ErrNoReport
		case err != nil:
			return nil, fmt.Errorf("reading workload report: %w", err)
		}
	}
}

// wholeRange is the region b, each of whose pages takes one minor fault.
func wholeRange(b []byte, access fault.Access, kind fault.Kind, pageSize int) Range {
	n := int64(len(b) / pageSize)
	return Range{
		Start:       addressOf(b),
		End:         addressOf(b) + Address(len(b)),
		Expectation: Expectation{Pages: n, Faults: n, Minor: n},
		Access:      access.String(),
		FaultKind:   kind.String(),
	}
}

// joinAdjacent merges ranges that follow each other in memory, in whichever order
// they come.
func joinAdjacent(ranges []Range) []Range {
	slices.SortFunc(ranges, func(a, b Range) int { return cmp.Compare(a.Start, b.Start) })
	var joined []Range
	for _, r := range ranges {
		if n := len(joined); n > 0 && joined[n-1].End == r.Start {
			joined[n-1].End = r.End
			joined[n-1].add(r.Expectation)
			continue
		}
		joined = append(joined, r)
	}
	return joined
}
