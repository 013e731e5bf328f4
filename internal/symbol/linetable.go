package symbol

import (
	"cmp"
	"slices"
	"sort"
	"unsafe"
)

// Bounds of one table of lines.
const (
	maxLineBytes = 64 << 20
	maxRows      = 2 << 20
	maxFiles     = 64 << 10
)

// lineTable is the line numbers of a unit.
type lineTable struct {
	version uint16
	dirs    []textRef
	files   []lineFile
	// rows are in the order of their addresses. One ends where the next begins; one with
	// the file noFile belongs to none.
	rows []row
}

type lineFile struct {
	name textRef
	dir  uint32
}

type row struct {
	addr uint64
	file uint32
	line uint32
}

const noFile = ^uint32(0)

func (t *lineTable) size() int {
	return cap(t.dirs)*int(unsafe.Sizeof(textRef{})) + cap(t.files)*int(unsafe.Sizeof(lineFile{})) + cap(t.rows)*int(unsafe.Sizeof(row{}))
}

func (t *lineTable) at(addr uint64) (file, line uint32, ok bool) {
	i := sort.Search(len(t.rows), func(i int) bool { return t.rows[i].addr > addr }) - 1
	if i < 0 || t.rows[i].file == noFile {
		return 0, 0, false
	}
	return t.rows[i].file, t.rows[i].line, true
}

// lineProgram is the header of a table that is read.
type lineProgram struct {
	c               *cursor
	base            uint64 // where c begins in .debug_line
	version         uint16
	dwarf64         bool
	addrSize        int
	minInst, maxOps uint64
	lineBase        int64
	lineRange       uint64
	opcodeLengths   []byte
}

// lineTable reads the table of a unit, as much of it as there is.
func (l *lines) lineTable(u *unit) lineTable {
	c := &cursor{b: l.line.bytes(u.stmtList, 16), order: l.order}
	length, dwarf64 := c.length()
	if c.bad || length > maxLineBytes {
		return lineTable{}
	}
	head := uint64(c.at)
	p := &lineProgram{
		c:    &cursor{b: l.line.bytes(u.stmtList+head, length), order: l.order},
		base: u.stmtList + head, dwarf64: dwarf64, addrSize: int(u.addrSize),
	}
	c = p.c
	if uint64(len(c.b)) < length {
		return lineTable{}
	}
	p.version = uint16(c.number(2))
	if p.version < 2 || p.version > 5 {
		return lineTable{}
	}
	if p.version == 5 {
		p.addrSize = int(c.number(1))
		c.number(1) // the size of a segment selector
	}
	headerLength := c.offset(dwarf64)
	program := uint64(c.at) + headerLength
	p.minInst, p.maxOps = c.number(1), 1
	if p.version >= 4 {
		p.maxOps = c.number(1)
	}
	c.number(1) // whether a row begins a statement
	p.lineBase = int64(int8(c.number(1)))
	p.lineRange = c.number(1)
	opcodes := c.number(1)
	if c.bad || opcodes == 0 || p.lineRange == 0 || p.maxOps == 0 || program < headerLength || program > uint64(len(c.b)) ||
		p.addrSize != 4 && p.addrSize != 8 {
		return lineTable{}
	}
	p.opcodeLengths = c.take(opcodes - 1)
	t := lineTable{version: p.version}
	if p.version < 5 {
		t.dirs, t.files = p.oldNames()
	} else {
		for _, d := range p.names(u) {
			t.dirs = append(t.dirs, d.name)
		}
		t.files = p.names(u)
	}
	if c.bad {
		return lineTable{}
	}
	t.dirs, t.files = slices.Clip(t.dirs), slices.Clip(t.files)
	c.at = int(program)
	t.rows = l.merge(p.run())
	return t
}

// oldNames reads folders and files as they were until version 4.
func (p *lineProgram) oldNames() (dirs []textRef, files []lineFile) {
	c := p.c
	text := func() (textRef, bool) {
		at := c.at
		c.skipText()
		return textRef{inLine, p.base + uint64(at)}, !c.bad && c.at > at+1
	}
	for {
		d, ok := text()
		if !ok {
			break
		}
		if len(dirs) >= maxFiles {
			c.bad = true
		}
		dirs = append(dirs, d)
	}
	for {
		name, ok := text()
		if !ok {
			break
		}
		if len(files) >= maxFiles {
			c.bad = true
		}
		dir := c.uleb()
		c.uleb() // time
		c.uleb() // size
		files = append(files, lineFile{name, uint32(min(dir, noFileDir))})
	}
	return dirs, files
}

const noFileDir = 1 << 31

