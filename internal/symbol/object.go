package symbol

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Bounds of what is read of one file for the names of its code. What is larger is read as
// if it were not there.
const (
	maxNote     = 64 << 10 // bytes of a section of notes
	maxBuildID  = 64       // bytes
	maxInflated = 64 << 20 // bytes of all compressed sections of a file
)

// object is an ELF file, of which sections are read in parts.
type object struct {
	r       io.ReaderAt
	f       *elf.File
	buildID string // hexadecimal
	// inflated are the compressed sections that were read, and held how many bytes.
	inflated map[string][]byte
	held     int
}

// readObject reads the headers of an ELF file, which may say anything.
func readObject(r io.ReaderAt) (o *object, err error) {
	defer func() {
		if p := recover(); p != nil {
			o, err = nil, fmt.Errorf("reading ELF headers: %v", p)
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
	// Sections are read through the same reader, in bounds of their own.
	headers.blocks, headers.through = nil, true
	r = &cached{r: r}
	if f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN {
		return nil, fmt.Errorf("reading ELF headers: %v is no program and no library", f.Type)
	}
	o = &object{r: r, f: f, inflated: map[string][]byte{}}
	o.buildID = o.readBuildID()
	return o, nil
}

// cached keeps the parts of a file that were read last: what is looked up is spread over a
// few places, and asking the kernel costs more than looking.
type cached struct {
	r      io.ReaderAt
	blocks [cachedBlocks]struct {
		known  bool
		number int64
		b      []byte
	}
}

const cachedBlocks = 64

func (c *cached) ReadAt(b []byte, off int64) (n int, err error) {
	if len(b) > 2*blockSize || off < 0 {
		return c.r.ReadAt(b, off)
	}
	for n < len(b) {
		number, in := (off+int64(n))/blockSize, (off+int64(n))%blockSize
		block := &c.blocks[number%cachedBlocks]
		if !block.known || block.number != number {
			if block.b == nil {
				block.b = make([]byte, blockSize)
			}
			block.known = false
			got, err := c.r.ReadAt(block.b[:blockSize], number*blockSize)
			if err != nil && !errors.Is(err, io.EOF) {
				return n, err
			}
			block.b = block.b[:got]
			block.known, block.number = true, number
		}
		if in >= int64(len(block.b)) {
			return n, io.EOF
		}
		n += copy(b[n:], block.b[in:])
	}
	return n, nil
}

// extent is a part of a file, or of memory.
type extent struct {
	r    io.ReaderAt
	off  uint64
	size uint64
}

// bytes reads n bytes, less at the end; nil if there are none.
func (e extent) bytes(off, n uint64) []byte {
	if e.r == nil || off >= e.size {
		return nil
	}
	n = min(n, e.size-off)
	// What a header says need not be there.
	if n > 1<<20 {
		b, err := io.ReadAll(io.NewSectionReader(e.r, int64(e.off+off), int64(n)))
		if err != nil {
			return nil
		}
		return b
	}
	b := make([]byte, n)
	got, err := e.r.ReadAt(b, int64(e.off+off))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil
	}
	return b[:got]
}

// text reads a string that ends with a 0, and is not longer than maxName.
func (e extent) text(off uint64) string {
	for n := uint64(64); ; n *= 8 {
		b := e.bytes(off, min(n, maxName))
		if end := bytes.IndexByte(b, 0); end >= 0 {
			return string(b[:end])
		}
		if n >= maxName || uint64(len(b)) < n {
			return ""
		}
	}
}

// section is the content of a section; empty if there is none with such a name, or if it
// cannot be read within bounds.
func (o *object) section(name string) extent {
	s := o.f.Section(name)
	if s == nil && strings.HasPrefix(name, ".debug_") {
		s = o.f.Section(".z" + name[1:]) // what compilers did before SHF_COMPRESSED
	}
	if s == nil || s.Type == elf.SHT_NOBITS {
		return extent{}
	}
	if s.Flags&elf.SHF_COMPRESSED == 0 && !strings.HasPrefix(s.Name, ".z") {
		if s.Offset+s.FileSize < s.Offset || s.Offset+s.FileSize > 1<<62 {
			return extent{}
		}
		return extent{o.r, s.Offset, s.FileSize}
	}
	b, known := o.inflated[name]
	if !known {
		b = o.inflate(s)
		o.inflated[name] = b
		o.held += cap(b)
	}
	return extent{bytes.NewReader(b), 0, uint64(len(b))}
}

func (o *object) inflate(s *elf.Section) (b []byte) {
	defer func() {
		if recover() != nil {
			b = nil
		}
	}()
	// More than that in one is not read at all: half a section has wrong offsets.
	room := maxInflated - o.held
	b, err := io.ReadAll(io.LimitReader(s.Open(), int64(room)+1))
	if err != nil || len(b) > room {
		return nil
	}
	return slices.Clip(b)
}

// readBuildID reads the build-id as linkers write it: of the GNU ones, else of Go's.
func (o *object) readBuildID() string {
	var notes []extent
	for _, s := range o.f.Sections {
		if s.Type == elf.SHT_NOTE && s.Flags&elf.SHF_COMPRESSED == 0 {
			notes = append(notes, extent{o.r, s.Offset, s.FileSize})
		}
	}
	if len(notes) == 0 {
		for _, p := range o.f.Progs {
			if p.Type == elf.PT_NOTE {
				notes = append(notes, extent{o.r, p.Off, p.Filesz})
			}
		}
	}
	budget := uint64(maxNote)
	for _, e := range notes {
		if e.off > 1<<62 || e.size > budget {
			continue
		}
		budget -= e.size
		if id := gnuBuildID(e.bytes(0, e.size), o.f.ByteOrder); id != nil {
			return hex.EncodeToString(id)
		}
	}
	return ""
}

func gnuBuildID(notes []byte, order binary.ByteOrder) []byte {
	const header, buildID = 12, 3 // NT_GNU_BUILD_ID
	for len(notes) >= header {
		nameSize, size := uint64(order.Uint32(notes)), uint64(order.Uint32(notes[4:]))
		kind := order.Uint32(notes[8:])
		at := header + (nameSize+3)&^3
		if at+size > uint64(len(notes)) {
			return nil
		}
		if kind == buildID && nameSize == 4 && string(notes[header:header+4]) == "GNU\x00" && size > 0 && size <= maxBuildID {
			return notes[at : at+size]
		}
		next := at + (size+3)&^3
		if next > uint64(len(notes)) {
			return nil
		}
		notes = notes[next:]
	}
	return nil
}

// debugLink is the name of a separate file and the CRC of its content.
func (o *object) debugLink() (name string, crc uint32, ok bool) {
	b := o.section(".gnu_debuglink").bytes(0, 1024)
	end := bytes.IndexByte(b, 0)
	if end <= 0 {
		return "", 0, false
	}
	name = string(b[:end])
	at := (end + 4) &^ 3
	if at+4 > len(b) || strings.ContainsRune(name, '/') || name == "." || name == ".." {
		return "", 0, false
	}
	return name, o.f.ByteOrder.Uint32(b[at:]), true
}

// addrOf is the virtual address of what is at an offset of the file. Code is asked for: of
// two segments that hold the offset it is in the one that can be executed.
func (o *object) addrOf(off uint64) (addr uint64, ok bool) {
	executable := false
	for _, p := range o.f.Progs {
		if p.Type != elf.PT_LOAD || off < p.Off || off-p.Off >= p.Filesz {
			continue
		}
		at, x := p.Vaddr+(off-p.Off), p.Flags&elf.PF_X != 0
		switch {
		case !ok, x && !executable:
			addr, executable, ok = at, x, true
		case x == executable && at != addr:
			return 0, false
		}
	}
	return addr, ok
}

// codeAt reports whether there is code at an address, as far as headers say that.
func (o *object) codeAt(addr uint64) bool {
	sections := false
	for _, s := range o.f.Sections {
		if s.Flags&elf.SHF_EXECINSTR == 0 {
			continue
		}
		sections = true
		if addr >= s.Addr && addr-s.Addr < s.Size {
			return true
		}
	}
	if sections {
		return false
	}
	for _, p := range o.f.Progs {
		if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 && addr >= p.Vaddr && addr-p.Vaddr < p.Memsz {
			return true
		}
	}
	return false
}

// loadOf is the address of an offset of the file, in whichever segment.
func (o *object) loadOf(off uint64) (uint64, bool) {
	for _, p := range o.f.Progs {
		if p.Type == elf.PT_LOAD && off >= p.Off && off-p.Off < p.Filesz {
			return p.Vaddr + (off - p.Off), true
		}
	}
	return 0, false
}
