package main

import (
	"os"
	"runtime"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
	"faultsnoop/internal/symbol"
)

func inlinedCall() uintptr {
	pc, _, _, _ := runtime.Caller(0)
	return pc
}

//go:noinline
func outerCall() uintptr { return inlinedCall() }

// TestUnwoundNames: names of the unwinder's frames are those of frames by frame pointers, also
// where the file was replaced and where functions of Go are inlined.
func TestUnwoundNames(t *testing.T) {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	pid := os.Getpid()
	list, err := process.ReadMaps(pid)
	if err != nil {
		t.Fatal(err)
	}
	pc := uint64(outerCall())
	for _, gone := range []string{"", " (deleted)"} {
		var maps fixedMappings
		for _, m := range list {
			if m.Path == exe {
				m.Path += gone
			}
			maps.Insert(m)
		}
		n := &stackNamer{maps: &maps, resolver: symbol.NewResolver(symbol.Options{
			PageSize: uint64(os.Getpagesize()), Symbols: true, Proc: process.ProcIsOurs(), Patient: true,
		})}
		defer n.resolver.Close()
		n.begin()
		w := newUnwound(nil, nil, nil)
		f := fault.Fault{PID: uint32(pid), End: process.Now(), Stack: &fault.Stack{Frames: []fault.Frame{
			{Func: "entry", Lang: fault.LangKernel},
			{Func: "main.outerCall", File: "wrong.go", Line: 1, Module: exe, Offset: pc, Lang: fault.LangGo},
			{Module: exe, Offset: pc, Lang: fault.LangNative},
			{Func: "f", Module: "/no/such/file", Offset: pc, Lang: fault.LangGo},
		}}}
		var got []string
		for _, frame := range w.nameFrames(&f, n).Frames {
			if strings.HasSuffix(frame.File, "/unwound_names_test.go") && frame.Line > 0 {
				frame.Func += " with line"
			}
			if frame.Inlined {
				frame.Func += ", inlined"
			}
			got = append(got, frame.Func[strings.LastIndexByte(frame.Func, '.')+1:])
		}
		want := "entry; inlinedCall with line, inlined; outerCall with line; inlinedCall with line, inlined; outerCall with line; f"
		if s := strings.Join(got, "; "); s != want {
			t.Errorf("%q: %s\nwant %s", gone, s, want)
		}
	}
}

// TestInterpretedModule: stat --by module has a row for each script.
func TestInterpretedModule(t *testing.T) {
	for _, c := range []struct{ frame, want fault.Frame }{
		{fault.Frame{Func: "f", File: "/srv/a.py", Line: 3, Lang: fault.LangPython}, fault.Frame{Func: "f", File: "/srv/a.py", Line: 3, Module: "/srv/a.py", Lang: fault.LangPython}},
		{fault.Frame{Func: "f", File: "a.cs", Module: "/srv/a.dll", Lang: fault.LangDotNet}, fault.Frame{Func: "f", File: "a.cs", Module: "/srv/a.dll", Lang: fault.LangDotNet}},
		{fault.Frame{Func: "Uint8Array", File: "<unknown>", Lang: fault.LangNode}, fault.Frame{Func: "Uint8Array", Lang: fault.LangNode}},
		{fault.Frame{Lang: fault.LangNode}, fault.Frame{Lang: fault.LangNode}},
	} {
		w := newUnwound(nil, nil, nil)
		s := w.nameFrames(&fault.Fault{Stack: &fault.Stack{Frames: []fault.Frame{c.frame}}}, &stackNamer{})
		if len(s.Frames) != 1 || s.Frames[0] != c.want {
			t.Errorf("%+v\nwant %+v", s.Frames, c.want)
		}
	}
}
