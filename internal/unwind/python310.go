package unwind

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"go.opentelemetry.io/ebpf-profiler/libpf"
	"go.opentelemetry.io/ebpf-profiler/support"
	"golang.org/x/sys/unix"
)

// python310 finds the lines of frames of CPython 3.10, which the library (v0.0.202633)
// gets wrong. It asks the interpreter itself for the place of f_lasti, which is no member that Python
// code may see in that version, and so reads the reference count; f_lasti
// counts instructions of two bytes now; and of the table of lines it only reads a half.
// It belongs to the goroutine that names traces.
type python310 struct {
	// pythons is the library's map of what it knows of a process.
	pythons *ebpf.Map
	// processes of CPython 3.10, by since when their traces have f_lasti: never if it cannot
	// be had.
	processes map[uint32]uint64
	codes     map[codeKey]codeLines
}

type codeKey struct {
	pid  uint32
	addr uint64
	// object is the library's checksum of it, so that another one at the same place is
	// told apart.
	object uint32
}

// codeLines is what a code object says of its lines. It is empty if it could not be read.
type codeLines struct {
	first uint32
	table []byte
}

const (
	// keptProcesses and keptCodes bound memory.
	keptProcesses = 4096
	keptCodes     = 16384
	maxLineTable  = 1 << 16
)

// The places of co_firstlineno and co_linetable in PyCodeObject, and of ob_size and ob_sval in
// PyBytesObject (Include/cpython/code.h and Include/cpython/bytesobject.h of 3.10, 64 bits).
const (
	codeFirstLine = 40
	codeLineTable = 120
	bytesSize     = 16
	bytesData     = 32
)

func newPython310(pythons *ebpf.Map) *python310 {
	return &python310{pythons: pythons, processes: map[uint32]uint64{}, codes: map[codeKey]codeLines{}}
}

// lines are those of the Python frames of a trace, in its order, or nil if the library
// knows better. A line that is not known is 0.
func (p *python310) lines(raw *libpf.EbpfTrace, frames libpf.Frames) []uint32 {
	var lines []uint32
	for rest := libpf.EbpfFrame(raw.FrameData[raw.NumKernelFrames:]); len(rest) > 0 && int(rest.Length()) > 0; rest = rest[rest.Length():] {
		if rest.Type() != libpf.PythonFrame || rest.Flags().Error() {
			continue
		}
		since := p.since(uint32(raw.PID), frames)
		if since == 0 {
			return nil
		}
		if uint64(raw.KTime) < since {
			lines = append(lines, 0)
			continue
		}
		where := rest.Variable(1)
		code := p.code(codeKey{uint32(raw.PID), rest.Variable(0), uint32(where)})
		lines = append(lines, lineAt(code, uint32(where>>32)&0x0fffffff))
	}
	return lines
}

// never is behind all times.
const never = ^uint64(0)

// since has the library read f_lasti of the process if that runs CPython 3.10, and returns 0
// if it does not. It is asked each time, as a process may exec, and its id be another one's later.
func (p *python310) since(pid uint32, frames libpf.Frames) uint64 {
	var info support.PyProcInfo
	known, ok := p.processes[pid]
	switch err := p.pythons.Lookup(pid, unsafe.Pointer(&info)); {
	case err != nil && ok: // it has just ended
		return known
	case err != nil && looksLike310(frames):
		return never
	case err != nil || info.Version != version310:
		delete(p.processes, pid)
		return 0
	case ok && (known == never || info.PyFrameObject_f_lasti == frameLastInstruction):
		return known
	}
	if len(p.processes) >= keptProcesses {
		clear(p.processes)
	}
	since := p.repair(pid, &info)
	p.processes[pid] = since
	return since
}

// version310 is 3.10 as the library writes it.
const version310 = 3<<8 | 10

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
func (p *python310) repair(pid uint32, info *support.PyProcInfo) uint64 {
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

func (p *python310) code(key codeKey) codeLines {
	if c, ok := p.codes[key]; ok {
		return c
	}
	if len(p.codes) >= keptCodes {
		clear(p.codes)
	}
	c, err := readCode(key.pid, key.addr)
	if err != nil {
		c = codeLines{}
	}
	p.codes[key] = c
	return c
}

func readCode(pid uint32, addr uint64) (codeLines, error) {
	object := make([]byte, codeLineTable+8)
	if err := readMemory(pid, addr, object); err != nil {
		return codeLines{}, err
	}
	table := binary.LittleEndian.Uint64(object[codeLineTable:])
	head := make([]byte, 8)
	if err := readMemory(pid, table+bytesSize, head); err != nil {
		return codeLines{}, err
	}
	size := binary.LittleEndian.Uint64(head)
	if size > maxLineTable {
		return codeLines{}, fmt.Errorf("table of %d bytes", size)
	}
	c := codeLines{first: binary.LittleEndian.Uint32(object[codeFirstLine:]), table: make([]byte, size)}
	if size > 0 {
		if err := readMemory(pid, table+bytesData, c.table); err != nil {
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

// lineAt finds the line of an instruction, by its number. The table has pairs of how
// many bytes of code are on a line and how far that is from the line before, as a signed byte, of which
// -128 says that there is no line (Objects/lnotab_notes.txt of 3.10).
func lineAt(c codeLines, instruction uint32) uint32 {
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
