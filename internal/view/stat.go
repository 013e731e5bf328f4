package view

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/docker/go-units"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// Stat is a run, or the interval of one, counted.
type Stat struct {
	// Part is what the counts are of.
	Part     Part
	Session  *fault.Session
	Rows     *fault.Rows
	Counters fault.Counters
	// Stacks are tables of the same faults by their stacks.
	Stacks []*aggregate.StackTable
	// Duration is how long faults were counted, and End when that was over.
	Duration time.Duration
	End      time.Time

	// Top bounds the rows of each table that are shown; 0 shows all.
	Top int
	// Hist adds the histogram of each kind to text.
	Hist bool
	// User and Cgroup name a user and a cgroup, and are asked for rows that are shown only;
	// the names are escaped here.
	User   func(uid uint32) string
	Cgroup func(id uint64) string
}

// Part tells counts of a run from those of a part of it.
type Part uint8

const (
	Run       Part = iota
	Interval       // one of several
	Intervals      // all of them: the run, after its intervals
)

// statRow is a row of a table.
type statRow struct {
	key  fault.Key
	cost fault.Cost
}

// rowName is a name that may hold raw bytes of processes, and may be cut, and the
// numbers behind it, which tell rows apart and may not.
type rowName struct{ text, numbers string }

// append appends the name in limit columns, 0 for as many as it needs.
func (n rowName) append(b []byte, limit int) []byte {
	text := n.text
	if limit > 0 {
		limit = max(limit-len(n.numbers), leastName)
		text = pathEnd(text, limit)
	}
	return append(appendEscaped(b, text, limit), n.numbers...)
}

// pathEnd shortens a path to size bytes; its end says more than its beginning.
func pathEnd(path string, size int) string {
	const dots = "..."
	if !strings.HasPrefix(path, "/") || len(path) <= size || size <= len(dots) {
		return path
	}
	at := len(path) - size + len(dots)
	for at < len(path) && !utf8.RuneStart(path[at]) {
		at++
	}
	return dots + path[at:]
}

// Total is the sum over all kinds.
func (s *Stat) Total() fault.Cost {
	var sum fault.Cost
	for i := range s.Rows.Kinds {
		sum.Add(&s.Rows.Kinds[i].Cost)
	}
	return sum
}

// AppendText appends all tables for people. Names are cut so that lines fit width, if
// that is not 0.
func (s *Stat) AppendText(b []byte, width int) []byte {
	total := s.Total()
	b = s.appendOverview(b, &total)
	b = s.appendKinds(b, &total)
	for i := range s.Rows.Tables {
		b = s.appendTable(b, &s.Rows.Tables[i], &total, width)
	}
	for _, t := range s.Stacks {
		b = s.appendStackTable(b, t, width)
	}
	if s.Hist {
		b = s.appendHistograms(b)
	}
	return b
}

func (s *Stat) appendOverview(b []byte, total *fault.Cost) []byte {
	switch s.Part {
	case Interval:
		b = append(s.End.AppendFormat(b, time.TimeOnly), ": "...)
	case Intervals:
		b = append(b, "whole run: "...)
	}
	b = fmt.Appendf(b, "%s in %s by hook %s: %s minor, %s major, %s", plural(total.Faults(), "fault"),
		duration(s.Duration), s.Session.Hook, group(total.Minor), group(total.Major), failures(s.Session, total.Failed, group(total.Failed)))
	if total.Unknown > 0 {
		b = fmt.Appendf(b, ", %s of unknown result", group(total.Unknown))
	}
	b = fmt.Appendf(b, "; %s lost", group(s.Counters.LostTotal()))
	lost := Summary{Counters: s.Counters}
	b = append(lost.appendCauses(b), '\n')
	if total.Untimed < total.Faults() {
		b = fmt.Appendf(b, "%s spent in faults, %s of the run time, the time of all threads added up", duration(total.Time),
			percent(uint64(total.Time), uint64(s.Duration)))
		if total.Untimed > 0 {
			b = fmt.Appendf(b, ";\nwithout %s whose time is not known", plural(total.Untimed, "fault"))
		}
		b = append(b, '\n')
	}
	if total.Bytes > 0 {
		b = fmt.Appendf(b, "%s mapped\n", units.BytesSize(float64(total.Bytes)))
	}
	return b
}

const kindHead = "KIND          FAULTS      MAJOR   TIME  SHARE OFFCPU    P50    P90    P99    MAX     MAPPED\n"

