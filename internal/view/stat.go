package view

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"encoding/json"
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
	// Interval says that it is one interval of several.
	Interval bool
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
	// User and Cgroup name a user and a cgroup, and are asked for rows that are shown only;
	// the names are escaped here.
	User   func(uid uint32) string
	Cgroup func(id uint64) string
}

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
	b = fmt.Appendf(b, "; %s lost", group(s.Counters.LostTotal()))
	lost := Summary{Counters: s.Counters}
	b = append(lost.appendCauses(b), '\n')
	if total.Untimed < total.Faults() {
		b = fmt.Appendf(b, "%s spent in faults, %s of the run time, the time of all threads added up", duration(total.Time),
			percent(uint64(total.Time), uint64(s.Duration)))
		if total.Untimed > 0 {
			b = fmt.Appendf(b, ";\nwithout %s faults whose time is not known", group(total.Untimed))
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
		b = name.append(b, max(width-len(head), leastName))
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
		return rowName{k.Name.String(), fmt.Sprintf(" (%d)", k.ID)}
	case fault.ByThread:
		return rowName{k.Name.String(), fmt.Sprintf(" (%d/%d)", k.ID, k.Value)}
	case fault.ByKind:
		return rowName{text: fault.Kind(k.ID).String()}
	case fault.ByFile:
		return rowName{text: label}
	case fault.ByMapping:
		if k.End != 0 {
			return rowName{label, fmt.Sprintf(" (%d -%x)", k.ID, k.End)}
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

// cgroup is the name of a cgroup, empty if it has none.
func (s *Stat) cgroup(id uint64) string {
	if s.Cgroup == nil {
		return ""
	}
	return s.Cgroup(id)
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
			b = fmt.Appendf(b, "  <= %-6s %11s", duration(min(st.bound, k.Max)), group(st.count))
			if st.count > 0 {
				b = append(append(b, ' '), bar(st.count, most)...)
			}
			b = append(b, '\n')
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
		"type": s.typeName(), "hook": s.Session.Hook, "time": s.End.UTC().Format(time.RFC3339Nano),
		"duration_ns": int64(s.Duration), "seen": total.Faults(), "lost": s.Counters.LostTotal(),
		"filtered": s.Counters.Filtered, "total": s.costObject(&total),
	}
	kinds := []object{}
	for _, kind := range s.kinds() {
		k := &s.Rows.Kinds[kind]
		o := s.costObject(&k.Cost)
		o["kind"] = nil
		if kind != fault.KindUnknown {
			o["kind"] = kind.String()
		}
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
			o := s.costObject(&rows[j].cost)
			s.keyObject(o, t.By, rows[j].key)
			list = append(list, o)
		}
		table := object{"by": t.By.String(), "rows": list, "other": s.costObject(&t.Other)}
		if hidden > 0 {
			more := s.costObject(&rest)
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

// typeName tells an interval from the run.
func (s *Stat) typeName() string {
	if s.Interval {
		return "interval"
	}
	return "stat"
}

func (s *Stat) costObject(c *fault.Cost) map[string]any {
	o := map[string]any{
		"faults": c.Faults(), "minor": c.Minor, "major": c.Major, "failed": c.Failed, "unknown": c.Unknown, "untimed": c.Untimed,
		"time_ns": nil, "max_ns": nil, "offcpu_ns": nil, "bytes": nil,
	}
	if c.Untimed < c.Faults() || c.Faults() == 0 {
		o["time_ns"] = int64(c.Time)
		if s.knowsOffCPU() {
			o["offcpu_ns"] = int64(c.OffCPU)
		}
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

// jsonName is a name that a process chose, in the notation of all other JSON.
type jsonName string

func (n jsonName) MarshalJSON() ([]byte, error) {
	b, _ := appendJSONString(nil, string(n))
	return b, nil
}

// keyObject adds what a row is of; what is not known is null.
func (s *Stat) keyObject(o map[string]any, by fault.By, k fault.Key) {
	text := func(key, value string) {
		o[key] = nil
		if value == "" {
			return
		}
		o[key] = jsonName(value)
		if !utf8.ValidString(value) {
			o[key+"_hex"] = fmt.Sprintf("%x", value)
		}
	}
	number := func(key string, value, unknown uint64) {
		o[key] = nil
		if value != unknown {
			o[key] = value
		}
	}
	switch by {
	case fault.ByProcess:
		number("pid", uint64(k.ID), 0)
		text("process", k.Name.String())
	case fault.ByThread:
		number("tid", uint64(k.ID), 0)
		number("pid", k.Value, 0)
		text("comm", k.Name.String())
	case fault.ByFile, fault.ByMapping:
		text("label", k.Label)
		o["inode"], o["dev"] = k.File.Inode, k.File.Dev
		if by == fault.ByMapping {
			number("pid", uint64(k.ID), 0)
			for name, address := range map[string]uint64{"start": k.Value, "end": k.End} {
				o[name] = nil
				if address != 0 {
					o[name] = fmt.Sprintf("%#x", address)
				}
			}
		}
	case fault.ByPage:
		number("pid", uint64(k.ID), 0)
		o["address"] = fmt.Sprintf("%#x", k.Value)
	case fault.ByCgroup:
		number("cgroup_id", k.Value, 0)
		text("cgroup", s.cgroup(k.Value))
	case fault.ByUID:
		number("uid", uint64(k.ID), fault.NoUID)
	case fault.ByCPU:
		o["cpu"] = k.ID
	default: // the words of an enumeration
		o[by.String()] = nil
		if word := s.nameOf(by, k).text; word != "unknown" {
			o[by.String()] = word
		}
	}
}

// AppendCSVHeader appends the names of the columns.
func AppendCSVHeader(b []byte) []byte {
	return append(b, "time,duration_ns,by,name,faults,minor,major,failed,unknown,untimed,time_ns,max_ns,p50_ns,p90_ns,p99_ns,bytes\n"...)
}

// AppendCSV appends a line for each kind and each row of the tables, but for that by kind:
// lines that say the same would be added up.
func (s *Stat) AppendCSV(b []byte) ([]byte, error) {
	var buf bytes.Buffer
	w := csv.NewWriter(&buf)
	when := s.End.UTC().Format(time.RFC3339Nano)
	num := func(v uint64) string { return strconv.FormatUint(v, 10) }
	line := func(by string, name rowName, c *fault.Cost, k *fault.KindCost) {
		cells := []string{
			when, num(uint64(s.Duration)), by, inert(string(name.append(nil, 0))),
			num(c.Faults()), num(c.Minor), num(c.Major), num(c.Failed), num(c.Unknown), num(c.Untimed), "", "", "", "", "", "",
		}
		if c.Untimed < c.Faults() {
			cells[10] = num(uint64(c.Time))
			if c.Max > 0 {
				cells[11] = num(uint64(c.Max))
			}
			for i, q := range quantiles {
				if k != nil {
					cells[12+i] = num(uint64(quantile(k, q.share)))
				}
			}
		}
		if c.Bytes > 0 {
			cells[15] = num(c.Bytes)
		}
		_ = w.Write(cells) // a bytes.Buffer takes everything
	}
	for _, kind := range s.kinds() {
		line("kind", rowName{text: kind.String()}, &s.Rows.Kinds[kind].Cost, &s.Rows.Kinds[kind])
	}
	for i := range s.Rows.Tables {
		t := &s.Rows.Tables[i]
		if t.By == fault.ByKind {
			continue
		}
		rows, rest, hidden := s.top(t)
		for j := range rows {
			line(t.By.String(), s.nameOf(t.By, rows[j].key), &rows[j].cost, nil)
		}
		if hidden > 0 {
			line(t.By.String(), moreName(hidden), &rest, nil)
		}
		if t.Other.Faults() > 0 {
			line(t.By.String(), rowName{text: "[other]"}, &t.Other, nil)
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

// group writes a number with commas between thousands.
func group(n uint64) string {
	s := strconv.FormatUint(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
