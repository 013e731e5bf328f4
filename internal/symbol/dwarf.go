package symbol

import (
	"cmp"
	"debug/dwarf"
	"debug/elf"
	"encoding/binary"
	"errors"
	"path"
	"slices"
	"sort"
	"unsafe"

	"faultsnoop/internal/fault"
)

// Bounds of what is read and kept of the DWARF sections of a file. A unit that is beyond
// them has no lines, the others have theirs.
const (
	maxUnits       = 128 << 10
	maxUnit        = 64 << 20 // bytes of .debug_info
	maxAbbrevBytes = 1 << 20  // of one table
	maxAttrs       = 256      // of one abbreviation
	maxNesting     = 1024
	maxScopes      = 1 << 20
	maxUnitRanges  = 1 << 20
	maxInlined     = 256      // functions in one place
	maxUnitBytes   = 16 << 20 // kept of all units of a file, of at least one
	maxOrigins     = 8        // from a function to its name
	maxQualified   = 4096     // bytes of a name with those that it is in
	maxHomes       = 64       // of these
	// maxWork bounds what is read of shared tables for one purpose, in bytes, since many
	// may ask for the same long one.
	maxWork = 256 << 20
)

// lines are the functions and source lines that DWARF, version 2 to 5, tells.
//
// It is not read by debug/dwarf, which wants whole sections in memory and trusts them: a
// large program has gigabytes of them, and a small file can have it allocate as much, which
// in Go nothing recovers from. Here the headers of units are read once, for the ranges that
// they cover, and the unit that an address is in when it is asked for.
type lines struct {
	order    binary.ByteOrder
	addrSize int

	info, abbrev, line, str, lineStr, strOffsets, addr, ranges, rnglists, aranges extent
	// code reports whether something can be at an address. What a linker has left out is
	// still described, as if it were at 0.
	code func(addr uint64) bool

	indexed bool
	units   []unit
	cover   []piece // names are indices of units

	kept  int // bytes of units that were read
	loads int // of units that may still be read for one address
	work  int // bytes of shared tables that were read
	clock uint64
}

// unit is a compilation unit.
type unit struct {
	off, end uint64 // of the whole, in .debug_info
	dies     uint64 // where its entries begin
	abbrev   uint64
	version  uint16
	dwarf64  bool
	addrSize uint8

	lang                                   fault.Lang
	low                                    uint64
	hasLines                               bool
	stmtList                               uint64
	compDir                                textRef
	strOffsetsBase, addrBase, rnglistsBase uint64
	rangesBase                             uint64
	read                                   *unitCode
	used                                   uint64
}

// unitCode is what is kept of a unit that was read.
type unitCode struct {
	scopes []scope
	pieces []piece // names are indices of scopes
	homes  []home
	table  lineTable
}

// home is a namespace or class in which functions are described.
type home struct {
	die, end uint64 // in .debug_info
	name     textRef
	origin   uint64 // where it is declared, if that is elsewhere
	outer    int32  // index of that which it is in, -1 if in none
	space    bool   // a namespace
	local    bool   // in a function
}

// scope is a function, or one that was put into another.
type scope struct {
	die      uint64 // where it is described, in .debug_info
	parent   int32  // index of that which it is in, -1 if in none
	callFile uint32
	callLine uint32
	inlined  bool
}

// textRef is where a text is.
type textRef struct {
	in  textPlace
	off uint64
}

type textPlace uint8

const (
	noText textPlace = iota
	inInfo
	inStr
	inLineStr
	inLine
	inStrOffsets // off is an index
)

// hasLines reports whether a file has DWARF.
func hasLines(o *object) bool {
	return slices.ContainsFunc(o.f.Sections, func(s *elf.Section) bool {
		return s.Type != elf.SHT_NOBITS && (s.Name == ".debug_info" || s.Name == ".zdebug_info")
	})
}

