package symbol

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"sort"

	"faultsnoop/internal/fault"
)

// Bounds of what is read of Go's table.
const (
	maxGoFuncs   = 16 << 20
	maxPCTable   = 1 << 20  // bytes of one function's table of places
	maxRelocs    = 64 << 20 // bytes
	maxGoInlined = 100
)

// goTable is the table of functions and lines that a Go program carries for its own
// tracebacks, stripped or not, of Go 1.16 and later.
type goTable struct {
	order   binary.ByteOrder
	ptr     uint64
	quantum uint64
	field   uint64 // the size of a field of the list of functions
	version int

	text  uint64 // what entries count from
	count uint64

	table                           extent // the whole
	names, units, files, pcs, funcs extent
	// inlined is where trees of inlined calls are, empty if that is not known.
	inlined extent
}

const (
	go116 = 0xfffffffa
	go118 = 0xfffffff0
	go120 = 0xfffffff1
)

// goTableOf finds the table, nil if there is none that can be read.
func goTableOf(o *object) *goTable {
	var section *elf.Section
	for _, name := range [...]string{".gopclntab", ".data.rel.ro.gopclntab"} {
		if section = o.f.Section(name); section != nil && section.Type != elf.SHT_NOBITS {
			break
		}
	}
	if section == nil || section.Flags&elf.SHF_COMPRESSED != 0 || section.Type == elf.SHT_NOBITS || section.Offset > 1<<62 {
		return nil
	}
	t := &goTable{order: o.f.ByteOrder, table: extent{o.r, section.Offset, section.FileSize}}
	head := t.table.bytes(0, 16+8*8)
	if len(head) < 16 || head[4] != 0 || head[5] != 0 {
		return nil
	}
	t.version = int(t.order.Uint32(head))
	t.quantum, t.ptr = uint64(head[6]), uint64(head[7])
	if t.ptr != 4 && t.ptr != 8 || t.quantum == 0 {
		return nil
	}
	c := &cursor{b: head, at: 8, order: t.order}
	word := func() uint64 { return c.number(int(t.ptr)) }
	t.count = word()
	word() // files
	t.field = t.ptr
	switch t.version {
	case go116:
	case go118, go120:
		t.field = 4
		t.text = word() // 0 where it would be relocated, and since Go 1.26
	default:
		return nil
	}
	part := func() extent {
		off := word()
		if off > t.table.size {
			return extent{}
		}
		return extent{o.r, t.table.off + off, t.table.size - off}
	}
	t.names, t.units, t.files, t.pcs, t.funcs = part(), part(), part(), part(), part()
	if c.bad || t.count == 0 || t.count > maxGoFuncs || (2*t.count+1)*t.field > t.funcs.size {
		return nil
	}
	t.findModule(o, section.Addr)
	if t.field == 4 && t.text == 0 {
		return nil
	}
	return t
}

// findModule reads runtime.firstmoduledata, which tells where the text begins and where
// trees of inlined calls are.
func (t *goTable) findModule(o *object, table uint64) {
	if t.version != go120 || t.ptr != 8 {
		t.fallbackText(o)
		return
	}
	// The fields of moduledata in words (runtime/symtab.go), Go 1.20 to 1.26.
	const text, gofunc, words = 22, 40, 41
	names := table + t.names.off - t.table.off
	relocated := o.relocations()
	value := func(b []byte, addr uint64, word int) uint64 {
		if v, ok := relocated[addr+uint64(word)*8]; ok {
			return v
		}
		return t.order.Uint64(b[word*8:])
	}
	try := func(addr uint64) bool {
		b := o.memory(addr, words*8)
		if len(b) < words*8 || value(b, addr, 0) != table || value(b, addr, 1) != names {
			return false
		}
		t.text = value(b, addr, text)
		base := value(b, addr, gofunc)
		for _, s := range o.f.Sections {
			if s.Type == elf.SHT_PROGBITS && s.Flags&elf.SHF_COMPRESSED == 0 && base >= s.Addr && base-s.Addr < s.Size && s.Addr != 0 {
				t.inlined = extent{o.r, s.Offset + (base - s.Addr), s.Size - (base - s.Addr)}
			}
		}
		return true
	}
	if s := o.f.Section(".go.module"); s != nil && try(s.Addr) {
		return
	}
	for addr, v := range relocated {
		if v == table && try(addr) {
			return
		}
	}
	for _, name := range [...]string{".noptrdata", ".data"} {
		s := o.f.Section(name)
		if s == nil || s.Type != elf.SHT_PROGBITS || s.Flags&elf.SHF_COMPRESSED != 0 {
			continue
		}
		want := make([]byte, 8)
		t.order.PutUint64(want, table)
		b := extent{o.r, s.Offset, s.FileSize}.bytes(0, maxRelocs)
		for at := 0; at < len(b); {
			i := bytes.Index(b[at:], want)
			if i < 0 {
				break
			}
			if at += i; at%8 == 0 && try(s.Addr+uint64(at)) {
				return
			}
			at++
		}
	}
	t.fallbackText(o)
}

// fallbackText takes the beginning of the section for that of Go's text, which is right for
// programs that are linked by Go's linker.
func (t *goTable) fallbackText(o *object) {
	if t.field == 4 && t.text == 0 && !o.linksLibraries() {
		if s := o.f.Section(".text"); s != nil {
			t.text = s.Addr
		}
	}
}

// linksLibraries reports whether a program was linked with others' code.
func (o *object) linksLibraries() bool { return o.f.Section(".init") != nil }

