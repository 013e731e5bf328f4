package view

import (
	"strings"

	"faultsnoop/internal/fault"
)

func (e *Encoder) appendCSVHeader(b []byte) []byte {
	for i := range e.columns {
		e.cells[i] = e.columns[i].csvName()
	}
	return e.appendRow(b, "stack", "mapper")
}

func (e *Encoder) appendCSV(b []byte, f *fault.Fault) []byte {
	var room [64]byte
	for i := range e.columns {
		c := &e.columns[i]
		if c.name != nil {
			e.cells[i] = inert(string(c.name(room[:0], f, 0)))
			continue
		}
		e.cells[i] = string(c.raw(e, room[:0], f))
	}
	var stack, mapper string
	if e.opts.Stacks {
		stack = inert(foldedStack(f.Stack))
	}
	if e.opts.Mappers {
		mapper = inert(foldedStack(f.Mapper))
	}
	return e.appendRow(b, stack, mapper)
}

// appendRow lets encoding/csv quote the cells and, behind them, stacks if they are shown.
// Writing to memory cannot fail.
func (e *Encoder) appendRow(b []byte, stack, mapper string) []byte {
	cells := e.cells
	if e.opts.Stacks {
		cells = append(cells, stack)
	}
	if e.opts.Mappers {
		cells = append(cells, mapper)
	}
	e.rows.Reset()
	_ = e.csv.Write(cells)
	e.csv.Flush()
	return append(b, e.rows.Bytes()...)
}

// inert escapes the first character of a name that a spreadsheet would run as a
// formula. The notation is that of all other escapes, so it can be undone.
func inert(name string) string {
	if name == "" || !strings.ContainsRune("=+-@", rune(name[0])) {
		return name
	}
	return string(appendHexEscape(nil, name[0])) + name[1:]
}