// linesOf is the DWARF of a file, nil if it has none that can be read. code reports whether
// there is code at an address.
func linesOf(o *object, code func(uint64) bool) *lines {
	l := &lines{order: o.f.ByteOrder, addrSize: 8, code: code}
	if o.f.Class == elf.ELFCLASS32 {
		l.addrSize = 4
	}
	l.info, l.abbrev = o.section(".debug_info"), o.section(".debug_abbrev")
	if l.info.size == 0 || l.abbrev.size == 0 {
		return nil
	}
	l.line, l.str, l.lineStr = o.section(".debug_line"), o.section(".debug_str"), o.section(".debug_line_str")
	l.strOffsets, l.addr = o.section(".debug_str_offsets"), o.section(".debug_addr")
	l.ranges, l.rnglists, l.aranges = o.section(".debug_ranges"), o.section(".debug_rnglists"), o.section(".debug_aranges")
	return l
}

// size is how many bytes are kept, about.
func (l *lines) size() int {
	return cap(l.units)*int(unsafe.Sizeof(unit{})) + cap(l.cover)*int(unsafe.Sizeof(piece{})) + l.kept
}

func (c *unitCode) size() int {
	return cap(c.scopes)*int(unsafe.Sizeof(scope{})) + cap(c.pieces)*int(unsafe.Sizeof(piece{})) + cap(c.homes)*int(unsafe.Sizeof(home{})) + c.table.size()
}

// at are the functions at an address, the innermost first. The last has no name if no
// function is described there, but lines are; it is bare if its name has none of the names
// that it is in: what no other unit can call has none for the linker there.
func (l *lines) at(addr uint64) (frames []fault.Frame, bare bool) {
	if !l.indexed {
		l.indexed = true
		l.index()
	}
	i := pieceAt(l.cover, addr)
	if i < 0 {
		return nil, false
	}
	u := &l.units[l.cover[i].name]
	l.loads = 2
	read := l.use(u)
	file, line, found := read.table.at(addr)
	frame := fault.Frame{Lang: u.lang}
	if found {
		frame.File, frame.Line = l.fileName(u, &read.table, file), line
	}
	i = pieceAt(read.pieces, addr)
	if i < 0 {
		if !found {
			return nil, false
		}
		return []fault.Frame{frame}, false
	}
	for at := int32(read.pieces[i].name); at >= 0 && len(frames) < maxInlined; {
		s := &read.scopes[at]
		name, forLinker := l.functionName(s.die)
		bare = !forLinker
		frame.Func, frame.Inlined = demangled(name), s.inlined
		frames = append(frames, frame)
		if !s.inlined {
			break
		}
		frame = fault.Frame{Lang: u.lang, File: l.fileName(u, &read.table, s.callFile), Line: s.callLine}
		at = s.parent
	}
	// What is inlined is in something.
	if last := &frames[len(frames)-1]; last.Inlined {
		if len(frames) == maxInlined {
			last.Inlined = false
		} else {
			frames = append(frames, frame)
		}
	}
	return frames, bare
}

func pieceAt(pieces []piece, addr uint64) int {
	i := sort.Search(len(pieces), func(i int) bool { return pieces[i].end > addr })
	if i == len(pieces) || addr < pieces[i].start {
		return -1
	}
	return i
}

// reference is where in .debug_info a value leads.
func (u *unit) reference(v value) (off uint64, ok bool) {
	switch v.form {
	case formRef1, formRef2, formRef4, formRef8, formRefUdata:
		return u.off + v.n, true
	case formRefAddr:
		return v.n, true
	}
	return 0, false // in another file
}

func (u *unit) text(v value) textRef {
	switch v.form {
	case formString:
		return textRef{inInfo, v.n}
	case formStrp:
		return textRef{inStr, v.n}
	case formLineStrp:
		return textRef{inLineStr, v.n}
	case formStrx, formStrx1, formStrx1 + 1, formStrx1 + 2, formStrx4:
		return textRef{inStrOffsets, v.n}
	}
	return textRef{}
}

