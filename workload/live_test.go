package workload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// childEnv makes the test binary run the kind and flags of its arguments.
const childEnv = "FAULTSNOOP_WORKLOAD_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	if err := runChild(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func runChild(args []string) error {
	for _, k := range Kinds() {
		if k.Name != args[0] {
			continue
		}
		fs := pflag.NewFlagSet(k.Name, pflag.ContinueOnError)
		c := k.Bind(fs)
		if err := fs.Parse(args[1:]); err != nil {
			return err
		}
		if err := c.Validate(); err != nil {
			return err
		}
		return c.Run(context.Background(), os.Stderr)
	}
	return fmt.Errorf("no kind %q", args[0])
}

func childCommand(t *testing.T, line string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self, strings.Fields(line)...)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	return cmd
}

// raceBuild is set in a binary with the race detector.
var raceBuild bool

// skipRace skips a test of exact counts: the race detector records each system call
// of a loop in memory of its own, which takes a fault every few hundred times.
func skipRace(t *testing.T) {
	t.Helper()
	if raceBuild {
		t.Skip("the race detector takes page faults of its own while it records system calls")
	}
}

// finished is what a child left.
type finished struct {
	*Report
	stderr string
	state  *os.ProcessState
}

// run runs one workload to its end.
func run(t *testing.T, line string) finished {
	t.Helper()
	cmd := childCommand(t, line)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if stdout.Len() > 0 {
		t.Errorf("%q on stdout, which belongs to the tracer", stdout.String())
	}
	r, err := Decode(bytes.NewReader(stderr.Bytes()))
	if err != nil && !errors.Is(err, ErrNoReport) {
		t.Fatal(err)
	}
	return finished{r, stderr.String(), cmd.ProcessState}
}

// missing are the parts of messages that name something this machine does not
// have: reasons to skip.
var missing = map[string][]string{
	"uffd":    {"no userfaultfd", "opening a userfaultfd: operation not permitted"},
	"thp":     {"no transparent huge pages", "transparent huge pages are off"},
	"hugetlb": {"no pool of huge pages", "permission denied", "too fragmented", "half of the available memory"},
	"swap":    {"no swap is on"},
	"file":    {"which lives in memory"},
}

// complete runs a workload that must succeed, or skips the test.
func complete(t *testing.T, line string) finished {
	t.Helper()
	f := run(t, line)
	if f.Report == nil || !f.state.Success() {
		kind, _, _ := strings.Cut(line, " ")
		for _, reason := range missing[kind] {
			if strings.Contains(f.stderr, reason) {
				t.Skip(strings.TrimSpace(f.stderr))
			}
		}
		t.Fatalf("%v: %s", f.state, f.stderr)
	}
	return f
}

// checkReport compares a report with the kernel's counts, and with what the kernel
// says of the whole process after its end.
func checkReport(t *testing.T, f finished) {
	t.Helper()
	r := f.Report
	if !r.Exact || !r.matches(r.Counted) {
		t.Errorf("expected %+v, the kernel counted %+v", r.Expectation, r.Counted)
	}
	if r.PID != f.state.Pid() && r.Kind != "device" { // there a child takes the faults
		t.Errorf("process %d reports pid %d", f.state.Pid(), r.PID)
	}
	usage := f.state.SysUsage().(*syscall.Rusage)
	if usage.Minflt < r.Minflt || usage.Majflt < r.Majflt {
		t.Errorf("the whole process took %d minor and %d major faults, less than %+v", usage.Minflt, usage.Majflt, r.Counted)
	}
	var sum Expectation
	tids := map[int]bool{}
	for _, th := range r.Threads {
		if th.TID == 0 || tids[th.TID] {
			t.Errorf("thread id %d is 0 or there twice", th.TID)
		}
		tids[th.TID] = true
		var own Expectation
		for _, rg := range th.Ranges {
			if span := int64(rg.End-rg.Start) / int64(r.PageSize); span < rg.Pages || rg.Start >= rg.End {
				t.Errorf("%d pages in %#x-%#x", rg.Pages, uint64(rg.Start), uint64(rg.End))
			}
			own.add(rg.Expectation)
		}
		if !own.matches(th.Counted) {
			t.Errorf("thread %d: expected %+v, the kernel counted %+v", th.TID, own, th.Counted)
		}
		sum.add(own)
	}
	if sum != r.Expectation || r.Faults != r.Minor+r.Major+r.Either {
		t.Errorf("the ranges add up to %+v, the report says %+v", sum, r.Expectation)
	}
}

