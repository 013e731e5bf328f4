package symbol

import (
	"bytes"
	"cmp"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"unsafe"

	"faultsnoop/internal/fault"
)

// Bounds of what is read of one file. Linkers stay far below them; whoever does not is
// shown without names.
const (
	maxSections    = 1024
	maxSectionName = 256      // bytes
	maxNames       = 64 << 10 // bytes of the table of them
	maxHeaderBytes = 256 << 10
)

// image is an ELF file as a linker has laid it out. All addresses are those that it was
// linked for.
type image struct {
	pageSize uint64
	segments []segment
	byAddr   []section
	byOffset []section
	names    int // bytes of the names of sections

	symbols symbols
}

// size is how many bytes are kept of an image, about.
func (im *image) size() int {
	return len(im.segments)*int(unsafe.Sizeof(segment{})) +
		(len(im.byAddr)+len(im.byOffset))*int(unsafe.Sizeof(section{})) + im.names + im.symbols.size()
}

// segment is a PT_LOAD program header.
type segment struct {
	off, fileSize, addr, size uint64
	flags                     uint64 // VM_READ, VM_WRITE, VM_EXEC
	// relocated: it is made read-only as a whole when a loader has relocated it.
	relocated bool
}

// section is a range of addresses or of the file.
type section struct {
	start, size uint64
	// addr is the address of start, where loaded.
	addr   uint64
	loaded bool
	name   string
}

// snapshot reads each block of a file once, and not more than so many: debug/elf reads as
// much as a file says it should, and whoever may write to it could change it between a
// check and that.
type snapshot struct {
	r      io.ReaderAt
	blocks map[int64][]byte
	// through: from now on it only passes on.
	through bool
}

const blockSize = 4 << 10

var errTooMuch = errors.New("headers are too large")

func (s *snapshot) ReadAt(b []byte, off int64) (n int, err error) {
	if s.through {
		return s.r.ReadAt(b, off)
	}
	for n < len(b) {
		at := off + int64(n)
		if at < 0 {
			return n, io.EOF
		}
		block, known := s.blocks[at/blockSize]
		if !known {
			if len(s.blocks) >= maxHeaderBytes/blockSize {
				return n, errTooMuch
			}
			block = make([]byte, blockSize)
			got, err := s.r.ReadAt(block, at/blockSize*blockSize)
			if err != nil && !errors.Is(err, io.EOF) {
				return n, err
			}
			block = block[:got]
			s.blocks[at/blockSize] = block
		}
		rest := min(at%blockSize, int64(len(block)))
		if rest == int64(len(block)) {
			return n, io.EOF
		}
		n += copy(b[n:], block[rest:])
	}
	return n, nil
}

// readImage reads the headers of an ELF file, which may say anything. Symbols are read
// from r when one is asked for.
func readImage(r io.ReaderAt, pageSize uint64) (im *image, err error) {
	// debug/elf promises nothing for input that wants to do harm, not even that it will
	// not panic, and all that it has by then is on this stack.
	defer func() {
		if p := recover(); p != nil {
			im, err = nil, fmt.Errorf("reading ELF headers: %v", p)
		}
	}()
	headers := &snapshot{r: r, blocks: map[int64][]byte{}}
	if err := checkNames(headers); err != nil {
		return nil, fmt.Errorf("reading ELF headers: %w", err)
	}
	f, err := elf.NewFile(headers)
	if err != nil {
		return nil, fmt.Errorf("reading ELF headers: %w", err)
	}
	im = &image{pageSize: pageSize, symbols: symbolsOf(r, f)}
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && p.Vaddr+p.Memsz >= p.Vaddr && p.Off+p.Filesz >= p.Off && p.Memsz >= p.Filesz &&
			(p.Vaddr-p.Off)%pageSize == 0 {
			im.segments = append(im.segments, segment{
				p.Off, p.Filesz, p.Vaddr, p.Memsz, permOf(p.Flags),
				slices.ContainsFunc(f.Progs, func(o *elf.Prog) bool {
					return o.Type == elf.PT_GNU_RELRO && o.Vaddr <= p.Vaddr && p.Vaddr+p.Memsz-o.Vaddr <= o.Memsz
				}),
			})
		}
	}
	for _, s := range f.Sections {
		im.addSection(s)
		im.names += len(s.Name)
	}
	byStart := func(a, b section) int { return cmp.Compare(a.start, b.start) }
	slices.SortStableFunc(im.byAddr, byStart)
	slices.SortStableFunc(im.byOffset, byStart)
	return im, nil
}

