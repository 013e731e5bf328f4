package symbol

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
)

const page = 0x1000

// layout is an ELF file to be written.
type layout struct {
	kind     elf.Type
	segments []elf.Prog64
	sections []sectionOf
	symbols  []symbolOf
}

type sectionOf struct {
	name            string
	kind            elf.SectionType
	flags           elf.SectionFlag
	addr, off, size uint64
}

type symbolOf struct {
	name        string
	kind        elf.SymType
	bind        elf.SymBind
	value, size uint64
}

// bytes writes the file; its tables are behind all that is loaded.
func (l *layout) bytes(class elf.Class) []byte {
	names, strings := []byte{0}, []byte{0}
	add := func(table *[]byte, s string) uint32 {
		at := uint32(len(*table))
		*table = append(append(*table, s...), 0)
		return at
	}
	var symbols, headers bytes.Buffer
	put := func(b *bytes.Buffer, v any) { _ = binary.Write(b, binary.LittleEndian, v) }
	symbolSize := uint64(elf.Sym64Size)
	if class == elf.ELFCLASS32 {
		symbolSize = elf.Sym32Size
	}
	symbols.Write(make([]byte, symbolSize))
	for _, s := range l.symbols {
		name, info := add(&strings, s.name), elf.ST_INFO(s.bind, s.kind)
		if class == elf.ELFCLASS32 {
			put(&symbols, elf.Sym32{Name: name, Info: info, Shndx: 1, Value: uint32(s.value), Size: uint32(s.size)})
			continue
		}
		put(&symbols, elf.Sym64{Name: name, Info: info, Shndx: 1, Value: s.value, Size: s.size})
	}
	const tables = 0x4000
	section := func(s sectionOf, link uint32, entry uint64) {
		name := add(&names, s.name)
		if class == elf.ELFCLASS32 {
			put(&headers, elf.Section32{
				Name: name, Type: uint32(s.kind), Flags: uint32(s.flags), Addr: uint32(s.addr),
				Off: uint32(s.off), Size: uint32(s.size), Link: link, Entsize: uint32(entry),
			})
			return
		}
		put(&headers, elf.Section64{
			Name: name, Type: uint32(s.kind), Flags: uint64(s.flags), Addr: s.addr,
			Off: s.off, Size: s.size, Link: link, Entsize: entry,
		})
	}
	section(sectionOf{}, 0, 0)
	for _, s := range l.sections {
		section(s, 0, 0)
	}
	n := uint32(len(l.sections))
	symbolsAt := uint64(tables)
	stringsAt := symbolsAt + uint64(symbols.Len())
	namesAt := stringsAt + uint64(len(strings))
	section(sectionOf{".symtab", elf.SHT_SYMTAB, 0, 0, symbolsAt, uint64(symbols.Len())}, n+2, symbolSize)
	section(sectionOf{".strtab", elf.SHT_STRTAB, 0, 0, stringsAt, uint64(len(strings))}, 0, 0)
	room := uint64(len(names) + len(".shstrtab\x00"))
	section(sectionOf{".shstrtab", elf.SHT_STRTAB, 0, 0, namesAt, room}, 0, 0)
	headersAt := (namesAt + room + 7) &^ 7

	var out bytes.Buffer
	ident := [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(class), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}
	if class == elf.ELFCLASS32 {
		put(&out, elf.Header32{
			Ident: ident, Type: uint16(l.kind), Machine: uint16(elf.EM_386), Version: 1, Phoff: 0x34, Shoff: uint32(headersAt),
			Ehsize: 0x34, Phentsize: 0x20, Phnum: uint16(len(l.segments)), Shentsize: 0x28, Shnum: uint16(n + 4), Shstrndx: uint16(n + 3),
		})
		for _, p := range l.segments {
			put(&out, elf.Prog32{
				Type: p.Type, Off: uint32(p.Off), Vaddr: uint32(p.Vaddr), Filesz: uint32(p.Filesz), Memsz: uint32(p.Memsz), Flags: p.Flags,
			})
		}
	} else {
		put(&out, elf.Header64{
			Ident: ident, Type: uint16(l.kind), Machine: uint16(elf.EM_X86_64), Version: 1, Phoff: 0x40, Shoff: headersAt,
			Ehsize: 0x40, Phentsize: 0x38, Phnum: uint16(len(l.segments)), Shentsize: 0x40, Shnum: uint16(n + 4), Shstrndx: uint16(n + 3),
		})
		for _, p := range l.segments {
			put(&out, p)
		}
	}
	out.Write(make([]byte, tables-out.Len()))
	out.Write(symbols.Bytes())
	out.Write(strings)
	out.Write(names)
	out.Write(make([]byte, headersAt-uint64(out.Len())))
	out.Write(headers.Bytes())
	return out.Bytes()
}

