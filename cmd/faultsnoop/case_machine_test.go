package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// checkUsable runs a trace in a machine from which something is missing: it works, by
// whichever hook, with the reason in the header, and blames no limit that is not to
// blame.
func checkUsable(t *testing.T, cmd *exec.Cmd) *traced {
	t.Helper()
	tr := traceBy(t, "", cmd)
	rep := tr.report(t)
	if n := count(tr.inRange(rep)); n.minor != 10 || tr.code != 0 {
		t.Errorf("exit code %d, %+v records of 10 faults\n%s", tr.code, n, tr.stderr)
	}
	if blamesMemlock(tr.stderr) || blamesMemlock(tr.header.Reason) {
		t.Errorf("the memory lock limit is not to blame:\n%s%s", tr.stderr, tr.header.Reason)
	}
	return tr
}

func blamesMemlock(s string) bool { return strings.Contains(strings.ToLower(s), "memlock") }

// small is the command line of a trace of ten faults, to be set into a scene.
func small(t *testing.T, flags ...string) []string {
	return slices.Concat([]string{self(t), "trace", "--json"}, flags,
		[]string{"--", self(t), "workload", "touch", "--pages", "10"})
}

// onStageCmd sets a scene for argv.
func onStageCmd(job []string, argv []string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", slices.Concat(job, argv)...)
	cmd.Env = append(os.Environ(), mainEnv+"=stage")
	switch job[0] {
	case "scarce", "without-btf", "debug-folder":
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	}
	return cmd
}

// doctorOn is doctor's diagnosis in a scene.
func doctorOn(t *testing.T, job ...string) diagnosis {
	t.Helper()
	code, stdout, stderr := outcome(t, onStageCmd(job, []string{self(t), "doctor", "--json"}))
	var d diagnosis
	if err := json.Unmarshal([]byte(stdout), &d); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v\n%s%s", code, err, stdout, stderr)
	}
	for _, h := range d.Hooks {
		if blamesMemlock(h.Why) || blamesMemlock(h.SelfTest) || blamesMemlock(h.Remedy) {
			t.Errorf("the memory lock limit is not to blame: %+v", h)
		}
	}
	return d
}

func (d *diagnosis) check(t *testing.T, name string) check {
	t.Helper()
	i := slices.IndexFunc(d.Checks, func(c check) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("doctor does not check %q: %+v", name, d.Checks)
	}
	return d.Checks[i]
}

// A machine where much is missing that is not needed: tracefs is not mounted, memory
// cannot be locked and, in a guest, kernel addresses are hidden. Every hook works.
// https://github.com/gma1k/podtrace/issues/160
func TestCaseScarceMachine(t *testing.T) {
	needRoot(t)
	job := []string{"scarce"}
	if os.Getenv(guestEnv) != "" {
		setFile(t, "/proc/sys/kernel/kptr_restrict", "2")
	}
	d := doctorOn(t, job...)
	if c := d.check(t, "tracefs"); c.OK || c.Found != "not mounted" {
		t.Errorf("%+v", c)
	}
	tr := checkUsable(t, onStageCmd(job, small(t)))
	if tr.header.Reason == "" || tr.summary.Hook != d.Use {
		t.Errorf("hook %s by %q, doctor would use %s", tr.summary.Hook, tr.header.Reason, d.Use)
	}
	// Whether hook fentry hears of all faults cannot be told without debugfs.
	hooks(t, []string{"kprobe", "tracepoint", "perf"}, func(t *testing.T, hook string) {
		tr := checkUsable(t, onStageCmd(job, small(t, "--hook", hook)))
		if tr.summary.Hook != hook {
			t.Errorf("hook %s instead of %s", tr.summary.Hook, hook)
		}
	})
}