// checkNames refuses names of sections that are long, and a table of them that is
// compressed or large: elf.NewFile makes a copy of it for each section, up to the next 0,
// and a thousand may begin in one long name.
func checkNames(r io.ReaderAt) error {
	var ident [elf.EI_NIDENT]byte
	if _, err := r.ReadAt(ident[:], 0); err != nil {
		return err
	}
	if string(ident[:len(elf.ELFMAG)]) != elf.ELFMAG {
		return errors.New("it is no ELF file")
	}
	var order binary.ByteOrder = binary.LittleEndian
	if elf.Data(ident[elf.EI_DATA]) == elf.ELFDATA2MSB {
		order = binary.BigEndian
	}
	read := func(off uint64, into any) error {
		return binary.Read(io.NewSectionReader(r, int64(off&math.MaxInt64), int64(binary.Size(into))), order, into)
	}
	var (
		h elf.Header64
		s elf.Section64
	)
	if elf.Class(ident[elf.EI_CLASS]) == elf.ELFCLASS64 {
		if err := read(0, &h); err != nil || h.Shoff == 0 {
			return err
		}
		if err := read(h.Shoff+uint64(h.Shstrndx)*uint64(h.Shentsize), &s); err != nil {
			return err
		}
	} else {
		var h32 elf.Header32
		var s32 elf.Section32
		if err := read(0, &h32); err != nil || h32.Shoff == 0 {
			return err
		}
		if err := read(uint64(h32.Shoff)+uint64(h32.Shstrndx)*uint64(h32.Shentsize), &s32); err != nil {
			return err
		}
		h.Shoff, h.Shnum, h.Shentsize = uint64(h32.Shoff), h32.Shnum, h32.Shentsize
		s.Flags, s.Off, s.Size = uint64(s32.Flags), uint64(s32.Off), uint64(s32.Size)
	}
	// A number that does not fit into the header is 0 there.
	if h.Shnum == 0 || h.Shnum > maxSections || s.Size > maxNames || elf.SectionFlag(s.Flags)&elf.SHF_COMPRESSED != 0 {
		return errTooMuch
	}
	names := make([]byte, s.Size)
	if err := read(s.Off, names); err != nil {
		return err
	}
	for i := range uint64(h.Shnum) {
		var name uint32 // the first field of both classes
		if err := read(h.Shoff+i*uint64(h.Shentsize), &name); err != nil {
			return err
		}
		if uint64(name) < s.Size && bytes.IndexByte(names[name:min(s.Size, uint64(name)+maxSectionName+1)], 0) < 0 {
			return errTooMuch
		}
	}
	return nil
}

func permOf(f elf.ProgFlag) uint64 {
	perm := []byte("---p")
	for i, bit := range [...]elf.ProgFlag{elf.PF_R, elf.PF_W, elf.PF_X} {
		if f&bit != 0 {
			perm[i] = "rwx"[i]
		}
	}
	return fault.PermFlags(string(perm))
}

func (im *image) addSection(s *elf.Section) {
	loaded := s.Flags&elf.SHF_ALLOC != 0
	// The zeroes of thread-local memory are in the file's place for nothing.
	if loaded && s.Size > 0 && s.Addr+s.Size >= s.Addr && !(s.Type == elf.SHT_NOBITS && s.Flags&elf.SHF_TLS != 0) {
		im.byAddr = append(im.byAddr, section{s.Addr, s.Size, s.Addr, true, s.Name})
	}
	if s.Type != elf.SHT_NULL && s.Type != elf.SHT_NOBITS && s.FileSize > 0 {
		im.byOffset = append(im.byOffset, section{s.Offset, s.FileSize, s.Addr, loaded, s.Name})
	}
}

