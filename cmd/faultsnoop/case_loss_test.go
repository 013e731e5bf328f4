package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// inGuest chooses another number for the kernel matrix, whose machines are emulated.
func inGuest(number, there int) int {
	if os.Getenv(guestEnv) != "" {
		return there
	}
	return number
}

// stormPages is how many pages each thread of a storm touches, of so many in all.
func stormPages(all int) string { return strconv.Itoa(all / runtime.NumCPU()) }

// Nobody reads the output: what cannot be kept is counted, and said everywhere.
// https://github.com/iovisor/bcc/issues/3476
func TestCaseStalledReader(t *testing.T) {
	hooks(t, someSources(), func(t *testing.T, hook string) {
		h := hold(t, self(t), "storm", "--pages", stormPages(inGuest(20000, 8000)))
		pid := h.cmd.Process.Pid
		before := faultsOf(t, pid)

		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		var stderr bytes.Buffer
		cmd := program("trace", "--json", "--hook", hook, "--buffer", "64K", "-p", strconv.Itoa(pid))
		cmd.Stdout, cmd.Stderr = w, &stderr
		startKilled(t, cmd)
		w.Close()
		in := bufio.NewReader(r)
		out, err := in.ReadBytes('\n')
		if err != nil {
			t.Fatalf("no header: %v: %s", err, stderr.String())
		}
		// The Go runtime of a program that waits may take a fault while the tracer starts,
		// and nobody knows whether before or after.
		meanwhile := faultsOf(t, pid) - before
		h.finish(t)
		truth := rusageFaults(h.cmd) - before

		done := make(chan error, 1)
		go func() {
			rest, err := io.ReadAll(in)
			out = append(out, rest...)
			done <- err
		}()
		if err := cmd.Process.Signal(unix.SIGINT); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		code := exitCode(t, cmd.Wait())
		checkLoss(t, parse(t, hook, out, stderr.String(), code), truth, meanwhile)
	})
}

// checkLoss compares a trace that has lost records with the kernel's count, of which
// some may be from before the tracing began.
func checkLoss(t *testing.T, tr *traced, truth, before int64) {
	t.Helper()
	n, s := count(tr.faults), tr.summary
	missing := truth - n.minor - n.major - int64(s.Lost)
	if tr.hook == "perf" {
		// It is blind to get_user_pages, by which the kernel may reach a futex of a thread
		// that ends.
		before += 2
	}
	if missing < 0 || missing > before {
		t.Errorf("%+v records and %d lost, the kernel counted %d, of these at most %d before", n, s.Lost, truth, before)
	}
	if s.Lost == 0 || tr.lost != s.Lost {
		t.Errorf("%d lost by the summary, %d by the lines of losses; want the same and some", s.Lost, tr.lost)
	}
	if s.Seen != uint64(len(tr.faults)) || s.Minor != uint64(n.minor) || s.Major != uint64(n.major) {
		t.Errorf("summary %+v of %+v records", s, n)
	}
	if !strings.Contains(tr.stderr, " faults lost so far") || !strings.Contains(tr.stderr, fmt.Sprintf("; %d lost (", s.Lost)) {
		t.Errorf("stderr does not tell of the %d lost:\n%s", s.Lost, tr.stderr)
	}
}

// The default buffer keeps up with all CPUs.
// https://github.com/iovisor/bcc/issues/3476
func TestCaseStormWithoutLoss(t *testing.T) {
	hooks(t, someSources(), func(t *testing.T, hook string) {
		out, err := os.Create(t.TempDir() + "/out")
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		cmd := program("trace", "--json", "--hook", hook, "--", self(t), "workload", "storm", "--pages", stormPages(inGuest(60000, 8000)))
		var stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = out, &stderr
		startKilled(t, cmd)
		code := exitCode(t, cmd.Wait())
		b, err := os.ReadFile(out.Name())
		if err != nil {
			t.Fatal(err)
		}
		tr := parse(t, hook, b, stderr.String(), code)
		rep := tr.report(t)
		n := count(tr.inRange(rep))
		if tr.summary.Lost != 0 || n.minor+n.major != rep.Faults {
			t.Errorf("%+v records of %d faults, %d lost\n%s", n, rep.Faults, tr.summary.Lost, tr.stderr)
		}
	})
}

