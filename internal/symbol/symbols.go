package symbol

import (
	"bytes"
	"cmp"
	"debug/elf"
	"encoding/binary"
	"io"
	"slices"
	"sort"
	"unsafe"

	"faultsnoop/internal/process"
)

// Bounds of what is read and kept of the symbols of one file.
const (
	maxTable     = 32 << 20 // bytes
	maxName      = 4 << 10  // bytes
	maxKeptNames = 1 << 20  // bytes
	maxAliases   = 64 << 10 // names that are compared with others for the same thing
)

// symbols are the objects and functions of an image. They are read when one is asked
// for. debug/elf would give them all as a slice with a string for each, be it for a
// function or for nothing, and a hostile file may have a million of them that share
// one long name: so only their form is taken from there.
type symbols struct {
	class elf.Class
	order binary.ByteOrder
	// code is not nil if it is the functions that are asked for, those without a size too: it
	// is the sections that those end with.
	code   []elf.SectionHeader
	local  bool   // so count what has no type and is local
	table  extent // empty if there is none or it has been read
	names  extent
	pieces []piece
	// known are names by their places, of so many bytes.
	known      map[uint32]string
	knownBytes int
	// took is how many nanoseconds reading has taken; it is for the caller to clear.
	took uint64
}

// piece is a range of addresses that belongs to a symbol and to no other inside it.
type piece struct {
	start, end uint64
	base       uint64 // where the symbol begins
	name       uint32 // place in the table of names
}

func symbolsOf(r io.ReaderAt, f *elf.File) symbols {
	s := symbols{class: f.Class, order: f.ByteOrder}
	// In files of other types values are no addresses.
	if f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN {
		return s
	}
	for _, kind := range []elf.SectionType{elf.SHT_SYMTAB, elf.SHT_DYNSYM} {
		if s.find(r, f, kind) {
			break
		}
	}
	return s
}

// functionsOf are the functions in one table of a file of code, nil if it has none.
//
// What was written in assembly often has no size. It then goes on to the next symbol,
// in its section; but not in the table for dynamic linking, where the next symbol is the
// next one that is exported.
func functionsOf(o *object, kind elf.SectionType) *symbols {
	s := &symbols{class: o.f.Class, order: o.f.ByteOrder, code: []elf.SectionHeader{}}
	// Elsewhere these mark where code and data begin.
	s.local = o.f.Machine == elf.EM_X86_64 || o.f.Machine == elf.EM_386
	if !s.find(o.r, o.f, kind) {
		return nil
	}
	if kind == elf.SHT_SYMTAB {
		for _, section := range o.f.Sections {
			s.code = append(s.code, section.SectionHeader)
		}
	}
	return s
}

// find finds a table.
func (s *symbols) find(r io.ReaderAt, f *elf.File, kind elf.SectionType) bool {
	t := f.SectionByType(kind)
	if t == nil || t.FileSize > maxTable || int(t.Link) >= len(f.Sections) {
		return false
	}
	names := f.Sections[t.Link]
	if names.Type != elf.SHT_STRTAB || (t.Flags|names.Flags)&elf.SHF_COMPRESSED != 0 {
		return false
	}
	s.table, s.names = extent{r, t.Offset, t.FileSize}, extent{r, names.Offset, names.FileSize}
	return true
}

// at is the innermost symbol at a linked address and how far behind its beginning that
// is; an empty name if there is none, or if more would have to be read and that may not be.
func (s *symbols) at(addr uint64, mayRead bool) (name string, offset uint64) {
	if s.table.size > 0 {
		if !mayRead {
			return "", 0
		}
		begin := process.Now()
		// What cannot be read has no symbols.
		s.pieces, _ = s.read()
		s.table = extent{}
		s.took += process.Now() - begin
	}
	i := sort.Search(len(s.pieces), func(i int) bool { return s.pieces[i].end > addr })
	if i == len(s.pieces) || addr < s.pieces[i].start {
		return "", 0
	}
	p := &s.pieces[i]
	name, known := s.known[p.name]
	if !known {
		if !mayRead {
			return "", 0
		}
		begin := process.Now()
		name = s.readName(p.name)
		s.took += process.Now() - begin
	}
	return name, addr - p.base
}

func (s *symbols) readName(at uint32) string {
	name := s.names.text(uint64(at))
	cost := nameCost + len(name)
	if s.known == nil || s.knownBytes+cost > maxKeptNames {
		s.known, s.knownBytes = map[uint32]string{}, 0
	}
	s.known[at] = name
	s.knownBytes += cost
	return name
}

// nameCost is what the map takes for a name, about.
const nameCost = 64

// size is how many bytes are kept, about.
func (s *symbols) size() int {
	return len(s.pieces)*int(unsafe.Sizeof(piece{})) + s.knownBytes
}

// entry is a symbol that has a place.
type entry struct {
	start, end uint64
	name       uint32
	section    uint16
	rank       uint8 // which of several names for the same thing is the best
}