func load(flags elf.ProgFlag, off, addr, fileSize, size uint64) elf.Prog64 {
	return elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(flags), Off: off, Vaddr: addr, Filesz: fileSize, Memsz: size}
}

const (
	alloc = elf.SHF_ALLOC
	rx    = elf.PF_R | elf.PF_X
	rw    = elf.PF_R | elf.PF_W
)

// program is laid out as linkers do: no page of the file is free, so the last page of
// a segment has the beginning of the next. base is 0 for PIE.
func program(kind elf.Type, base uint64) *layout {
	return &layout{
		kind: kind,
		segments: []elf.Prog64{
			load(rx, 0, base, 0x1800, 0x1800),
			load(rw, 0x1800, base+0x2800, 0x1900, 0x9000), // 0x2800 - 0x4100 of the file, to 0xb800
		},
		sections: []sectionOf{
			{".text", elf.SHT_PROGBITS, alloc | elf.SHF_EXECINSTR, base + 0x1000, 0x1000, 0x700},
			{".rodata", elf.SHT_PROGBITS, alloc, base + 0x1700, 0x1700, 0x100},
			{".tdata", elf.SHT_PROGBITS, alloc | elf.SHF_TLS, base + 0x2800, 0x1800, 0x10},
			{".tbss", elf.SHT_NOBITS, alloc | elf.SHF_TLS, base + 0x2810, 0x1810, 0x4000},
			{".data", elf.SHT_PROGBITS, alloc | elf.SHF_WRITE, base + 0x2810, 0x1810, 0x18f0},
			{".bss", elf.SHT_NOBITS, alloc | elf.SHF_WRITE, base + 0x4100, 0x3100, 0x7700},
			{".comment", elf.SHT_PROGBITS, 0, 0, 0x3100, 0x400},
		},
		symbols: []symbolOf{
			{"main", elf.STT_FUNC, elf.STB_GLOBAL, base + 0x1000, 0x40},
			{"table", elf.STT_OBJECT, elf.STB_GLOBAL, base + 0x2810, 0x1000},
			{"array", elf.STT_OBJECT, elf.STB_LOCAL, base + 0x4200, 0x6000},
			{"label", elf.STT_NOTYPE, elf.STB_LOCAL, base + 0xa300, 0x100},
			{"per_thread", elf.STT_TLS, elf.STB_LOCAL, base + 0xa300, 0x100},
		},
	}
}

func mapping(start, end, pgoff uint64, perm string) fault.VMA {
	return fault.VMA{Start: start, End: end, PgOff: pgoff, Flags: fault.PermFlags(perm), Inode: 1}
}

