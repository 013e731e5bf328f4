package view

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"faultsnoop/internal/fault"
)

// long is a name of 10,000 bytes.
var long = strings.Repeat("long::name<T>", 770)[:10_000]

// hostileNames are what a process can call its functions and files.
var hostileNames = []string{
	"</script><script>alert(1)</script>", "<!--<script>", "]]>", "a\u2028b\u2029c", "\xff\xfe bad", "new\nline\r\n", "semi;colon 12", "\u202eevil", "\x1b[2J",
	"\"quoted\" \\ 'single' & <b>", "=cmd|' /C", "漢字", "مرحبا", "a\u0301\u0302\u0303\u0304\u0305", "\x00nul", "\ufffe\uffff", "{{data}}", long,
}

// stacks is a profile whose stacks have all that stacks can have.
func stacks() *fault.Profile {
	const libc, python, exe = "/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/libpython3.11.so.1.0", "/home/me/bin/touch pages"
	kernel := fault.Frame{Addr: 0xffffffff81234567, Func: "_copy_to_iter", Module: "[kernel]", Offset: 0xffffffff81234567, Lang: fault.LangKernel}
	memset := fault.Frame{Addr: 0x7f0000181234, Func: "__memset_avx2_unaligned_erms", Module: libc, Offset: 0x181234, BuildID: "79005c16293efa45b441fed45f4f29b138557e9e", Lang: fault.LangNative}
	eval := fault.Frame{Addr: 0x7f1000054321, Func: "_PyEval_EvalFrameDefault", Module: python, Offset: 0x154321, BuildID: "aa11", Lang: fault.LangNative}
	alloc := fault.Frame{Func: "make_block", File: "/srv/app/alloc.py", Line: 8, Lang: fault.LangPython}
	module := fault.Frame{Func: "<module>", File: "/srv/app/alloc.py", Line: 31, Lang: fault.LangPython}
	inlined := fault.Frame{Addr: 0x55000000123a, Func: "std::fill<char*>(char*, char*)", File: "/usr/include/c++/12/bits/stl_algobase.h", Line: 9, Module: exe, Offset: 0x123a, BuildID: "bb22", Lang: fault.LangCPP, Inlined: true}
	touch := fault.Frame{Addr: 0x55000000123a, Func: "touch_pages(long)", File: "/home/me/src/touch.cc", Line: 22, Module: exe, Offset: 0x123a, BuildID: "bb22", Lang: fault.LangCPP}
	main := fault.Frame{Addr: 0x550000001300, Func: "main", File: "/home/me/src/touch.cc", Line: 31, Module: exe, Offset: 0x1300, BuildID: "bb22", Lang: fault.LangCPP}
	start := fault.Frame{Addr: 0x7f0000029d90, Func: "__libc_start_main", Module: libc, Offset: 0x29d90, BuildID: memset.BuildID, Lang: fault.LangNative}
	nameless := fault.Frame{Addr: 0x7f2000000999, Module: "/opt/stripped.so", Offset: 0x999, Lang: fault.LangNative}
	anon := fault.Frame{Addr: 0x7f3000000abc, Module: "[anon]", Offset: 0xabc}

	p := &fault.Profile{
		Session: &session, Begin: time.Date(2026, 11, 30, 3, 2, 1, 5, time.UTC), Duration: 2500 * time.Millisecond, Lost: 7,
	}
	add := func(end fault.StackEnd, kind fault.Kind, major bool, faults uint64, frames ...fault.Frame) {
		p.Samples = append(p.Samples, fault.StackSample{
			Stack: p.Stacks.Add(&fault.Stack{Frames: frames, End: end}), PID: 4711, TID: 4712, Comm: fault.MakeComm("worker"), Process: fault.MakeComm("python3"),
			Kind: kind, Major: major, Faults: faults, Time: time.Duration(faults) * 1500, Bytes: faults * 4096,
		})
	}
	add(fault.StackWhole, fault.Anon, false, 900, memset, eval, alloc, module, start)
	add(fault.StackWhole, fault.THP, false, 4, memset, eval, alloc, module, start)
	add(fault.StackWhole, fault.File, true, 60, kernel, memset, eval, module, start)
	add(fault.StackWhole, fault.Anon, false, 500, inlined, touch, main, start)
	add(fault.StackTruncated, fault.Cow, false, 30, touch, main)
	add(fault.StackUnreadable, fault.Swap, true, 20, nameless, anon)
	add(fault.StackIncomplete, fault.KindUnknown, false, 10, fault.Frame{Addr: 0x1234})
	add(fault.StackNone, fault.Anon, false, 80)
	// The same stack once more, of another process that has the file elsewhere.
	moved := memset
	moved.Addr += 1 << 32
	p.Samples = append(p.Samples, fault.StackSample{
		Stack: p.Stacks.Add(&fault.Stack{Frames: []fault.Frame{moved, eval, alloc, module, start}}), PID: 5000, TID: 5000, Comm: fault.MakeComm("a;b\n\xff"),
		Process: fault.MakeComm("a;b\n\xff"), Kind: fault.Anon, Faults: 1, Time: 1, Bytes: 4096,
	})
	for i, name := range hostileNames {
		add(fault.StackWhole, fault.Anon, false, uint64(i+1),
			fault.Frame{Addr: 0x7f4000000000 + uint64(i), Func: name, File: "/src/" + name, Line: uint32(i), Module: "/lib/" + name, Offset: uint64(i), BuildID: name},
			fault.Frame{Addr: 0x7f5000000000, Module: "/lib/" + name, Offset: 0x5000})
	}
	p.Faults = sumOf(p, Faults)
	return p
}