// memory is what a file puts at an address.
func (o *object) memory(addr, n uint64) []byte {
	for _, p := range o.f.Progs {
		if p.Type == elf.PT_LOAD && addr >= p.Vaddr && addr-p.Vaddr < p.Filesz && p.Off < 1<<62 {
			return extent{o.r, p.Off, p.Filesz}.bytes(addr-p.Vaddr, n)
		}
	}
	return nil
}

// relocations are the addresses that a loader fills with others of the file.
func (o *object) relocations() map[uint64]uint64 {
	if o.f.Type != elf.ET_DYN || o.f.Class != elf.ELFCLASS64 {
		return nil
	}
	var relative uint32
	switch o.f.Machine {
	case elf.EM_X86_64:
		relative = uint32(elf.R_X86_64_RELATIVE)
	case elf.EM_AARCH64:
		relative = uint32(elf.R_AARCH64_RELATIVE)
	default:
		return nil
	}
	const size = 24
	module := o.f.Section(".go.module")
	out := map[uint64]uint64{}
	for _, name := range [...]string{".rela", ".rela.dyn"} {
		s := o.f.Section(name)
		if s == nil || s.Type != elf.SHT_RELA || s.Flags&elf.SHF_COMPRESSED != 0 {
			continue
		}
		b := extent{o.r, s.Offset, s.FileSize}.bytes(0, maxRelocs)
		for ; len(b) >= size; b = b[size:] {
			at, info, addend := o.f.ByteOrder.Uint64(b), o.f.ByteOrder.Uint64(b[8:]), o.f.ByteOrder.Uint64(b[16:])
			// All others are of no interest.
			if uint32(info) == relative && (module == nil || at >= module.Addr && at-module.Addr < module.Size) {
				out[at] = addend
			}
		}
	}
	return out
}

// entry is where a function begins, and where it is described.
func (t *goTable) entry(i uint64) (addr, off uint64) {
	c := &cursor{b: t.funcs.bytes(2*i*t.field, 2*t.field), order: t.order}
	addr = c.number(int(t.field))
	if t.field == 4 {
		addr += t.text
	}
	if i == t.count {
		return addr, 0
	}
	return addr, c.number(int(t.field))
}

// at are the functions at an address, the innermost first.
func (t *goTable) at(addr uint64) []fault.Frame {
	i := sort.Search(int(t.count)+1, func(i int) bool { at, _ := t.entry(uint64(i)); return at > addr }) - 1
	if i < 0 || i >= int(t.count) {
		return nil
	}
	begin, off := t.entry(uint64(i))
	c := &cursor{b: t.funcs.bytes(off, 512), order: t.order}
	c.take(t.field) // where it begins, again
	name := c.number(4)
	c.take(3 * 4) // arguments, deferreturn, stack
	fileTable, lineTable := c.number(4), c.number(4)
	tables := c.number(4)
	unit := c.number(4)
	if t.version == go120 {
		c.take(4) // the line on which it begins
	}
	c.take(3)
	data := c.number(1)
	if c.bad {
		return nil
	}
	place := func(pc uint64) (file string, line uint32) {
		f, ok1 := t.value(fileTable, begin, pc)
		n, ok2 := t.value(lineTable, begin, pc)
		if !ok1 || !ok2 || f < 0 || n <= 0 {
			return "", 0
		}
		at := (&cursor{b: t.units.bytes((unit+uint64(f))*4, 4), order: t.order}).number(4)
		if at == 0xffffffff {
			return "", 0
		}
		return t.files.text(at), uint32(n)
	}
	// Which inlined call an instruction is of, and the tree of them.
	const treeIndex, tree = 2, 3
	var calls, treeOff uint64
	if tables > treeIndex && data > tree && t.version == go120 && t.inlined.size > 0 && tables < 64 {
		rest := *c
		rest.take(treeIndex * 4)
		calls = rest.number(4)
		rest = *c
		rest.take((tables + tree) * 4)
		if treeOff = rest.number(4); rest.bad || treeOff == 0xffffffff {
			calls = 0
		}
	}
	var frames []fault.Frame
	pc := addr
	for len(frames) < maxGoInlined {
		f := fault.Frame{Lang: fault.LangGo}
		f.File, f.Line = place(pc)
		index := int32(-1)
		if calls != 0 {
			index, _ = t.value(calls, begin, pc)
		}
		if index >= 0 {
			const size = 16
			c := &cursor{b: t.inlined.bytes(treeOff+uint64(index)*size, size), order: t.order}
			c.take(4) // kind of function
			f.Func, f.Inlined = t.names.text(c.number(4)), true
			parent := c.number(4)
			if !c.bad {
				frames = append(frames, f)
				pc = begin + parent
				continue
			}
			f.Inlined = false
		}
		f.Func = t.names.text(name)
		return append(frames, f)
	}
	// That is no tree.
	f := fault.Frame{Lang: fault.LangGo, Func: t.names.text(name)}
	return []fault.Frame{f}
}

// value is that of a table of places at an instruction; -1 where there is none.
func (t *goTable) value(table, begin, pc uint64) (int32, bool) {
	if table == 0 {
		return -1, false
	}
	for room := uint64(512); ; room *= 16 {
		b := t.pcs.bytes(table, min(room, maxPCTable))
		c := &cursor{b: b, order: t.order}
		at, v := begin, int32(-1)
		for first := true; ; first = false {
			delta := uint32(c.uleb())
			if delta == 0 && !first && !c.bad {
				return -1, false
			}
			step := int32(delta >> 1)
			if delta&1 != 0 {
				step = ^step
			}
			v += step
			at += c.uleb() * t.quantum
			if c.bad {
				break
			}
			if pc < at {
				return v, true
			}
		}
		if room >= maxPCTable || uint64(len(b)) < room {
			return -1, false
		}
	}
}