// Without BTF only perf events are left, which is said.
// https://github.com/gma1k/podtrace/issues/160
func TestCaseWithoutBTF(t *testing.T) {
	needRoot(t)
	const file = "/sys/kernel/btf/vmlinux"
	job := []string{"without-btf"}
	d := doctorOn(t, job...)
	if c := d.check(t, "btf"); c.OK || !strings.Contains(c.Found, file) || c.Remedy == "" || d.Use != "perf" {
		t.Errorf("%+v, would use %s", c, d.Use)
	}
	tr := checkUsable(t, onStageCmd(job, small(t)))
	if tr.summary.Hook != "perf" || !strings.Contains(tr.header.Reason, file) || !strings.Contains(tr.stderr, "using hook perf") {
		t.Errorf("hook %s, reason %q, stderr\n%s", tr.summary.Hook, tr.header.Reason, tr.stderr)
	}
	for _, hook := range bpfHooks {
		code, stdout, stderr := outcome(t, onStageCmd(job, small(t, "--hook", hook)))
		if code != exitFailure || stdout != "" || !strings.Contains(stderr, file) && !strings.Contains(stderr, "not") || blamesMemlock(stderr) {
			t.Errorf("--hook %s: exit code %d, stdout %q, stderr %q", hook, code, stdout, stderr)
		}
	}
}

// setFile writes a setting until the end of the test.
func setFile(t *testing.T, name, value string) {
	t.Helper()
	old, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(value), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(name, bytes.TrimSpace(old), 0o644); err != nil {
			t.Error(err)
		}
	})
}

// An ordinary user: BPF hooks are refused with cause and remedy, their command never
// runs, and hook perf works.
// https://github.com/gma1k/podtrace/issues/160
// https://github.com/tarides/runtime_events_tools/issues/110
func TestCaseOrdinaryUser(t *testing.T) {
	needRoot(t)
	exe := copyProgram(t, "faultsnoop")
	as := func(args ...string) *exec.Cmd {
		cmd := exec.Command(exe, args...)
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), mainEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		return cmd
	}
	mark := filepath.Join(t.TempDir(), "faultsnoop-never-run")
	for _, hook := range bpfHooks {
		code, stdout, stderr := outcome(t, as("trace", "--hook", hook, "--", "sleep", "77", mark))
		if code != exitFailure || stdout != "" || blamesMemlock(stderr) ||
			!strings.Contains(stderr, "needs root, or CAP_BPF and CAP_PERFMON") || !strings.Contains(stderr, "run as root") {
			t.Errorf("--hook %s: exit code %d, stdout %q, stderr %q", hook, code, stdout, stderr)
		}
	}
	if pids := processesWith(t, mark); len(pids) > 0 {
		t.Errorf("processes %v of commands that were not to run", pids)
	}
	if b, err := os.ReadFile("/proc/sys/kernel/perf_event_paranoid"); err != nil || len(b) > 1 && b[0] > '2' && b[0] <= '9' {
		t.Skipf("kernel.perf_event_paranoid is %s: no perf events for ordinary users", b)
	}
	tr := checkUsable(t, as("trace", "--json", "--", exe, "workload", "touch", "--pages", "10"))
	if tr.summary.Hook != "perf" || !strings.Contains(tr.header.Reason, "CAP_BPF") {
		t.Errorf("hook %s, reason %q", tr.summary.Hook, tr.header.Reason)
	}
}

// processesWith lists the processes with an argument.
func processesWith(t *testing.T, arg string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var pids []string
	for _, name := range files {
		b, _ := os.ReadFile(name) // it may have ended
		if slices.Contains(strings.Split(string(b), "\x00"), arg) {
			pids = append(pids, filepath.Base(filepath.Dir(name)))
		}
	}
	return pids
}

// Process ids of seven digits.
// https://github.com/eunomia-bpf/agentsight/issues/6
func TestCaseLargePIDs(t *testing.T) {
	ownMachine(t)
	const least = 4000000
	if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(least)), 0o644); err != nil {
		t.Fatal(err)
	}
	_, text, stderr := outcome(t, program("trace", "--", self(t), "workload", "touch", "--pages", "3"))
	rep, err := workload.Decode(strings.NewReader(stderr))
	if err != nil || rep.PID < least {
		t.Fatalf("pid %d, want one from %d: %v", rep.PID, least, err)
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	at := slices.Index(strings.Fields(lines[0]), "PID")
	for _, line := range lines[1:] {
		if w := strings.Fields(line); at < 0 || len(w) <= at || w[at] != strconv.Itoa(rep.PID) {
			t.Fatalf("no pid %d in column %d of %q", rep.PID, at, line)
		}
	}
}

