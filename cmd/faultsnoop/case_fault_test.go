package main

import (
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// A fault that drops its lock and is tried again is one record.
// https://github.com/josefbacik/systing/pull/208
func TestCaseRetriedFaultsAreOne(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		const pages = 64
		tr := trace(t, hook, "--", self(t), "workload", "uffd", "--pages", "64", "--delay", "2ms")
		rep := tr.report(t)
		checkWorkload(t, tr, rep)
		in := tr.inRange(rep)
		if len(in) != pages {
			t.Fatalf("%d records of %d faults", len(in), pages)
		}
		seen := map[hexNumber]bool{}
		for i := range in {
			f := &in[i]
			if seen[f.Address] {
				t.Errorf("two records for %#x", f.Address)
			}
			seen[f.Address] = true
			if (f.Attempts != nil) != (hook == "fentry" || hook == "kprobe") {
				t.Errorf("attempts known: %v", f.Attempts != nil)
			}
			// From the first entry to the last exit: the server's pause lies between.
			if f.Latency != nil && *f.Latency < 2e6 {
				t.Errorf("latency %d ns of a fault that waits 2 ms", *f.Latency)
			}
		}
	})
}

// Arguments, fields and flags are those of the running kernel.
// https://github.com/aquasecurity/tracee/issues/3385
func TestCaseKnownAddresses(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		tr := trace(t, hook, "--", self(t), "workload", "where")
		rep := tr.report(t)
		type access struct {
			address uint64
			access  string
			start   uint64
			end     uint64
		}
		want := []access{
			{0x7e0000001234, "read", 0x7e0000000000, 0x7e0000010000},
			{0x7e0000005678, "write", 0x7e0000000000, 0x7e0000010000},
			{0x7e0000001abc, "write", 0x7e0000000000, 0x7e0000010000},
			{0x7e0000100010, "exec", 0x7e0000100000, 0x7e0000101000},
		}
		if rep.Faults == 3 { // no shared zero page here, so nothing to copy
			want = slices.Delete(want, 2, 3)
		}
		in := tr.inRange(rep)
		if len(in) != len(want) {
			t.Fatalf("%d records, want %d: %+v", len(in), len(want), in)
		}
		for i, w := range want {
			f := &in[i]
			got := access{address: uint64(f.Address), access: words(f.Access)}
			if f.VMA != nil && f.VMA.Start != nil {
				got.start, got.end = uint64(*f.VMA.Start), uint64(*f.VMA.End)
			}
			if hook == "perf" { // it knows neither, and says so
				w.access = "null"
				if got.start == 0 {
					w.start, w.end = 0, 0
				}
			}
			if got != w {
				t.Errorf("record %d: %+x, want %+x", i, got, w)
			}
			checkFlags(t, f, hook, w.access)
		}
	})
}

// checkFlags compares the flags with what the access implies.
func checkFlags(t *testing.T, f *liveFault, hook, access string) {
	t.Helper()
	if hook == "perf" {
		if f.Flags != nil {
			t.Errorf("flags %v, which perf cannot know", f.Flags)
		}
		return
	}
	for flag, want := range map[string]bool{"USER": true, "WRITE": access == "write", "INSTRUCTION": access == "exec", "REMOTE": false} {
		if slices.Contains(f.Flags, flag) != want {
			t.Errorf("flags %v of access %s", f.Flags, access)
		}
	}
}

// Faults that the kernel takes on user memory, and what the header says of such.
// https://github.com/microsoft/one-collect/issues/186
func TestCaseKernelMode(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		tr := trace(t, hook, "--", self(t), "workload", "kernel", "--pages", "1024")
		rep := tr.report(t)
		checkWorkload(t, tr, rep)
		if n := count(tr.inRange(rep)); n != (tally{minor: 1024}) {
			t.Errorf("%+v, want 1024 minor faults", n)
		}
		for _, f := range tr.inRange(rep) {
			if words(f.Mode) != "kernel" {
				t.Fatalf("mode %s of a fault inside read(2)", words(f.Mode))
			}
		}
		checkPopulation(t, tr.header, hook)
	})
}

// checkPopulation checks what the header says of the faults that a hook covers.
func checkPopulation(t *testing.T, h liveHeader, hook string) {
	t.Helper()
	if h.Hook != hook || h.Reason == "" {
		t.Errorf("header %+v of hook %s", h, hook)
	}
	blind := strings.Join(h.Blind, "; ")
	for _, covered := range []string{"user", "kernel"} {
		if !slices.Contains(h.Covers, covered) {
			t.Errorf("covers %q, want %s among them", h.Covers, covered)
		}
	}
	remote := hook == "fentry" || hook == "kprobe"
	if slices.Contains(h.Covers, "remote") != remote || strings.Contains(blind, "get_user_pages") == remote {
		t.Errorf("covers %q, blind to %q", h.Covers, blind)
	}
}