func TestLiveExactness(t *testing.T) {
	skipRace(t)
	for _, tc := range []struct {
		line   string
		mode   string
		faults int64
		major  int64
	}{
		{"alloc --size 41MB --block 10MB", "user", pagesOf(41 << 20), 0},
		{"touch", "user", 1024, 0},
		{"touch --pages 200 --threads 5 --stride 3 --name pool-worker", "user", 1000, 0},
		{"file", "user", 256, 0},
		{"file --warm --pages 700", "user", 700, 0},
		{"file --cold --pages 64", "user", 64, 64},
		{"file --around", "user", 256 / max(1, pagesOf(aroundBytes)), 0},
		{"cow", "user", 1024, 0},
		{"cow --huge --pages 5", "user", 5, 0},
		{"kernel", "kernel", 1024, 0},
		{"device --pages 100", "user", 100, 0},
		{"reuse", "user", 256, 0},
		{"zero", "user", 256, 0},
		{"cow-file", "user", 256, 0},
		{"cow-file --mapped", "user", 256, 0},
		{"mkwrite", "user", 256, 0},
		{"remote", "remote", 1024, 0},
		{"uffd --delay 100us", "user", 64, 0},
		{"thp --pages 3", "user", 3, 0},
		{"hugetlb --pages 2", "user", 2, 0},
		{"shmem", "user", 1024, 0},
		{"shmem --memfd", "user", 1024, 0},
		{"shmem --sysv", "user", 1024, 0},
		{"stack", "user", 128, 0},
		{"swap --pages 64", "user", 64, 0},
		{"storm --pages 1300 --cpus 1", "user", 1300, 0},
		{"image", "user", 3 * pagesOf(aroundBytes), 0},
	} {
		t.Run(tc.line, func(t *testing.T) {
			f := complete(t, tc.line)
			checkReport(t, f)
			if f.Mode != tc.mode || f.Faults != tc.faults {
				t.Errorf("%d faults in mode %s, want %d in %s", f.Faults, f.Mode, tc.faults, tc.mode)
			}
			if f.Kind != "swap" && f.Major != tc.major {
				t.Errorf("%d major faults, want %d", f.Major, tc.major)
			}
		})
	}
}

func pagesOf(bytes int64) int64 { return bytes / int64(os.Getpagesize()) }

func TestLiveThreads(t *testing.T) {
	f := complete(t, "touch --pages 10 --threads 4 --name pool-worker")
	if len(f.Threads) != 4 {
		t.Fatalf("%d threads, want 4", len(f.Threads))
	}
	for _, th := range f.Threads {
		if th.Comm != "pool-worker" || th.Minflt != 10 {
			t.Errorf("thread %d is called %q and took %d faults", th.TID, th.Comm, th.Minflt)
		}
	}
}

func TestLiveStormEndsInTime(t *testing.T) {
	skipRace(t)
	start := time.Now()
	f := complete(t, "storm --duration 200ms")
	checkReport(t, f)
	if took := time.Since(start); took < 200*time.Millisecond {
		t.Errorf("ended after %v", took)
	}
	var cpus unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cpus); err != nil {
		t.Fatal(err)
	}
	if len(f.Threads) != cpus.Count() {
		t.Errorf("%d threads for %d CPUs", len(f.Threads), cpus.Count())
	}
	for _, th := range f.Threads {
		if th.Minflt < stormPages {
			t.Errorf("thread %d took %d faults, less than one round", th.TID, th.Minflt)
		}
	}
}

func TestLiveDeath(t *testing.T) {
	for _, tc := range []struct {
		how    string
		signal syscall.Signal
	}{
		{howMapErr, syscall.SIGSEGV}, {howAccErr, syscall.SIGSEGV}, {howSIGBUS, syscall.SIGBUS},
	} {
		t.Run(tc.how, func(t *testing.T) {
			f := run(t, "segv --how "+tc.how)
			if f.Report == nil {
				t.Fatalf("no report: %s", f.stderr)
			}
			checkReport(t, f)
			status := f.state.Sys().(syscall.WaitStatus)
			if !status.Signaled() || status.Signal() != tc.signal || status.CoreDump() {
				t.Errorf("ended with %v, want the signal %v and no core dump", f.state, tc.signal)
			}
			if f.Failed != 1 || f.Faults != 16 || strings.Count(f.stderr, "\n") != 1 {
				t.Errorf("%d failed, %d resolved, stderr %q", f.Failed, f.Faults, f.stderr)
			}
		})
	}
}

