package unwind

import (
	"reflect"
	"testing"

	"go.opentelemetry.io/ebpf-profiler/libpf"
	"go.opentelemetry.io/ebpf-profiler/process"
	"go.opentelemetry.io/ebpf-profiler/reporter"

	"faultsnoop/internal/fault"
)

func mapped(name, buildID string) libpf.FrameMapping {
	return libpf.NewFrameMapping(libpf.FrameMappingData{File: libpf.NewFrameMappingFile(libpf.FrameMappingFileData{
		FileName: libpf.Intern(name), GnuBuildID: buildID,
	})})
}

func TestStack(t *testing.T) {
	libc := mapped("libc.so.6", "abcd")
	native := func(address uint64) libpf.Frame {
		return libpf.Frame{Type: libpf.NativeFrame, Mapping: libc, AddressOrLineno: libpf.AddressOrLineno(address)}
	}
	kernel := libpf.Frame{Type: libpf.KernelFrame, FunctionName: libpf.Intern("copy_to_user"), Mapping: mapped("vmlinux", "")}
	module := libpf.Frame{Type: libpf.KernelFrame, FunctionName: libpf.Intern("ext4_write"), Mapping: mapped("ext4", "")}
	python := libpf.Frame{Type: libpf.PythonFrame, FunctionName: libpf.Intern("f"), SourceFile: libpf.Intern("a.py"), SourceLine: 7}
	abort := func(code uint64) libpf.Frame {
		return libpf.Frame{Type: libpf.FrameTypeFromString("abort-marker"), AddressOrLineno: libpf.AddressOrLineno(code)}
	}
	const libcPath = "/lib/libc.so.6"
	for name, tt := range map[string]struct {
		kernel []uint64
		frames []libpf.Frame
		lines  []uint32
		want   fault.Stack
	}{
		"a caller's address is where it goes on": {
			frames: []libpf.Frame{native(0x100), native(0x1ff)},
			want: fault.Stack{Frames: []fault.Frame{
				{Lang: fault.LangNative, Module: libcPath, Offset: 0x100, BuildID: "abcd"},
				{Lang: fault.LangNative, Module: libcPath, Offset: 0x200, BuildID: "abcd"},
			}},
		},
		"kernel": {
			kernel: []uint64{0xffff1, 0xffff2}, frames: []libpf.Frame{kernel, module, native(0x1ff)},
			want: fault.Stack{Frames: []fault.Frame{
				{Lang: fault.LangKernel, Func: "copy_to_user", Module: "[kernel]", Addr: 0xffff1},
				{Lang: fault.LangKernel, Func: "ext4_write", Module: "[ext4]", Addr: 0xffff2},
				{Lang: fault.LangNative, Module: libcPath, Offset: 0x200, BuildID: "abcd"},
			}},
		},
		"interpreted": {
			frames: []libpf.Frame{python},
			want:   fault.Stack{Frames: []fault.Frame{{Lang: fault.LangPython, Func: "f", File: "a.py", Line: 7}}},
		},
		"lines of our own": {
			frames: []libpf.Frame{python, python}, lines: []uint32{9},
			want: fault.Stack{Frames: []fault.Frame{
				{Lang: fault.LangPython, Func: "f", File: "a.py", Line: 9},
				{Lang: fault.LangPython, Func: "f", File: "a.py"},
			}},
		},
		"no mapping": {
			frames: []libpf.Frame{{Type: libpf.NativeFrame, AddressOrLineno: 5}},
			want:   fault.Stack{Frames: []fault.Frame{{Lang: fault.LangNative, Module: "[anon]"}}},
		},
		"process not known": {frames: []libpf.Frame{abort(4012)}, want: fault.Stack{Frames: []fault.Frame{}, End: fault.StackNone}},
		"code not known": {
			frames: []libpf.Frame{python, abort(4012)},
			want:   fault.Stack{Frames: []fault.Frame{{Lang: fault.LangPython, Func: "f", File: "a.py", Line: 7}}, End: fault.StackIncomplete},
		},
		"too deep": {
			frames: []libpf.Frame{python, abort(errStackLength)},
			want:   fault.Stack{Frames: []fault.Frame{{Lang: fault.LangPython, Func: "f", File: "a.py", Line: 7}}, End: fault.StackTruncated},
		},
		"not resident": {
			frames: []libpf.Frame{python, abort(errPCRead)},
			want:   fault.Stack{Frames: []fault.Frame{{Lang: fault.LangPython, Func: "f", File: "a.py", Line: 7}}, End: fault.StackUnreadable},
		},
		"nothing": {want: fault.Stack{Frames: []fault.Frame{}, End: fault.StackNone}},
	} {
		t.Run(name, func(t *testing.T) {
			in := newInterner()
			in.ReportExecutable(&reporter.ExecutableMetadata{
				MappingFile: libc.Value().File, Mapping: &process.RawMapping{Path: libcPath},
			})
			var frames libpf.Frames
			for i := range tt.frames {
				frames.Append(&tt.frames[i])
			}
			got := in.stack(tt.kernel, frames, tt.lines)
			if !reflect.DeepEqual(*got, tt.want) {
				t.Errorf("stack is\n%s, want\n%s", format(got), format(&tt.want))
			}
			if in.stack(tt.kernel, frames, tt.lines) != got {
				t.Error("the same stack is made twice")
			}
		})
	}
}