// A fault that no mapping answers is a record too, and the command's signal its status.
// https://github.com/bpftrace/bpftrace/issues/668
func TestCaseFailedFaults(t *testing.T) {
	for _, c := range []struct {
		how, result string
		code        int
	}{
		{"maperr", "sigsegv", 139},
		{"accerr", "sigsegv", 139},
		{"sigbus", "sigbus", 135},
	} {
		t.Run(c.how, func(t *testing.T) {
			hooks(t, allHooks, func(t *testing.T, hook string) {
				tr := trace(t, hook, "--", self(t), "workload", "segv", "--how", c.how, "--pages", "16")
				if tr.code != c.code {
					t.Errorf("exit code %d, want %d", tr.code, c.code)
				}
				rep := tr.report(t)
				ranges := rep.Threads[0].Ranges
				bad := ranges[len(ranges)-1]
				var found []liveFault
				for _, f := range tr.inRange(rep) {
					if uint64(f.Address) >= uint64(bad.Start) && uint64(f.Address) < uint64(bad.End) {
						found = append(found, f)
					}
				}
				if n := count(tr.inRange(rep)); n.minor != 16 {
					t.Errorf("%+v records, want 16 good ones", n)
				}
				if len(found) != 1 {
					t.Fatalf("%d records of the bad access: %+v", len(found), found)
				}
				f := &found[0]
				if uint64(f.Address) != uint64(bad.Touches[0].Address) || words(f.Mode) != "user" || f.PID != rep.PID {
					t.Errorf("record %+v, want address %#x", f, bad.Touches[0].Address)
				}
				wantResult, wantAccess := c.result, "read"
				if hook == "perf" {
					wantResult, wantAccess = "null", "null"
				}
				if words(f.Result) != wantResult || words(f.Access) != wantAccess {
					t.Errorf("result %s, access %s, want %s and %s", words(f.Result), words(f.Access), wantResult, wantAccess)
				}
				if hook != "perf" && tr.summary.Failed < 1 {
					t.Errorf("summary %+v without failed faults", tr.summary)
				}
			})
		})
	}
}

// A system call on a bad address faults, and no signal tells of it.
// https://github.com/bpftrace/bpftrace/issues/668
func TestCaseEFAULT(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		tr := trace(t, hook, append([]string{"--"}, onStage(t, []string{"efault"})...)...)
		if tr.code != 0 {
			t.Fatalf("exit code %d: %s", tr.code, tr.stderr)
		}
		if strings.Contains(strings.Join(tr.header.Blind, "; "), "EFAULT") {
			t.Skip("the hook says that it is blind to them here: no page_fault_kernel tracepoint on this architecture")
		}
		var found []liveFault
		for _, f := range tr.faults {
			if f.Address == 0x10 {
				found = append(found, f)
			}
		}
		if len(found) != 1 {
			t.Fatalf("%d records of address 0x10: %+v", len(found), found)
		}
		f, result, access := &found[0], "efault", "write"
		if hook == "perf" {
			result, access = "null", "null"
		}
		if words(f.Mode) != "kernel" || words(f.Result) != result || words(f.Access) != access {
			t.Errorf("mode %s, result %s, access %s", words(f.Mode), words(f.Result), words(f.Access))
		}
	})
}

// A name with quotes, a backslash, control characters and broken UTF-8.
// https://github.com/eunomia-bpf/agentsight/issues/6
func TestCaseHostileName(t *testing.T) {
	const readable = `a"b\c`
	const name = readable + "\n\x1b[1m\xff\u202e"
	hooks(t, allHooks, func(t *testing.T, hook string) {
		args := []string{"--", self(t), "workload", "touch", "--pages", "20", "--name", name}
		tr := trace(t, hook, args...) // each line is parsed
		in := tr.inRange(tr.report(t))
		if len(in) != 20 || tr.lost != 0 {
			t.Fatalf("%d records, %d lost", len(in), tr.lost)
		}
		if !strings.HasPrefix(in[0].Comm, readable+"\n\x1b[1m") {
			t.Errorf("comm %q, want %q", in[0].Comm, name)
		}
		_, text, _ := outcome(t, program(slices.Concat([]string{"trace", "--hook", hook}, args)...))
		if !utf8.ValidString(text) || !strings.Contains(text, `a\"b\\c\n`) { // quoted there
			t.Errorf("the name is not in %q", text)
		}
		for _, r := range text {
			if r < ' ' && r != '\n' || r == 0x7f || r == '\u202e' {
				t.Fatalf("raw %q in the output", r)
			}
		}
	})
}

// An address of which a double would round the last bits.
// https://github.com/eunomia-bpf/agentsight/issues/6
func TestCaseVsyscallAddress(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("only x86-64 has a vsyscall page")
	}
	// handle_mm_fault is never called for it.
	hooks(t, []string{"tracepoint", "perf"}, func(t *testing.T, hook string) {
		const address = 0xffffffffff600400 // time(2)
		tr := trace(t, hook, append([]string{"--"}, onStage(t, []string{"call", "0xffffffffff600400"})...)...)
		// The page may be emulated or switched off.
		if tr.code != 0 && tr.code != 139 && tr.code != 2 {
			t.Errorf("exit code %d: %s", tr.code, tr.stderr)
		}
		for _, f := range tr.faults {
			if f.Address == address {
				if hook == "tracepoint" && words(f.Access) != "exec" {
					t.Errorf("access %s, want exec", words(f.Access))
				}
				return
			}
		}
		t.Errorf("no record of %#x", uint64(address))
	})
}