func TestLiveAddresses(t *testing.T) {
	if os.Getpagesize() != 4096 {
		t.Skip("kind where is made for pages of 4096 bytes")
	}
	f := complete(t, "where")
	checkReport(t, f)
	var touches []Touch
	for _, rg := range f.Threads[0].Ranges {
		for _, touch := range rg.Touches {
			if touch.Address < rg.Start || touch.Address >= rg.End {
				t.Errorf("%#x is outside of its range", uint64(touch.Address))
			}
			touches = append(touches, touch)
		}
	}
	want := []Touch{
		{WhereData + 0x1234, "read"}, {WhereData + 0x1abc, "write"}, {WhereData + 0x5678, "write"}, {WhereCode + 0x10, "exec"},
	}
	if fmt.Sprint(touches) != fmt.Sprint(want) {
		t.Errorf("touches %x, want %x", touches, want)
	}
	if f.Faults != 3 && f.Faults != 4 {
		t.Errorf("%d faults, want 3 or, with a page of zeros shared, 4", f.Faults)
	}
}

// TestLiveHold reads the early line while the process waits, as a tracer does that
// attaches to it.
func TestLiveHold(t *testing.T) {
	cmd := childCommand(t, "touch --hold 300ms --threads 2")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd.Stderr = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	d := NewDecoder(r)
	early, err := d.Next()
	if err != nil || !early.Ready {
		t.Fatalf("early report %+v, %v", early, err)
	}
	at := time.Now()
	for _, th := range early.Threads {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", early.PID, th.TID)); err != nil {
			t.Errorf("a thread announced does not exist: %v", err)
		}
	}
	final, err := d.Next()
	if err != nil || final.Ready || time.Since(at) < 200*time.Millisecond {
		t.Fatalf("final report %+v, %v after %v", final, err, time.Since(at))
	}
	for i, th := range final.Threads {
		if th.TID != early.Threads[i].TID || th.Ranges[0].Start != early.Threads[i].Ranges[0].Start {
			t.Errorf("thread %+v was announced as %+v", th, early.Threads[i])
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestLiveLeavesNothing looks for what a workload must undo.
func TestLiveLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	complete(t, "file --dir "+dir)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
	before, err := readInt(poolFile)
	if err != nil {
		t.Skipf("no pool of huge pages: %v", err)
	}
	run(t, "hugetlb --pages 2")
	run(t, "hugetlb --pages 99999999")
	if after, err := readInt(poolFile); err != nil || after != before {
		t.Errorf("the pool of huge pages had %d pages and has %d, %v", before, after, err)
	}
}

// TestLiveChildDiesWithParent kills a workload that has forked.
func TestLiveChildDiesWithParent(t *testing.T) {
	cmd := childCommand(t, "remote --hold 1m")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	early, err := NewDecoder(stderr).Next()
	if err != nil || early.Target == 0 {
		t.Fatalf("early report %+v, %v", early, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// The child holds the other end of the pipe too.
	closed := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, stderr)
		closed <- err
	}()
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Errorf("child %d lives a minute after its parent was killed", early.Target)
		_ = unix.Kill(early.Target, unix.SIGKILL)
	}
	_ = cmd.Wait() // killed
}

func TestLivePython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	cmd := exec.CommandContext(t.Context(), python, "alloc.py", "--size", "21MB", "--block", "10MB")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	r, err := Decode(&stderr)
	if err != nil {
		t.Fatal(err)
	}
	checkReport(t, finished{Report: r, state: cmd.ProcessState})
	if want := pagesOf(21 << 20); r.Pages != want || r.Minor != want {
		t.Errorf("%d pages, %d minor faults, want %d", r.Pages, r.Minor, want)
	}
	if comm := r.Threads[0].Comm; !strings.Contains(comm, "python") {
		t.Errorf("the process is called %q", comm)
	}
	if got := stdout.String(); !strings.HasPrefix(got, "allocated 22020096 bytes in 3 blocks") || strings.Count(got, "\n") != 1 {
		t.Errorf("said %q", got)
	}
	if out, err := exec.CommandContext(t.Context(), python, "alloc.py", "--size", "1000").CombinedOutput(); err == nil {
		t.Errorf("--size 1000 was accepted: %s", out)
	}
}
