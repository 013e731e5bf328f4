package main

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// -p follows every thread, those that exist before the attach too; pid and tid are
// apart.
// https://github.com/iovisor/bcc/issues/547
func TestCaseAllThreadsOfProcess(t *testing.T) {
	hooks(t, someSources(), func(t *testing.T, hook string) {
		h := hold(t, self(t), "touch", "--threads", "4", "--pages", "200")
		pid := strconv.Itoa(h.cmd.Process.Pid)
		a := startArmed(t, hook, "-p", pid)
		rep := h.finish(t)
		tr := a.stop(t, hook)
		checkCounts(t, tr, rep)

		tids := map[int]int{}
		for _, f := range tr.inRange(rep) {
			tids[f.TID]++
		}
		if len(tids) != 4 {
			t.Errorf("faults by thread %v, want four threads", tids)
		}
		for tid, n := range tids {
			if n != 200 {
				t.Errorf("%d faults of thread %d, want 200", n, tid)
			}
		}
		for _, f := range tr.faults {
			if f.PID != rep.PID {
				t.Fatalf("a record of process %d, -p is %d", f.PID, rep.PID)
			}
		}
		checkNamespaceIDs(t, tr, rep)
	})
}

// -t follows one thread.
// https://github.com/iovisor/bcc/issues/547
func TestCaseOneThread(t *testing.T) {
	hooks(t, []string{bestHook(t), "perf"}, func(t *testing.T, hook string) {
		h := hold(t, self(t), "touch", "--threads", "4", "--pages", "200")
		want := h.ready.Threads[2].TID
		a := startArmed(t, hook, "-t", strconv.Itoa(want))
		rep := h.finish(t)
		tr := a.stop(t, hook)
		in := tr.inRange(rep)
		if len(in) != 200 {
			t.Errorf("%d records, want the 200 of thread %d", len(in), want)
		}
		for _, f := range tr.faults {
			if f.TID != want || f.PID != rep.PID {
				t.Fatalf("a record of %d/%d, want %d/%d only", f.PID, f.TID, rep.PID, want)
			}
		}
	})
}

// A filter longer than the kernel's 15 bytes is matched on the program's file name;
// threads that were renamed are found by the process's name.
// https://github.com/bpftrace/bpftrace/issues/2580
func TestCaseNames(t *testing.T) {
	one, two := copyProgram(t, "fault_sampler_x_one"), copyProgram(t, "fault_sampler_x_two")
	renamed := copyProgram(t, "case_renamed")
	touch := func(exe string, args ...string) *workload.Report {
		cmd := exec.Command(exe, append([]string{"workload", "touch"}, args...)...)
		cmd.Env = append(os.Environ(), mainEnv+"=1")
		return reportOf(t, cmd)
	}
	hooks(t, someSources(), func(t *testing.T, hook string) {
		a := startArmed(t, hook, "--comm", "fault_sampler_x_one", "--comm", "case_renamed")
		other := touch(two, "--pages", "700")
		long := touch(one, "--pages", "300")
		pool := touch(renamed, "--pages", "100", "--threads", "4", "--name", "pool-worker")
		tr := a.stop(t, hook)
		checkCounts(t, tr, long)
		checkCounts(t, tr, pool)
		for want, rep := range map[int]*workload.Report{300: long, 400: pool} {
			if n := len(ofProcess(tr.inRange(rep), rep.PID)); n != want {
				t.Errorf("%d records, want %d", n, want)
			}
		}
		for _, f := range tr.faults {
			if f.PID != long.PID && f.PID != pool.PID {
				t.Fatalf("a record of process %d (the other program's is %d): %+v", f.PID, other.PID, f)
			}
		}
		for _, f := range ofProcess(tr.inRange(pool), pool.PID) {
			if f.Comm != "pool-worker" || f.Process != "case_renamed" {
				t.Fatalf("comm %q of process %q", f.Comm, f.Process)
			}
		}
	})
}

// A filter that cannot match is refused.
// https://github.com/bpftrace/bpftrace/issues/2580
func TestCaseNoSilentlyEmptyFilter(t *testing.T) {
	anyKernel(t)
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"-p", strconv.Itoa(gone.ProcessState.Pid())},
		{"-t", strconv.Itoa(gone.ProcessState.Pid())},
		{"-c", ""},
		{"-c", strings.Repeat("x", 256)}, // no file name is that long
		{"--cgroup", "/no/such/cgroup"},
		{"--uid", "no-such-user"},
	} {
		code, stdout, stderr := outcome(t, program(slices.Concat([]string{"trace", "-d", "1s"}, args)...))
		if code == 0 || stdout != "" || !strings.HasPrefix(stderr, "faultsnoop: ") {
			t.Errorf("%q: exit code %d, stdout %q, stderr %q", args, code, stdout, stderr)
		}
	}
}

