package aggregate

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

func native(name, module string) fault.Frame {
	return fault.Frame{Func: name, Module: module, Lang: fault.LangNative, Addr: 1, Offset: 1}
}

// randomProfile has few different frames, so that stacks meet.
func randomProfile(r *rand.Rand, samples int) *fault.Profile {
	p := &fault.Profile{}
	for range samples {
		var frames []fault.Frame
		for range r.IntN(4) {
			frames = append(frames, fault.Frame{
				Addr: r.Uint64N(2), Func: []string{"", "f", "g"}[r.IntN(3)], Line: r.Uint32N(2), Module: []string{"", "/a", "/usr/lib/libc.so.6"}[r.IntN(3)],
				Offset: r.Uint64N(2), Lang: fault.Lang(r.IntN(3)), Inlined: r.IntN(4) == 0,
			})
		}
		s := fault.StackSample{
			Stack: p.Stacks.Add(&fault.Stack{Frames: frames, End: fault.StackEnd(r.IntN(5))}), TID: r.Uint32N(2), Kind: fault.Kind(r.IntN(3)), Major: r.IntN(2) == 0,
			Faults: r.Uint64N(100), Time: time.Duration(r.IntN(1000)), Bytes: r.Uint64N(1 << 20),
		}
		if r.IntN(10) == 0 {
			s.Stack = 0
		}
		p.Samples = append(p.Samples, s)
		p.Faults += s.Faults
	}
	return p
}

// However faults are divided, all are there.
func TestStackSums(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		p := randomProfile(r, r.IntN(100))
		want := StackTotal(p)
		if want.Faults != p.Faults {
			t.Fatalf("%+v, want %d faults", want, p.Faults)
		}
		var none uint64
		for i := range p.Samples {
			if p.Samples[i].Stack == 0 {
				none += p.Samples[i].Faults
			}
		}
		if got := Stacked(p); got+none != p.Faults {
			t.Errorf("%d with a stack and %d without, of %d", got, none, p.Faults)
		}
		for by := ByFunction; by <= ByModule; by++ {
			for _, skip := range []bool{false, true} {
				table := TableOf(p, by, skip)
				var sum StackCost
				var without uint64
				for i := range table.Rows {
					sum.Add(table.Rows[i].StackCost)
					if table.Rows[i].Frame.Func == NoStack {
						without += table.Rows[i].Faults
					}
				}
				if sum != want || table.Total != want || without != none {
					t.Errorf("by %s: %+v, total %+v, %d without a stack; want %+v and %d", by, sum, table.Total, without, want, none)
				}
			}
		}
		for _, forget := range []func(*fault.StackSample){nil, func(s *fault.StackSample) { s.TID, s.Kind, s.Major = 0, 0, false }} {
			merged := fault.Profile{Stacks: p.Stacks, Samples: MergeSamples(p, forget)}
			got := StackTotal(&merged)
			if forget != nil {
				got.Major = want.Major // forgotten
			}
			if got != want {
				t.Errorf("merged %+v, want %+v", got, want)
			}
			if again := MergeSamples(&merged, forget); len(again) != len(merged.Samples) {
				t.Errorf("%d samples, merged again %d", len(merged.Samples), len(again))
			}
		}
	}
}

func TestMergeSamples(t *testing.T) {
	stack := func(addr uint64) *fault.Stack {
		return &fault.Stack{Frames: []fault.Frame{{Addr: addr, Func: "f", Module: "/a", Offset: 7}, {Addr: addr + 1, Func: "main", Module: "/a", Offset: 8}}}
	}
	cut := stack(5)
	cut.End = fault.StackTruncated
	p := &fault.Profile{}
	one := fault.StackSample{Stack: p.Stacks.Add(stack(5)), PID: 1, Kind: fault.Anon, Faults: 2, Time: 3, Bytes: 4}
	other := one
	other.PID, other.Stack = 2, p.Stacks.Add(stack(500)) // the same code in another process
	short := one
	short.Stack = p.Stacks.Add(cut)
	p.Samples = []fault.StackSample{one, other, short}
	if got := MergeSamples(p, nil); len(got) != 3 {
		t.Errorf("%d samples, want 3: processes and ends differ", len(got))
	}
	got := MergeSamples(p, func(s *fault.StackSample) { s.PID = 0 })
	if len(got) != 2 || got[0].Faults != 4 || got[0].Time != 6 || got[0].Bytes != 8 || p.Stacks.Stack(got[1].Stack).End != fault.StackTruncated {
		t.Errorf("%+v", got)
	}
	if p.Samples[0].PID != 1 || p.Samples[0].Faults != 2 {
		t.Error("the samples were changed")
	}
}

