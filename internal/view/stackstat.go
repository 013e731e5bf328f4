package view

import (
	"encoding/json"
	"fmt"
	"path"
	"time"
	"unicode/utf8"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// stackTitles say what the names of each table's rows are.
var stackTitles = [...]string{
	aggregate.ByFunction: "FUNCTION (MODULE)", aggregate.ByLine: "FUNCTION FILE:LINE",
	aggregate.ByStack: "STACK", aggregate.ByModule: "MODULE",
}

// topStacks returns the rows to show, and the sum and number of those that are not. The row of
// faults without a stack is always shown, as the last one.
func (s *Stat) topStacks(t *aggregate.StackTable) (rows []aggregate.StackRow, rest aggregate.StackCost, hidden int) {
	rows = t.Rows
	if last := len(rows) - 1; last >= 0 && rows[last].Frame.Func == aggregate.NoStack {
		none := rows[last]
		rows = rows[:last:last]
		defer func() { rows = append(rows, none) }()
	}
	if s.Top > 0 && len(rows) > s.Top {
		for i := range rows[s.Top:] {
			rest.Add(rows[s.Top+i].StackCost)
		}
		hidden = len(rows) - s.Top
		rows = rows[:s.Top:s.Top]
	}
	return rows, rest, hidden
}

// appendStackTable appends a table for people. Its columns are those of all others, but for
// the longest fault, which is not counted by stack.
func (s *Stat) appendStackTable(b []byte, t *aggregate.StackTable, width int) []byte {
	const head = "     FAULTS      MAJOR   TIME  SHARE     MAPPED  "
	b = append(append(b, '\n'), head...)
	b = append(b, stackTitles[t.By]...)
	if t.SkipRuntime {
		b = append(b, ", runtimes skipped"...)
	}
	if t.Taken > 0 {
		b = fmt.Appendf(b, ", estimated from %s of the faults", percent(t.Taken, t.Total.Faults))
	} else if stacked := t.Stacked(); stacked.Faults < t.Total.Faults {
		b = fmt.Appendf(b, ", of %s of the faults", percent(stacked.Faults, t.Total.Faults))
	}
	b = append(b, '\n')
	limit := 0
	if width > 0 {
		limit = max(width-len(head), leastName)
	}
	stacked := t.Stacked()
	cost := func(c *aggregate.StackCost, share string) {
		took, mapped := string(unknown), string(unknown)
		if c.Time > 0 {
			took = duration(c.Time)
		}
		if c.Bytes > 0 {
			mapped = Bytes.format(c.Bytes)
		}
		b = fmt.Appendf(b, "%11s %10s %6s %6s %10s  ", group(c.Faults), group(c.Major), took, share, mapped)
	}
	rows, rest, hidden := s.topStacks(t)
	for i := range rows {
		r := &rows[i]
		if r.Frame.Func == aggregate.NoStack && hidden > 0 {
			cost(&rest, stackShare(&rest, &stacked))
			b = append(moreName(hidden).append(b, limit), '\n')
			hidden = 0
		}
		if r.Frame.Func == aggregate.NoStack {
			cost(&r.StackCost, string(unknown))
		} else {
			cost(&r.StackCost, stackShare(&r.StackCost, &stacked))
		}
		if r.Stack == 0 {
			b = append(appendRowName(b, t.By, &r.Frame, limit), '\n')
			continue
		}
		stack := t.Stacks.Stack(r.Stack)
		for j := range stack.Frames {
			if j > 0 {
				b = appendBlanks(b, len(head))
			}
			b = append(appendRowName(b, aggregate.ByLine, &stack.Frames[j], limit), '\n')
		}
		if end := aggregate.EndName(stack.End); end != "" {
			b = append(append(appendBlanks(b, len(head)), end...), '\n')
		}
	}
	if hidden > 0 {
		cost(&rest, stackShare(&rest, &stacked))
		b = append(moreName(hidden).append(b, limit), '\n')
	}
	return b
}

// stackShare is a row's share of the time or, where no time is known, of the faults.
func stackShare(c, total *aggregate.StackCost) string {
	if total.Time == 0 {
		return percent(c.Faults, total.Faults)
	}
	return percent(uint64(c.Time), uint64(total.Time))
}

// appendRowName appends what a row is of in limit columns, 0 for as many as it needs. A path
// loses its beginning, and the line's number is never cut.
func appendRowName(b []byte, by aggregate.StackBy, f *fault.Frame, limit int) []byte {
	if by == aggregate.ByModule {
		return rowName{text: moduleName(f)}.append(b, limit)
	}
	name, offset := frameName(f)
	where, number := f.File, ""
	if by == aggregate.ByLine && f.Line > 0 && f.File != "" {
		number = fmt.Sprintf(":%d", f.Line)
	}
	before, after := " ", ""
	if by == aggregate.ByFunction || where == "" {
		where = ""
		if f.Func != "" && f.Module != "" {
			where, before, after = f.Module, " (", ")"
			if limit > 0 {
				where = path.Base(where)
			}
		}
	}
	if where == "" {
		return rowName{name, offset}.append(b, limit)
	}
	if limit == 0 {
		b = append(append(appendEscaped(b, name, 0), offset...), before...)
		return append(append(appendEscaped(b, where, 0), number...), after...)
	}
	// The place gets what the name leaves, but at least half.
	const ends = 2
	width := columnsOf(appendEscaped(nil, where, 0)) + len(before) + len(number) + len(after)
	room := max(limit-min(width, limit/ends)-len(offset), leastName)
	from := len(b)
	b = append(append(appendEscaped(b, name, room), offset...), before...)
	rest := max(limit-columnsOf(b[from:])-len(number)-len(after), leastName)
	return append(append(appendEscaped(b, pathEnd(where, rest), rest), number...), after...)
}

// moduleName names a row by module.
func moduleName(f *fault.Frame) string {
	switch {
	case f.Module != "":
		return f.Module
	case f.Func == aggregate.NoStack:
		return aggregate.NoStack
	}
	return "[unknown]"
}

// stackTableObject is a table for JSON.
func (s *Stat) stackTableObject(t *aggregate.StackTable) map[string]any {
	stacked := t.Stacked()
	rows, rest, hidden := s.topStacks(t)
	list := []map[string]any{}
	for i := range rows {
		r := &rows[i]
		o := stackCostObject(&r.StackCost)
		o["share"] = nil
		if r.Frame.Func != aggregate.NoStack {
			o["share"] = shareOf(&r.StackCost, &stacked)
		}
		switch {
		case t.By == aggregate.ByStack:
			o["stack"], o["stack_end"] = nil, fault.StackNone.String()
			if r.Stack != 0 {
				stack := t.Stacks.Stack(r.Stack)
				o["stack"], o["stack_end"] = json.RawMessage(appendFrames(nil, stack)), stack.End.String()
			}
		case t.By == aggregate.ByModule:
			textMember(o, "module", r.Frame.Module)
			textMember(o, "build_id", r.Frame.BuildID)
			o["stack"] = r.Frame.Func != aggregate.NoStack
		default:
			frameObject(o, t.By, &r.Frame)
			o["stack"] = r.Frame.Func != aggregate.NoStack
		}
		list = append(list, o)
	}
	table := map[string]any{"by": t.By.String(), "skip_runtime": t.SkipRuntime, "rows": list}
	if table["estimated"] = t.Taken > 0; t.Taken > 0 {
		stacked.Faults = t.Taken
	}
	table["stacked"] = stacked.Faults
	if hidden > 0 {
		more := stackCostObject(&rest)
		more["rows"] = hidden
		table["more"] = more
	}
	return table
}

func frameObject(o map[string]any, by aggregate.StackBy, f *fault.Frame) {
	name := f.Func
	if name == aggregate.NoStack {
		name = ""
	}
	textMember(o, "func", name)
	textMember(o, "file", f.File)
	textMember(o, "module", f.Module)
	o["offset"], o["lang"] = nil, nil
	if name == "" && f.Module != "" {
		o["offset"] = fmt.Sprintf("%#x", f.Offset)
	}
	if f.Lang != fault.LangUnknown {
		o["lang"] = f.Lang.String()
	}
	if by == aggregate.ByLine {
		o["line"] = nil
		if f.Line > 0 {
			o["line"] = f.Line
		}
	}
}

// textMember adds a text that may be hostile; one that is not known is null.
func textMember(o map[string]any, key, value string) {
	o[key] = nil
	if value == "" {
		return
	}
	o[key] = jsonName(value)
	if !utf8.ValidString(value) {
		o[key+"_hex"] = fmt.Sprintf("%x", value)
	}
}

// stackCostObject has the members that costObject has.
func stackCostObject(c *aggregate.StackCost) map[string]any {
	o := map[string]any{
		"faults": c.Faults, "minor": nil, "major": c.Major, "failed": nil, "unknown": nil, "untimed": nil,
		"time_ns": nil, "max_ns": nil, "offcpu_ns": nil, "bytes": nil,
	}
	if c.Time > 0 {
		o["time_ns"] = int64(c.Time)
	}
	if c.Bytes > 0 {
		o["bytes"] = c.Bytes
	}
	return o
}

// shareOf is what stackShare writes, as a number from 0 to 1.
func shareOf(c, total *aggregate.StackCost) float64 {
	if total.Time == 0 {
		return float64(c.Faults) / float64(max(total.Faults, 1))
	}
	return float64(c.Time) / float64(total.Time)
}

// stackCells are a row's cells in CSV, from that of the name on.
func stackCells(name string, c *aggregate.StackCost) []string {
	number := func(n uint64) string { return string(appendUint(nil, n)) }
	cells := []string{inert(name), number(c.Faults), "", number(c.Major), "", "", "", "", "", "", "", "", ""}
	if c.Time > 0 {
		cells[7] = number(uint64(c.Time / time.Nanosecond))
	}
	if c.Bytes > 0 {
		cells[12] = number(c.Bytes)
	}
	return cells
}

// csvName is the name of a row in CSV; that of a stack is its frames in the folded format.
func csvName(t *aggregate.StackTable, r *aggregate.StackRow) string {
	if r.Stack == 0 {
		return string(appendRowName(nil, t.By, &r.Frame, 0))
	}
	return foldedStack(t.Stacks.Stack(r.Stack))
}