func TestPlaces(t *testing.T) {
	const at = 0x555555554000 // where PIE is loaded
	text, data := mapping(at, at+0x2000, 0, "r-xp"), mapping(at+0x2000, at+0x5000, 1, "rw-p")
	relocated := mapping(at+0x2000, at+0x3000, 1, "r--p")
	whole := mapping(0x7f0000000000, 0x7f0000020000, 0, "r--p")
	for _, class := range []elf.Class{elf.ELFCLASS64, elf.ELFCLASS32} {
		im, err := readImage(bytes.NewReader(program(elf.ET_DYN, 0).bytes(class)), page)
		if err != nil {
			t.Fatal(err)
		}
		for _, test := range []struct {
			name, section, symbol string
			v                     fault.VMA
			addr                  uint64
			unbound               bool // the mapping's bounds are not known
		}{
			{name: "function", v: text, addr: at + 0x1010, section: ".text", symbol: "main+0x10"},
			{name: "behind the function", v: text, addr: at + 0x1040, section: ".text"},
			{name: "read-only", v: text, addr: at + 0x1780, section: ".rodata"},
			{name: "headers", v: text, addr: at + 0x10},
			{name: "template of threads", v: data, addr: at + 0x2808, section: ".tdata"},
			{name: "object", v: data, addr: at + 0x2810, section: ".data", symbol: "table"},
			{name: "object's end", v: data, addr: at + 0x380f, section: ".data", symbol: "table+0xfff"},
			{name: "behind the object", v: data, addr: at + 0x3810, section: ".data"},
			{name: "read-only after relocation", v: relocated, addr: at + 0x2900, section: ".data", symbol: "table+0xf0"},
			{name: "unknown bounds", v: data, addr: at + 0x3000, section: ".data", symbol: "table+0x7f0", unbound: true},
			{name: "cleared by the loader", v: data, addr: at + 0x4208, section: ".bss", symbol: "array+0x8"},
			{name: "the same with unknown bounds", v: data, addr: at + 0x4208, unbound: true},
			{name: "read as a file", v: whole, addr: 0x7f0000003208, section: ".comment"},
			{name: "read as a file, .data", v: whole, addr: 0x7f0000001810, section: ".data", symbol: "table"},
			{name: "read as a file, no section", v: whole, addr: 0x7f0000003600},
		} {
			off := test.v.PgOff*page + test.addr - test.v.Start
			check(t, test.name, im, im.placeOfOffset(off, &test.v, !test.unbound), test.section, test.symbol)
		}
	}
}

func check(t *testing.T, name string, im *image, p place, section, symbol string) {
	t.Helper()
	var got string
	if p.hasAddr {
		f := fault.Fault{}
		f.Symbol, f.SymbolOffset = im.symbols.at(p.addr, true)
		got = shown(&f)
	}
	if p.section != section || got != symbol {
		t.Errorf("%s: %q in %q, want %q in %q", name, got, p.section, symbol, section)
	}
}

// shown is a symbol as a view would put it.
func shown(f *fault.Fault) string {
	if f.Symbol == "" || f.SymbolOffset == 0 {
		return f.Symbol
	}
	return f.Symbol + "+0x" + strings.TrimLeft(hexOf(f.SymbolOffset), "0")
}

func hexOf(v uint64) string {
	var b [16]byte
	for i := range b {
		b[15-i] = "0123456789abcdef"[v>>(4*i)&0xf]
	}
	return string(b[:])
}

// Memory that a segment has and its file has not.
func TestBeyond(t *testing.T) {
	for _, test := range []struct {
		kind       elf.Type
		base, load uint64
	}{
		{elf.ET_EXEC, 0x400000, 0x400000}, {elf.ET_DYN, 0, 0x555555554000},
	} {
		im, err := readImage(bytes.NewReader(program(test.kind, test.base).bytes(elf.ELFCLASS64)), page)
		if err != nil {
			t.Fatal(err)
		}
		data := mapping(test.load+0x2000, test.load+0x5000, 1, "rw-p")
		for _, at := range []struct {
			name, section, symbol string
			v                     fault.VMA
			distance              uint64
		}{
			{"the first page", ".bss", "array+0xe00", data, 0},
			{"the array's end", ".bss", "array+0x5fff", data, 0x51ff},
			{"behind the array", ".bss", "", data, 0x5200},
			{"the last byte", ".bss", "", data, 0x67ff},
			{"the heap", "", "", data, 0x6800},
			{"the heap", "", "", data, 0x7000},
			{"far behind", "", "", data, 1 << 40},
			{"it wraps", "", "", data, ^uint64(0)},
			{"not the end of the file's part", "", "", mapping(test.load+0x2000, test.load+0x4000, 1, "rw-p"), 0},
			{"the text", "", "", mapping(test.load, test.load+0x2000, 0, "r-xp"), 0},
			{"not the segment's rights", "", "", mapping(test.load+0x2000, test.load+0x5000, 1, "rwxp"), 0},
			{"a mapping of the file", "", "", mapping(0x10000, 0x30000, 0, "r--p"), 0},
			{"a part of the segment", ".bss", "array+0xe00", mapping(test.load+0x4000, test.load+0x5000, 3, "rw-p"), 0},
		} {
			var p place
			if addr, ok := im.beyond(&at.v, at.distance); ok {
				p = im.placeOfAddr(addr)
			}
			check(t, at.name, im, p, at.section, at.symbol)
		}
	}
}

