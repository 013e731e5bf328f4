package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/test/memlock"
	"faultsnoop/workload"
)

// guestEnv is set in the guests of the kernel matrix (test/vm/guest). A test that
// finds it set owns the machine.
const guestEnv = "FAULTSNOOP_VM"

func ownMachine(t *testing.T) {
	t.Helper()
	if os.Getenv(guestEnv) == "" {
		t.Skip("it changes the whole machine: " + guestEnv + " is not set, this is no guest of the kernel matrix")
	}
}

// anyKernel marks a test of what is decided above the kernel.
func anyKernel(t *testing.T) {
	t.Helper()
	if os.Getenv(guestEnv) != "" {
		t.Skip("it is the same on every kernel, and was run on the host: emulated machines are slow")
	}
}

// bestHook is the hook that would be chosen here, for what does not depend on it.
func bestHook(t *testing.T) string {
	t.Helper()
	needRoot(t)
	for _, v := range probeOnce() {
		if v.OK {
			return string(v.Hook)
		}
	}
	t.Fatal("no hook works here")
	return ""
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("it needs root: for BPF hooks, namespaces, limits or other users")
	}
}

// statusOf is an exit code as a shell shows it, 128+N for signal N.
func statusOf(cmd *exec.Cmd, code int) int {
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && st.Signaled() {
		return 128 + int(st.Signal())
	}
	return code
}

// patience is how long anything may take that takes no time on an idle machine.
const patience = 4 * time.Minute

// holdTime is how long a held workload waits by itself: long enough to stop it.
const holdTime = 2 * time.Second

// held is a workload that is stopped when its memory and threads exist and before
// its first fault.
type held struct {
	cmd     *exec.Cmd
	reports *workload.Decoder
	ready   *workload.Report
}

func hold(t *testing.T, exe string, args ...string) *held {
	t.Helper()
	cmd := exec.Command(exe, append(append([]string{"workload"}, args...), "--hold", holdTime.String())...)
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	return holdCmd(t, cmd)
}

func holdCmd(t *testing.T, cmd *exec.Cmd) *held {
	t.Helper()
	h := &held{cmd: cmd}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	h.reports = workload.NewDecoder(stderr)
	startKilled(t, cmd)
	if h.ready, err = h.reports.Next(); err != nil {
		t.Fatalf("workload %q: %v", cmd.Args, err)
	}
	h.stop(t)
	return h
}

func (h *held) stop(t *testing.T) {
	t.Helper()
	h.signal(t, unix.SIGSTOP)
	waitFor(t, "the workload to stop", func() bool { return statField(h.cmd.Process.Pid, 3) == "T" })
}

func (h *held) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := h.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// finish lets the workload take its faults and end.
func (h *held) finish(t *testing.T) *workload.Report {
	t.Helper()
	rep := h.end(t)
	if !rep.Exact {
		t.Fatalf("the kernel counted other faults than the workload expects: %+v", rep)
	}
	return rep
}

// end does the same whatever the kernel counted.
func (h *held) end(t *testing.T) *workload.Report {
	t.Helper()
	h.signal(t, unix.SIGCONT)
	rep, err := h.reports.Next()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	return rep
}

// startKilled starts a process that will not outlive the test.
func startKilled(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
}

// runWorkload runs a workload to its end.
func runWorkload(t *testing.T, args ...string) *workload.Report {
	t.Helper()
	return reportOf(t, program(append([]string{"workload"}, args...)...))
}

// reportOf runs a command that becomes a workload.
func reportOf(t *testing.T, cmd *exec.Cmd) *workload.Report {
	t.Helper()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%q: %v\n%s", cmd.Args, err, stderr.String())
	}
	rep, err := workload.Decode(&stderr)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

// traceBy runs a command that becomes trace --json.
func traceBy(t *testing.T, hook string, cmd *exec.Cmd) *traced {
	t.Helper()
	r := &running{cmd: cmd}
	cmd.Stdout, cmd.Stderr = &r.stdout, &r.stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.timer = time.AfterFunc(6*time.Minute, func() { cmd.Process.Kill() })
	return finish(t, hook, r)
}

// outcome runs a command and returns its exit code, as a shell shows it, and output.
func outcome(t *testing.T, cmd *exec.Cmd) (code int, stdout, stderr string) {
	t.Helper()
	var out, talk bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &talk
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(2*patience, func() { cmd.Process.Kill() })
	err := cmd.Wait()
	if !timer.Stop() {
		t.Fatalf("%q did not end\n%s", cmd.Args, talk.String())
	}
	return exitCode(t, err), out.String(), talk.String()
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waiting for %s: not within %v", what, patience)
		}
	}
}

// statField is a field of /proc/PID/stat, counted from 1 as in proc(5), from the third on.
func statField(pid, n int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(b), ") ") // no test names a thread like this
	fields := strings.Fields(rest)
	if n-3 >= len(fields) {
		return ""
	}
	return fields[n-3]
}

