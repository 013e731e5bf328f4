package view

import (
	"slices"

	"faultsnoop/internal/fault"
)

const (
	unknown = '-'
	blanks  = "                    "
	// leastName is what a name at the end of a line gets even where the line is full.
	leastName = 4

	red   = "\x1b[1;31m"
	reset = "\x1b[0m"
)

func (e *Encoder) appendTitles(b []byte) []byte {
	line := row{start: len(b)}
	for i := range e.columns {
		c := &e.columns[i]
		cell := line.open(&b, i)
		b = append(b, c.Title...)
		line.close(&b, c, cell, i == len(e.columns)-1)
	}
	return append(b, '\n')
}

func (e *Encoder) appendText(b []byte, f *fault.Fault) []byte {
	line := row{start: len(b)}
	for i := range e.columns {
		c := &e.columns[i]
		last := i == len(e.columns)-1
		cell := line.open(&b, i)
		b = e.appendTextCell(b, c, f, e.limit(c, line.used, last))
		if len(b) == cell {
			b = append(b, unknown)
		}
		line.close(&b, c, cell, last)
		if e.opts.Color && c.key == "major" && f.Is(fault.HasMajor) && f.Major {
			b = slices.Insert(b, cell, []byte(red)...)
			b = append(b, reset...)
		}
	}
	b = append(b, '\n')
	if e.opts.Stacks {
		b = appendStackText(b, f.Stack, e.opts.StackDepth)
	}
	if e.opts.Mappers {
		b = append(b, "  mapped by\n"...)
		b = appendStackText(b, f.Mapper, e.opts.StackDepth)
	}
	return b
}

func (e *Encoder) appendTextCell(b []byte, c *Column, f *fault.Fault, limit int) []byte {
	switch {
	case c.name != nil:
		return c.name(b, f, limit)
	case c.text != nil:
		return c.text(e, b, f)
	}
	return c.raw(e, b, f)
}

// limit is how many terminal columns a name may take.
func (e *Encoder) limit(c *Column, used int, last bool) int {
	switch {
	case !last:
		return c.Width
	case e.opts.Width == 0:
		return 0
	}
	return max(e.opts.Width-used, leastName)
}

// failureWords are those for faults that failed, as wide as maj and min.
var failureWords = [...]string{
	fault.SIGBUS: "bus", fault.SIGSEGV: "seg", fault.OOM: "oom", fault.HWPoison: "hwp",
	fault.Interrupted: "int", fault.EFAULT: "efa",
}

func (e *Encoder) appendMajor(b []byte, f *fault.Fault) []byte {
	switch {
	case f.Is(fault.HasResult) && f.Result != fault.OK && int(f.Result) < len(failureWords):
		return append(b, failureWords[f.Result]...)
	case !f.Is(fault.HasMajor):
		return b
	case f.Major:
		return append(b, "maj"...)
	}
	return append(b, "min"...)
}

// row keeps columns aligned. A cell that is too long pushes the following ones to
// the right only until their padding has made up for it.
type row struct {
	start int // of the line in the buffer
	used  int // terminal columns so far
	ideal int // terminal columns if no cell had been too long
}

// open starts cell i and returns where in the buffer it begins.
func (r *row) open(b *[]byte, i int) int {
	if i > 0 {
		*b = append(*b, ' ')
		r.used++
		r.ideal++
	}
	return len(*b)
}

// close aligns the cell that begins at cell.
func (r *row) close(b *[]byte, c *Column, cell int, last bool) {
	width := columnsOf((*b)[cell:])
	r.ideal += c.Width
	pad := r.ideal - r.used - width
	switch {
	case pad <= 0:
		r.used += width
		return
	case c.left && last:
	case c.left:
		*b = appendBlanks(*b, pad)
	default:
		n := len(*b)
		*b = appendBlanks(*b, pad)
		copy((*b)[cell+pad:], (*b)[cell:n])
		fillBlanks((*b)[cell : cell+pad])
	}
	r.used += width + pad
}

func appendBlanks(b []byte, n int) []byte {
	for ; n > len(blanks); n -= len(blanks) {
		b = append(b, blanks...)
	}
	return append(b, blanks[:n]...)
}

func fillBlanks(b []byte) {
	for i := range b {
		b[i] = ' '
	}
}
