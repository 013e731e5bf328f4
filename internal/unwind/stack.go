package unwind

import (
	"hash/maphash"
	"slices"
	"strings"
	"sync"

	"go.opentelemetry.io/ebpf-profiler/libpf"
	"go.opentelemetry.io/ebpf-profiler/reporter"
	"go.opentelemetry.io/ebpf-profiler/reporter/samples"

	"faultsnoop/internal/fault"
)

// The library's reasons to give up that say something of a stack's end: ErrorCode in its
// support/ebpf/errors.h.
const (
	errStackLength = 2
	errTailCalls   = 5
	errPCRead      = 4007
)

// unreadable are the errors that say that memory could not be read.
var unreadable = [...]uint64{
	errPCRead,
	2000, // PyCodeObject
	2002, // PyFrameObject
	2003, // current_frame
	2006, // frame of the thread state
}

// endOf tells why a stack ends, from the library's error.
func endOf(code uint64) fault.StackEnd {
	switch {
	case code == 0:
		return fault.StackWhole
	case code == errStackLength, code == errTailCalls:
		return fault.StackTruncated
	case slices.Contains(unreadable[:], code):
		return fault.StackUnreadable
	}
	return fault.StackIncomplete
}

var langs = map[libpf.InterpreterType]fault.Lang{
	libpf.Kernel:  fault.LangKernel,
	libpf.Native:  fault.LangNative,
	libpf.Go:      fault.LangGo,
	libpf.Python:  fault.LangPython,
	libpf.HotSpot: fault.LangJava,
	libpf.V8:      fault.LangNode,
	libpf.Ruby:    fault.LangRuby,
	libpf.Perl:    fault.LangPerl,
	libpf.PHP:     fault.LangPHP,
	libpf.PHPJIT:  fault.LangPHP,
	libpf.Dotnet:  fault.LangDotNet,
	libpf.BEAM:    fault.LangBEAM,
}

// interner keeps one Stack of each and the paths of files, both bounded. Stacks belong to
// the goroutine that names traces; paths come from the one that looks at processes.
type interner struct {
	seed maphash.Seed
	// stacks and, in older, those that have not been met since stacks was begun.
	stacks, older map[uint64]*interned

	mu    sync.Mutex
	paths map[libpf.FrameMappingFile]string
}

// interned is a stack and what it was made of. Another one with the same hash replaces it.
type interned struct {
	kernel []uint64
	frames libpf.Frames
	lines  []uint32
	stack  *fault.Stack
}

// keptStacks, of which there are two times as many, and keptPaths bound memory: about 2 KiB
// and 100 bytes each.
const (
	keptStacks = 8192
	keptPaths  = 65536
)

func newInterner() *interner {
	return &interner{
		seed:   maphash.MakeSeed(),
		stacks: map[uint64]*interned{},
		paths:  map[libpf.FrameMappingFile]string{},
	}
}

// ReportExecutable implements reporter.ExecutableReporter: a frame has the name of its
// file only without its folder.
func (in *interner) ReportExecutable(m *reporter.ExecutableMetadata) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.paths) >= keptPaths {
		clear(in.paths)
	}
	in.paths[m.MappingFile] = strings.Clone(m.Mapping.Path)
}

func (in *interner) path(f libpf.FrameMappingFile) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	if p := in.paths[f]; p != "" {
		return p
	}
	return f.Value().FileName.String()
}

// stack makes the stack of frames, of which the first are those of the addresses kernel.
// The Python frames are on lines, or where they say if that is nil.
func (in *interner) stack(kernel []uint64, frames libpf.Frames, lines []uint32) *fault.Stack {
	var h maphash.Hash
	h.SetSeed(in.seed)
	for _, a := range kernel {
		maphash.WriteComparable(&h, a)
	}
	for _, f := range frames {
		maphash.WriteComparable(&h, f)
	}
	for _, l := range lines {
		maphash.WriteComparable(&h, l)
	}
	sum := h.Sum64()
	k := in.stacks[sum]
	if k.is(kernel, frames, lines) {
		return k.stack
	}
	if k = in.older[sum]; !k.is(kernel, frames, lines) {
		k = &interned{slices.Clone(kernel), slices.Clone(frames), lines, in.make(kernel, frames, lines)}
	}
	if len(in.stacks) >= keptStacks {
		in.stacks, in.older = map[uint64]*interned{}, in.stacks
	}
	in.stacks[sum] = k
	return k.stack
}