func TestTableOf(t *testing.T) {
	memset := native("__memset_avx2_unaligned_erms", "/usr/lib/x86_64-linux-gnu/libc.so.6")
	eval := native("_PyEval_EvalFrameDefault", "/usr/bin/python3.11")
	line := func(n uint32) fault.Frame {
		return fault.Frame{Func: "make_block", File: "alloc.py", Line: n, Lang: fault.LangPython}
	}
	p := &fault.Profile{}
	p.Samples = []fault.StackSample{
		{Stack: p.Stacks.Add(&fault.Stack{Frames: []fault.Frame{memset, eval, line(8), line(31)}}), Faults: 10, Time: 100, Major: true},
		{Stack: p.Stacks.Add(&fault.Stack{Frames: []fault.Frame{memset, eval, line(9), line(31)}}), Faults: 20, Time: 50},
		{Stack: p.Stacks.Add(&fault.Stack{Frames: []fault.Frame{memset, eval}}), Faults: 1, Time: 1},
		{Faults: 5, Time: 500},
	}
	names := func(by StackBy, skip bool) (names []string) {
		for _, r := range TableOf(p, by, skip).Rows {
			name := r.Frame.Func
			if by == ByModule && name == "" {
				name = r.Frame.Module
			}
			names = append(names, name)
		}
		return names
	}
	for _, test := range []struct {
		by   StackBy
		skip bool
		want []string
	}{
		{ByFunction, false, []string{memset.Func, NoStack}},
		{ByFunction, true, []string{"make_block", memset.Func, NoStack}},
		{ByLine, true, []string{"make_block", "make_block", memset.Func, NoStack}},
		{ByModule, false, []string{memset.Module, NoStack}},
		{ByStack, true, []string{"", "", "", NoStack}},
	} {
		got := names(test.by, test.skip)
		if len(got) != len(test.want) {
			t.Fatalf("by %s: %q, want %q", test.by, got, test.want)
		}
		for i := range got {
			if got[i] != test.want[i] {
				t.Errorf("by %s: %q, want %q", test.by, got, test.want)
			}
		}
	}
	row := TableOf(p, ByLine, true).Rows[0]
	if row.Frame.Line != 8 || row.Frame.File != "alloc.py" || row.StackCost != (StackCost{Faults: 10, Major: 10, Time: 100}) {
		t.Errorf("%+v", row)
	}
	for by := ByFunction; by <= ByModule; by++ {
		if got, ok := ParseStackBy(by.String()); !ok || got != by {
			t.Errorf("%s is %v, %v", by, got, ok)
		}
	}
	if _, ok := ParseStackBy("page"); ok {
		t.Error("page is no way to divide stacks")
	}
}

func TestStackTree(t *testing.T) {
	a, b, c := native("a", "/x"), native("b", "/x"), native("c", "/x")
	var stacks fault.StackTree
	whole, outer := stacks.Add(&fault.Stack{Frames: []fault.Frame{c, b, a}}), stacks.Add(&fault.Stack{Frames: []fault.Frame{b, a}})
	short := stacks.Add(&fault.Stack{Frames: []fault.Frame{b}, End: fault.StackUnreadable})
	tree := NewStackTree(Place)
	add := tree.Merge(&stacks)
	first, second := add(whole), add(outer)
	if tree.Nodes[first].Parent != second {
		t.Errorf("nodes %+v: %d is not below %d", tree.Nodes, first, second)
	}
	cut := add(short)
	if parent := tree.Nodes[cut].Parent; tree.Frames[tree.Nodes[parent].Frame].Func != "(memory not resident)" || tree.Nodes[parent].Parent != 0 {
		t.Errorf("nodes %+v", tree.Nodes)
	}
	if none := add(0); tree.Frames[tree.Nodes[none].Frame].Func != NoStack || tree.Nodes[none].Parent != 0 {
		t.Errorf("nodes %+v", tree.Nodes)
	}
	for i, n := range tree.Nodes[1:] {
		if int(n.Parent) > i {
			t.Errorf("node %d comes before its parent %d", i+1, n.Parent)
		}
	}
}