// Many faults that sleep at once: each exit is heard of or the record says that its
// latency is not known.
// https://github.com/gma1k/podtrace/pull/395
func TestCaseManySleepingFaults(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		const pages = 64
		processes := inGuest(60, 16) // a return probe stands ten or so by default
		a := startArmed(t, hook, "--comm", "case_asleep")
		reports := crowd(t, processes, "uffd", "--pages", strconv.Itoa(pages), "--delay", "20ms", "--name", "case_asleep")
		tr := a.stop(t, hook)
		missing, untimed := int64(0), 0
		for _, rep := range reports {
			in := ofProcess(tr.inRange(rep), rep.PID)
			n := count(in)
			missing += pages - n.minor - n.major
			if n.minor+n.major > pages || n.failed+n.unknown != 0 {
				t.Errorf("%+v records of process %d, want %d", n, rep.PID, pages)
			}
			for _, f := range in {
				switch {
				case f.Latency == nil:
					untimed++
				case *f.Latency < 2e6 || *f.Latency > int64(time.Minute):
					t.Errorf("latency %d ns", *f.Latency)
				}
			}
		}
		// The start of so many programs may be too much for hook perf, which hears of all
		// faults of the machine and filters afterwards.
		if missing > 0 && (hook != "perf" || missing > int64(tr.summary.Lost)) {
			t.Errorf("%d records missing, %d lost: %s", missing, tr.summary.Lost, tr.stderr)
		}
		if untimed > 0 && (tr.summary.Untimed < uint64(untimed) || !strings.Contains(tr.stderr, "without latency")) {
			t.Errorf("%d records without latency, the summary tells of %d:\n%s", untimed, tr.summary.Untimed, tr.stderr)
		}
		t.Logf("%d of %d records without latency", untimed, processes*pages)
	})
}

// crowd runs many processes at once.
func crowd(t *testing.T, n int, args ...string) []*workload.Report {
	t.Helper()
	cmds := make([]*exec.Cmd, n)
	stderrs := make([]bytes.Buffer, n)
	for i := range cmds {
		cmds[i] = program(append([]string{"workload"}, args...)...)
		cmds[i].Stderr = &stderrs[i]
		startKilled(t, cmds[i])
	}
	reports := make([]*workload.Report, n)
	for i, cmd := range cmds {
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v: %s", err, stderrs[i].String())
		}
		var err error
		if reports[i], err = workload.Decode(&stderrs[i]); err != nil {
			t.Fatal(err)
		}
	}
	return reports
}

// Processes killed in the middle of a fault leave nothing behind.
// https://github.com/gma1k/podtrace/pull/395
func TestCaseKilledInFault(t *testing.T) {
	hooks(t, allHooks, func(t *testing.T, hook string) {
		a := startArmed(t, hook, "--comm", "case_killed")
		victims := inGuest(20, 5)
		type victim struct {
			cmd   *exec.Cmd
			ready *workload.Report
		}
		var all []victim
		for range victims {
			cmd := program("workload", "uffd", "--pages", "4", "--delay", "10m", "--hold", "1ms", "--name", "case_killed")
			stderr, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			startKilled(t, cmd)
			ready, err := workload.NewDecoder(stderr).Next()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, victim{cmd, ready})
		}
		for _, v := range all {
			tid := v.ready.Threads[0].TID
			waitFor(t, "a thread to sleep in a fault", func() bool { return inFault(v.cmd.Process.Pid, tid) })
			v.cmd.Process.Kill()
		}
		for _, v := range all {
			v.cmd.Wait()
		}
		rep := runWorkload(t, "touch", "--pages", "500", "--name", "case_killed")
		tr := a.stop(t, hook)
		if in := ofProcess(tr.inRange(rep), rep.PID); len(in) != 500 {
			t.Errorf("%d records of the next process, want 500", len(in))
		} else {
			for _, f := range in {
				checkRecord(t, &f, hook, rep)
			}
		}
		want := tally{failed: 1}
		if hook == "perf" {
			want = tally{unknown: 1}
		}
		for _, v := range all {
			if n := count(ofProcess(tr.inRange(v.ready), v.ready.PID)); n != want {
				t.Errorf("%+v records of killed process %d, want %+v; %d lost", n, v.ready.PID, want, tr.summary.Lost)
			}
		}
	})
}

// inFault reports whether a thread sleeps in a userfaultfd fault: it is in no system
// call and yet not ready to run.
func inFault(pid, tid int) bool {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", pid, tid))
	state := statField(tid, 3)
	return strings.HasPrefix(string(b), "-1 ") && (state == "S" || state == "D")
}
