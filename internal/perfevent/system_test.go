package perfevent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// TestSystemWide chooses among all processes by name, user and cgroup.
func TestSystemWide(t *testing.T) {
	if paranoid, err := readInt(paranoidFile); os.Geteuid() != 0 && (err != nil || paranoid > 0) {
		t.Skip("watching all processes needs root or perf_event_paranoid 0 or less")
	}
	uid := uint32(65534)
	one := copyProgram(t, "fault_sampler_x_one")
	two := copyProgram(t, "fault_sampler_x_two")
	group := makeCgroup(t)
	for _, test := range []struct {
		name string
		flt  fault.Filter
		want [3]int // faults of: one, two as another user, two in a cgroup
	}{
		{"long name", fault.Filter{Comms: []string{"fault_sampler_x_one"}}, [3]int{300, 0, 0}},
		{"short name", fault.Filter{Comms: []string{"fault_sampler"}}, [3]int{300, 300, 300}},
		{"user", fault.Filter{UID: &uid}, [3]int{0, 300, 0}},
		{"cgroup", fault.Filter{Cgroup: group}, [3]int{0, 0, 300}},
		{"cgroup and user", fault.Filter{Cgroup: group, UID: &uid}, [3]int{0, 0, 0}},
	} {
		if test.flt.Cgroup != "" && group == "" {
			t.Log("no writable cgroup v2 is mounted: left out", test.name)
			continue
		}
		s := open(t, Options{Filter: test.flt})
		done := make(chan struct{})
		var got [3]report
		go func() {
			defer close(done)
			got[0] = runProgram(t, one, 0, "")
			got[1] = runProgram(t, two, uid, "")
			got[2] = runProgram(t, two, 0, group)
		}()
		faults, c := collect(t, s, done)
		for i, r := range got {
			n := count(faults, func(f *fault.Fault) bool { return in(r)(f) && f.PID == uint32(r.PID) })
			if n > test.want[i] || n+int(c.LostTotal()) < test.want[i] {
				t.Errorf("%s: %d faults of program %d, want %d; counters %+v", test.name, n, i, test.want[i], c)
			}
		}
		// A busy machine may fill the rings.
		for _, l := range c.Lost {
			if strings.Contains(l.Where, unrecorded) && l.Count > 1+(c.Seen+c.Filtered)/1000 {
				t.Errorf("%s: counters %+v", test.name, c)
			}
		}
	}
}

// copyProgram copies this program to a name of its own, for all users.
func copyProgram(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(testProgram(t))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "perfevent")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, name)
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}

// makeCgroup makes a cgroup v2, or returns "".
func makeCgroup(t *testing.T) string {
	t.Helper()
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := process.CgroupOf(mount); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(mount, "perfevent-test-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { os.Remove(dir) })
		return dir
	}
	return ""
}

// runProgram lets a copy of this program touch 300 pages. It lives until the end of the
// test: whose a process is that ends at once may not be known.
func runProgram(t *testing.T, path string, uid uint32, cgroup string) (r report) {
	cmd := exec.Command(path, "300")
	cmd.Env = append(os.Environ(), childEnv+"=stay")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	if cgroup != "" {
		dir, err := os.Open(cgroup)
		if err != nil {
			t.Error(err)
			return r
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Error(err)
		return r
	}
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Error(err)
		return r
	}
	t.Cleanup(func() {
		if err := errors.Join(stdin.Close(), cmd.Wait()); err != nil {
			t.Error(err)
		}
	})
	if err := json.NewDecoder(stdout).Decode(&r); err != nil {
		t.Error(err)
	}
	return r
}

// TestInnerIDs watches a process in a pid namespace of its own from outside.
func TestInnerIDs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making a pid namespace needs root")
	}
	c := startChild(t, false, "wait", "100", "2")
	if c.line() != "ready" {
		t.Fatal("not ready")
	}
	if n := count(attachAndFinish(t, c), func(f *fault.Fault) bool { return f.Is(fault.HasInnerIDs) }); n != 0 {
		t.Errorf("%d faults have inner ids though there is no inner namespace", n)
	}
	c = startChild(t, false, "namespace", "100", "2")
	if c.line() != "ready" {
		t.Fatal("not ready")
	}
	faults := attachAndFinish(t, c)
	n := count(faults, func(f *fault.Fault) bool {
		return f.Is(fault.HasInnerIDs) && f.InnerPID == 1 && f.InnerTID != f.TID && f.PID != 1
	})
	if n < 200 {
		t.Errorf("%d faults of process 1 in its namespace, want 200 at least", n)
	}
}

// attachAndFinish attaches to the process that prints that it is ready, which may be
// the child's child.
func attachAndFinish(t *testing.T, c *child) []fault.Fault {
	t.Helper()
	pids := []uint32{uint32(c.pid())}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", c.pid(), c.pid()))
	if err == nil {
		for _, field := range strings.Fields(string(b)) {
			pid, _ := strconv.Atoi(field)
			pids = append(pids, uint32(pid))
		}
	}
	s := open(t, Options{Filter: fault.Filter{PIDs: pids}})
	_, faults := finish(t, s, c)
	return faults
}

// TestForeignProc works in a pid namespace whose /proc is that of another.
func TestForeignProc(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making a pid namespace needs root")
	}
	cmd := exec.Command(testProgram(t), "-test.run", "Test(Command|Family|Kernel|Failed|OwnIDsOnly)$")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("with a foreign /proc: %v\n%s", err, b)
	}
}

// TestOwnIDsOnly is run by TestForeignProc.
func TestOwnIDsOnly(t *testing.T) {
	if process.ProcIsOurs() {
		t.Skip("/proc shows our own pids; TestForeignProc runs this")
	}
	_, _, faults, _ := run(t, Options{}, "touch", "10")
	if n := count(faults, func(f *fault.Fault) bool { return f.Is(fault.HasIDs) || f.Is(fault.HasInnerIDs) }); n != 0 {
		t.Errorf("%d faults have ids that cannot be known", n)
	}
	if _, err := Open(Options{Filter: fault.Filter{PIDs: []uint32{1}}}); err == nil || !strings.Contains(err.Error(), "--mount-proc") {
		t.Errorf("got %v", err)
	}
}
