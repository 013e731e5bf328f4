package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"faultsnoop/internal/fault"
	"faultsnoop/workload"
)

// faultCase is a program with known faults and what their records must tell.
type faultCase struct {
	name  string
	main  string // what the test binary is for it: see mainEnv
	args  []string
	codes []int // it may end with
	check func(t *testing.T, tr *traced, rep *workload.Report)
}

const hostileName = `a"b\c` + "\n\x1b[1m\xff\u202e"

var faultCases = []faultCase{
	{"retried", "1", []string{"workload", "uffd", "--pages", "64", "--delay", "2ms"}, []int{0}, checkRetried},
	{"where", "1", []string{"workload", "where"}, []int{0}, checkKnownAddresses},
	{"kernel", "1", []string{"workload", "kernel", "--pages", "1024"}, []int{0}, checkKernelMode},
	{"maperr", "1", []string{"workload", "segv", "--how", "maperr"}, []int{139}, checkFailed("sigsegv")},
	{"accerr", "1", []string{"workload", "segv", "--how", "accerr"}, []int{139}, checkFailed("sigsegv")},
	{"sigbus", "1", []string{"workload", "segv", "--how", "sigbus"}, []int{135}, checkFailed("sigbus")},
	{"efault", "stage", []string{"efault"}, []int{0}, checkEFAULT},
	{"cold", "stage", []string{"cold"}, []int{0}, checkColdStack},
	{"hostile", "1", []string{"workload", "touch", "--pages", "20", "--name", hostileName}, []int{0}, checkHostileName},
	// The page may be emulated or switched off; Go ends with 2 after a signal.
	{"vsyscall", "stage", []string{"call", "0xffffffffff600400"}, []int{0, 2, 139}, checkVsyscall},
}

// What the records tell of faults of many sorts, heard of by one trace: starting
// one takes long in an emulated machine.
func TestCaseFaults(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		comm := filepath.Base(self(t))
		a := startArmed(t, hook, "-c", comm[:min(len(comm), fault.MaxComm)])
		reports := make([]*workload.Report, len(faultCases))
		for i, c := range faultCases {
			reports[i] = c.run(t)
		}
		tr := a.stop(t, hook)
		checkPopulation(t, tr.header, hook)
		for i, c := range faultCases {
			t.Run(c.name, func(t *testing.T) { c.check(t, tr, reports[i]) })
		}
	})
}