func (l *lines) read(u *unit, t textRef) string {
	switch t.in {
	case inInfo:
		return l.info.text(t.off)
	case inStr:
		return l.str.text(t.off)
	case inLineStr:
		return l.lineStr.text(t.off)
	case inLine:
		return l.line.text(t.off)
	case inStrOffsets:
		if off, ok := l.entryOf(l.strOffsets, u.strOffsetsBase, t.off, u.offsetSize()); ok {
			return l.str.text(off)
		}
	}
	return ""
}

func (u *unit) offsetSize() uint64 {
	if u.dwarf64 {
		return 8
	}
	return 4
}

// entryOf is an entry of an array of numbers.
func (l *lines) entryOf(e extent, base, i, size uint64) (uint64, bool) {
	if i >= e.size/size {
		return 0, false
	}
	c := &cursor{b: e.bytes(base+i*size, size), order: l.order}
	n := c.number(int(size))
	return n, !c.bad
}

func (l *lines) address(u *unit, v value) (uint64, bool) {
	switch v.form {
	case formAddr:
		return v.n, true
	case formAddrx, formAddrx1, formAddrx1 + 1, formAddrx1 + 2, formAddrx4, formGNUAddr:
		return l.entryOf(l.addr, u.addrBase, v.n, uint64(u.addrSize))
	}
	return 0, false
}

// index reads the headers of all units.
func (l *lines) index() {
	const header = 64
	l.work = 0
	var entries []entry
	without := false // some unit does not say what it covers
	covered := map[uint64]bool{}
	for off := uint64(0); off < l.info.size && len(l.units) < maxUnits; {
		c := &cursor{b: l.info.bytes(off, header), order: l.order}
		u, ok := l.header(c, off)
		if u.end <= off || u.end > l.info.size {
			break
		}
		next := u.end
		if ok {
			if ranges := l.describe(&u); u.hasLines || ranges != nil {
				i := uint32(len(l.units))
				for _, r := range ranges {
					if len(entries) < maxUnitRanges && l.code(r.start) {
						entries = append(entries, entry{start: r.start, end: r.end, name: i})
					}
				}
				without = without || len(ranges) == 0
				covered[u.off] = len(ranges) > 0
			}
			// Those without code may have the names of others.
			l.units = append(l.units, u)
		}
		off = next
	}
	if without {
		entries = l.addAranges(entries, covered)
	}
	l.units = slices.Clip(l.units)
	sortNested(entries)
	l.cover = cut(entries)
}

func sortNested(entries []entry) {
	slices.SortStableFunc(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(b.end, a.end), cmp.Compare(a.name, b.name))
	})
}

// header reads how a unit begins, and reports whether it is one with code.
func (l *lines) header(c *cursor, off uint64) (u unit, ok bool) {
	u.off = off
	length, dwarf64 := c.length()
	u.dwarf64 = dwarf64
	u.end = off + uint64(c.at) + length
	if u.end < off {
		u.end = 0
	}
	u.version = uint16(c.number(2))
	const (
		unitCompile, unitPartial, unitSkeleton = 1, 3, 4
	)
	kind := uint64(unitCompile)
	switch {
	case u.version >= 2 && u.version <= 4:
		u.abbrev = c.offset(dwarf64)
		u.addrSize = uint8(c.number(1))
	case u.version == 5:
		kind = c.number(1)
		u.addrSize = uint8(c.number(1))
		u.abbrev = c.offset(dwarf64)
		if kind == unitSkeleton {
			c.take(8) // the id of the file with the rest
		}
	default:
		return u, false
	}
	u.dies = off + uint64(c.at)
	return u, !c.bad && (u.addrSize == 4 || u.addrSize == 8) && (kind == unitCompile || kind == unitPartial || kind == unitSkeleton)
}

type span struct{ start, end uint64 }

