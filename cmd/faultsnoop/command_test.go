package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// startTest starts argv stopped, in this process.
func startTest(t *testing.T, argv ...string) *command {
	t.Helper()
	path, err := resolve(argv[0])
	if err != nil {
		t.Fatal(err)
	}
	c, err := startStopped(path, argv)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Abort)
	return c
}

func TestCommandStatus(t *testing.T) {
	for script, want := range map[string]int{
		"exit 0": 0, "exit 3": 3, "kill -SEGV $$": 139, "kill -TERM $$": 143, "kill -KILL $$": 137,
	} {
		c := startTest(t, "sh", "-c", script)
		if err := c.Release(); err != nil {
			t.Fatal(err)
		}
		if got := c.Wait(); got != want {
			t.Errorf("%s: status %d, want %d", script, got, want)
		}
	}
}

// A shim waits, and so calls exec, on the thread that perf events are opened for.
func TestShimThread(t *testing.T) {
	for range 10 {
		pid := startTest(t, "true").PID()
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
		if err != nil {
			t.Skip(err) // CONFIG_HAVE_ARCH_TRACEHOOK, and the permission to look
		}
		// It has said that it is ready and may not be in its next call yet.
		for deadline := time.Now().Add(patience); !strings.HasPrefix(string(b), fmt.Sprintf("%d ", unix.SYS_READ)); {
			if time.Now().After(deadline) {
				t.Fatalf("the main thread of a shim is in system call %q, want read", b)
			}
			time.Sleep(time.Millisecond)
			b, _ = os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
		}
	}
}

// TestExitCodes is case 11: the code of the command, or why it could not run.
func TestExitCodes(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("exit 9\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	badScript := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(badScript, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		argv []string
		want int
	}{
		{[]string{"sh", "-c", "exit 3"}, 3},
		{[]string{"sh", "-c", "kill -SEGV $$"}, 139},
		{[]string{"true"}, 0},
		{[]string{"/no/such"}, 127},
		{[]string{"/etc/passwd"}, 126},
		{[]string{"/etc"}, 126},
		{[]string{plain}, 9},
		{[]string{badScript}, 127},
	} {
		err := faultsnoop(t, "few", append([]string{"trace", "--"}, c.argv...)...).Run()
		if got := exitCode(t, err); got != c.want {
			t.Errorf("%q: exit code %d, want %d", c.argv, got, c.want)
		}
	}
}

// TestCommandSeesNothingOfUs: arguments, environment, descriptors, process group
// and signals are those that a shell would have given it.
func TestCommandSeesNothingOfUs(t *testing.T) {
	const script = `printf '%s\n' "$0" "$@"; env | sort; for n in 0 1 2 3 4 5 6 7 8 9; do [ -e /proc/$$/fd/$n ] && echo fd $n; done; ` +
		`cut -d' ' -f5 /proc/$$/stat; grep -E '^Sig(Blk|Ign)' /proc/$$/status; ulimit -Sn; cat <&7`
	argv := []string{"-c", script, "name", "a b", "", "*"}
	output := func(cmd *exec.Cmd) string {
		extra, err := os.Open("/proc/version")
		if err != nil {
			t.Fatal(err)
		}
		defer extra.Close()
		cmd.ExtraFiles = []*os.File{nil, nil, nil, nil, extra} // 7
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	direct := exec.Command("sh", argv...)
	direct.Env = faultsnoop(t, "few").Env
	traced := faultsnoop(t, "few", append([]string{"trace", "--json", "--", "sh"}, argv...)...)
	want := output(direct)
	var got strings.Builder
	for line := range strings.Lines(output(traced)) {
		if !strings.HasPrefix(line, `{"type":`) {
			got.WriteString(line)
		}
	}
	wanted, gotten := strings.Split(want, "\n"), strings.Split(got.String(), "\n")
	if len(wanted) != len(gotten) {
		t.Fatalf("%d lines, %d without us", len(gotten), len(wanted))
	}
	for i := range wanted {
		if gotten[i] != wanted[i] {
			t.Errorf("%q, without us %q", gotten[i], wanted[i])
		}
	}
	if !strings.Contains(want, "Linux version") {
		t.Fatalf("descriptor 7 is missing without us, too: %s", want)
	}
}

func TestStoppedUntilReleased(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	c := startTest(t, "sh", "-c", "echo $$ >"+mark)
	time.Sleep(100 * time.Millisecond)
	if _, err := os.Stat(mark); err == nil {
		t.Fatal("the command ran before its release")
	}
	if err := c.Release(); err != nil {
		t.Fatal(err)
	}
	c.Wait()
	said, err := os.ReadFile(mark)
	if err != nil || strings.TrimSpace(string(said)) != strconv.Itoa(c.PID()) {
		t.Errorf("the command's pid is %q, %v, want %d", said, err, c.PID())
	}
}

func TestReleaseReturnsAfterExec(t *testing.T) {
	c := startTest(t, "sleep", "10")
	if err := c.Release(); err != nil {
		t.Fatal(err)
	}
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", c.PID()))
	if err != nil || string(comm) != "sleep\n" {
		t.Errorf("comm %q, %v", comm, err)
	}
	c.Abort() // must leave a command alone that runs
	if err := c.Signal(syscall.Signal(0)); err != nil || isEnded(c) {
		t.Errorf("a running command was ended: %v", err)
	}
	if err := c.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := c.Wait(); got != 143 {
		t.Errorf("status %d", got)
	}
	if err := c.Signal(unix.SIGTERM); err != nil {
		t.Errorf("a signal to a command that has ended: %v", err)
	}
}

func isEnded(c *command) bool {
	select {
	case <-c.Ended():
		return true
	default:
		return false
	}
}

func TestAbortLeavesNothing(t *testing.T) {
	c := startTest(t, "sleep", "10")
	c.Abort()
	if err := unix.Kill(c.PID(), 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("process %d is still there: %v", c.PID(), err)
	}
}

// TestOwnFailureLeavesNoChild is the end of case 11.
func TestOwnFailureLeavesNoChild(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	cmd := faultsnoop(t, "broken", "trace", "--", "touch", mark)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if got := exitCode(t, cmd.Run()); got != exitFailure {
		t.Errorf("exit code %d", got)
	}
	oneLineOf(t, stderr.String())
	time.Sleep(50 * time.Millisecond)
	if _, err := os.Stat(mark); err == nil {
		t.Error("the command ran")
	}
}

// TestTracerDies: a shim whose tracer is killed ends without running the command.
func TestTracerDies(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	fds, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	said, err := makePipe()
	if err != nil {
		t.Fatal(err)
	}
	shim := exec.Command("/proc/self/exe")
	shim.Args = []string{"faultsnoop", "/bin/touch", "touch", mark}
	shim.Env = append(os.Environ(), shimEnv+"=3,4")
	shim.ExtraFiles = []*os.File{fds.reader, said.writer}
	if err := shim.Start(); err != nil {
		t.Fatal(err)
	}
	fds.reader.Close()
	said.writer.Close()
	if _, err := said.reader.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	fds.writer.Close() // as the kernel does for a process that was killed
	if got := exitCode(t, shim.Wait()); got != exitFailure {
		t.Errorf("exit code %d", got)
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("the command ran")
	}
}