// run takes the faults. The report of what is no workload has only the pid.
func (c *faultCase) run(t *testing.T) *workload.Report {
	t.Helper()
	cmd := exec.Command(self(t), c.args...)
	cmd.Env = append(os.Environ(), mainEnv+"="+c.main)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if code := exitCode(t, cmd.Run()); !slices.Contains(c.codes, statusOf(cmd, code)) {
		t.Fatalf("%q: exit code %d: %s", c.args, code, stderr.String())
	}
	if c.name == "cold" && stderr.Len() > 0 {
		t.Logf("%q: %s", c.args, stderr.String())
	}
	if c.main != "1" {
		return &workload.Report{PID: cmd.ProcessState.Pid()}
	}
	rep, err := workload.Decode(&stderr)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

// A fault that drops its lock and is tried again is one record.
// https://github.com/josefbacik/systing/pull/208
func checkRetried(t *testing.T, tr *traced, rep *workload.Report) {
	const pages = 64
	checkWorkload(t, tr, rep)
	in := ofProcess(tr.inRange(rep), rep.PID)
	if len(in) != pages {
		t.Fatalf("%d records of %d faults", len(in), pages)
	}
	seen := map[hexNumber]bool{}
	for _, f := range in {
		if seen[f.Address] {
			t.Errorf("two records for %#x", f.Address)
		}
		seen[f.Address] = true
		if (f.Attempts != nil) != (tr.hook == "fentry" || tr.hook == "kprobe") {
			t.Errorf("attempts known: %v", f.Attempts != nil)
		}
		// From the first entry to the last exit: the server's pause lies between.
		if f.Latency != nil && *f.Latency < 2e6 {
			t.Errorf("latency %d ns of a fault that waits 2 ms", *f.Latency)
		}
	}
}

// Arguments, fields and flags are those of the running kernel.
// https://github.com/aquasecurity/tracee/issues/3385
func checkKnownAddresses(t *testing.T, tr *traced, rep *workload.Report) {
	type access struct {
		address    uint64
		access     string
		start, end uint64 // of the mapping
		kind       string
	}
	want := []access{
		{workload.WhereData + 0x1234, "read", workload.WhereData, workload.WhereData + 0x10000, "zero"},
		{workload.WhereData + 0x5678, "write", workload.WhereData, workload.WhereData + 0x10000, "anon"},
		{workload.WhereData + 0x1abc, "write", workload.WhereData, workload.WhereData + 0x10000, "cow"},
		{workload.WhereCode + 0x10, "exec", workload.WhereCode, workload.WhereCode + 0x1000, "shmem"},
	}
	if rep.Faults == 3 { // no shared zero page here, so nothing to copy
		want = slices.Delete(want, 2, 3)
		want[0].kind = "anon"
	}
	in := ofProcess(tr.inRange(rep), rep.PID)
	if len(in) != len(want) {
		t.Fatalf("%d records, want %d: %+v", len(in), len(want), in)
	}
	for i, w := range want {
		f := &in[i]
		got := access{address: uint64(f.Address), access: words(f.Access), kind: words(f.Kind)}
		if f.VMA != nil && f.VMA.Start != nil {
			got.start, got.end = uint64(*f.VMA.Start), uint64(*f.VMA.End)
		}
		if tr.hook == "perf" { // it does not know the access and perhaps not the mapping
			checkInferred(t, f, w.kind)
			w.access, w.kind = "null", got.kind
			if got.start == 0 {
				w.start, w.end = 0, 0
			}
		}
		if got != w {
			t.Errorf("record %d: %+x, want %+x", i, got, w)
		}
		checkFlags(t, f, tr.hook, w.access)
	}
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

// Faults that the kernel takes on user memory.
// https://github.com/microsoft/one-collect/issues/186
func checkKernelMode(t *testing.T, tr *traced, rep *workload.Report) {
	checkWorkload(t, tr, rep) // mode kernel, and the number
	if n := count(ofProcess(tr.inRange(rep), rep.PID)); n != (tally{minor: 1024}) {
		t.Errorf("%+v, want 1024 minor faults", n)
	}
}

// checkPopulation checks what the header says of the faults that a hook covers.
// https://github.com/google/perfetto/issues/3995
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

// A fault that no mapping answers is a record too.
// https://github.com/bpftrace/bpftrace/issues/668
func checkFailed(result string) func(*testing.T, *traced, *workload.Report) {
	return func(t *testing.T, tr *traced, rep *workload.Report) {
		in := ofProcess(tr.inRange(rep), rep.PID)
		want := tally{minor: 16, failed: 1}
		access := "read"
		if tr.hook == "perf" {
			want, result, access = tally{minor: 16, unknown: 1}, "null", "null"
		}
		if n := count(in); n != want {
			t.Fatalf("%+v records, want %+v", n, want)
		}
		ranges := rep.Threads[0].Ranges
		bad := ranges[len(ranges)-1].Touches[0].Address
		f := &in[len(in)-1]
		if uint64(f.Address) != uint64(bad) || words(f.Mode) != "user" || words(f.Result) != result || words(f.Access) != access || f.Kind != nil {
			t.Errorf("address %#x, mode %s, result %s, access %s, kind %s; want %#x, user, %s, %s, null",
				f.Address, words(f.Mode), words(f.Result), words(f.Access), words(f.Kind), bad, result, access)
		}
	}
}

// A system call on a bad address faults, and no signal tells of it.
// https://github.com/bpftrace/bpftrace/issues/668
func checkEFAULT(t *testing.T, tr *traced, rep *workload.Report) {
	if strings.Contains(strings.Join(tr.header.Blind, "; "), "EFAULT") {
		t.Skip("the hook says that it is blind to them: there is no tracepoint page_fault_kernel here")
	}
	found := ofAddress(ofProcess(tr.faults, rep.PID), 0x10)
	if len(found) != 1 {
		t.Fatalf("%d records of address 0x10: %+v", len(found), found)
	}
	f, result, access := &found[0], "efault", "write"
	if tr.hook == "perf" {
		result, access = "null", "null"
	}
	if words(f.Mode) != "kernel" || words(f.Result) != result || words(f.Access) != access {
		t.Errorf("mode %s, result %s, access %s", words(f.Mode), words(f.Result), words(f.Access))
	}
}

// The stack of the faulting thread is in swap: nothing of the record needs it.
// https://github.com/latchset/crypto-auditing/pull/301
func checkColdStack(t *testing.T, tr *traced, rep *workload.Report) {
	n := 0
	for _, f := range ofProcess(tr.faults, rep.PID) {
		if uint64(f.Address) < coldAddress || uint64(f.Address) >= coldAddress+coldPages*uint64(os.Getpagesize()) {
			continue
		}
		n++
		if words(f.Mode) != "user" || words(f.Result) != "ok" || f.VMA == nil || tr.hook != "perf" && words(f.Kind) != "anon" {
			t.Fatalf("%+v", f)
		}
	}
	if n != coldPages {
		t.Errorf("%d records, want %d", n, coldPages)
	}
}

func ofAddress(faults []liveFault, address uint64) []liveFault {
	return slices.DeleteFunc(slices.Clone(faults), func(f liveFault) bool { return uint64(f.Address) != address })
}

// A name with quotes, a backslash, control characters and broken UTF-8: each line of
// the trace is parsed.
// https://github.com/eunomia-bpf/agentsight/issues/6
func checkHostileName(t *testing.T, tr *traced, rep *workload.Report) {
	in := ofProcess(tr.inRange(rep), rep.PID)
	if len(in) != 20 {
		t.Fatalf("%d records, want 20", len(in))
	}
	if clean := hostileName[:strings.IndexByte(hostileName, 0xff)]; !strings.HasPrefix(in[0].Comm, clean) {
		t.Errorf("comm %q, want %q", in[0].Comm, hostileName)
	}
}

// The same name on a terminal.
// https://github.com/eunomia-bpf/agentsight/issues/6
func TestCaseHostileText(t *testing.T) {
	anyKernel(t)
	_, text, stderr := outcome(t, program("trace", "--hook", bestHook(t), "--",
		self(t), "workload", "touch", "--pages", "20", "--name", hostileName))
	if !utf8.ValidString(text) || !strings.Contains(text, `a\"b\\c\n`) {
		t.Errorf("the name is not in %q\n%s", text, stderr)
	}
	for _, r := range text {
		if r < ' ' && r != '\n' || r == 0x7f || r == '\u202e' {
			t.Fatalf("raw %q in the output", r)
		}
	}
}

// vsyscallTime is where time(2) is on the vsyscall page of x86-64.
const vsyscallTime = 0xffffffffff600400

// An address of which a double would round the last bits. handle_mm_fault is never
// called for it.
// https://github.com/eunomia-bpf/agentsight/issues/6
func checkVsyscall(t *testing.T, tr *traced, rep *workload.Report) {
	if runtime.GOARCH != "amd64" || tr.hook == "fentry" || tr.hook == "kprobe" {
		t.Skip("only hooks tracepoint and perf on x86-64 hear of the vsyscall page")
	}
	found := ofAddress(ofProcess(tr.faults, rep.PID), vsyscallTime)
	if len(found) == 0 {
		t.Fatalf("no record of %#x", uint64(vsyscallTime))
	}
	if tr.hook == "tracepoint" && words(found[0].Access) != "exec" {
		t.Errorf("access %s, want exec", words(found[0].Access))
	}
}