// find is the section of a list that holds a place, nil if none does.
func find(list []section, at uint64) *section {
	i := sort.Search(len(list), func(i int) bool { return list[i].start > at }) - 1
	if i < 0 || at-list[i].start >= list[i].size {
		return nil
	}
	return &list[i]
}

// place is where in an image something is: addr is known if hasAddr.
type place struct {
	section string
	addr    uint64
	hasAddr bool
}

// placeOfOffset finds what is mapped at an offset of the file. The mapping tells memory
// that a loader has cleared, behind the end of a segment, from what the file has there.
func (im *image) placeOfOffset(off uint64, v *fault.VMA, bounds bool) place {
	switch addr, n := im.cleared(off, v, bounds); {
	case n == 1:
		return im.placeOfAddr(addr)
	case n > 1:
		return place{}
	}
	s := find(im.byOffset, off)
	switch {
	case s == nil:
		return place{}
	case !s.loaded:
		return place{section: s.name}
	}
	return place{s.name, s.addr + (off - s.start), true}
}

func (im *image) placeOfAddr(addr uint64) place {
	if s := find(im.byAddr, addr); s != nil {
		return place{s.name, addr, true}
	}
	return place{}
}

// cleared finds an offset in the last page that is mapped of a segment, behind what is
// the segment's: its address, and how many segments that may be. Where the bounds of the
// mapping are not known, it may also be one of the whole file, by a program that reads it.
func (im *image) cleared(off uint64, v *fault.VMA, bounds bool) (addr uint64, n int) {
	for i := range im.segments {
		s := &im.segments[i]
		switch {
		case !im.holds(s, off):
		case off >= s.off && off-s.off < s.fileSize:
			return 0, 0
		case off > s.off && off-s.off < s.size && !bounds:
			n += 2
		case off > s.off && off-s.off < s.size && im.shows(s, v):
			addr = s.addr + (off - s.off)
			n++
		}
	}
	return addr, n
}

// first and last are the ends of the pages that a segment has in its file.
func (im *image) first(s *segment) uint64 { return s.off &^ (im.pageSize - 1) }

func (im *image) last(s *segment) uint64 {
	return (s.off + s.fileSize + im.pageSize - 1) &^ (im.pageSize - 1)
}

func (im *image) holds(s *segment, off uint64) bool {
	return s.fileSize > 0 && off >= im.first(s) && off < im.last(s)
}

// shows reports whether a mapping is of a segment, or of a part of it that was given
// fewer rights.
func (im *image) shows(s *segment, v *fault.VMA) bool {
	const read, write, exec = 1, 2, 4 // VM_*
	begin, size, perm := v.PgOff*im.pageSize, v.End-v.Start, v.Flags&(read|write|exec)
	return im.holds(s, begin) && size <= im.last(s)-begin && perm&^s.flags == 0 && !(s.relocated && perm&write != 0)
}

// beyond is the linked address for one that is so many bytes behind the end of a
// mapping of the file: memory that a segment has and its file has not.
func (im *image) beyond(v *fault.VMA, distance uint64) (addr uint64, ok bool) {
	n := 0
	for i := range im.segments {
		s := &im.segments[i]
		if !im.endsWith(s, v) {
			continue
		}
		end := s.addr + (im.last(s) - s.off)
		if at := end + distance; at >= end && at-s.addr < s.size {
			addr = at
			n++
		}
	}
	return addr, n == 1
}

// hasTail reports whether memory without a file belongs behind a mapping.
func (im *image) hasTail(v *fault.VMA) bool {
	_, ok := im.beyond(v, 0)
	return ok
}

func (im *image) endsWith(s *segment, v *fault.VMA) bool {
	return im.shows(s, v) && v.PgOff*im.pageSize+(v.End-v.Start) == im.last(s)
}
