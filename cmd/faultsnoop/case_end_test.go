package main

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The command's exit code is returned.
// https://github.com/tarides/runtime_events_tools/issues/110
func TestCaseExitCode(t *testing.T) {
	anyKernel(t)
	dir := t.TempDir()
	plain, script := filepath.Join(dir, "plain"), filepath.Join(dir, "script")
	for name, mode := range map[string]os.FileMode{plain: 0o644, script: 0o755} {
		if err := os.WriteFile(name, []byte("#!/no/such/interpreter\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	hook := bestHook(t)
	for _, c := range []struct {
		want int
		argv []string
	}{
		{143, []string{"sh", "-c", "kill -TERM $$"}},
		{139, []string{self(t), "workload", "segv"}},
		{135, []string{self(t), "workload", "segv", "--how", "sigbus"}},
		{127, []string{"/no/such"}},
		{126, []string{plain}},
		{127, []string{script}},
	} {
		code, _, stderr := outcome(t, program(append([]string{"trace", "--hook", hook, "--"}, c.argv...)...))
		if code != c.want {
			t.Errorf("%q: exit code %d, want %d: %s", c.argv, code, c.want, stderr)
		}
	}
}

// INT, TERM and HUP end a trace with all that it has seen.
// https://github.com/bpftrace/bpftrace/issues/928
func TestCaseSignals(t *testing.T) {
	anyKernel(t)
	for _, sig := range []syscall.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP} {
		hook := bestHook(t)
		a := startArmed(t, hook, "--comm", "case_signal")
		rep := runWorkload(t, "touch", "--pages", "50", "--name", "case_signal")
		if err := a.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		tr := a.wait(t, hook)
		if tr.code != 0 || !strings.Contains(tr.stderr, " faults: ") {
			t.Errorf("%v: exit code %d, stderr %q", sig, tr.code, tr.stderr)
		}
		checkWorkload(t, tr, rep)
	}
}

// When the reader goes away, so does the trace, whether there is something to write
// or not.
// https://github.com/bpftrace/bpftrace/issues/928
func TestCaseReaderGoesAway(t *testing.T) {
	anyKernel(t)
	hook := bestHook(t)
	storm := program("workload", "storm", "--cpus", "1", "--duration", "10m")
	startKilled(t, storm)
	idle := program("workload", "touch", "--hold", "10m")
	startKilled(t, idle)
	for _, target := range []*os.Process{storm.Process, idle.Process} {
		cmd := program("trace", "--hook", hook, "-p", strconv.Itoa(target.Pid))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		startKilled(t, cmd)
		if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
			t.Fatalf("no line: %v: %s", err, stderr.String())
		}
		stdout.Close()
		timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
		code := exitCode(t, cmd.Wait())
		if !timer.Stop() || code != 0 || stderr.Len() > 0 {
			t.Errorf("exit code %d, stderr %q", code, stderr.String())
		}
	}
}
