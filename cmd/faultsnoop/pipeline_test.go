package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

func TestCountIsExact(t *testing.T) {
	for _, n := range []string{"1", "499", "500", "501", "1234"} {
		code, out, stderr := runWith(fakes["storm"], "trace", "--json", "-n", n)
		if code != 0 {
			t.Fatalf("code %d: %s", code, stderr)
		}
		var want int
		if err := json.Unmarshal([]byte(n), &want); err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(out, `{"type":"fault"`); got != want {
			t.Errorf("-n %s: %d records", n, got)
		}
		if !strings.HasPrefix(out, `{"type":"header"`) || !strings.Contains(out[strings.LastIndex(out[:len(out)-1], "\n"):], `"type":"summary"`) {
			t.Errorf("-n %s: header or summary is not in its place", n)
		}
	}
}

func TestDuration(t *testing.T) {
	begin := time.Now()
	code, _, stderr := runWith(fakes["storm"], "trace", "-d", "300ms")
	if took := time.Since(begin); code != 0 || took < 300*time.Millisecond {
		t.Errorf("code %d after %v: %s", code, took, stderr)
	}
}

// TestOrder: the command is stopped when the source is opened and runs after the
// header is out; its faults are shown although it has ended by then.
func TestOrder(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	var src fakeSource
	open := func(o sourceOptions, _ *slog.Logger) (source, error) {
		if unix.Kill(o.CommandPID, 0) != nil {
			t.Error("no command when the source is opened")
		}
		if _, err := os.Stat(mark); err == nil {
			t.Error("the command ran before the source was open")
		}
		src = fakeSource{session: fakeSession(), mu: new(sync.Mutex), batches: []fault.Batch{{Faults: sampleFaults()}, {Faults: sampleFaults()}, {Faults: sampleFaults()}}}
		return &src, nil
	}
	code, out, stderr := runWith(open, "trace", "--json", "--", "sh", "-c", "touch "+mark+"; exit 5")
	if code != 5 || !src.stopped || !src.closed {
		t.Errorf("code %d, stopped %v, closed %v: %s", code, src.stopped, src.closed, stderr)
	}
	if got := strings.Count(out, `{"type":"fault"`); got != 15 {
		t.Errorf("%d records", got)
	}
}

func TestLossIsTold(t *testing.T) {
	one := script(fakeSource{batches: []fault.Batch{{Lost: []fault.Loss{{Where: "ring buffer full", Count: 1}}}, {}}})
	if _, _, stderr := runWith(one, "trace", "-d", "100ms"); !strings.Contains(stderr, "1 fault lost so far") {
		t.Errorf("stderr: %s", stderr)
	}
	lost := []fault.Batch{{Lost: []fault.Loss{{Where: "ring buffer full", Count: 3}}}, {Lost: []fault.Loss{{Where: "ring buffer full", Count: 4}}}, {}}
	code, out, stderr := runWith(script(fakeSource{batches: lost}), "trace", "--json", "-d", "100ms")
	if code != 0 || strings.Count(out, `"type":"lost"`) != 2 || !strings.Contains(out, `"lost":7,`) {
		t.Errorf("code %d: %s", code, out)
	}
	if !strings.Contains(stderr, "7 faults lost so far") || !strings.Contains(stderr, "7 lost (ring buffer full: 3, ring buffer full: 4)") {
		t.Errorf("stderr: %s", stderr)
	}
}

// TestUnseenIsTold: "0 lost" is not all there is to say where a hook is blind.
func TestUnseenIsTold(t *testing.T) {
	open := func(o sourceOptions, log *slog.Logger) (source, error) {
		src, err := script(fakeSource{})(o, log)
		src.Session().Unseen = []string{"remote faults", "those of others"}
		return src, err
	}
	_, _, stderr := runWith(open, "trace", "-d", "1ms")
	if want := "s by tracepoint\nfaultsnoop: hook tracepoint does not see: remote faults; those of others\n"; !strings.HasSuffix(stderr, want) {
		t.Errorf("stderr: %s", stderr)
	}
}

