package unwind

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"go.opentelemetry.io/ebpf-profiler/libpf"
	"go.opentelemetry.io/ebpf-profiler/support"
	"golang.org/x/sys/unix"
)

// pythonLines finds the lines of frames of CPython from 3.10 on, which the library (v0.0.202633)
// gets wrong. In 3.10 it asks the interpreter itself for the place of f_lasti, which is no member
// that Python code may see in that version, and so reads the reference count; f_lasti
// counts instructions of two bytes now; and of the table of lines it only reads a half.
// Since 3.11 it loses count of lines at code that is on none, which is where generators
// and functions with closures begin and where with and except end.
// It belongs to the goroutine that names traces.
type pythonLines struct {
	// pythons is the library's map of what it knows of a process.
	pythons   *ebpf.Map
	processes map[uint32]pythonProcess
	codes     map[codeKey]codeLines
}

// pythonProcess is what is done about the frames of a process.
type pythonProcess struct {
	// layout is nil if the library knows better.
	layout *codeLayout
	// since is from when on traces have f_lasti, and never if it cannot be had.
	since uint64
}

type codeKey struct {
	pid  uint32
	addr uint64
	// object is the library's checksum of it, so that another one at the same place is
	// told apart. 0: it could not be read at the fault.
	object uint32
}

// codeLines is what a code object says of its lines. It is empty if it could not be read.
type codeLines struct {
	first uint32
	table []byte
}

// unchanged stands for the line that the library says.
const unchanged = ^uint32(0)

const (
	// keptProcesses and keptCodes bound memory.
	keptProcesses = 4096
	keptCodes     = 16384
	maxLineTable  = 1 << 16
)

// codeLayout has the places of members of PyCodeObject (Include/cpython/code.h, 64 bits) and
// how to read the table of lines.
type codeLayout struct {
	arguments, keywordOnly, flags, firstLine, lineTable int
	lineAt                                              func(c codeLines, instruction uint32) uint32
}

var (
	code310 = &codeLayout{16, 24, 36, 40, 120, lineAt310}
	code311 = &codeLayout{56, 64, 48, 72, 136, lineAt311}
	code312 = &codeLayout{52, 60, 48, 68, 136, lineAt311}
)

// codeLayouts are by the library's way to write versions.
var codeLayouts = map[uint16]*codeLayout{
	3<<8 | 10: code310, 3<<8 | 11: code311, 3<<8 | 12: code312, 3<<8 | 13: code312, 3<<8 | 14: code312,
}

// The places of ob_size and ob_sval in PyBytesObject (Include/cpython/bytesobject.h).
const (
	bytesSize = 16
	bytesData = 32
)

func newPythonLines(pythons *ebpf.Map) *pythonLines {
	return &pythonLines{pythons: pythons, processes: map[uint32]pythonProcess{}, codes: map[codeKey]codeLines{}}
}

// lines are those of the Python frames of a trace, in its order, or nil if the library
// knows better. A line that is not known is 0.
func (p *pythonLines) lines(raw *libpf.EbpfTrace, frames libpf.Frames) []uint32 {
	var lines []uint32
	for rest := libpf.EbpfFrame(raw.FrameData[raw.NumKernelFrames:]); len(rest) > 0 && int(rest.Length()) > 0; rest = rest[rest.Length():] {
		if rest.Type() != libpf.PythonFrame || rest.Flags().Error() {
			continue
		}
		process := p.process(uint32(raw.PID), frames)
		if process.layout == nil {
			return nil
		}
		if uint64(raw.KTime) < process.since {
			lines = append(lines, 0)
			continue
		}
		where := rest.Variable(1)
		line := unchanged
		if code, ok := p.code(codeKey{uint32(raw.PID), rest.Variable(0), uint32(where)}, process.layout); ok {
			line = process.layout.lineAt(code, uint32(where>>32)&0x0fffffff)
		} else if process.layout == code310 {
			line = 0
		}
		lines = append(lines, line)
	}
	return lines
}

// never is behind all times.
const never = ^uint64(0)

// process has the library read f_lasti of the process if that runs CPython 3.10. It is asked
// each time, as a process may exec, and its id be another one's later.
func (p *pythonLines) process(pid uint32, frames libpf.Frames) pythonProcess {
	known, ok := p.processes[pid]
	var info support.PyProcInfo
	switch err := p.pythons.Lookup(pid, unsafe.Pointer(&info)); {
	case err != nil && ok: // it has just ended
		return known
	case err != nil && looksLike310(frames):
		known = pythonProcess{code310, never}
	case err != nil:
		known = pythonProcess{}
	default:
		layout := codeLayouts[info.Version]
		if ok && known.layout == layout &&
			(layout != code310 || known.since != never && info.PyFrameObject_f_lasti == frameLastInstruction) {
			return known
		}
		if known = (pythonProcess{layout: layout}); layout == code310 {
			known.since = p.repair(pid, &info)
		}
	}
	if !ok && len(p.processes) >= keptProcesses {
		clear(p.processes)
	}
	p.processes[pid] = known
	return known
}

// prepare is process for those of CPython 3.10 that the library has looked at since, so that
// their first stacks have lines as well. One that it misses is found by its first stack.
func (p *pythonLines) prepare() {
	var pid uint32
	var info support.PyProcInfo
	for all := p.pythons.Iterate(); all.Next(&pid, unsafe.Pointer(&info)); {
		if codeLayouts[info.Version] == code310 && info.PyFrameObject_f_lasti != frameLastInstruction {
			p.process(pid, nil)
		}
	}
}