// describe reads the first entry of a unit, and what code it covers.
func (l *lines) describe(u *unit) []span {
	if u.version >= 5 {
		// Behind the headers of these sections, unless the unit says where.
		u.strOffsetsBase, u.addrBase, u.rnglistsBase = 8, 8, 12
	}
	for room := uint64(512); ; room *= 8 {
		b := l.info.bytes(u.dies, min(room, u.end-u.dies))
		c := &cursor{b: b, order: l.order}
		code := c.uleb()
		a, err := l.abbreviation(u.abbrev, code)
		if err != nil || c.bad {
			return nil
		}
		if a.tag != dwarf.TagCompileUnit && a.tag != dwarf.TagPartialUnit && a.tag != 0x4a {
			return nil
		}
		var low, high, ranges value
		for _, t := range a.attrs {
			switch v := u.value(c, u.dies, t); t.attr {
			case dwarf.AttrLanguage:
				u.lang = langOf(v.n)
			case dwarf.AttrStmtList:
				u.stmtList, u.hasLines = v.n, true
			case dwarf.AttrCompDir:
				u.compDir = u.text(v)
			case dwarf.AttrLowpc:
				low = v
			case dwarf.AttrHighpc:
				high = v
			case dwarf.AttrRanges:
				ranges = v
			case dwarf.AttrStrOffsetsBase:
				u.strOffsetsBase = v.n
			case dwarf.AttrAddrBase, 0x2133: // DW_AT_GNU_addr_base
				u.addrBase = v.n
			case dwarf.AttrRnglistsBase:
				u.rnglistsBase = v.n
			case 0x2132: // DW_AT_GNU_ranges_base
				u.rangesBase = v.n
			}
		}
		if c.bad && room < 64<<10 && uint64(len(b)) == room {
			continue
		}
		if c.bad {
			return nil
		}
		if u.lang == fault.LangUnknown {
			u.lang = fault.LangNative
		}
		u.low, _ = l.address(u, low)
		return l.rangesOf(u, nil, low, high, ranges)
	}
}

// rangesOf appends what an entry covers.
func (l *lines) rangesOf(u *unit, out []span, low, high, ranges value) []span {
	switch ranges.form {
	case 0:
	case formRnglistx:
		off, ok := l.entryOf(l.rnglists, u.rnglistsBase, ranges.n, u.offsetSize())
		if !ok {
			return out
		}
		return l.rangeList(u, out, u.rnglistsBase+off)
	default:
		if u.version >= 5 {
			return l.rangeList(u, out, ranges.n)
		}
		return l.rangePairs(u, out, u.rangesBase+ranges.n)
	}
	start, ok := l.address(u, low)
	if !ok {
		return out
	}
	end, ok := l.address(u, high)
	if !ok {
		if high.form == 0 {
			return out
		}
		end = start + high.n
	}
	if end > start {
		out = append(out, span{start, end})
	}
	return out
}

// rangePairs reads a list of .debug_ranges.
func (l *lines) rangePairs(u *unit, out []span, off uint64) []span {
	base := u.low
	size := int(u.addrSize)
	all := ^uint64(0) >> (64 - 8*size)
	for n := 0; n < maxUnitRanges; {
		c := &cursor{b: l.ranges.bytes(off, 4096), order: l.order}
		if l.work += len(c.b); len(c.b) < 2*size || l.work > maxWork {
			break
		}
		for ; len(c.b)-c.at >= 2*size; n++ {
			start, end := c.number(size), c.number(size)
			switch {
			case start == 0 && end == 0:
				return out
			case start == all:
				base = end
			case end > start && base+end > base+start:
				out = append(out, span{base + start, base + end})
			}
		}
		off += uint64(c.at)
	}
	return out
}