// names reads folders or files as they are since version 5.
func (p *lineProgram) names(u *unit) []lineFile {
	const (
		contentPath = 1
		contentDir  = 2
	)
	c := p.c
	type format struct {
		content uint64
		form    form
	}
	var formats []format
	for range c.number(1) {
		formats = append(formats, format{c.uleb(), form(c.uleb())})
	}
	n := c.uleb()
	if c.bad || n > maxFiles || len(formats) == 0 && n > 0 {
		c.bad = true
		return nil
	}
	as := &unit{version: p.version, dwarf64: p.dwarf64, addrSize: uint8(p.addrSize)}
	var out []lineFile
	for range n {
		f := lineFile{dir: 0}
		for _, t := range formats {
			if t.form == formImplicit {
				c.bad = true
			}
			v := as.value(c, p.base, attribute{form: t.form})
			switch t.content {
			case contentPath:
				if f.name = u.text(v); v.form == formString {
					f.name.in = inLine
				}
			case contentDir:
				f.dir = uint32(min(v.n, noFileDir))
			}
		}
		if c.bad {
			return nil
		}
		out = append(out, f)
	}
	return out
}

// run is the program of a table: it gives sequences of rows, each with an end.
func (p *lineProgram) run() (sequences [][]row) {
	const (
		stdCopy             = 1
		stdAdvancePC        = 2
		stdAdvanceLine      = 3
		stdSetFile          = 4
		stdConstAddPC       = 8
		stdFixedAdvancePC   = 9
		extEndSequence      = 1
		extSetAddress       = 2
		maxOpcodeOfTheTable = 255
	)
	c := p.c
	var (
		addr, op uint64
		file     uint32
		line     int64
		rows     []row
		n        int
	)
	reset := func() { addr, op, file, line, rows = 0, 0, 1, 1, nil }
	advance := func(by uint64) {
		addr += p.minInst * ((op + by) / p.maxOps)
		op = (op + by) % p.maxOps
	}
	emit := func(file uint32) {
		r := row{addr, file, uint32(max(line, 0))}
		if last := len(rows) - 1; last >= 0 {
			switch {
			case rows[last].file == r.file && rows[last].line == r.line:
				return
			case rows[last].addr == addr:
				rows[last] = r
				return
			}
		}
		rows = append(rows, r)
		n++
	}
	reset()
	for !c.bad && c.at < len(c.b) && n < maxRows {
		opcode := c.number(1)
		switch {
		case opcode > uint64(len(p.opcodeLengths)):
			adjusted := opcode - uint64(len(p.opcodeLengths)) - 1
			advance(adjusted / p.lineRange)
			line += p.lineBase + int64(adjusted%p.lineRange)
			emit(file)
		case opcode == 0:
			size := c.uleb()
			if size == 0 {
				break
			}
			body := c.take(size)
			if body == nil {
				break
			}
			switch body[0] {
			case extEndSequence:
				emit(noFile)
				if len(rows) > 1 {
					sequences = append(sequences, rows)
				}
				reset()
			case extSetAddress:
				in := cursor{b: body[1:], order: c.order}
				addr, op = in.number(len(in.b)), 0
			}
		case opcode == stdCopy:
			emit(file)
		case opcode == stdAdvancePC:
			advance(c.uleb())
		case opcode == stdAdvanceLine:
			line += c.sleb()
		case opcode == stdSetFile:
			file = uint32(min(c.uleb(), uint64(noFile-1)))
		case opcode == stdConstAddPC:
			advance((maxOpcodeOfTheTable - uint64(len(p.opcodeLengths)) - 1) / p.lineRange)
		case opcode == stdFixedAdvancePC:
			addr, op = addr+c.number(2), 0
		default:
			for range p.opcodeLengths[opcode-1] {
				c.uleb()
			}
		}
	}
	return sequences
}

// merge makes one list of sequences that are where code is.
func (l *lines) merge(sequences [][]row) []row {
	sequences = slices.DeleteFunc(sequences, func(s []row) bool {
		return !l.code(s[0].addr) || !slices.IsSortedFunc(s, func(a, b row) int { return cmp.Compare(a.addr, b.addr) })
	})
	slices.SortStableFunc(sequences, func(a, b []row) int { return cmp.Compare(a[0].addr, b[0].addr) })
	n := 0
	for _, s := range sequences {
		n += len(s)
	}
	out := make([]row, 0, n)
	for _, s := range sequences {
		// The end of the one before is where this one begins, or what it says of this is
		// not believed.
		for len(out) > 0 && out[len(out)-1].addr >= s[0].addr {
			out = out[:len(out)-1]
		}
		out = append(out, s...)
	}
	return out
}