func (k *interned) is(kernel []uint64, frames libpf.Frames, lines []uint32) bool {
	return k != nil && slices.Equal(k.kernel, kernel) && slices.Equal(k.frames, frames) && slices.Equal(k.lines, lines)
}

// shim is the frame by which C code has called Python in 3.12, which nobody has written.
const shim = "<interpreter trampoline>"

func (in *interner) make(kernel []uint64, frames libpf.Frames, lines []uint32) *fault.Stack {
	s := &fault.Stack{Frames: make([]fault.Frame, 0, len(frames))}
	for i, handle := range frames {
		f := handle.Value()
		if f.Type.IsAbort() {
			s.End = endOf(uint64(f.AddressOrLineno))
			continue
		}
		frame := in.frame(&f, i > 0)
		if i < len(kernel) {
			frame.Addr = kernel[i]
		}
		if frame.Lang == fault.LangPython && lines != nil {
			line := uint32(0)
			if len(lines) > 0 {
				line, lines = lines[0], lines[1:]
			}
			if line != unchanged {
				frame.Line = line
			}
			if frame.Func == shim {
				continue
			}
		}
		s.Frames = append(s.Frames, frame)
	}
	if len(s.Frames) == 0 {
		s.End = fault.StackNone
	}
	return s
}

// frame converts one. The library has subtracted 1 from the address of a caller, which
// our symbols do when they look it up.
func (in *interner) frame(f *libpf.Frame, caller bool) fault.Frame {
	out := fault.Frame{
		Func: f.FunctionName.String(),
		File: f.SourceFile.String(),
		Line: uint32(f.SourceLine),
		Lang: langs[f.Type.Interpreter()],
	}
	interp := f.Type.Interpreter()
	if interp == libpf.Kernel {
		out.Module = "[kernel]"
		if f.Mapping.Valid() {
			if name := f.Mapping.Value().File.Value().FileName.String(); name != "" && name != "vmlinux" {
				out.Module = "[" + name + "]"
			}
		}
		return out
	}
	if f.Mapping.Valid() {
		file := f.Mapping.Value().File
		out.Module = in.path(file)
		out.BuildID = file.Value().GnuBuildID
		if out.Module == vdsoPath {
			out.Module = "[vdso]"
		}
		if interp == libpf.Native || interp == libpf.Go {
			out.Offset = uint64(f.AddressOrLineno)
			if caller {
				out.Offset++
			}
		}
	} else if interp == libpf.Native {
		out.Module = "[anon]"
	}
	return out
}

// vdsoPath is what the library calls the vdso.
const vdsoPath = "linux-vdso.1.so"

// ReportTraceEvent implements reporter.TraceReporter. It is called by HandleTrace.
func (u *Unwinder) ReportTraceEvent(trace *libpf.Trace, meta *samples.TraceEventMeta) error {
	raw := u.current
	kernel := raw.FrameData[:min(int(raw.NumKernelFrames), len(raw.FrameData))]
	t := Trace{
		Time: uint64(raw.KTime),
		PID:  uint32(meta.PID), TID: uint32(meta.TID), CPU: uint32(meta.CPU),
		Comm:  fault.MakeComm(meta.Comm.String()),
		Stack: u.stacks.stack(kernel, trace.Frames, u.pythonLines.lines(raw, trace.Frames)),
	}
	u.got.Add(1)
	if t.Stack.End == fault.StackIncomplete || t.Stack.End == fault.StackNone {
		u.aborted.Add(1)
	}
	select {
	case u.traces <- t:
	case <-u.closing.Done():
	}
	return nil
}