func java(name, file string) fault.Frame {
	return fault.Frame{Func: name, File: file, Lang: fault.LangJava}
}

func TestRuntime(t *testing.T) {
	for _, test := range []struct {
		frame fault.Frame
		want  bool
	}{
		{native("__memset_avx2_unaligned_erms", "/usr/lib/x86_64-linux-gnu/libc.so.6"), true},
		{native("", "/lib/libc-2.31.so"), true},
		{native("_dl_relocate_object", "/lib64/ld-linux-x86-64.so.2"), true},
		{native("", "/lib/ld-musl-x86_64.so.1"), true},
		{native("", "/usr/lib/libstdc++.so.6.0.30"), true},
		{native("je_arena_malloc", "/usr/lib/libjemalloc.so.2"), true},
		{native("", "/usr/lib/libtcmalloc_minimal.so.4"), true},
		{native("_PyEval_EvalFrameDefault", "/usr/lib/libpython3.11.so.1.0"), true},
		{native("_PyEval_EvalFrameDefault", "/opt/bin/python3.13t"), true},
		{native("", "/usr/lib/jvm/java-17/lib/server/libjvm.so"), true},
		{native("malloc", "/srv/static"), true},
		{native("operator new(unsigned long)", "/srv/static"), true},
		{native("main", "/srv/static"), false},
		{native("my_malloc", "/srv/static"), false},
		{native("f", "/srv/libcfoo.so"), false},
		{native("f", "/srv/libc.so.6/evil"), false},
		{native("PyArray_Zeros", "/usr/lib/python3/numpy/_multiarray_umath.so"), false},
		{fault.Frame{Func: "make_block", File: "alloc.py", Module: "/usr/bin/python3.11", Lang: fault.LangPython}, false},
		{fault.Frame{Func: "malloc", File: "alloc.py", Lang: fault.LangPython}, false},
		{fault.Frame{Func: "_find_and_load", File: "<frozen importlib._bootstrap>", Lang: fault.LangPython}, true},
		{fault.Frame{Func: "do_anonymous_page", Lang: fault.LangKernel}, true},
		{fault.Frame{Func: "runtime.mallocgc", Lang: fault.LangGo}, true},
		{fault.Frame{Func: "runtimes.Run", Lang: fault.LangGo}, false},
		{fault.Frame{Func: "main.main", Lang: fault.LangGo}, false},
		{fault.Frame{Func: "std::vector<int>::push_back(int&&)", Lang: fault.LangCPP}, true},
		{fault.Frame{Func: "stdx::f()", Lang: fault.LangCPP}, false},
		{fault.Frame{Func: "<alloc::vec::Vec<T> as Clone>::clone", Lang: fault.LangRust}, true},
		{fault.Frame{Func: "java.util.ArrayList.grow", Lang: fault.LangJava}, true},
		{java("byte[] java.util.Arrays.copyOf(byte[], int)", "Arrays.java"), true},
		{java("java.lang.StringBuilder java.lang.StringBuilder.append(java.lang.String)", ""), true},
		{java("void jdk.internal.misc.InnocuousThread.run()", "InnocuousThread.java"), true},
		{java("java.lang.Class sun.launcher.LauncherHelper.loadMainClass(int, java.lang.String)", "LauncherHelper.java"), true},
		{java("java.lang.String K.mkString(int)", "K.java"), false},
		{java("java.lang.String K.mkString(int)", ""), false},
		{java("void K.main(java.lang.String[])", "K.java"), false},
		{java("sun.misc.Unsafe org.example.Access.unsafe()", ""), false},
		{java("void javax.servlet.http.HttpServlet.service()", ""), false},
		{java("void K$$Lambda$14.0x0000000800c03000.run()", ""), false},
		{java("void java.lang.String.<init>(byte[])", ""), true},
		{java("", "K.java"), false},
		{java("new_type_array Runtime1 stub", ""), true},
		{java("StubRoutines (1) [call_stub_return_address]", ""), true},
		{java("I2C/C2I adapters(0xbb)", ""), true},
		{java("Interpreter", ""), true},
		{java("vtable stub", ""), true},
		{fault.Frame{Func: "read", File: "node:fs", Lang: fault.LangNode}, true},
		{fault.Frame{Func: "V8::StubFrame", Lang: fault.LangNode}, true},
		{fault.Frame{Func: "V8::UnknownFrame", Lang: fault.LangNode}, true},
		{fault.Frame{Func: "<external-file>", Lang: fault.LangNode}, true},
		{fault.Frame{Func: "Builtin:ArrayPush", Module: "/usr/bin/other", Lang: fault.LangNode}, true},
		{fault.Frame{Func: "touchPages", File: "/srv/n2.js", Line: 1, Lang: fault.LangNode}, false},
		{fault.Frame{Func: "touchPages", Lang: fault.LangNode}, false},
		{fault.Frame{}, false},
		{fault.Frame{Lang: fault.LangNode}, true},
		{java("", ""), true},
		{fault.Frame{Lang: fault.LangDotNet, Module: "/srv/a.dll"}, false},
		{fault.Frame{Lang: fault.LangNative}, false},
	} {
		if got := Runtime(&test.frame); got != test.want {
			t.Errorf("%+v: %v", test.frame, got)
		}
	}
}