// rangeList reads a list of .debug_rnglists.
func (l *lines) rangeList(u *unit, out []span, off uint64) []span {
	const (
		endOfList = iota
		baseAddressx
		startxEndx
		startxLength
		offsetPair
		baseAddress
		startEnd
		startLength
	)
	const longest = 1 + 2*10
	base := u.low
	size := int(u.addrSize)
	indexed := func(i uint64) uint64 {
		at, _ := l.entryOf(l.addr, u.addrBase, i, uint64(size))
		return at
	}
	for n := 0; n < maxUnitRanges; {
		b := l.rnglists.bytes(off, 4096)
		c := &cursor{b: b, order: l.order}
		if l.work += len(b); l.work > maxWork {
			break
		}
		for more := true; more; n++ {
			var start, end uint64
			switch c.number(1) {
			case endOfList:
				return out
			case baseAddressx:
				base = indexed(c.uleb())
			case startxEndx:
				start, end = indexed(c.uleb()), indexed(c.uleb())
			case startxLength:
				start = indexed(c.uleb())
				end = start + c.uleb()
			case offsetPair:
				start, end = base+c.uleb(), base+c.uleb()
			case baseAddress:
				base = c.number(size)
			case startEnd:
				start, end = c.number(size), c.number(size)
			case startLength:
				start = c.number(size)
				end = start + c.uleb()
			default:
				return out
			}
			if c.bad {
				return out
			}
			if end > start {
				out = append(out, span{start, end})
			}
			// At the end of the section whatever is left is enough, or bad.
			more = len(b)-c.at >= longest || len(b) < 4096
		}
		off += uint64(c.at)
	}
	return out
}

// addAranges appends what .debug_aranges says of units that do not say it themselves.
func (l *lines) addAranges(entries []entry, covered map[uint64]bool) []entry {
	for off := uint64(0); off < l.aranges.size; {
		c := &cursor{b: l.aranges.bytes(off, 64), order: l.order}
		length, dwarf64 := c.length()
		end := off + uint64(c.at) + length
		version := c.number(2)
		of := c.offset(dwarf64)
		size, segment := int(c.number(1)), c.number(1)
		if c.bad || end <= off || end > l.aranges.size {
			break
		}
		i, found := slices.BinarySearchFunc(l.units, of, func(u unit, off uint64) int { return cmp.Compare(u.off, off) })
		said, described := covered[of]
		if found && described && !said && version == 2 && (size == 4 || size == 8) && segment == 0 {
			pair := uint64(2 * size)
			at := off + (uint64(c.at)+pair-1)/pair*pair
			c := &cursor{b: l.aranges.bytes(at, min(end-at, maxNames)), order: l.order}
			for len(entries) < maxUnitRanges {
				start, n := c.number(size), c.number(size)
				if c.bad || start == 0 && n == 0 {
					break
				}
				if start+n > start && l.code(start) {
					entries = append(entries, entry{start: start, end: start + n, name: uint32(i)})
				}
			}
		}
		off = end
	}
	return entries
}

// use is what a unit has, nil if no more may be read now.
func (l *lines) use(u *unit) *unitCode {
	l.clock++
	u.used = l.clock
	if u.read == nil && l.loads > 0 {
		l.loads--
		l.load(u)
	}
	return u.read
}

// load reads a unit. One that cannot be read has nothing.
func (l *lines) load(u *unit) {
	code := &unitCode{}
	l.work = 0
	if u.hasLines {
		code.table = l.lineTable(u)
	}
	if scopes, entries, homes, err := l.scopes(u); err == nil {
		sortNested(entries)
		code.scopes, code.pieces, code.homes = slices.Clip(scopes), cut(entries), slices.Clip(homes)
	}
	u.read = code
	l.kept += code.size()
	for l.kept > maxUnitBytes {
		var oldest *unit
		for i := range l.units {
			if o := &l.units[i]; o.read != nil && o != u && (oldest == nil || o.used < oldest.used) {
				oldest = o
			}
		}
		if oldest == nil {
			break
		}
		l.kept -= oldest.read.size()
		oldest.read = nil
	}
}

