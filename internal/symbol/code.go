package symbol

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"slices"
	"unsafe"

	"faultsnoop/internal/fault"
)

// Bounds of one file's code.
const (
	// maxUnpacked bounds what .gnu_debugdata holds.
	maxUnpacked = 32 << 20
	// maxAnswers bounds the bytes of answers that are kept of a file.
	maxAnswers = 1 << 20
)

// Code is the functions and source lines of one ELF file. It reads from the file when it
// is asked, within bounds whatever the file says, and keeps what it has read. It is not
// safe for concurrent use.
type Code struct {
	// BuildID in hexadecimal; empty if the file has none.
	BuildID string

	object *object
	golang *goTable
	lines  *lines // nil until they are asked for
	// described has DWARF that was not read yet.
	described *object
	tables    []*symbols // the first that has a name is right
	objs      []*object

	answers     map[uint64][]fault.Frame
	answerBytes int
}

// separate finds what was split off a file, and returns nil if it finds nothing.
type separate func(buildID, link string, crc uint32, hasLink bool) *object

// NewCode reads the headers of an ELF file, from r, which must stay open. Separate debug
// files are not looked for.
func NewCode(r io.ReaderAt) (*Code, error) { return newCode(r, nil) }

func newCode(r io.ReaderAt, find separate) (c *Code, err error) {
	o, err := readObject(r)
	if err != nil {
		return nil, err
	}
	// What is read of the sections is bounded, and so is what a mistake in reading can do.
	defer func() {
		if p := recover(); p != nil {
			c, err = nil, fmt.Errorf("reading the code of an ELF file: %v", p)
		}
	}()
	c = &Code{BuildID: o.buildID, object: o, objs: []*object{o}, answers: map[uint64][]fault.Frame{}}
	c.golang = goTableOf(o)
	if hasLines(o) {
		c.described = o
	}
	all := functionsOf(o, elf.SHT_SYMTAB)
	if all != nil {
		c.tables = append(c.tables, all)
	} else if mini := unpack(o); mini != nil {
		c.add(mini)
	}
	if find != nil && (all == nil || c.described == nil) && (c.golang == nil || o.linksLibraries()) {
		link, crc, ok := o.debugLink()
		if debug := find(o.buildID, link, crc, ok); debug != nil {
			c.add(debug)
			if c.described == nil && hasLines(debug) {
				c.described = debug
			}
		}
	}
	if dynamic := functionsOf(o, elf.SHT_DYNSYM); dynamic != nil {
		c.tables = append(c.tables, dynamic)
	}
	return c, nil
}

func (c *Code) add(o *object) {
	c.objs = append(c.objs, o)
	if t := functionsOf(o, elf.SHT_SYMTAB); t != nil {
		c.tables = append(c.tables, t)
	}
}

// unpack reads the symbols that Fedora's programs carry with them: an ELF file, compressed
// with xz, in a section (MiniDebugInfo).
func unpack(o *object) *object {
	packed := o.section(".gnu_debugdata")
	if packed.size == 0 || packed.size > maxUnpacked {
		return nil
	}
	b, err := unxz(io.NewSectionReader(packed.r, int64(packed.off), int64(packed.size)), maxUnpacked)
	if err != nil {
		return nil
	}
	mini, err := readObject(bytes.NewReader(slices.Clip(b)))
	if err != nil {
		return nil
	}
	mini.held += len(b)
	return mini
}

// AddrOf is the virtual address, as the file is linked, of code at an offset of the file.
// It is false if no segment holds the offset, or more than one.
func (c *Code) AddrOf(off uint64) (addr uint64, ok bool) { return c.object.addrOf(off) }

// At are the functions at an address as the file is linked, the innermost first: those
// that were inlined into the next, and the one that they are in. Func is empty if no symbol
// holds the address, Line 0 if no line is known. There is always one frame; it has
// BuildID, Offset and Lang.
//
// Of an address to return to the caller passes the byte before, which is still in the
// call. The frames must not be changed.
func (c *Code) At(addr uint64) []fault.Frame {
	if frames, known := c.answers[addr]; known {
		return frames
	}
	frames := c.find(addr)
	size := answerCost
	for i := range frames {
		f := &frames[i]
		f.BuildID, f.Offset = c.BuildID, addr
		size += int(unsafe.Sizeof(*f)) + len(f.Func) + len(f.File)
	}
	if c.answerBytes+size > maxAnswers {
		clear(c.answers)
		c.answerBytes = 0
	}
	c.answers[addr] = frames
	c.answerBytes += size
	return frames
}

// answerCost is what the map takes for an answer, about.
const answerCost = 64

func (c *Code) find(addr uint64) (frames []fault.Frame) {
	defer func() {
		if recover() != nil {
			frames = []fault.Frame{{Lang: fault.LangUnknown}}
		}
	}()
	if !c.object.codeAt(addr) {
		return []fault.Frame{{Lang: fault.LangUnknown}}
	}
	if c.golang != nil {
		if frames := c.golang.at(addr); len(frames) > 0 {
			return frames
		}
	}
	if c.lines == nil && c.described != nil {
		c.lines = linesOf(c.described, c.object.codeAt)
		c.described = nil
	}
	bare := false
	if c.lines != nil {
		frames, bare = c.lines.at(addr)
	}
	if len(frames) == 0 {
		frames = []fault.Frame{{Lang: fault.LangUnknown}}
	}
	last := &frames[len(frames)-1]
	if last.Func != "" && !bare {
		return frames
	}
	for _, t := range c.tables {
		name, _ := t.at(addr, true)
		if name == "" {
			continue
		}
		if last.Func == "" || mangled(name) {
			last.Func = demangled(name)
		}
		if lang := langOfName(name); lang != fault.LangNative || last.Lang == fault.LangUnknown {
			last.Lang = lang
		}
		break
	}
	return frames
}

// Size is how many bytes are kept, about.
func (c *Code) Size() int {
	n := c.answerBytes
	for _, t := range c.tables {
		n += t.size()
	}
	if c.lines != nil {
		n += c.lines.size()
	}
	for _, o := range c.objs {
		n += o.held + cachedBlocks*blockSize + len(o.f.Sections)*objectCost + len(o.f.Progs)*objectCost
	}
	return n
}

// objectCost is what debug/elf takes for a section or segment, about.
const objectCost = 256