// Code without a file of its own is of its source.
func TestModuleOfSource(t *testing.T) {
	for _, c := range []struct {
		frame fault.Frame
		want  string
	}{
		{fault.Frame{Func: "f", File: "/srv/a.py", Lang: fault.LangPython}, "/srv/a.py"},
		{fault.Frame{Func: "f", File: "/srv/a.js", Module: "[anon]", Addr: 7, Offset: 7, Lang: fault.LangNode}, "/srv/a.js"},
		{fault.Frame{Func: "f", File: "a.c", Module: "/srv/a", Lang: fault.LangNative}, "/srv/a"},
		{fault.Frame{Func: "f", Module: "[anon]"}, "[anon]"},
	} {
		p := &fault.Profile{}
		p.Samples = []fault.StackSample{{Stack: p.Stacks.Add(&fault.Stack{Frames: []fault.Frame{c.frame}}), Faults: 1}}
		for _, by := range []StackBy{ByModule, ByFunction, ByLine} {
			if got := TableOf(p, by, false).Rows[0].Frame.Module; got != c.want {
				t.Errorf("%+v by %s: module %q, want %q", c.frame, by, got, c.want)
			}
		}
	}
}

// Shares are compared, not numbers: the second run is ten times as long.
func TestChanges(t *testing.T) {
	profile := func(a, b, c uint64) *fault.Profile {
		p := &fault.Profile{}
		for name, n := range map[string]uint64{"a": a, "b": b, "c": c} {
			if n > 0 {
				p.Samples = append(p.Samples, fault.StackSample{Stack: p.Stacks.Add(&fault.Stack{Frames: []fault.Frame{native(name, "/x")}}), Faults: n, Time: time.Duration(n), Bytes: n})
			}
		}
		return p
	}
	changes := Changes(TableOf(profile(50, 50, 0), ByFunction, false), TableOf(profile(500, 200, 300), ByFunction, false))
	want := map[string]float64{"a": 0, "b": -0.3, "c": 0.3}
	for _, c := range changes {
		if d := c.Faults - want[c.Frame.Func]; math.Abs(d) > 1e-12 || c.Time != c.Faults || c.Bytes != c.Faults {
			t.Errorf("%s: %+v", c.Frame.Func, c)
		}
	}
	if len(changes) != 3 || changes[2].Frame.Func != "a" {
		t.Errorf("%+v", changes)
	}
	r := rand.New(rand.NewPCG(5, 6))
	for range 50 {
		for by := ByFunction; by <= ByModule; by++ {
			before, after := randomProfile(r, 1+r.IntN(50)), randomProfile(r, 1+r.IntN(50))
			a, b := TableOf(before, by, false), TableOf(after, by, false)
			if a.Total.Faults == 0 || b.Total.Faults == 0 {
				continue
			}
			var sum float64
			var first, second uint64
			for _, c := range Changes(a, b) {
				sum += c.Faults
				first += c.Before.Faults
				second += c.After.Faults
			}
			if math.Abs(sum) > 1e-9 || first != before.Faults || second != after.Faults {
				t.Errorf("by %s: changes add up to %v, %d and %d faults", by, sum, first, second)
			}
		}
	}
}