// Run mode: everything from exec on, the loader's faults too; daemons are followed;
// neither strangers nor the tool's own process before exec are in it.
// https://github.com/janestreet/magic-trace/issues/113
func TestCaseRunModeFollowsTree(t *testing.T) {
	hooks(t, someSources(), func(t *testing.T, hook string) {
		dir := t.TempDir()
		report, release := filepath.Join(dir, "report"), filepath.Join(dir, "release")
		script := fmt.Sprintf(`(setsid %[1]s workload touch --pages 300 2>%[2]s &)
until [ -e %[3]s ]; do sleep 0.1; done
%[1]s workload touch --pages 200
exit 3`, self(t), report, release)
		r := start(t, hook, "--", "sh", "-c", script)
		var daemon *workload.Report
		waitFor(t, "the daemon", func() bool {
			f, err := os.Open(report)
			if err != nil {
				return false
			}
			defer f.Close()
			daemon, err = workload.Decode(f)
			return err == nil
		})
		stranger := runWorkload(t, "touch", "--pages", "700")
		if err := os.WriteFile(release, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		tr := finish(t, hook, r)
		if tr.code != 3 {
			t.Errorf("exit code %d, want 3", tr.code)
		}
		rep := tr.report(t)

		byPID := map[int][]liveFault{}
		for _, f := range tr.faults {
			byPID[f.PID] = append(byPID[f.PID], f)
			// The new program's argument pages are written before it has its name. Other
			// processes may be called exe: busybox runs itself by /proc/self/exe.
			if f.PID == r.cmd.Process.Pid || f.PID == tr.faults[0].PID && f.Comm == "exe" && words(f.Mode) != "remote" {
				t.Fatalf("a record of the tool's own process: %+v", f)
			}
		}
		if n := len(byPID[stranger.PID]); n != 0 {
			t.Errorf("%d records of process %d, which is not of the tree", n, stranger.PID)
		}
		for _, w := range []*workload.Report{daemon, rep} {
			if n := len(ofProcess(tr.inRange(w), w.PID)); int64(n) != w.Faults {
				t.Errorf("%d records of process %d, want %d", n, w.PID, w.Faults)
			}
		}
		checkLoader(t, byPID[tr.faults[0].PID])
	})
}

// checkLoader looks for the first faults of a program: those of its interpreter, or of
// itself if it has none.
func checkLoader(t *testing.T, faults []liveFault) {
	t.Helper()
	path, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	if p := interpreter(t, path); p != "" {
		path = p
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		t.Fatal(err)
	}
	var labels []string
	for _, f := range faults {
		if f.VMA == nil {
			continue
		}
		if words(f.VMA.Label) == filepath.Base(path) {
			return
		}
		labels = append(labels, words(f.VMA.Label))
	}
	t.Errorf("no fault in %s among %q", path, labels)
}

// interpreter is the dynamic loader of a program, empty if it has none.
func interpreter(t *testing.T, path string) string {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b := make([]byte, p.Filesz)
			if _, err := p.ReadAt(b, 0); err != nil {
				t.Fatal(err)
			}
			return unix.ByteSliceToString(b)
		}
	}
	return ""
}

// namespaceEnv is set for the tests inside a pid namespace.
const namespaceEnv = "FAULTSNOOP_NAMESPACE"

// inNamespace are the attributes of the first process of a pid namespace.
func inNamespace() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
}

// Inside a pid namespace, pids are those that one sees there.
// https://github.com/iovisor/bcc/issues/1329
func TestCaseInsidePidNamespace(t *testing.T) {
	cmd := exec.Command("/proc/self/exe", "namespace", "env", "-u", mainEnv, self(t),
		"-test.v", "-test.run", "^TestCase(AllThreadsOfProcess|RunModeFollowsTree)$/^("+bestHook(t)+"|perf)$")
	cmd.Env = append(os.Environ(), mainEnv+"=stage", namespaceEnv+"=1")
	cmd.SysProcAttr = inNamespace()
	code, stdout, stderr := outcome(t, cmd)
	if code != 0 || !strings.Contains(stdout, "--- PASS: TestCaseAllThreadsOfProcess/perf") {
		t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
	}
}

// checkNamespaceIDs checks ids of a process that is watched from its own namespace.
func checkNamespaceIDs(t *testing.T, tr *traced, rep *workload.Report) {
	t.Helper()
	inside := os.Getenv(namespaceEnv) != ""
	for _, f := range tr.inRange(rep) {
		if f.NSPID != 0 && f.NSPID != f.PID {
			t.Fatalf("inner pid %d of process %d", f.NSPID, f.PID)
		}
		if inside && (f.PID > 1000 || f.HostPID == f.PID) || !inside && f.HostPID != 0 && f.HostPID != f.PID {
			t.Fatalf("pid %d, host pid %d, in a namespace of its own: %v", f.PID, f.HostPID, inside)
		}
	}
}

// From outside, the host's pid and the inner one.
// https://github.com/iovisor/bcc/issues/1329
func TestCaseOutsidePidNamespace(t *testing.T) {
	hooks(t, someSources(), func(t *testing.T, hook string) {
		cmd := exec.Command("/proc/self/exe", "namespace", self(t), "workload", "touch", "--pages", "500", "--hold", holdTime.String())
		cmd.Env = append(os.Environ(), mainEnv+"=stage")
		cmd.SysProcAttr = inNamespace()
		h := holdCmd(t, cmd)
		a := startArmed(t, hook, "-p", strconv.Itoa(cmd.Process.Pid))
		rep := h.finish(t)
		tr := a.stop(t, hook)
		in := tr.inRange(rep)
		if len(in) != 500 {
			t.Errorf("%d records, want 500", len(in))
		}
		for _, f := range in {
			if f.PID != cmd.Process.Pid || f.NSPID != rep.PID || rep.PID != 1 {
				t.Fatalf("pid %d and inner pid %d, want %d and %d: %+v", f.PID, f.NSPID, cmd.Process.Pid, rep.PID, f)
			}
		}
	})
}
