package view

import (
	"slices"
	"strconv"
	"time"

	"faultsnoop/internal/fault"
)

// Summary is what is left to say when tracing has ended.
type Summary struct {
	fault.Counters
	// Printed is how many records were shown, and of these Stacked with a stack, if Stacks were
	// taken.
	Printed, Stacked uint64
	Stacks           bool

	Duration time.Duration
	Session  *fault.Session
}

// Line is the summary for people, without a line end.
func (s *Summary) Line() string {
	b := appendUint(nil, s.Seen)
	b = append(b, " faults: "...)
	if s.Seen == 1 {
		b = append(b[:0], "1 fault: "...)
	}
	b = append(appendUint(b, s.Minor), " minor, "...)
	b = append(appendUint(b, s.Major), " major, "...)
	b = append(b, failures(s.Session, s.Failed, strconv.FormatUint(s.Failed, 10))...)
	if sum := s.Minor + s.Major + s.Failed; sum < s.Seen {
		b = append(b, ", "...)
		b = append(appendUint(b, s.Seen-sum), " of unknown result"...)
	}
	if s.Untimed > 0 {
		b = append(b, ", "...)
		b = append(appendUint(b, s.Untimed), " without latency (completion not heard of)"...)
	}
	if s.Unremembered > 0 {
		b = append(b, ", "...)
		b = append(appendUint(b, s.Unremembered), " without again (no room for more pages)"...)
	}
	if s.Printed < s.Seen {
		b = append(b, "; "...)
		b = append(appendUint(b, s.Printed), " shown"...)
	}
	if s.Stacks {
		b = append(b, "; "...)
		b = append(appendUint(b, s.Stacked), " ("...)
		b = append(append(b, percent(s.Stacked, s.Printed)...), ") of those shown with a stack"...)
	}
	b = append(b, "; "...)
	b = append(appendUint(b, s.LostTotal()), " lost"...)
	b = s.appendCauses(b)
	b = append(b, "; "...)
	b = append(appendUint(b, s.Filtered), " filtered out; "...)
	b = strconv.AppendFloat(b, s.Duration.Seconds(), 'f', 1, 64)
	b = append(b, " s by "...)
	return string(append(b, s.Session.Hook...))
}

// failuresUnseen reports that none were seen since the hook does not hear of faults that fail.
func failuresUnseen(s *fault.Session, failed uint64) bool {
	return failed == 0 && !slices.Contains(s.Covers, "failed")
}

// failures is how many failed, by the number as it is to be shown, or that the hook does not say.
func failures(s *fault.Session, failed uint64, number string) string {
	if failuresUnseen(s, failed) {
		return "failed ones not seen"
	}
	return number + " failed"
}

// appendCauses names the places of the losses in parentheses.
func (s *Summary) appendCauses(b []byte) []byte {
	open := " ("
	for _, l := range s.Lost {
		if l.Count == 0 {
			continue
		}
		b = append(b, open...)
		b = append(b, l.Where...)
		b = append(b, ": "...)
		b = appendUint(b, l.Count)
		open = ", "
	}
	if open == ", " {
		b = append(b, ')')
	}
	return b
}

func (s *Summary) appendJSON(b []byte) []byte {
	failed := strconv.AppendUint(nil, s.Failed, 10)
	if failuresUnseen(s.Session, s.Failed) {
		failed = []byte("null")
	}
	b = appendUint(append(b, `{"type":"summary","seen":`...), s.Seen)
	b = appendUint(append(b, `,"lost":`...), s.LostTotal())
	b = appendUint(append(b, `,"filtered":`...), s.Filtered)
	b = appendUint(append(b, `,"minor":`...), s.Minor)
	b = appendUint(append(b, `,"major":`...), s.Major)
	b = append(append(b, `,"failed":`...), failed...)
	b = appendUint(append(b, `,"untimed":`...), s.Untimed)
	b = appendUint(append(b, `,"unremembered":`...), s.Unremembered)
	if s.Stacks {
		b = appendUint(append(b, `,"printed":`...), s.Printed)
		b = appendUint(append(b, `,"stacked":`...), s.Stacked)
	}
	b = appendUint(append(b, `,"duration_ns":`...), uint64(max(s.Duration, 0)))
	b = append(b, `,"hook":`...)
	b, _ = appendJSONString(b, s.Session.Hook)
	return append(b, "}\n"...)
}