func (s *Stat) appendKinds(b []byte, total *fault.Cost) []byte {
	b = append(b, '\n')
	b = append(b, kindHead...)
	for _, kind := range s.kinds() {
		k := &s.Rows.Kinds[kind]
		b = fmt.Appendf(b, "%-8s %11s %10s %6s %6s %6s", kind, group(k.Faults()), group(k.Major),
			timed(&k.Cost, k.Time), share(&k.Cost, total), s.offCPU(&k.Cost))
		for _, q := range quantiles {
			b = fmt.Appendf(b, " %6s", timed(&k.Cost, quantile(k, q.share)))
		}
		b = fmt.Appendf(b, " %6s %10s\n", timed(&k.Cost, k.Max), mapped(&k.Cost))
	}
	return b
}

// kinds are those that happened, the most expensive first.
func (s *Stat) kinds() []fault.Kind {
	var kinds []fault.Kind
	for i := range s.Rows.Kinds {
		if s.Rows.Kinds[i].Faults() > 0 {
			kinds = append(kinds, fault.Kind(i))
		}
	}
	slices.SortStableFunc(kinds, func(a, b fault.Kind) int {
		return dearer(&s.Rows.Kinds[a].Cost, &s.Rows.Kinds[b].Cost)
	})
	return kinds
}

var quantiles = [...]struct {
	name  string
	share float64
}{{"p50_ns", 0.5}, {"p90_ns", 0.9}, {"p99_ns", 0.99}}

// quantile never claims more than the longest latency that was seen.
func quantile(k *fault.KindCost, q float64) time.Duration {
	return min(aggregate.Quantile(k.Buckets, q), k.Max)
}

// dearer orders by time, and by number where times are not known.
func dearer(a, b *fault.Cost) int {
	return -cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(a.Faults(), b.Faults()))
}

// statTitles say what the names of each table's rows are.
var statTitles = map[fault.By]string{
	fault.ByProcess: "PROCESS (PID)", fault.ByThread: "THREAD (TID/PID)", fault.ByKind: "KIND", fault.ByFile: "FILE",
	fault.ByMapping: "MAPPING (PID START, of stacks -END)", fault.ByPage: "PAGE (PID)", fault.ByCgroup: "CGROUP", fault.ByUID: "USER",
	fault.ByCPU: "CPU", fault.ByAccess: "ACCESS", fault.ByMode: "MODE", fault.ByResult: "RESULT",
}

func (s *Stat) appendTable(b []byte, t *fault.Table, total *fault.Cost, width int) []byte {
	const head = "     FAULTS      MAJOR   TIME  SHARE    MAX     MAPPED  "
	b = append(b, '\n')
	b = append(b, head...)
	b = append(b, statTitles[t.By]...)
	b = append(b, '\n')
	rows, rest, hidden := s.top(t)
	line := func(name rowName, c *fault.Cost) {
		b = fmt.Appendf(b, "%11s %10s %6s %6s %6s %10s  ", group(c.Faults()), group(c.Major), timed(c, c.Time),
			share(c, total), timed(c, c.Max), mapped(c))
		limit := 0
		if width > 0 {
			limit = max(width-len(head), leastName)
		}
		b = name.append(b, limit)
		b = append(b, '\n')
	}
	for i := range rows {
		line(s.nameOf(t.By, rows[i].key), &rows[i].cost)
	}
	if hidden > 0 {
		line(moreName(hidden), &rest)
	}
	if t.Other.Faults() > 0 {
		line(rowName{text: "[other]", numbers: " (no room for more rows)"}, &t.Other)
	}
	return b
}

// top returns the rows to show, and the sum and number of those that are not.
func (s *Stat) top(t *fault.Table) (rows []statRow, rest fault.Cost, hidden int) {
	rows = make([]statRow, 0, len(t.Rows))
	for key, cost := range t.Rows {
		rows = append(rows, statRow{key, cost})
	}
	slices.SortFunc(rows, func(a, b statRow) int {
		if order := dearer(&a.cost, &b.cost); order != 0 {
			return order
		}
		return compareKeys(&a.key, &b.key)
	})
	if s.Top > 0 && len(rows) > s.Top {
		for i := range rows[s.Top:] {
			rest.Add(&rows[s.Top+i].cost)
		}
		hidden = len(rows) - s.Top
		rows = rows[:s.Top]
	}
	return rows, rest, hidden
}

