package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"faultsnoop/internal/fault"
	"faultsnoop/workload"
)

// sees tells which hooks can hear of a workload's faults.
var sees = map[string][]string{
	"user":   allHooks,
	"kernel": allHooks,
	"remote": {"fentry", "kprobe"},
}

// needMachine are workloads that want more than a kernel: a swap device, huge
// pages, a disk. They say what is missing; the kernel matrix has it all.
var needMachine = []string{"swap", "thp", "hugetlb", "file", "cow-file", "mkwrite"}

func needsMachine(args []string) bool {
	return slices.Contains(needMachine, args[0]) || slices.Contains(args, "--huge")
}

// oracles are the workloads that every hook is measured by.
var oracles = []struct {
	mode string
	args []string
}{
	{"user", []string{"alloc", "--size", "8MB", "--block", "1MB"}},
	{"user", []string{"touch", "--pages", "257", "--threads", "3"}},
	{"user", []string{"cow", "--pages", "128"}},
	{"user", []string{"cow", "--huge", "--pages", "4"}},
	{"user", []string{"reuse", "--pages", "128"}},
	{"user", []string{"zero", "--pages", "128"}},
	{"user", []string{"shmem", "--pages", "128"}},
	{"user", []string{"shmem", "--memfd", "--pages", "16"}},
	{"user", []string{"shmem", "--sysv", "--pages", "16"}},
	{"user", []string{"stack", "--pages", "32"}},
	{"kernel", []string{"kernel", "--pages", "256"}},
	{"remote", []string{"remote", "--pages", "64"}},
	{"user", []string{"uffd", "--pages", "16"}},
	{"user", []string{"thp"}},
	{"user", []string{"hugetlb"}},
	{"user", []string{"where"}},
	{"user", []string{"image"}},
	{"user", []string{"device", "--pages", "32"}},
	{"user", []string{"file", "--pages", "64", "--dir", fileDir()}},
	{"user", []string{"file", "--cold", "--pages", "64", "--dir", fileDir()}},
	{"user", []string{"cow-file", "--pages", "64", "--dir", fileDir()}},
	{"user", []string{"cow-file", "--mapped", "--pages", "64", "--dir", fileDir()}},
	{"user", []string{"mkwrite", "--pages", "64", "--dir", fileDir()}},
	{"user", []string{"swap", "--pages", "64"}},
}

// Every workload's own count, which is getrusage's, against the records in its
// range. One trace sees them all: starting one takes long in an emulated machine.
func TestWorkloads(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		comm := filepath.Base(self(t))
		run := startArmed(t, hook, "-c", comm[:min(len(comm), fault.MaxComm)])
		reports := make([]*workload.Report, len(oracles))
		skipped := make([]string, len(oracles))
		for i, w := range oracles {
			reports[i], skipped[i] = runOracle(t, w.args)
		}
		tr := run.stop(t, hook)
		for i, w := range oracles {
			t.Run(strings.Join(w.args, " "), func(t *testing.T) {
				switch {
				case skipped[i] != "":
					t.Skip(skipped[i])
				case !slices.Contains(sees[w.mode], hook):
					checkCountedAsLost(t, tr, reports[i])
				default:
					checkWorkload(t, tr, reports[i])
				}
			})
		}
		s := tr.summary
		if s.Seen != uint64(len(tr.faults)) || s.Lost != tr.lost || s.Seen != s.Minor+s.Major+s.Failed {
			t.Errorf("summary %+v with %d records and %d lost", s, len(tr.faults), tr.lost)
		}
	})
}

// runOracle returns a workload's report, or why this machine cannot run it.
func runOracle(t *testing.T, args []string) (*workload.Report, string) {
	t.Helper()
	cmd := exec.Command(self(t), append([]string{"workload"}, args...)...)
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	code := exitCode(t, cmd.Run())
	if code == exitFailure && needsMachine(args) {
		return nil, stderr.String()
	}
	rep, err := workload.Decode(&stderr)
	if err != nil || code != 0 {
		t.Fatalf("workload %v: %v, exit code %d: %s", args, err, code, stderr.String())
	}
	return rep, ""
}

