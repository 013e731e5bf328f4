package unwind

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strings"

	"go.opentelemetry.io/ebpf-profiler/libpf"
	"golang.org/x/sys/unix"
)

// python310 finds the lines of frames of CPython 3.10, which the library (v0.0.202633)
// gets wrong: f_lasti counts instructions of two bytes since that version, and the table of lines
// is only read to its half. It belongs to the goroutine that names traces.
type python310 struct {
	processes map[uint32]bool
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

func newPython310() *python310 {
	return &python310{processes: map[uint32]bool{}, codes: map[codeKey]codeLines{}}
}

// lines are those of the Python frames of a trace, in its order, or nil if the library
// knows better. A line that is not known is 0.
func (p *python310) lines(raw *libpf.EbpfTrace, frames libpf.Frames) []uint32 {
	var lines []uint32
	for rest := libpf.EbpfFrame(raw.FrameData[raw.NumKernelFrames:]); len(rest) > 0 && int(rest.Length()) > 0; rest = rest[rest.Length():] {
		if rest.Type() != libpf.PythonFrame || rest.Flags().Error() {
			continue
		}
		if lines == nil && !p.is(uint32(raw.PID), frames) {
			return nil
		}
		where := rest.Variable(1)
		code := p.code(codeKey{uint32(raw.PID), rest.Variable(0), uint32(where)})
		lines = append(lines, lineAt(code, uint32(where>>32)&0x0fffffff))
	}
	return lines
}

// is tells whether the process runs CPython 3.10, by the names of what it has mapped.
func (p *python310) is(pid uint32, frames libpf.Frames) bool {
	if known, ok := p.processes[pid]; ok {
		return known
	}
	if len(p.processes) >= keptProcesses {
		clear(p.processes)
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	is := bytes.Contains(maps, []byte("python3.10"))
	if err != nil {
		// It has ended: its stack may tell.
		for _, f := range frames {
			if m := f.Value().Mapping; m.Valid() {
				name := m.Value().File.Value().FileName.String()
				is = is || strings.Contains(name, "python3.10") || strings.Contains(name, "cpython-310")
			}
		}
	}
	p.processes[pid] = is
	return is
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