// read reads the table in steps.
func (s *symbols) read() ([]piece, error) {
	const step = 4096 // entries
	size := elf.Sym64Size
	if s.class == elf.ELFCLASS32 {
		size = elf.Sym32Size
	}
	var entries []entry
	b := make([]byte, step*size)
	for off := uint64(0); off < s.table.size; off += uint64(len(b)) {
		part := b[:min(uint64(len(b)), s.table.size-off)]
		if _, err := s.table.r.ReadAt(part, int64(s.table.off+off)); err != nil {
			return nil, err
		}
		for ; len(part) >= size; part = part[size:] {
			if e, ok := s.decode(part); ok {
				entries = append(entries, e)
			}
		}
	}
	byPlace := func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(b.end, a.end), cmp.Compare(b.rank, a.rank))
	}
	slices.SortStableFunc(entries, byPlace)
	if s.code != nil {
		entries = s.bound(entries)
		s.preferShort(entries)
		slices.SortStableFunc(entries, byPlace)
	}
	entries = slices.CompactFunc(entries, func(a, b entry) bool { return a.start == b.start && a.end == b.end })
	return cut(entries), nil
}

func (s *symbols) decode(b []byte) (entry, bool) {
	var (
		order       = s.order
		info        byte
		shndx       uint16
		e           entry
		value, size uint64
	)
	if s.class == elf.ELFCLASS32 {
		var sym elf.Sym32
		info = b[unsafe.Offsetof(sym.Info)]
		shndx = order.Uint16(b[unsafe.Offsetof(sym.Shndx):])
		e.name = order.Uint32(b[unsafe.Offsetof(sym.Name):])
		value = uint64(order.Uint32(b[unsafe.Offsetof(sym.Value):]))
		size = uint64(order.Uint32(b[unsafe.Offsetof(sym.Size):]))
	} else {
		var sym elf.Sym64
		info = b[unsafe.Offsetof(sym.Info)]
		shndx = order.Uint16(b[unsafe.Offsetof(sym.Shndx):])
		e.name = order.Uint32(b[unsafe.Offsetof(sym.Name):])
		value = order.Uint64(b[unsafe.Offsetof(sym.Value):])
		size = order.Uint64(b[unsafe.Offsetof(sym.Size):])
	}
	bind := elf.SymBind(info >> 4)
	switch elf.SymType(info & 0xf) {
	case elf.STT_FUNC, elf.STT_GNU_IFUNC:
	case elf.STT_NOTYPE:
		if s.code == nil || bind == elf.STB_LOCAL && !s.local {
			return e, false
		}
	case elf.STT_OBJECT, elf.STT_COMMON:
		if s.code != nil {
			return e, false
		}
	default:
		return e, false
	}
	switch bind {
	case elf.STB_GLOBAL:
		e.rank = 2
	case elf.STB_WEAK:
		e.rank = 1
	}
	e.start, e.end, e.section = value, value+size, shndx
	if elf.SectionIndex(shndx) == elf.SHN_UNDEF || elf.SectionIndex(shndx) == elf.SHN_ABS {
		return e, false
	}
	if size == 0 && int(shndx) < len(s.code) {
		section := &s.code[shndx]
		return e, section.Flags&elf.SHF_EXECINSTR != 0 && value >= section.Addr && value-section.Addr < section.Size
	}
	return e, e.end > e.start
}

// bound gives those without a size an end: where the next symbol of their section begins, or
// the section ends. The order is that of their beginnings.
// One inside another that has a size is only a label.
func (s *symbols) bound(entries []entry) []entry {
	covered := uint64(0)
	for i := range entries {
		e := &entries[i]
		if e.end == e.start && e.start < covered {
			e.section = uint16(elf.SHN_UNDEF)
		}
		covered = max(covered, e.end)
	}
	entries = slices.DeleteFunc(entries, func(e entry) bool { return e.section == uint16(elf.SHN_UNDEF) })
	next := map[uint16]uint64{} // begins the one after, by section
	last := map[uint16]uint64{} // and this one
	for i := range slices.Backward(entries) {
		e := &entries[i]
		if at, known := last[e.section]; !known || at != e.start {
			next[e.section] = at
			last[e.section] = e.start
		}
		if e.end > e.start {
			continue
		}
		section := &s.code[e.section]
		e.end = section.Addr + section.Size
		if at := next[e.section]; at > e.start {
			e.end = min(e.end, at)
		}
		e.rank = 0
	}
	return slices.DeleteFunc(entries, func(e entry) bool { return e.end <= e.start })
}

// preferShort gives a better rank to names that begin with fewer underscores, of several for
// the same thing: malloc, not __libc_malloc.
func (s *symbols) preferShort(entries []entry) {
	for i := range entries {
		entries[i].rank *= 4
	}
	same := func(a, b *entry) bool { return a.start == b.start && a.end == b.end && a.rank == b.rank }
	for i, looks := 0, 0; i < len(entries) && looks < maxAliases; {
		n := i + 1
		for n < len(entries) && same(&entries[i], &entries[n]) {
			n++
		}
		for j := i; n-i > 1 && j < n && looks < maxAliases; j++ {
			b := s.names.bytes(uint64(entries[j].name), 2)
			entries[j].rank += 3 - uint8(len(b)-len(bytes.TrimLeft(b, "_")))
			looks++
		}
		i = n
	}
}

// cut divides what symbols cover, in the order of their beginnings, so that each piece
// belongs to the one that begins last.
func cut(entries []entry) []piece {
	var (
		out  []piece
		open []entry
		at   uint64
	)
	until := func(next uint64) {
		for len(open) > 0 {
			top := open[len(open)-1]
			if end := min(top.end, next); end > at {
				out = append(out, piece{at, end, top.start, top.name})
				at = end
			}
			if top.end > next {
				break
			}
			open = open[:len(open)-1]
		}
		at = max(at, next)
	}
	for _, e := range entries {
		until(e.start)
		open = append(open, e)
	}
	until(^uint64(0))
	return slices.Clip(out)
}
