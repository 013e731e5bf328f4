package view

import (
	"fmt"
	"strconv"
	"time"

	"faultsnoop/internal/fault"
)

// The cells of [Columns].

// appendDev appends a device number as /proc/PID/maps shows it.
func appendDev(b []byte, dev uint32) []byte {
	return fmt.Appendf(b, "%02x:%02x", dev>>20, dev&(1<<20-1))
}

// ofFile reports whether the mapping is of a file. System V shared memory may have
// inode 0, but not device 0.
func ofFile(f *fault.Fault) bool {
	return f.Is(fault.HasLabel) && (f.VMA.Inode != 0 || f.VMA.Dev != 0)
}

// appendSymbol appends NAME, or NAME+0xOFFSET behind its beginning.
func appendSymbol(b []byte, f *fault.Fault) []byte {
	b = append(b, f.Symbol...)
	if f.Symbol == "" || f.SymbolOffset == 0 {
		return b
	}
	return appendHex(append(b, '+'), f.SymbolOffset)
}

func appendPathJSON(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if f.VMA.Path == "" {
		return b
	}
	return appendJSONName(b, "path", f.VMA.Path)
}

// appendPath appends the path of the mapped file.
func appendPath(b []byte, f *fault.Fault, limit int) []byte {
	if f.VMA.Path == "" {
		return b
	}
	return appendEscaped(b, f.VMA.Path, limit)
}

// known makes a cell that is empty unless the fault knows want.
func known(want fault.Field, appendFact func([]byte, *fault.Fault) []byte) cell {
	return func(_ *Encoder, b []byte, f *fault.Fault) []byte {
		if !f.Is(want) {
			return b
		}
		return appendFact(b, f)
	}
}

func appendUint(b []byte, v uint64) []byte { return strconv.AppendUint(b, v, 10) }

// appendID appends a task id; 0 means that the task has none where we are.
func appendID(b []byte, id uint32) []byte {
	if id == 0 {
		return b
	}
	return appendUint(b, uint64(id))
}

func appendThread(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if f.TID == f.PID && f.TID != 0 {
		return append(b, '.')
	}
	return appendID(b, f.TID)
}

func appendInnerPID(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasInnerIDs) || f.InnerPID == f.PID {
		return b
	}
	return appendID(b, f.InnerPID)
}

func appendHostPID(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasIDs) || f.HostPID == f.PID {
		return b
	}
	return appendID(b, f.HostPID)
}

func appendMode(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasMode) {
		return b
	}
	return append(b, f.Mode.String()...)
}

func appendAccess(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasAccess) {
		return b
	}
	return append(b, f.Access.String()...)
}

func appendKindBy(b []byte, f *fault.Fault) []byte {
	if f.KindExact {
		return append(b, "exact"...)
	}
	return append(b, "inferred"...)
}

// appendOffset appends the offset in the mapped file, if it is one.
func (e *Encoder) appendOffset(b []byte, f *fault.Fault, base int) []byte {
	if !f.Is(fault.HasPgOff) || f.VMA.Inode == 0 && f.VMA.Dev == 0 {
		return b
	}
	return strconv.AppendUint(b, f.FileOffset(e.session.PageSize), base)
}

// appendVMALock appends whether FAULT_FLAG_VMA_LOCK was set, where the kernel has it.
func (e *Encoder) appendVMALock(b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasFlags) {
		return b
	}
	for _, n := range e.session.FlagNames {
		if n.Name == "VMA_LOCK" {
			return strconv.AppendBool(b, f.Flags&n.Bit != 0)
		}
	}
	return append(b, "false"...)
}

// appendWait appends why the thread did not run, if it did not.
func appendWait(b []byte, f *fault.Fault) []byte {
	if f.OffCPU == 0 {
		return b
	}
	return append(b, f.Wait.String()...)
}

func appendHow(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasMode) && !f.Is(fault.HasAccess) {
		return b
	}
	mode, access := byte('-'), byte('-')
	if f.Is(fault.HasMode) && int(f.Mode) < len("UKR") {
		mode = "UKR"[f.Mode]
	}
	if f.Is(fault.HasAccess) && int(f.Access) < len("rwx") {
		access = "rwx"[f.Access]
	}
	return append(b, mode, '/', access)
}

func appendMajorBool(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasMajor) {
		return b
	}
	return strconv.AppendBool(b, f.Major)
}

// appendPerm is VMA.Perm without the string it allocates.
func appendPerm(b []byte, f *fault.Fault) []byte {
	return append(b, permNames[f.VMA.Flags&0x7|f.VMA.Flags>>4&0x8]...)
}

// permNames are the permission strings by VM_READ, VM_WRITE, VM_EXEC and, moved
// down from 0x80 to 0x8, VM_MAYSHARE.
var permNames = func() (names [16]string) {
	for i := range names {
		vma := fault.VMA{Flags: uint64(i&0x7 | i&0x8<<4)}
		names[i] = vma.Perm()
	}
	return names
}()

func appendLabelJSON(_ *Encoder, b []byte, f *fault.Fault) []byte {
	if !f.Is(fault.HasLabel) {
		return b
	}
	return appendJSONName(b, "label", f.VMA.Label)
}

// appendJSONName appends a name that a process chose. Where it is not UTF-8, a
// second key with _hex behind its name keeps the bytes.
func appendJSONName[T []byte | string](b []byte, key string, name T) []byte {
	b, valid := appendJSONString(b, name)
	if valid {
		return b
	}
	b = append(b, `,"`...)
	b = append(b, key...)
	b = append(b, `_hex":"`...)
	return append(appendHexBytes(b, name), '"')
}

// appendDuration appends d with three digits, cut, not rounded: 850ns, 12.3us, 1.05s.
func appendDuration(b []byte, d time.Duration) []byte {
	unit, name := time.Second, "s"
	switch {
	case d < time.Microsecond:
		return append(strconv.AppendInt(b, int64(d), 10), "ns"...)
	case d < time.Millisecond:
		unit, name = time.Microsecond, "us"
	case d < time.Second:
		unit, name = time.Millisecond, "ms"
	}
	whole := int64(d / unit)
	b = strconv.AppendInt(b, whole, 10)
	hundredths := int64(d%unit) * 100 / int64(unit)
	switch {
	case whole < 10:
		b = append(b, '.', hexDigits[hundredths/10], hexDigits[hundredths%10])
	case whole < 100:
		b = append(b, '.', hexDigits[hundredths/10])
	}
	return append(b, name...)
}
