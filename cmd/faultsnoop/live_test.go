package main

import (
	"os"
	"slices"
	"testing"
	"time"

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
var needMachine = []string{"swap", "thp", "hugetlb", "file"}

// Every workload's own count, which is getrusage's, against the records in its range.
func TestWorkloads(t *testing.T) {
	for _, w := range []struct {
		mode string
		args []string
	}{
		{"user", []string{"alloc", "--size", "8MB", "--block", "1MB"}},
		{"user", []string{"touch", "--pages", "257", "--threads", "3"}},
		{"user", []string{"cow", "--pages", "128"}},
		{"user", []string{"shmem", "--pages", "128"}},
		{"kernel", []string{"kernel", "--pages", "256"}},
		{"remote", []string{"remote", "--pages", "64"}},
		{"user", []string{"uffd", "--pages", "16"}},
		{"user", []string{"thp"}},
		{"user", []string{"hugetlb"}},
		{"user", []string{"where"}},
		{"user", []string{"file", "--pages", "64", "--dir", fileDir()}},
		{"user", []string{"file", "--cold", "--pages", "64", "--dir", fileDir()}},
		{"user", []string{"swap", "--pages", "64"}},
	} {
		t.Run(w.args[0], func(t *testing.T) {
			hooks(t, sees[w.mode], func(t *testing.T, hook string) {
				args := append([]string{"--", self(t), "workload"}, w.args...)
				tr := trace(t, hook, args...)
				if tr.code == exitFailure && slices.Contains(needMachine, w.args[0]) {
					t.Skip(tr.stderr)
				}
				if tr.code != 0 {
					t.Fatalf("exit code %d: %s", tr.code, tr.stderr)
				}
				checkWorkload(t, tr, tr.report(t))
			})
		})
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
	in := tr.inRange(rep)
	n := count(in)
	if n.minor+n.major != rep.Faults || n.failed != rep.Failed || n.unknown != 0 {
		t.Errorf("records %+v in range, want %d faults and %d failed", n, rep.Faults, rep.Failed)
	}
	if n.minor < rep.Minor || n.major < rep.Major || n.minor-rep.Minor+n.major-rep.Major != rep.Either {
		t.Errorf("records %+v, want %d minor, %d major and %d of either", n, rep.Minor, rep.Major, rep.Either)
	}
	if rep.Exact && (n.minor != rep.Minflt || n.major != rep.Majflt) {
		t.Errorf("records %+v, getrusage %d minor and %d major", n, rep.Minflt, rep.Majflt)
	}
	for i := range in {
		checkRecord(t, &in[i], tr.hook, rep)
		if t.Failed() {
			t.Fatalf("record %d: %+v", i, in[i])
		}
	}
	s := tr.summary
	if s.Seen != uint64(len(tr.faults)) || s.Lost != tr.lost || s.Seen != s.Minor+s.Major+s.Failed {
		t.Errorf("summary %+v with %d records and %d lost", s, len(tr.faults), tr.lost)
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
	if f.VMA == nil || f.PgOff == nil {
		t.Errorf("the mapping is unknown")
	} else if hook != "perf" && f.VMA.Start == nil {
		t.Errorf("the bounds of the mapping are unknown")
	} else if f.VMA.Start != nil && (f.Address < *f.VMA.Start || f.Address >= *f.VMA.End) {
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

// A whole process from fork to exit: the records are the kernel's own counts.
func TestWholeProcess(t *testing.T) {
	hooks(t, bpfHooks, func(t *testing.T, hook string) {
		tr := trace(t, hook, "--", "env", mainEnv+"=spawn", self(t),
			self(t), "workload", "touch", "--pages", "3000", "--threads", "4")
		child := decodeSpawned(t, tr.stderr)
		var mine []liveFault
		for _, f := range tr.faults {
			if f.PID == child.PID {
				mine = append(mine, f)
			}
		}
		n := count(mine)
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