// ofProcess selects the faults of one process: workloads use the same addresses.
func ofProcess(faults []liveFault, pid int) []liveFault {
	var mine []liveFault
	for _, f := range faults {
		if f.PID == pid {
			mine = append(mine, f)
		}
	}
	return mine
}

// checkCountedAsLost checks faults that a hook cannot see: the BPF hooks find them in
// the thread's own counters.
func checkCountedAsLost(t *testing.T, tr *traced, rep *workload.Report) {
	t.Helper()
	if in := ofProcess(tr.inRange(rep), rep.PID); len(in) != 0 {
		t.Errorf("%d records of faults that hook %s cannot see", len(in), tr.hook)
	}
	if tr.hook == "tracepoint" && tr.summary.Lost < uint64(rep.Faults) {
		t.Errorf("%d lost, want at least the %d faults that are not seen", tr.summary.Lost, rep.Faults)
	}
}

// fileDir is a real file system: the guest of the kernel matrix mounts one.
func fileDir() string {
	if _, err := os.Stat("/mnt/lost+found"); err == nil {
		return "/mnt"
	}
	return "/var/tmp"
}

func checkWorkload(t *testing.T, tr *traced, rep *workload.Report) {
	t.Helper()
	checkCounts(t, tr, rep)
	for _, f := range ofProcess(tr.inRange(rep), rep.PID) {
		checkRecord(t, &f, tr.hook, rep)
		if t.Failed() {
			t.Fatalf("record %+v", f)
		}
	}
}

// checkCounts compares the numbers of records and of losses with what is known of them.
func checkCounts(t *testing.T, tr *traced, rep *workload.Report) {
	t.Helper()
	n := count(ofProcess(tr.inRange(rep), rep.PID))
	if n.minor+n.major != rep.Faults || n.failed != rep.Failed || n.unknown != 0 {
		t.Errorf("records %+v in range, want %d faults and %d failed", n, rep.Faults, rep.Failed)
	}
	if n.minor < rep.Minor || n.major < rep.Major || n.minor-rep.Minor+n.major-rep.Major != rep.Either {
		t.Errorf("records %+v, want %d minor, %d major and %d of either", n, rep.Minor, rep.Major, rep.Either)
	}
	if rep.Exact && (n.minor != rep.Minflt || n.major != rep.Majflt) {
		t.Errorf("records %+v, getrusage %d minor and %d major", n, rep.Minflt, rep.Majflt)
	}
}

// checkRecord checks what a record must know by the promise of its hook.
func checkRecord(t *testing.T, f *liveFault, hook string, rep *workload.Report) {
	t.Helper()
	if f.PID != rep.PID {
		t.Errorf("pid %d, want %d", f.PID, rep.PID)
	}
	if words(f.Mode) != rep.Mode {
		t.Errorf("mode %s, want %s", words(f.Mode), rep.Mode)
	}
	// Without the kernel's word the perf hook says unknown rather than guess.
	if hook != "perf" && (f.VMA == nil || f.VMA.Start == nil || f.PgOff == nil) {
		t.Errorf("the mapping is unknown")
	} else if f.VMA != nil && f.VMA.Start != nil && (f.Address < *f.VMA.Start || f.Address >= *f.VMA.End) {
		t.Errorf("address %#x outside of %#x-%#x", f.Address, *f.VMA.Start, *f.VMA.End)
	}
	if f.Latency == nil || *f.Latency <= 0 || *f.Latency > int64(time.Minute) {
		t.Errorf("latency %v", f.Latency)
	}
	for _, th := range rep.Threads {
		for _, r := range th.Ranges {
			if uint64(f.Address) < uint64(r.Start) || uint64(f.Address) >= uint64(r.End) {
				continue
			}
			if f.TID != th.TID {
				t.Errorf("tid %d, want %d", f.TID, th.TID)
			}
			if hook != "perf" && r.Access != "" && words(f.Access) != r.Access {
				t.Errorf("access %s, want %s", words(f.Access), r.Access)
			}
			if hook == "perf" && r.FaultKind != "" {
				checkInferred(t, f, r.FaultKind)
			} else if hook != "perf" && r.FaultKind != "" && (words(f.Kind) != r.FaultKind || words(f.KindBy) != "exact") {
				t.Errorf("kind %s by %s, want exactly %s", words(f.Kind), words(f.KindBy), r.FaultKind)
			}
			if r.Section != "" && words(f.Section) != r.Section {
				t.Errorf("section %s, want %s", words(f.Section), r.Section)
			}
			if want := labelOf(&r, hook); want != "" && (f.VMA == nil || words(f.VMA.Label) != want) {
				t.Errorf("mapping %+v, want %s", f.VMA, want)
			}
			if r.PgOff != nil && f.PgOff != nil {
				want := uint64(*r.PgOff) + (uint64(f.Address)-uint64(r.Start))/4096
				if *f.PgOff != want {
					t.Errorf("pgoff %#x, want %#x", *f.PgOff, want)
				}
			}
		}
	}
	if rep.Kind == "uffd" && f.Attempts != nil && *f.Attempts < 2 {
		t.Errorf("%d attempts, want at least 2", *f.Attempts)
	}
}

