package view

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// Stat is a run, or the interval of one, counted.
type Stat struct {
	Session  *fault.Session
	Rows     *fault.Rows
	Counters fault.Counters
	// Duration is how long faults were counted, and End when that was over.
	Duration time.Duration
	End      time.Time

	// Top bounds the rows of each table that are shown; 0 shows all.
	Top int
	// Hist adds the histogram of each kind to text.
	Hist bool
	// User and Cgroup name a user and a cgroup; the names are escaped here.
	User   func(uid uint32) string
	Cgroup func(id uint64) string
}

// statRow is a row of a table with the name that it is shown by.
type statRow struct {
	name string
	key  fault.Key
	cost fault.Cost
}

// Total is the sum over all kinds.
func (s *Stat) Total() fault.Cost {
	var sum fault.Cost
	for i := range s.Rows.Kinds {
		sum.Add(&s.Rows.Kinds[i].Cost)
	}
	return sum
}

// AppendText appends all tables for people. Names are cut so that lines fit width.
func (s *Stat) AppendText(b []byte, width int) []byte {
	total := s.Total()
	b = s.appendOverview(b, &total)
	b = s.appendKinds(b, &total)
	for i := range s.Rows.Tables {
		b = s.appendTable(b, &s.Rows.Tables[i], &total, width)
	}
	if s.Hist {
		b = s.appendHistograms(b)
	}
	return b
}

func (s *Stat) appendOverview(b []byte, total *fault.Cost) []byte {
	b = fmt.Appendf(b, "%s faults in %s by hook %s: %s minor, %s major, %s failed", group(total.Faults()),
		duration(s.Duration), s.Session.Hook, group(total.Minor), group(total.Major), group(total.Failed))
	if total.Unknown > 0 {
		b = fmt.Appendf(b, ", %s of unknown result", group(total.Unknown))
	}
	b = fmt.Appendf(b, "; %s lost\n", group(s.Counters.LostTotal()))
	if total.Untimed < total.Faults() {
		b = fmt.Appendf(b, "%s spent in faults, %s of the run time, the time of all threads added up", duration(total.Time),
			percent(uint64(total.Time), uint64(s.Duration)))
		if total.Untimed > 0 {
			b = fmt.Appendf(b, "; without %s faults whose time is not known", group(total.Untimed))
		}
		b = append(b, '\n')
	}
	if total.Bytes > 0 {
		b = fmt.Appendf(b, "%s mapped\n", units.BytesSize(float64(total.Bytes)))
	}
	return b
}

const kindHead = "KIND          FAULTS      MAJOR   TIME  SHARE    P50    P90    P99    MAX     MAPPED\n"