// faultsOf is the kernel's own count of a process's faults so far.
func faultsOf(t *testing.T, pid int) int64 {
	t.Helper()
	var sum int64
	for _, field := range []int{10, 12} { // minflt, majflt
		n, err := strconv.ParseInt(statField(pid, field), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// rusageFaults is the same of a process that has ended.
func rusageFaults(cmd *exec.Cmd) int64 {
	ru := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	return ru.Minflt + ru.Majflt
}

// copyProgram copies the test binary to a name of its own, where every user can run it.
func copyProgram(t *testing.T, name string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "faultsnoop-case-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	from, err := os.Open(self(t))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	path := filepath.Join(dir, name)
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(to, from)
	if err := errors.Join(err, to.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// stage does a job in a process of its own and then becomes the rest of the command
// line, if there is any.
func stage(args []string) int {
	job, rest := args[0], args[1:]
	var err error
	switch job {
	case "efault": // the kernel writes to address 0x10 on our behalf
		return efault()
	case "cold": // faults while the stack is in swap
		return touchOnColdStack()
	case "call": // ADDRESS
		return call(rest[0])
	case "pin": // CPU
		var set unix.CPUSet
		var cpu int
		if cpu, err = strconv.Atoi(rest[0]); err == nil {
			runtime.LockOSThread() // exec keeps the caller's CPUs
			set.Set(cpu)
			err = unix.SchedSetaffinity(0, &set)
		}
		rest = rest[1:]
	case "namespace": // in new pid and mount namespaces
		err = remount(func() error { return unix.Mount("proc", "/proc", "proc", 0, "") })
	case "container": // the same, with files of its own in /tmp
		err = remount(func() error {
			return errors.Join(unix.Mount("proc", "/proc", "proc", 0, ""), unix.Mount("none", "/tmp", "tmpfs", 0, ""))
		})
	case "debug-folder": // FOLDER, in a new mount namespace
		err = remount(func() error {
			return errors.Join(os.MkdirAll(debugFolder, 0o755), unix.Mount(rest[0], debugFolder, "", unix.MS_BIND, ""))
		})
		rest = rest[1:]
	case "scarce": // in a new mount namespace
		const locked = 64 << 10
		err = errors.Join(remount(hideTracefs), unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: locked, Max: locked}))
	case "memlock": // where the unwinder of any language loads
		runtime.LockOSThread() // exec keeps the caller's system call filter
		err = memlock.Allow()
	case "without-btf": // in a new mount namespace
		err = remount(func() error { return unix.Mount("none", "/sys/kernel/btf", "tmpfs", 0, "") })
	default:
		err = errors.New("no such job")
	}
	if err == nil {
		var path string
		if path, err = exec.LookPath(rest[0]); err == nil {
			os.Setenv(mainEnv, "1")
			err = unix.Exec(path, rest, os.Environ())
		}
	}
	fmt.Fprintf(os.Stderr, "stage %s: %v\n", job, err)
	return 1
}

// debugFolder is where debuggers look for symbols that were taken out of programs.
const debugFolder = "/usr/lib/debug"

// remount changes mounts of this process's own namespace only.
func remount(change func() error) error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return change()
}

func hideTracefs() error {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	lines := strings.Split(string(b), "\n")
	slices.Reverse(lines) // tracefs is mounted below debugfs
	for _, line := range lines {
		if w := strings.Fields(line); len(w) > 2 && (w[2] == "tracefs" || w[2] == "debugfs") {
			err = errors.Join(err, unix.Unmount(w[1], unix.MNT_DETACH))
		}
	}
	return err
}

func efault() int {
	fd, err := unix.Open("/dev/zero", unix.O_RDONLY, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	_, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), 0x10, 8)
	if errno != unix.EFAULT {
		fmt.Fprintf(os.Stderr, "reading to address 0x10: %v instead of EFAULT\n", errno)
		return 1
	}
	return 0
}

// What touchOnColdStack faults on.
const coldAddress, coldPages = 0x6d0000000000, 200

// touchOnColdStack has its callers' frames written to swap and faults on fresh pages.
func touchOnColdStack() int {
	size := uintptr(os.Getpagesize())
	p, err := unix.MmapPtr(-1, 0, unsafe.Add(nil, coldAddress), coldPages*size, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	mem := unsafe.Slice((*byte)(p), coldPages*size)
	if err := unix.Madvise(mem, unix.MADV_NOHUGEPAGE); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	debug.SetGCPercent(-1) // it would look at the stack
	runtime.LockOSThread()
	const frames = 20
	resident := make([]byte, frames)
	left := descend(frames, func(deepest uintptr) {
		from := (deepest + 2*size - 1) &^ (size - 1)
		for range 50 {
			unix.RawSyscall(unix.SYS_MADVISE, from, (frames-2)*size, unix.MADV_PAGEOUT)
			unix.RawSyscall(unix.SYS_MINCORE, from, (frames-2)*size, uintptr(unsafe.Pointer(&resident[0])))
			if !slices.Contains(resident, 1) {
				break
			}
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
		for at := uintptr(0); at < uintptr(len(mem)); at += size {
			mem[at] = 1
		}
	})
	if slices.Contains(resident, 1) || left == 0 {
		fmt.Fprintln(os.Stderr, "the stack stayed in memory: is swap on?")
	}
	return 0
}

// descend calls itself in frames of a page and more, and then f with where the last is.
//
//go:noinline
func descend(frames int, f func(deepest uintptr)) int {
	var frame [4096]byte
	frame[frames] = 1
	if frames == 0 {
		f(uintptr(unsafe.Pointer(&frame)))
	} else {
		frame[0] = byte(descend(frames-1, f))
	}
	return int(frame[frames]) + int(frame[0])
}

// call calls a function at a fixed address. A func value points to a word that holds
// the address of its code.
func call(address string) int {
	entry, err := strconv.ParseUint(address, 0, 64)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	value := unsafe.Pointer(&entry)
	(*(*func())(unsafe.Pointer(&value)))()
	return 0
}