// inferable are the kinds that hook perf tells, of processes that stay for long enough
// after a fault. (Package perfevent tests that it does tell them.)
var inferable = []string{"file", "shmem", "hugetlb", "device"}

// checkInferred checks that the kind is the true one, or unknown.
func checkInferred(t *testing.T, f *liveFault, want string) {
	t.Helper()
	by := "inferred"
	if f.Kind == nil || !slices.Contains(inferable, want) {
		want, by = "null", "null"
	}
	if words(f.Kind) != want || words(f.KindBy) != by {
		t.Errorf("kind %s by %s, want %s by %s", words(f.Kind), words(f.KindBy), want, by)
	}
}

// labelOf is what a hook has to call the mapping of a range, empty if that is not known.
func labelOf(r *workload.Range, hook string) string {
	if hook == "perf" && strings.HasPrefix(r.Label, "[stack:") {
		return "[anon]"
	}
	return r.Label
}

// NUMA balancing takes the permissions of pages away to hear of their use. Only the
// kernel matrix has several nodes, and nobody else who minds the hints.
func TestWorkloadsNUMA(t *testing.T) {
	const knob = "/proc/sys/kernel/numa_balancing"
	if os.Getenv(guestEnv) == "" {
		t.Skip("needs a machine with several nodes: the kernel matrix runs it")
	}
	if err := os.WriteFile(knob, []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	defer os.WriteFile(knob, []byte("0"), 0o644)
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		tr := trace(t, hook, "--", self(t), "workload", "numa", "--pages", "64")
		rep := tr.report(t)
		for _, f := range tr.inRange(rep) {
			if words(f.Kind) != "numa" || words(f.KindBy) != "exact" {
				t.Fatalf("kind %s by %s: %+v", words(f.Kind), words(f.KindBy), f)
			}
		}
		if n := count(tr.inRange(rep)); n.minor < rep.Faults || n.minor+n.major > rep.Minflt+rep.Majflt {
			t.Errorf("records %+v in the range, want at least its %d pages and at most the %d faults of the thread", n, rep.Faults, rep.Minflt)
		}
	})
}