// scopes reads the functions of a unit, and what they are in.
func (l *lines) scopes(u *unit) ([]scope, []entry, []home, error) {
	if u.end-u.dies > maxUnit {
		return nil, nil, nil, errTooMuch
	}
	table, err := l.abbreviations(u.abbrev)
	if err != nil {
		return nil, nil, nil, err
	}
	c := &cursor{b: l.info.bytes(u.dies, u.end-u.dies), order: l.order}
	var (
		scopes  []scope
		entries []entry
		spans   []span
		homes   []home
		parents []parent // of the entries that are open
		seen    int      // functions
	)
	for c.at < len(c.b) {
		die := u.dies + uint64(c.at)
		code := c.uleb()
		if code == 0 {
			if len(parents) <= 1 {
				break
			}
			if p := parents[len(parents)-1]; p.opens {
				if h := &homes[p.home]; h.space || seen > p.seen {
					h.end = die
				} else {
					homes = homes[:p.home]
				}
			}
			parents = parents[:len(parents)-1]
			continue
		}
		a, ok := table.find(code)
		if !ok {
			return nil, nil, nil, errors.New("an entry has no abbreviation")
		}
		up := parent{scope: -1, home: -1}
		if len(parents) > 0 {
			up = parents[len(parents)-1]
		}
		up.opens = false
		var low, high, ranges, name, origin value
		s := scope{die: die, parent: up.scope, inlined: a.tag == dwarf.TagInlinedSubroutine}
		for _, t := range a.attrs {
			switch v := u.value(c, u.dies, t); t.attr {
			case dwarf.AttrLowpc:
				low = v
			case dwarf.AttrHighpc:
				high = v
			case dwarf.AttrRanges:
				ranges = v
			case dwarf.AttrCallFile:
				s.callFile = uint32(v.n)
			case dwarf.AttrCallLine:
				s.callLine = uint32(v.n)
			case dwarf.AttrName:
				name = v
			case dwarf.AttrSpecification:
				origin = v
			}
		}
		if c.bad {
			return nil, nil, nil, errors.New("an entry goes beyond its unit")
		}
		if a.tag == dwarf.TagSubprogram || s.inlined {
			if !s.inlined {
				s.parent = -1
				up.local = true
				seen++
			}
			spans = l.rangesOf(u, spans[:0], low, high, ranges)
			if l.work > maxWork {
				return nil, nil, nil, errTooMuch
			}
			if len(spans) > 0 {
				i := uint32(len(scopes))
				for _, r := range spans {
					if l.code(r.start) {
						entries = append(entries, entry{start: r.start, end: r.end, name: i})
					}
				}
				up.scope = int32(i)
				scopes = append(scopes, s)
				if len(scopes) > maxScopes || len(entries) > maxUnitRanges {
					return nil, nil, nil, errTooMuch
				}
			} else if !s.inlined {
				up.scope = -1
			}
		}
		if a.children && isHome(a.tag) {
			h := home{die: die, name: u.text(name), outer: up.home, space: a.tag == dwarf.TagNamespace, local: up.local}
			h.origin, _ = u.reference(origin)
			homes = append(homes, h)
			if len(homes) > maxScopes {
				return nil, nil, nil, errTooMuch
			}
			up = parent{scope: up.scope, home: int32(len(homes) - 1), opens: true, seen: seen}
		}
		if a.children {
			if len(parents) >= maxNesting {
				return nil, nil, nil, errTooMuch
			}
			parents = append(parents, up)
		}
	}
	for i := range homes {
		if homes[i].end == 0 {
			homes[i].end = u.end
		}
	}
	return scopes, entries, homes, nil
}

// parent is what an entry is in.
type parent struct {
	scope, home int32 // indices, -1 for none
	local       bool  // in a function, and in no class there
	opens       bool  // it is the home
	seen        int   // functions before the home
}

func isHome(t dwarf.Tag) bool {
	return t == dwarf.TagNamespace || t == dwarf.TagClassType || t == dwarf.TagStructType || t == dwarf.TagUnionType
}

