package view

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

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
	for _, t := range s.Stacks {
		tables = append(tables, s.stackTableObject(t))
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
	if s.Part == Interval {
		return "interval"
	}
	return "stat"
}

func (s *Stat) costObject(c *fault.Cost) map[string]any {
	o := map[string]any{
		"faults": c.Faults(), "minor": c.Minor, "major": c.Major, "failed": c.Failed, "unknown": c.Unknown, "untimed": c.Untimed,
		"time_ns": nil, "max_ns": nil, "offcpu_ns": nil, "bytes": nil,
	}
	if failuresUnseen(s.Session, c.Failed) {
		o["failed"] = nil
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
	text := func(key, value string) { textMember(o, key, value) }
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
		o["inode"], o["dev"] = nil, nil
		if k.File != (fault.FileKey{}) {
			o["inode"], o["dev"] = k.File.Inode, string(appendDev(nil, k.File.Dev))
		}
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
	return append(b, "type,time,duration_ns,by,name,faults,minor,major,failed,unknown,untimed,time_ns,max_ns,p50_ns,p90_ns,p99_ns,bytes\n"...)
}

// AppendCSV appends a line for each kind and each row of the tables, but for that by kind:
// lines that say the same would be added up.
func (s *Stat) AppendCSV(b []byte) ([]byte, error) {
	var buf bytes.Buffer
	w := csv.NewWriter(&buf)
	when := s.End.UTC().Format(time.RFC3339Nano)
	num := func(v uint64) string { return strconv.FormatUint(v, 10) }
	known := func(v uint64, is bool) string {
		if !is {
			return ""
		}
		return num(v)
	}
	line := func(by string, name rowName, c *fault.Cost, k *fault.KindCost) {
		timed := c.Untimed < c.Faults()
		cells := []string{
			s.typeName(), when, num(uint64(s.Duration)), by, inert(string(name.append(nil, 0))),
			num(c.Faults()), num(c.Minor), num(c.Major), known(c.Failed, !failuresUnseen(s.Session, c.Failed)), num(c.Unknown), num(c.Untimed),
			known(uint64(c.Time), timed), known(uint64(c.Max), timed && c.Max > 0),
		}
		for _, q := range quantiles {
			var v time.Duration
			if k != nil {
				v = quantile(k, q.share)
			}
			cells = append(cells, known(uint64(v), k != nil && timed))
		}
		cells = append(cells, known(c.Bytes, c.Bytes > 0))
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
	for _, t := range s.Stacks {
		rows, rest, hidden := s.topStacks(t)
		line := func(name string, c *aggregate.StackCost) {
			_ = w.Write(append([]string{s.typeName(), when, num(uint64(s.Duration)), t.By.String()}, stackCells(name, c)...))
		}
		for i := range rows {
			line(csvName(t, &rows[i]), &rows[i].StackCost)
		}
		if hidden > 0 {
			line(string(moreName(hidden).append(nil, 0)), &rest)
		}
	}
	w.Flush()
	if err := w.Error(); err != nil {
		return b, fmt.Errorf("encoding the counts: %w", err)
	}
	return append(b, buf.Bytes()...), nil
}