// CPUs with a hole in their numbers, and one that comes while tracing.
// https://github.com/cilium/ebpf/issues/2100
func TestCaseHotplug(t *testing.T) {
	ownMachine(t)
	if _, err := os.Stat("/sys/devices/system/cpu/cpu3"); err != nil {
		t.Skip("it needs four CPUs")
	}
	const online = "/sys/devices/system/cpu/cpu1/online"
	hooks(t, allHooks, func(t *testing.T, hook string) {
		setFile(t, online, "0")
		a := startArmed(t, hook, "--comm", "case_hotplug")
		pinned := func(cpu, pages string) *exec.Cmd {
			return onStageCmd([]string{"pin", cpu}, []string{self(t), "workload", "touch", "--pages", pages, "--name", "case_hotplug"})
		}
		three := reportOf(t, pinned("3", "500"))
		if err := os.WriteFile(online, []byte("1"), 0o644); err != nil {
			t.Fatal(err)
		}
		if hook == "perf" {
			// Until it has noticed the CPU nothing counts there (docs/faults.md).
			time.Sleep(3 * time.Second)
		}
		one := reportOf(t, pinned("1", "300"))
		tr := a.stop(t, hook)

		of3, of1 := ofProcess(tr.inRange(three), three.PID), ofProcess(tr.inRange(one), one.PID)
		if len(of3) != 500 {
			t.Errorf("%d records of CPU 3, want 500", len(of3))
		}
		missing := 300 - len(of1)
		sure := hook == "fentry" || hook == "kprobe"
		if missing < 0 || missing > 0 && (sure || uint64(missing) > tr.summary.Lost) {
			t.Errorf("%d records of CPU 1 and %d lost, want 300", len(of1), tr.summary.Lost)
		}
		for cpu, faults := range map[int][]liveFault{3: of3, 1: of1} {
			for _, f := range faults {
				if f.CPU != cpu {
					t.Fatalf("a record of CPU %d instead of %d", f.CPU, cpu)
				}
			}
		}
		t.Logf("%d of 300 records of the new CPU", len(of1))
	})
}

// lockDown asks for the test that locks the kernel down until it is booted again.
var lockDown = flag.Bool("lockdown", false, "run the test that locks the kernel down, in a guest of the kernel matrix")

// Under lockdown=confidentiality BPF may not read the kernel: the cause is named, and
// perf events are left.
// https://github.com/gma1k/podtrace/issues/160
func TestLockdown(t *testing.T) {
	if !*lockDown {
		t.Skip("it lasts until the machine is booted again: -lockdown is not set")
	}
	ownMachine(t)
	if err := os.WriteFile("/sys/kernel/security/lockdown", []byte("confidentiality"), 0o644); err != nil {
		t.Fatal(err)
	}
	d := doctorOn(t, "pin", "0")
	if c := d.check(t, "lockdown"); c.OK || c.Found != "confidentiality" || c.Remedy == "" || d.Use != "perf" {
		t.Errorf("%+v, would use %q", c, d.Use)
	}
	tr := checkUsable(t, program(small(t)[1:]...))
	if tr.summary.Hook != "perf" || !strings.Contains(tr.header.Reason, "lockdown") {
		t.Errorf("hook %s, reason %q, stderr %s", tr.summary.Hook, tr.header.Reason, tr.stderr)
	}
	for _, hook := range bpfHooks {
		code, stdout, stderr := outcome(t, program(small(t, "--hook", hook)[1:]...))
		if code != exitFailure || stdout != "" || !strings.Contains(stderr, "lockdown") && !strings.Contains(stderr, "not in this kernel") || blamesMemlock(stderr) {
			t.Errorf("--hook %s: exit code %d, stdout %q, stderr %q", hook, code, stdout, stderr)
		}
	}
}