// Segments that are not where their file is: each has a page of its own more.
func TestSeveralSegments(t *testing.T) {
	l := &layout{
		kind: elf.ET_DYN,
		segments: []elf.Prog64{
			load(elf.PF_R, 0, 0, 0x900, 0x900),
			load(rx, 0x900, 0x1900, 0x800, 0x800),
			load(rw, 0x1100, 0x3100, 0x200, 0xf00), // relocated, and padded to 0x4000
			load(rw, 0x1300, 0x4300, 0x100, 0x3000),
			{Type: uint32(elf.PT_GNU_RELRO), Off: 0x1100, Vaddr: 0x3100, Filesz: 0x200, Memsz: 0xf00},
		},
		sections: []sectionOf{
			{".rodata", elf.SHT_PROGBITS, alloc, 0x800, 0x800, 0x100},
			{".text", elf.SHT_PROGBITS, alloc, 0x1900, 0x900, 0x800},
			{".data.rel.ro", elf.SHT_PROGBITS, alloc | elf.SHF_WRITE, 0x3100, 0x1100, 0x200},
			{".relro_padding", elf.SHT_NOBITS, alloc | elf.SHF_WRITE, 0x3300, 0x1300, 0xd00},
			{".data", elf.SHT_PROGBITS, alloc | elf.SHF_WRITE, 0x4300, 0x1300, 0x100},
			{".bss", elf.SHT_NOBITS, alloc | elf.SHF_WRITE, 0x4400, 0x1400, 0x2f00},
			{".comment", elf.SHT_PROGBITS, 0, 0, 0x1400, 0x400},
		},
		symbols: []symbolOf{
			{"constant", elf.STT_OBJECT, elf.STB_GLOBAL, 0x3100, 0x200},
			{"variable", elf.STT_OBJECT, elf.STB_GLOBAL, 0x4300, 0x100},
			{"zeroes", elf.STT_OBJECT, elf.STB_GLOBAL, 0x4400, 0x2f00},
		},
	}
	im, err := readImage(bytes.NewReader(l.bytes(elf.ELFCLASS64)), page)
	if err != nil {
		t.Fatal(err)
	}
	relocated, data := mapping(0x3000, 0x4000, 1, "r--p"), mapping(0x4000, 0x5000, 1, "rw-p")
	for addr, want := range map[uint64][2]string{
		0x3180: {".data.rel.ro", "constant+0x80"},
		0x4380: {".data", "variable+0x80"},
		0x4500: {".bss", "zeroes+0x100"},
	} {
		v := data
		if addr < data.Start {
			v = relocated
		}
		check(t, hexOf(addr), im, im.placeOfOffset(v.PgOff*page+addr-v.Start, &v, true), want[0], want[1])
	}
	// Both segments that may be written to can be shown for reading only.
	check(t, "padding", im, im.placeOfOffset(0x1500, &relocated, true), "", "")
	addr, ok := im.beyond(&data, 0x20)
	if !ok || addr != 0x5020 {
		t.Errorf("behind .data: %#x, %v", addr, ok)
	}
}