// compareKeys orders rows whose cost is the same, in one way every time.
func compareKeys(a, b *fault.Key) int {
	return cmp.Or(
		strings.Compare(a.Name.String(), b.Name.String()), strings.Compare(a.Label, b.Label), cmp.Compare(a.ID, b.ID),
		cmp.Compare(a.Value, b.Value), cmp.Compare(a.End, b.End), cmp.Compare(a.File.Dev, b.File.Dev), cmp.Compare(a.File.Inode, b.File.Inode),
	)
}

func moreName(hidden int) rowName { return rowName{text: fmt.Sprintf("[%d more]", hidden)} }

// nameOf is what a row is called.
func (s *Stat) nameOf(by fault.By, k fault.Key) rowName {
	label := k.Label
	if label == "" {
		label = "[unknown]"
	}
	switch by {
	case fault.ByProcess:
		return taskName(&k, fmt.Sprintf(" (%d)", k.ID))
	case fault.ByThread:
		return taskName(&k, fmt.Sprintf(" (%d/%d)", k.ID, k.Value))
	case fault.ByKind:
		return rowName{text: fault.Kind(k.ID).String()}
	case fault.ByFile:
		return rowName{text: label}
	case fault.ByMapping:
		if k.End != 0 {
			return rowName{label, fmt.Sprintf(" (%d -%x)", k.ID, k.End)}
		}
		if k.Value == 0 {
			return rowName{label, fmt.Sprintf(" (%d)", k.ID)}
		}
		return rowName{label, fmt.Sprintf(" (%d %x)", k.ID, k.Value)}
	case fault.ByPage:
		return rowName{numbers: fmt.Sprintf("%x (%d)", k.Value, k.ID)}
	case fault.ByCgroup:
		if k.Value == 0 {
			return rowName{text: "[unknown]"}
		}
		if name := s.cgroup(k.Value); name != "" {
			return rowName{text: name}
		}
		return rowName{numbers: fmt.Sprintf("cgroup %d", k.Value)}
	case fault.ByUID:
		if k.ID == fault.NoUID {
			return rowName{text: "[unknown]"}
		}
		if s.User != nil {
			if name := s.User(k.ID); name != "" {
				return rowName{name, fmt.Sprintf(" (%d)", k.ID)}
			}
		}
	case fault.ByAccess:
		return rowName{text: fault.Access(k.ID).String()}
	case fault.ByMode:
		return rowName{text: fault.Mode(k.ID).String()}
	case fault.ByResult:
		return rowName{text: fault.Result(k.ID).String()}
	}
	return rowName{numbers: strconv.FormatUint(uint64(k.ID), 10)}
}

// taskName is what a process or thread is called. One without an id here, in another pid
// namespace, may have a name all the same.
func taskName(k *fault.Key, ids string) rowName {
	if k.ID == 0 {
		ids = ""
	}
	return rowName{cmp.Or(k.Name.String(), "[unknown]"), ids}
}

// cgroup is the name of a cgroup, empty if it has none.
func (s *Stat) cgroup(id uint64) string {
	if s.Cgroup == nil {
		return ""
	}
	return s.Cgroup(id)
}

// timed is a duration, or unknown if no fault of c has one.
func timed(c *fault.Cost, d time.Duration) string {
	if c.Faults() > 0 && c.Untimed == c.Faults() || d == 0 {
		return string(unknown)
	}
	return duration(d)
}

func duration(d time.Duration) string { return string(appendDuration(nil, d)) }

// knowsOffCPU: perf events do not tell when a thread leaves its CPU.
func (s *Stat) knowsOffCPU() bool { return s.Session.Hook != "perf" }

// offCPU is the share of the time in which threads did not run.
func (s *Stat) offCPU(c *fault.Cost) string {
	if c.Time == 0 || !s.knowsOffCPU() {
		return string(unknown)
	}
	return percent(uint64(c.OffCPU), uint64(c.Time))
}

func mapped(c *fault.Cost) string {
	if c.Bytes == 0 {
		return string(unknown)
	}
	return units.BytesSize(float64(c.Bytes))
}

func share(c, total *fault.Cost) string {
	if total.Time == 0 || c.Untimed == c.Faults() {
		return string(unknown)
	}
	return percent(uint64(c.Time), uint64(total.Time))
}

func percent(part, whole uint64) string {
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(max(whole, 1)))
}

// plural writes a number of things.
func plural(n uint64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return group(n) + " " + noun + "s"
}

// group writes a number with commas between thousands.
func group(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