// A cgroup that is too small makes its processes free memory themselves, in the middle
// of their faults.
func TestWorkloadsReclaim(t *testing.T) {
	if os.Getenv(guestEnv) == "" {
		t.Skip("needs the memory controller of cgroup v2, and swap: the kernel matrix runs it")
	}
	const cgroup = "/sys/fs/cgroup/faultsnoop-reclaim"
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(cgroup)
	if err := os.WriteFile(cgroup+"/memory.max", []byte("40M"), 0o644); err != nil {
		t.Fatal(err)
	}
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		tr := trace(t, hook, "--", "sh", "-c", "echo $$ > "+cgroup+"/cgroup.procs; exec "+self(t)+" workload touch --pages 12000")
		rep := tr.report(t)
		var reclaimed int
		for _, f := range tr.inRange(rep) {
			switch {
			case f.OffCPU == nil || f.Reclaim == nil || f.Latency == nil:
				t.Fatalf("times unknown: %+v", f)
			case *f.OffCPU > *f.Latency || *f.Reclaim > *f.Latency:
				t.Fatalf("a part is longer than the whole: off CPU %d, reclaim %d of %d ns", *f.OffCPU, *f.Reclaim, *f.Latency)
			case *f.Reclaim > 0:
				reclaimed++
			}
		}
		// At least the 47 MiB that do not fit have to be freed, at most a few MiB at a time.
		if reclaimed == 0 {
			t.Errorf("none of %d faults reclaimed memory", rep.Faults)
		}
	})
}

// A cgroup's CPU quota stops its threads wherever they are in the kernel, until Linux
// 6.18 lets them return to user mode before. Clearing a huge page takes long, and can be
// interrupted for it.
func TestWorkloadsThrottled(t *testing.T) {
	if os.Getenv(guestEnv) == "" {
		t.Skip("needs the CPU controller of cgroup v2: the kernel matrix runs it")
	}
	const cgroup = "/sys/fs/cgroup/faultsnoop-throttled"
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(cgroup)
	if err := os.WriteFile(cgroup+"/cpu.max", []byte("4000 20000"), 0o644); err != nil {
		t.Fatal(err)
	}
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		h := hold(t, self(t), "thp", "--pages", "12")
		pid := strconv.Itoa(h.cmd.Process.Pid)
		a := startArmed(t, hook, "-p", pid)
		// Not before: what the program does at its start is not wanted to take long.
		if err := os.WriteFile(cgroup+"/cgroup.procs", []byte(pid), 0o644); err != nil {
			t.Fatal(err)
		}
		rep := h.finish(t)
		tr := a.stop(t, hook)
		var throttled, long int
		var off time.Duration
		for _, f := range tr.inRange(rep) {
			if f.OffCPU != nil {
				off += time.Duration(*f.OffCPU)
			}
			if words(f.Wait) != "throttled" {
				continue
			}
			throttled++
			if *f.OffCPU >= int64(5*time.Millisecond) {
				long++
			}
		}
		stat, err := os.ReadFile(cgroup + "/cpu.stat")
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d of %d faults throttled, %d for 5 ms and more, all off the CPU for %v; %s", throttled, rep.Faults, long, off, strings.Join(strings.Fields(string(stat)), " "))
		switch perTask := os.Getenv(guestEnv) == "7"; {
		case strings.Contains(string(stat), "nr_throttled 0"):
			t.Error("the cgroup was not throttled")
		case perTask && throttled > 0:
			t.Error("this kernel throttles no thread in a fault")
		case !perTask && long == 0:
			t.Error("no fault waited long for the quota of the next period")
		}
	})
}

// A whole process from fork to exit: the records are the kernel's own counts.
func TestWholeProcess(t *testing.T) {
	hooks(t, bpfHooks, func(t *testing.T, hook string) {
		tr := trace(t, hook, "--", "env", mainEnv+"=spawn", self(t),
			self(t), "workload", "touch", "--pages", "3000", "--threads", "4")
		child := decodeSpawned(t, tr.stderr)
		n := count(ofProcess(tr.faults, child.PID))
		missing := child.Minflt + child.Majflt - n.minor - n.major
		if hook == "tracepoint" {
			// get_user_pages is invisible to it, but counted.
			if missing < 0 || missing > int64(tr.summary.Lost) {
				t.Errorf("getrusage %+v, records %+v, lost %d", child, n, tr.summary.Lost)
			}
			return
		}
		if n.minor != child.Minflt || n.major != child.Majflt || tr.summary.Lost != 0 {
			t.Errorf("getrusage %+v, records %+v, lost %d", child, n, tr.summary.Lost)
		}
	})
}