// qualified is a name with those of the namespaces and classes that it is in, by where it is
// described.
func (l *lines) qualified(u *unit, die uint64, name string) string {
	if u.lang != fault.LangCPP && u.lang != fault.LangRust {
		return name
	}
	full, homes := name, 0
	for range maxOrigins {
		read := l.use(u)
		if read == nil {
			return name
		}
		// The last that begins before it is what it is in, or is in that too.
		i := sort.Search(len(read.homes), func(i int) bool { return read.homes[i].die >= die }) - 1
		for i >= 0 && read.homes[i].end < die {
			i = int(read.homes[i].outer)
		}
		elsewhere := uint64(0)
		for i >= 0 && elsewhere == 0 {
			h := &read.homes[i]
			in := l.read(u, h.name)
			switch elsewhere = h.origin; {
			case in != "":
			case elsewhere != 0:
				if of := l.unitOf(elsewhere); of != nil {
					n, _ := l.namesAt(of, elsewhere)
					in = n.plain
				}
			case h.space:
				in = "(anonymous namespace)"
			default:
				in = "(anonymous class)"
			}
			if homes++; in == "" || homes > maxHomes || len(in)+len(full) > maxQualified {
				return name
			}
			full = in + "::" + full
			if h.local {
				return full
			}
			i = int(h.outer)
		}
		if elsewhere == 0 {
			return full
		}
		die = elsewhere
		if u = l.unitOf(die); u == nil {
			return name
		}
	}
	return name
}

// unitOf is the unit that an entry is in, nil if it is in none.
func (l *lines) unitOf(die uint64) *unit {
	i := sort.Search(len(l.units), func(i int) bool { return l.units[i].off > die }) - 1
	if i < 0 || die < l.units[i].dies || die >= l.units[i].end {
		return nil
	}
	return &l.units[i]
}

// names are those that an entry has itself, and where more of it is described.
type names struct {
	plain, linkage string
	origin         uint64
	more           bool
}

// namesAt reads an entry of a unit.
func (l *lines) namesAt(u *unit, die uint64) (n names, ok bool) {
	// The attributes before the name are short, or else there is none.
	c := &cursor{b: l.info.bytes(die, min(maxName, u.end-die)), order: l.order}
	code := c.uleb()
	a, err := l.abbreviation(u.abbrev, code)
	if err != nil {
		return names{}, false
	}
	var plain, linkage, origin value
	for _, t := range a.attrs {
		v := u.value(c, die, t)
		if c.bad {
			break
		}
		switch t.attr {
		case dwarf.AttrName:
			plain = v
		case dwarf.AttrLinkageName, 0x2007: // DW_AT_MIPS_linkage_name
			linkage = v
		case dwarf.AttrAbstractOrigin, dwarf.AttrSpecification:
			origin = v
		}
	}
	n = names{plain: l.read(u, u.text(plain)), linkage: l.read(u, u.text(linkage))}
	if origin.form != 0 {
		n.origin, n.more = u.reference(origin)
	}
	return n, true
}

// functionName is the name of a function for the linker, or else for people, by where it
// or a part of it is described.
func (l *lines) functionName(die uint64) (name string, forLinker bool) {
	l.work = 0
	for range maxOrigins {
		u := l.unitOf(die)
		if u == nil {
			return "", false
		}
		n, ok := l.namesAt(u, die)
		if !ok {
			return "", false
		}
		if n.linkage != "" {
			return n.linkage, true
		}
		if !n.more {
			if n.plain == "" {
				return "", false
			}
			return l.qualified(u, die, n.plain), false
		}
		die = n.origin
	}
	return "", false
}

// fileName is the path of a file of a unit.
func (l *lines) fileName(u *unit, t *lineTable, i uint32) string {
	if t.version < 5 {
		i-- // they begin with 1
	}
	if uint64(i) >= uint64(len(t.files)) {
		return ""
	}
	f := t.files[i]
	name := l.read(u, f.name)
	dir := f.dir
	if name == "" {
		return ""
	}
	if t.version < 5 {
		dir-- // the first is not in the list
	}
	if uint64(dir) < uint64(len(t.dirs)) && !path.IsAbs(name) {
		name = path.Join(l.read(u, t.dirs[dir]), name)
	}
	if !path.IsAbs(name) {
		name = path.Join(l.read(u, u.compDir), name)
	}
	return path.Clean(name)
}

// langOf is the language of a DW_LANG.
func langOf(n uint64) fault.Lang {
	switch n {
	case 0x04, 0x1a, 0x21, 0x2b, 0x3a: // C++, 11, 14, 17, 20
		return fault.LangCPP
	case 0x1c:
		return fault.LangRust
	case 0x16:
		return fault.LangGo
	}
	return fault.LangNative
}