func TestSourceFailure(t *testing.T) {
	code, out, stderr := runWith(script(fakeSource{err: errors.New("ring gone")}), "trace", "--json")
	if code != exitFailure || !strings.Contains(stderr, "faultsnoop: reading faults: ring gone\n") || !strings.Contains(stderr, "0 faults:") {
		t.Errorf("code %d: %s", code, stderr)
	}
	if !strings.Contains(out, `"type":"summary"`) {
		t.Errorf("no summary: %s", out)
	}
}

func TestDiskFull(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	cmd := faultsnoop(t, "storm", "trace", "--json")
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = full, &stderr
	if got := exitCode(t, cmd.Run()); got != exitFailure {
		t.Errorf("exit code %d", got)
	}
	if !strings.Contains(stderr.String(), "faultsnoop: writing the output: no space left on device\n") || !strings.Contains(stderr.String(), " faults: ") {
		t.Errorf("stderr: %s", stderr.String())
	}
}

// TestOutputFile: the data goes to the file, whatever it held, and to it alone.
func TestOutputFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "out")
	for _, n := range []int{3, 1} {
		code, stdout, stderr := runWith(fakes["storm"], "trace", "--json", "-n", strconv.Itoa(n), "-o", file, "--", "sh", "-c", "exit 4")
		if code != 4 || stdout != "" {
			t.Errorf("code %d, stdout %q: %s", code, stdout, stderr)
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(string(b), "\n"); got != n+2 || !strings.HasPrefix(string(b), `{"type":"header"`) {
			t.Errorf("%d lines, want header, %d faults and summary: %s", got, n, b)
		}
	}
	if st, err := os.Stat(file); err != nil || st.Mode() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

// TestOutputFails: before the command is started, or as soon as the disk is full.
func TestOutputFails(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	code, _, stderr := runWith(fakes["storm"], "trace", "-o", "/no/such/file", "--", "touch", mark)
	if _, err := os.Stat(mark); code != exitFailure || err == nil || !strings.HasPrefix(stderr, "faultsnoop: opening the output: ") {
		t.Errorf("code %d, command run: %v: %s", code, err == nil, stderr)
	}
	oneLineOf(t, stderr)
	code, _, stderr = runWith(fakes["storm"], "trace", "-o", "/dev/full")
	if code != exitFailure || !strings.Contains(stderr, "faultsnoop: writing the output: no space left on device\n") {
		t.Errorf("code %d: %s", code, stderr)
	}
}

// TestEndsWithNamedTasks: with the last one named, be it waited for by then or not.
func TestEndsWithNamedTasks(t *testing.T) {
	for _, flag := range []string{"-p", "-t"} {
		begin := time.Now()
		args := []string{"trace", "--json", "-d", "2m"}
		for _, life := range []string{"0.1", "0.5"} {
			cmd := exec.Command("sleep", life)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			args = append(args, flag, strconv.Itoa(cmd.Process.Pid))
		}
		code, out, stderr := runWith(fakes["few"], args...)
		if took := time.Since(begin); code != 0 || took > time.Minute || took < 500*time.Millisecond {
			t.Errorf("%v: code %d after %v: %s", args, code, took, stderr)
		}
		if strings.Count(out, `{"type":"fault"`) != len(sampleFaults()) || !strings.Contains(stderr, "5 faults: ") {
			t.Errorf("%v: %s%s", args, out, stderr)
		}
	}
}

// TestClosedPipe: quiet, at once, whether faults keep coming or not, and
// with a command that goes on.
func TestClosedPipe(t *testing.T) {
	for fake, args := range map[string][]string{
		"storm": {"trace"}, "few": {"trace", "--json"}, "quiet": {"trace", "--", "sleep", "3"},
	} {
		cmd := faultsnoop(t, fake, args...)
		stderr := stderrFile(t)
		cmd.Stderr = stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		out.Close()
		if code := processExit(t, cmd); code != 0 {
			t.Errorf("%s: exit code %d", fake, code)
		}
		if said := contents(t, stderr); said != "" {
			t.Errorf("%s: not quiet: %s", fake, said)
		}
	}
}

// stderrFile is a file rather than a pipe, since a command that goes on would
// keep the pipe open.
func stderrFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func contents(t *testing.T, f *os.File) string {
	t.Helper()
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// processExit waits for the process alone, not for its descriptors to close.
func processExit(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	state, err := cmd.Process.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if ws := state.Sys().(syscall.WaitStatus); ws.Signaled() {
		return exitSignal + int(ws.Signal())
	}
	return state.ExitCode()
}

// startTraced starts the program in a session without terminal and waits for its
// first line.
func startTraced(t *testing.T, stderr io.Writer, fake string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := faultsnoop(t, fake, args...)
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, out)
	return cmd
}

func TestSignalEndsWithSummary(t *testing.T) {
	for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP} {
		stderr := stderrFile(t)
		cmd := startTraced(t, stderr, "few", "trace", "--json")
		time.Sleep(100 * time.Millisecond)
		for range 2 { // as timeout(1) does
			if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Millisecond)
		}
		code := processExit(t, cmd)
		if said := contents(t, stderr); code != 0 || !strings.HasPrefix(said, "5 faults: ") {
			t.Errorf("%v: exit code %d: %s", sig, code, said)
		}
	}
}