func (s *Stat) appendKinds(b []byte, total *fault.Cost) []byte {
	b = append(b, '\n')
	b = append(b, kindHead...)
	for _, kind := range s.kinds() {
		k := &s.Rows.Kinds[kind]
		b = fmt.Appendf(b, "%-8s %11s %10s %6s %6s", kind, group(k.Faults()), group(k.Major),
			timed(&k.Cost, k.Time), share(&k.Cost, total))
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
	if a.Time != b.Time {
		return -cmpUint(uint64(a.Time), uint64(b.Time))
	}
	return -cmpUint(a.Faults(), b.Faults())
}

func cmpUint(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// statNames is what the names of each table's rows are.
var statTitles = map[fault.By]string{
	fault.ByProcess: "PROCESS (PID)", fault.ByThread: "THREAD (TID/PID)", fault.ByKind: "KIND", fault.ByFile: "FILE",
	fault.ByMapping: "MAPPING (PID START)", fault.ByPage: "PAGE (PID)", fault.ByCgroup: "CGROUP", fault.ByUID: "USER",
	fault.ByCPU: "CPU", fault.ByAccess: "ACCESS", fault.ByMode: "MODE", fault.ByResult: "RESULT",
}

func (s *Stat) appendTable(b []byte, t *fault.Table, total *fault.Cost, width int) []byte {
	const head = "     FAULTS      MAJOR   TIME  SHARE    MAX     MAPPED  "
	b = append(b, '\n')
	b = append(b, head...)
	b = append(b, statTitles[t.By]...)
	b = append(b, '\n')
	rows, rest, hidden := s.top(t)
	line := func(name string, c *fault.Cost) {
		b = fmt.Appendf(b, "%11s %10s %6s %6s %6s %10s  ", group(c.Faults()), group(c.Major), timed(c, c.Time),
			share(c, total), timed(c, c.Max), mapped(c))
		b = appendEscaped(b, name, max(width-len(head), leastName))
		b = append(b, '\n')
	}
	for i := range rows {
		line(rows[i].name, &rows[i].cost)
	}
	if hidden > 0 {
		line(fmt.Sprintf("[%d more]", hidden), &rest)
	}
	if t.Other.Faults() > 0 {
		line("[other] (no room for more rows)", &t.Other)
	}
	return b
}

// top returns the rows to show, and the sum and number of those that are not.
func (s *Stat) top(t *fault.Table) (rows []statRow, rest fault.Cost, hidden int) {
	rows = make([]statRow, 0, len(t.Rows))
	for key, cost := range t.Rows {
		rows = append(rows, statRow{s.nameOf(t.By, key), key, cost})
	}
	slices.SortFunc(rows, func(a, b statRow) int {
		if order := dearer(&a.cost, &b.cost); order != 0 {
			return order
		}
		if order := strings.Compare(a.name, b.name); order != 0 {
			return order
		}
		return cmpUint(a.key.Value, b.key.Value)
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

// nameOf is what a row is called. It holds raw bytes of processes.
func (s *Stat) nameOf(by fault.By, k fault.Key) string {
	label := k.Label
	if label == "" {
		label = "[unknown]"
	}
	switch by {
	case fault.ByProcess:
		return fmt.Sprintf("%s (%d)", k.Name, k.ID)
	case fault.ByThread:
		return fmt.Sprintf("%s (%d/%d)", k.Name, k.ID, k.Value)
	case fault.ByKind:
		return fault.Kind(k.ID).String()
	case fault.ByFile:
		return label
	case fault.ByMapping:
		return fmt.Sprintf("%s (%d %x)", label, k.ID, k.Value)
	case fault.ByPage:
		return fmt.Sprintf("%x (%d)", k.Value, k.ID)
	case fault.ByCgroup:
		if s.Cgroup != nil {
			if name := s.Cgroup(k.Value); name != "" {
				return name
			}
		}
		return fmt.Sprintf("cgroup %d", k.Value)
	case fault.ByUID:
		if s.User != nil {
			if name := s.User(k.ID); name != "" {
				return fmt.Sprintf("%s (%d)", name, k.ID)
			}
		}
	case fault.ByAccess:
		return fault.Access(k.ID).String()
	case fault.ByMode:
		return fault.Mode(k.ID).String()
	case fault.ByResult:
		return fault.Result(k.ID).String()
	}
	return strconv.FormatUint(uint64(k.ID), 10)
}

// histWidth is the longest bar, in terminal columns.
const histWidth = 50

// appendHistograms draws the latencies of each kind, four steps to each power of two.
func (s *Stat) appendHistograms(b []byte) []byte {
	for _, kind := range s.kinds() {
		k := &s.Rows.Kinds[kind]
		steps := coarse(k.Buckets)
		if len(steps) == 0 {
			continue
		}
		var most uint64
		for _, st := range steps {
			most = max(most, st.count)
		}
		b = fmt.Appendf(b, "\n%s, latency\n", kind)
		for _, st := range steps {
			b = fmt.Appendf(b, "  <= %-6s %11s %s\n", duration(min(st.bound, k.Max)), group(st.count), bar(st.count, most))
		}
	}
	return b
}

type histStep struct {
	bound time.Duration
	count uint64
}

// coarse joins buckets to steps and leaves out the empty ones at both ends.
func coarse(buckets []uint64) []histStep {
	const join = 8
	var steps []histStep
	last := 0
	for i := 0; i+join <= len(buckets); i += join {
		var n uint64
		for _, c := range buckets[i : i+join] {
			n += c
		}
		if n == 0 && len(steps) == 0 {
			continue
		}
		steps = append(steps, histStep{aggregate.Bound(i + join - 1), n})
		if n > 0 {
			last = len(steps)
		}
	}
	return steps[:last]
}

// bar draws n of most in eighths of a column.
func bar(n, most uint64) string {
	const eighths = "▏▎▍▌▋▊▉"
	units := n * histWidth * 8 / max(most, 1)
	s := strings.Repeat("█", int(units/8))
	if rest := units % 8; rest > 0 {
		const size = len("▏")
		s += eighths[(rest-1)*uint64(size) : rest*uint64(size)]
	} else if n > 0 && units == 0 {
		s = "▏"
	}
	return s
}

// AppendJSON appends one object on one line.
func (s *Stat) AppendJSON(b []byte) ([]byte, error) {
	total := s.Total()
	type object = map[string]any
	out := object{
		"type": "stat", "hook": s.Session.Hook, "time": s.End.UTC().Format(time.RFC3339Nano),
		"duration_ns": int64(s.Duration), "seen": total.Faults(), "lost": s.Counters.LostTotal(),
		"filtered": s.Counters.Filtered, "total": costObject(&total),
	}
	var kinds []object
	for _, kind := range s.kinds() {
		k := &s.Rows.Kinds[kind]
		o := costObject(&k.Cost)
		o["kind"] = kind.String()
		if k.Untimed < k.Faults() {
			for _, q := range quantiles {
				o[q.name] = int64(quantile(k, q.share))
			}
			o["histogram"] = histogramObject(k.Buckets)
		}
		kinds = append(kinds, o)
	}
	out["kinds"] = kinds
	var tables []object
	for i := range s.Rows.Tables {
		t := &s.Rows.Tables[i]
		rows, rest, hidden := s.top(t)
		list := []object{}
		for j := range rows {
			o := costObject(&rows[j].cost)
			keyObject(o, t.By, rows[j].key, rows[j].name)
			list = append(list, o)
		}
		table := object{"by": t.By.String(), "rows": list, "other": costObject(&t.Other)}
		if hidden > 0 {
			more := costObject(&rest)
			more["rows"] = hidden
			table["more"] = more
		}
		tables = append(tables, table)
	}
	if tables != nil {
		out["tables"] = tables
	}
	line, err := json.Marshal(out)
	if err != nil {
		return b, fmt.Errorf("encoding the counts: %w", err)
	}
	return append(append(b, line...), '\n'), nil
}

func costObject(c *fault.Cost) map[string]any {
	o := map[string]any{
		"faults": c.Faults(), "minor": c.Minor, "major": c.Major, "failed": c.Failed, "untimed": c.Untimed,
		"time_ns": nil, "max_ns": nil, "bytes": nil,
	}
	if c.Untimed < c.Faults() || c.Faults() == 0 {
		o["time_ns"] = int64(c.Time)
	}
	if c.Max > 0 {
		o["max_ns"] = int64(c.Max)
	}
	if c.Bytes > 0 || c.Faults() == 0 {
		o["bytes"] = c.Bytes
	}
	return o
}

// histogramObject lists bounds and counts of the buckets that are not empty.
func histogramObject(buckets []uint64) [][2]uint64 {
	list := [][2]uint64{}
	for i, n := range buckets {
		if n > 0 {
			list = append(list, [2]uint64{uint64(aggregate.Bound(i)), n})
		}
	}
	return list
}

// keyObject adds what a row is of.
func keyObject(o map[string]any, by fault.By, k fault.Key, name string) {
	text := func(key, value string) {
		o[key] = strings.ToValidUTF8(value, "\uFFFD")
		if o[key] != value {
			o[key+"_hex"] = fmt.Sprintf("%x", value)
		}
	}
	switch by {
	case fault.ByProcess:
		o["pid"] = k.ID
		text("process", k.Name.String())
	case fault.ByThread:
		o["tid"], o["pid"] = k.ID, k.Value
		text("comm", k.Name.String())
	case fault.ByFile, fault.ByMapping:
		text("label", k.Label)
		o["inode"], o["dev"] = k.Inode, k.Dev
		if by == fault.ByMapping {
			o["pid"], o["start"] = k.ID, fmt.Sprintf("%#x", k.Value)
		}
	case fault.ByPage:
		o["pid"], o["address"] = k.ID, fmt.Sprintf("%#x", k.Value)
	case fault.ByCgroup:
		o["cgroup_id"] = k.Value
		text("cgroup", name)
	case fault.ByUID:
		o["uid"] = k.ID
	case fault.ByCPU:
		o["cpu"] = k.ID
	default:
		o[by.String()] = name
	}
}

// AppendCSV appends a line for each kind and each row of the tables.
func (s *Stat) AppendCSV(b []byte) ([]byte, error) {
	var buf bytes.Buffer
	w := csv.NewWriter(&buf)
	_ = w.Write([]string{"by", "name", "faults", "minor", "major", "failed", "time_ns", "max_ns", "p50_ns", "p90_ns", "p99_ns", "bytes"})
	line := func(by, name string, c *fault.Cost, k *fault.KindCost) {
		num := func(v uint64) string { return strconv.FormatUint(v, 10) }
		cells := []string{
			by, string(appendEscaped(nil, name, 0)), num(c.Faults()), num(c.Minor), num(c.Major), num(c.Failed),
			"", "", "", "", "", "",
		}
		if c.Untimed < c.Faults() {
			cells[6] = num(uint64(c.Time))
			if c.Max > 0 {
				cells[7] = num(uint64(c.Max))
			}
			for i, q := range quantiles {
				if k != nil {
					cells[8+i] = num(uint64(quantile(k, q.share)))
				}
			}
		}
		if c.Bytes > 0 {
			cells[11] = num(c.Bytes)
		}
		_ = w.Write(cells) // a bytes.Buffer takes everything
	}
	for _, kind := range s.kinds() {
		line("kind", kind.String(), &s.Rows.Kinds[kind].Cost, &s.Rows.Kinds[kind])
	}
	for i := range s.Rows.Tables {
		t := &s.Rows.Tables[i]
		rows, rest, hidden := s.top(t)
		for j := range rows {
			line(t.By.String(), rows[j].name, &rows[j].cost, nil)
		}
		if hidden > 0 {
			line(t.By.String(), fmt.Sprintf("[%d more]", hidden), &rest, nil)
		}
		if t.Other.Faults() > 0 {
			line(t.By.String(), "[other]", &t.Other, nil)
		}
	}
	w.Flush()
	if err := w.Error(); err != nil {
		return b, fmt.Errorf("encoding the counts: %w", err)
	}
	return append(b, buf.Bytes()...), nil
}

// timed is a duration, or unknown if no fault of c has one.
func timed(c *fault.Cost, d time.Duration) string {
	if c.Faults() > 0 && c.Untimed == c.Faults() || d == 0 {
		return string(unknown)
	}
	return duration(d)
}

func duration(d time.Duration) string { return string(appendDuration(nil, d)) }

func mapped(c *fault.Cost) string {
	if c.Bytes == 0 {
		return string(unknown)
	}
	return units.BytesSize(float64(c.Bytes))
}

func share(c, total *fault.Cost) string {
	if total.Time == 0 {
		return string(unknown)
	}
	return percent(uint64(c.Time), uint64(total.Time))
}

func percent(part, whole uint64) string {
	return fmt.Sprintf("%.1f%%", 100*float64(part)/float64(max(whole, 1)))
}

// group writes a number with commas between thousands.
func group(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