func TestCut(t *testing.T) {
	e := func(start, end uint64, name uint32) entry { return entry{start: start, end: end, name: name} }
	p := func(start, end, base uint64, name uint32) piece { return piece{start, end, base, name} }
	for _, test := range []struct {
		name string
		in   []entry
		want []piece
	}{
		{"none", nil, nil},
		{"apart", []entry{e(1, 3, 1), e(5, 6, 2)}, []piece{p(1, 3, 1, 1), p(5, 6, 5, 2)}},
		{"side by side", []entry{e(1, 3, 1), e(3, 6, 2)}, []piece{p(1, 3, 1, 1), p(3, 6, 3, 2)}},
		{"inside", []entry{e(1, 9, 1), e(3, 5, 2), e(6, 7, 3)}, []piece{p(1, 3, 1, 1), p(3, 5, 3, 2), p(5, 6, 1, 1), p(6, 7, 6, 3), p(7, 9, 1, 1)}},
		{"same beginning", []entry{e(1, 9, 1), e(1, 5, 2)}, []piece{p(1, 5, 1, 2), p(5, 9, 1, 1)}},
		{"overlapping", []entry{e(1, 5, 1), e(3, 9, 2)}, []piece{p(1, 3, 1, 1), p(3, 9, 3, 2)}},
		{"to the end", []entry{e(1, ^uint64(0), 1)}, []piece{p(1, ^uint64(0), 1, 1)}},
	} {
		if got := cut(test.in); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// Of several names for one thing a global one is taken.
func TestRank(t *testing.T) {
	l := program(elf.ET_DYN, 0)
	l.symbols = []symbolOf{
		{"local", elf.STT_OBJECT, elf.STB_LOCAL, 0x4200, 8},
		{"weak", elf.STT_OBJECT, elf.STB_WEAK, 0x4200, 8},
		{"global", elf.STT_OBJECT, elf.STB_GLOBAL, 0x4200, 8},
		{"again", elf.STT_OBJECT, elf.STB_GLOBAL, 0x4200, 8},
		{"nothing", elf.STT_OBJECT, elf.STB_GLOBAL, 0x4204, 0},
		{"wraps", elf.STT_OBJECT, elf.STB_GLOBAL, 0x4204, ^uint64(0)},
		{strings.Repeat("n", maxName), elf.STT_OBJECT, elf.STB_GLOBAL, 0x5000, 8},
	}
	im, err := readImage(bytes.NewReader(l.bytes(elf.ELFCLASS64)), page)
	if err != nil {
		t.Fatal(err)
	}
	if name, off := im.symbols.at(0x4205, true); name != "global" || off != 5 {
		t.Errorf("got %s+%d", name, off)
	}
	if name, _ := im.symbols.at(0x5000, true); name != "" {
		t.Errorf("a name of %d bytes", len(name))
	}
}

// TestHostile reads what is cut off anywhere, and what says that it is enormous.
func TestHostile(t *testing.T) {
	whole := program(elf.ET_EXEC, 0x400000).bytes(elf.ELFCLASS64)
	for n := 0; n < len(whole); n += 1 + n/0x200%0x20 {
		probe(whole[:n])
	}
	order := binary.LittleEndian
	shoff := order.Uint64(whole[0x28:])
	last := shoff + 0x40*uint64(order.Uint16(whole[0x3c:])-1)
	for name, change := range map[string]func([]byte){
		"compressed names":      func(b []byte) { order.PutUint64(b[last+8:], uint64(elf.SHF_COMPRESSED)) },
		"large names":           func(b []byte) { order.PutUint64(b[last+0x20:], 1<<40) },
		"many sections":         func(b []byte) { order.PutUint16(b[0x3c:], 0xfe00) },
		"more sections":         func(b []byte) { order.PutUint16(b[0x3c:], 0); order.PutUint64(b[shoff+0x20:], 1<<30) },
		"many segments":         func(b []byte) { order.PutUint16(b[0x38:], 0xffff) },
		"headers out of bounds": func(b []byte) { order.PutUint64(b[0x28:], 1<<63-1) },
	} {
		b := bytes.Clone(whole)
		change(b)
		if _, err := readImage(bytes.NewReader(b), page); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	b := bytes.Clone(whole)
	table := last - 2*0x40
	order.PutUint64(b[table+0x20:], 1<<40)
	im, err := readImage(bytes.NewReader(b), page)
	if err != nil {
		t.Fatal(err)
	}
	if name, _ := im.symbols.at(0x402810, true); name != "" {
		t.Errorf("%s in a table that is not there", name)
	}
}

// sharedName is a file with many sections, whose names are all ends of one.
func sharedName(sections, length int) []byte {
	l := &layout{kind: elf.ET_DYN}
	for range sections {
		l.sections = append(l.sections, sectionOf{"", elf.SHT_PROGBITS, 0, 0, 0x1000, 0x100})
	}
	l.sections[0].name = strings.Repeat("n", length)
	b := l.bytes(elf.ELFCLASS64)
	headers := binary.LittleEndian.Uint64(b[0x28:])
	for i := range uint32(sections) {
		binary.LittleEndian.PutUint32(b[headers+uint64(1+i)*0x40:], 2+i%uint32(length)) // behind two empty ones
	}
	return b
}

// TestSectionNames: debug/elf copies a name for each section that has it.
func TestSectionNames(t *testing.T) {
	const most = maxSections - 4 // others are in each file
	for _, test := range []struct {
		length int
		ok     bool
	}{{maxSectionName, true}, {maxSectionName + 1, false}, {60 << 10, false}} {
		im, err := readImage(bytes.NewReader(sharedName(most, test.length)), page)
		if (err == nil) != test.ok {
			t.Errorf("names of %d bytes: %v", test.length, err)
		}
		if err != nil {
			continue
		}
		names := 0
		for _, s := range im.byOffset {
			names += len(s.name)
		}
		if names > maxSections*maxSectionName || names > im.size() || names < most {
			t.Errorf("%d bytes of names are kept, %d bytes in all", names, im.size())
		}
	}
}

// TestSymbolNames: names are kept by their bytes, not by their number.
func TestSymbolNames(t *testing.T) {
	l := program(elf.ET_DYN, 0)
	l.symbols = nil
	const n = 2*maxKeptNames/maxName + 1
	for i := range uint64(n) {
		l.symbols = append(l.symbols, symbolOf{strings.Repeat("n", maxName-1), elf.STT_OBJECT, elf.STB_GLOBAL, 0x4200 + i, 1})
	}
	im, err := readImage(bytes.NewReader(l.bytes(elf.ELFCLASS64)), page)
	if err != nil {
		t.Fatal(err)
	}
	most := 0
	for i := range uint64(n) {
		if name, _ := im.symbols.at(0x4200+i, true); len(name) != maxName-1 {
			t.Fatalf("symbol %d has a name of %d bytes", i, len(name))
		}
		kept := 0
		for _, name := range im.symbols.known {
			kept += len(name)
		}
		if most = max(most, kept); kept > maxKeptNames || kept > im.size() {
			t.Fatalf("%d bytes of names are kept, %d bytes in all", kept, im.size())
		}
	}
	if most < maxKeptNames/2 {
		t.Errorf("not more than %d bytes are kept", most)
	}
}

// restless is a file that is another one whenever it is read.
type restless struct{ files []*bytes.Reader }

func (r *restless) ReadAt(b []byte, off int64) (int, error) {
	f := r.files[0]
	if len(r.files) > 1 {
		r.files = r.files[1:]
	}
	return f.ReadAt(b, off)
}

// TestChanging: what was checked is what is used.
func TestChanging(t *testing.T) {
	good := program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64)
	bad := bytes.Repeat([]byte{0xff}, len(good))
	s := snapshot{r: &restless{[]*bytes.Reader{bytes.NewReader(good), bytes.NewReader(bad)}}, blocks: map[int64][]byte{}}
	for off := range int64(3) {
		b := make([]byte, 0x20)
		if _, err := s.ReadAt(b, off); err != nil || !bytes.Equal(b, good[off:off+0x20]) {
			t.Errorf("%x, %v at %d", b, err, off)
		}
	}
	for _, off := range []int64{-1, int64(len(good)) - 1, 1<<63 - 1} {
		if n, err := s.ReadAt(make([]byte, 2), off); err == nil {
			t.Errorf("%d bytes at %d", n, off)
		}
	}
}

// probe asks everything of a file.
func probe(b []byte) {
	im, err := readImage(bytes.NewReader(b), page)
	if err != nil {
		return
	}
	for off := uint64(0); off < 0x20000; off += 0x7f0 {
		for _, v := range []fault.VMA{mapping(0, 0x10000, 0, "r--p"), mapping(0x2000, 0x5000, 1, "rw-p"), mapping(0x402000, 0x405000, 1, "rw-p")} {
			im.placeOfOffset(off, &v, true)
			if addr, ok := im.beyond(&v, off); ok {
				im.placeOfAddr(addr)
			}
			im.hasTail(&v)
		}
		im.placeOfAddr(off)
		im.symbols.at(off, true)
		im.symbols.at(0x400000+off, true)
	}
}

func FuzzImage(f *testing.F) {
	whole := program(elf.ET_EXEC, 0x400000).bytes(elf.ELFCLASS64)
	f.Add(whole)
	f.Add(program(elf.ET_DYN, 0).bytes(elf.ELFCLASS32))
	f.Add(whole[:len(whole)-0x100])
	f.Add(whole[:0x100])
	f.Add([]byte(elf.ELFMAG))
	f.Fuzz(func(_ *testing.T, b []byte) { probe(b) })
}