// TestSignalIsTheCommands: a command gets the signal, and its status is returned.
func TestSignalIsTheCommands(t *testing.T) {
	for script, want := range map[string]int{
		`trap 'exit 7' TERM HUP INT; echo; while :; do sleep 0.05; done`: 7,
		`echo; exec sleep 10`: 143,
	} {
		stderr := stderrFile(t)
		cmd := startTraced(t, stderr, "quiet", "trace", "--json", "--", "sh", "-c", script)
		time.Sleep(300 * time.Millisecond)
		if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		code := processExit(t, cmd)
		if said := contents(t, stderr); code != want || !strings.Contains(said, "0 faults: ") {
			t.Errorf("%s: exit code %d, want %d: %s", script, code, want, said)
		}
	}
}

// TestHeldWorkloadIsInterrupted: with the signal's code and without a word.
func TestHeldWorkloadIsInterrupted(t *testing.T) {
	cmd := faultsnoop(t, "quiet", "workload", "touch", "--pages", "1", "--hold", "20s")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := bufio.NewReader(stderr)
	if _, err := said.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(said)
	if code := processExit(t, cmd); code != exitSignal+int(unix.SIGINT) || len(rest) > 0 || err != nil {
		t.Errorf("exit code %d: %s %v", code, rest, err)
	}
}

// TestSecondSignal ends a program that hangs in its source.
func TestSecondSignal(t *testing.T) {
	cmd := startTraced(t, nil, "stuck", "trace", "--json")
	for range 2 {
		time.Sleep(200 * time.Millisecond)
		if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	if code := processExit(t, cmd); code != 143 {
		t.Errorf("exit code %d", code)
	}
}

// TestSecondSignalStalledReader ends a program that hangs in a write.
func TestSecondSignalStalledReader(t *testing.T) {
	cmd := faultsnoop(t, "storm", "trace", "--json")
	out, err := cmd.StdoutPipe() // nobody reads it
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		time.Sleep(300 * time.Millisecond)
		if err := cmd.Process.Signal(unix.SIGINT); err != nil {
			t.Fatal(err)
		}
	}
	if code := processExit(t, cmd); code != 130 {
		t.Errorf("exit code %d", code)
	}
}

// TestTracingEndsBeforeCommand: -n leaves the command alone and returns its status.
func TestTracingEndsBeforeCommand(t *testing.T) {
	code, out, stderr := runWith(fakes["storm"], "trace", "--json", "-n", "3", "--", "sh", "-c", "sleep 0.5; exit 6")
	if code != 6 || strings.Count(out, `{"type":"fault"`) != 3 || !strings.Contains(stderr, "waiting for the command") {
		t.Errorf("code %d: %s", code, stderr)
	}
}

// TestPrompt: a single record reaches a pipe although the buffer is far from full.
func TestPrompt(t *testing.T) {
	cmd := faultsnoop(t, "few", "trace", "--json")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for range 1 + len(sampleFaults()) {
		if !lines.Scan() {
			t.Fatal(lines.Err())
		}
		if !json.Valid(lines.Bytes()) {
			t.Errorf("no JSON: %s", lines.Bytes())
		}
	}
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if got := processExit(t, cmd); got != 0 {
		t.Errorf("exit code %d", got)
	}
}