func sumOf(p *fault.Profile, v Value) uint64 {
	var n uint64
	for i := range p.Samples {
		s := &p.Samples[i]
		n += [...]uint64{s.Faults, uint64(s.Time), s.Bytes}[v]
	}
	return n
}

// manyStacks is a profile of a large program: samples of one fault each, whose stacks, of 20
// to 60 frames, are shared.
func manyStacks(faults, distinct int) *fault.Profile {
	r := rand.New(rand.NewPCG(1, 2))
	var functions []fault.Frame
	for i := range 5000 {
		functions = append(functions, fault.Frame{
			Addr: 0x7f0000000000 + uint64(i)*64, Func: fmt.Sprintf("namespace%d::Class%d::method_%d(int, char const*)", i%17, i%311, i),
			File: fmt.Sprintf("/srv/project/src/component%d/file%d.cc", i%40, i%700), Line: uint32(i), Module: fmt.Sprintf("/usr/lib/libcomponent%d.so", i%40),
			Offset: uint64(i) * 64, BuildID: fmt.Sprintf("%040x", i%40), Lang: fault.Lang(1 + i%int(fault.LangBEAM)),
		})
	}
	p := &fault.Profile{Session: &session, Begin: session.Started, Duration: time.Minute}
	all := make([]int32, 0, distinct)
	frames := []fault.Frame{functions[0]}
	for len(all) < distinct {
		// Like a program: the next stack differs from the last in its innermost frames.
		frames = frames[:max(len(frames)-r.IntN(8), 1)]
		for len(frames) < 20+r.IntN(40) {
			frames = append(frames, functions[r.IntN(len(functions))])
		}
		stack := make([]fault.Frame, len(frames))
		for i := range frames {
			stack[len(frames)-1-i] = frames[i]
		}
		all = append(all, p.Stacks.Add(&fault.Stack{Frames: stack}))
	}
	for i := range faults {
		p.Samples = append(p.Samples, fault.StackSample{
			Stack: all[i%distinct], PID: uint32(1 + i%3), TID: uint32(1 + i%24), Comm: fault.MakeComm(fmt.Sprintf("worker-%d", i%24)),
			Process: fault.MakeComm("server"), Kind: fault.Kind(1 + r.IntN(5)), Major: r.IntN(50) == 0, Faults: 1,
			Time: time.Duration(r.IntN(5000)), Bytes: 4096,
		})
	}
	p.Faults = uint64(faults)
	return p
}