// looksLike310 is for a process that has ended: its stack may tell.
func looksLike310(frames libpf.Frames) bool {
	for _, f := range frames {
		if m := f.Value().Mapping; m.Valid() {
			name := m.Value().File.Value().FileName.String()
			if strings.Contains(name, "python3.10") || strings.Contains(name, "cpython-310") {
				return true
			}
		}
	}
	return false
}

// frameLastInstruction is the place of f_lasti in PyFrameObject of 3.10
// (Include/cpython/frameobject.h).
const frameLastInstruction = 96

// repair returns from when on traces have f_lasti.
func (p *pythonLines) repair(pid uint32, info *support.PyProcInfo) uint64 {
	info.PyFrameObject_f_lasti = frameLastInstruction
	if err := p.pythons.Update(pid, unsafe.Pointer(info), ebpf.UpdateExist); err != nil {
		return never
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return never
	}
	return uint64(now.Nano())
}

// code reports false if the object is not, or no more, what the layout and the trace say.
func (p *pythonLines) code(key codeKey, layout *codeLayout) (codeLines, bool) {
	if c, ok := p.codes[key]; ok {
		return c, true
	}
	if len(p.codes) >= keptCodes {
		clear(p.codes)
	}
	c, err := readCode(key, layout)
	if errors.Is(err, errOtherObject) {
		delete(p.processes, key.pid) // it may have become another program
		return codeLines{}, false
	}
	if err != nil {
		return codeLines{}, true
	}
	p.codes[key] = c
	return c, true
}

var errOtherObject = errors.New("not the object that was seen")

func readCode(key codeKey, layout *codeLayout) (codeLines, error) {
	object := make([]byte, layout.lineTable+8)
	if err := readMemory(key.pid, key.addr, object); err != nil {
		return codeLines{}, err
	}
	number := func(at int) uint32 { return binary.LittleEndian.Uint32(object[at:]) }
	first := number(layout.firstLine)
	sum := number(layout.arguments)<<25 + number(layout.keywordOnly)<<18 + number(layout.flags)<<10 + first
	if key.object != 0 && key.object != sum {
		return codeLines{}, errOtherObject
	}
	table := binary.LittleEndian.Uint64(object[layout.lineTable:])
	head := make([]byte, 8)
	if err := readMemory(key.pid, table+bytesSize, head); err != nil {
		return codeLines{}, err
	}
	size := binary.LittleEndian.Uint64(head)
	if size > maxLineTable {
		return codeLines{}, fmt.Errorf("table of %d bytes", size)
	}
	c := codeLines{first: first, table: make([]byte, size)}
	if size > 0 {
		if err := readMemory(key.pid, table+bytesData, c.table); err != nil {
			return codeLines{}, err
		}
	}
	return c, nil
}

func readMemory(pid uint32, addr uint64, b []byte) error {
	local := []unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(len(b))
	n, err := unix.ProcessVMReadv(int(pid), local, []unix.RemoteIovec{{Base: uintptr(addr), Len: len(b)}}, 0)
	if err == nil && n < len(b) {
		err = unix.EFAULT
	}
	return err
}

// lineAt310 finds the line of an instruction, by its number. The table has pairs of how
// many bytes of code are on a line and how far that is from the line before, as a signed byte, of which
// -128 says that there is no line (Objects/lnotab_notes.txt of 3.10).
func lineAt310(c codeLines, instruction uint32) uint32 {
	line, end := int64(c.first), uint32(0)
	for t := c.table; len(t) >= 2; t = t[2:] {
		end += uint32(t[0])
		delta := int64(int8(t[1]))
		if delta != -128 {
			line += delta
		}
		if 2*instruction < end {
			if delta == -128 || line < 0 {
				return 0
			}
			return uint32(line)
		}
	}
	return 0
}

// lineAt311 does the same since 3.11. Only the first byte of an entry has its highest bit set.
// It says of how many instructions the entry is and of which sort; lines, if there are any, and
// then columns follow (Objects/locations.md of 3.11).
func lineAt311(c codeLines, instruction uint32) uint32 {
	line, end := int64(c.first), uint32(0)
	for t := c.table; len(t) > 0; {
		head := t[0]
		if head&0x80 == 0 {
			return 0
		}
		t = t[1:]
		rest := 0
		for rest < len(t) && t[rest]&0x80 == 0 {
			rest++
		}
		somewhere := true
		switch sort := head >> 3 & 15; sort {
		case 15:
			somewhere = false
		case 13, 14:
			line += signedVarint(t[:rest])
		case 10, 11, 12:
			line += int64(sort - 10)
		}
		t = t[rest:]
		if end += uint32(head&7) + 1; instruction < end {
			if !somewhere || line < 0 {
				return 0
			}
			return uint32(line)
		}
	}
	return 0
}

// signedVarint reads a number of six bits a byte, the lowest first, of which bit 6 says that
// there are more; the lowest bit of all is the sign.
func signedVarint(b []byte) int64 {
	var v uint64
	for i, c := range b {
		v |= uint64(c&0x3f) << min(6*i, 63)
		if c&0x40 == 0 {
			break
		}
	}
	if v&1 != 0 {
		return -int64(v >> 1)
	}
	return int64(v >> 1)
}
