package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/kernel"
	"faultsnoop/workload"
)

// hexNumber is a 64-bit number written as "0x...".
type hexNumber uint64

func (h *hexNumber) UnmarshalJSON(b []byte) error {
	s, err := strconv.Unquote(string(b))
	if err != nil {
		return err
	}
	v, err := strconv.ParseUint(s, 0, 64)
	*h = hexNumber(v)
	return err
}

// liveFault is a line of type fault. Pointers are nil for null.
type liveFault struct {
	Type     string
	Time     time.Time
	MonoNS   uint64 `json:"mono_ns"`
	PID, TID int
	HostPID  int `json:"host_pid"`
	NSPID    int `json:"nspid"`
	CPU      int
	Comm     string
	Process  string
	Mode     *string
	Access   *string
	Major    *bool
	Address  hexNumber
	IP       *hexNumber
	Flags    []string
	Attempts *int
	Result   *string
	Kind     *string
	KindBy   *string `json:"kind_by"`
	PageSize *uint64 `json:"page_size"`
	Latency  *int64  `json:"latency_ns"`
	OffCPU   *int64  `json:"offcpu_ns"`
	Wait     *string
	Reclaim  *int64 `json:"reclaim_ns"`
	VMA      *struct {
		Start, End  *hexNumber
		PgOff       *uint64
		Perm, Label *string
		Path        *string
		Deleted     *bool
		Dev         *string
		Inode       *uint64
	}
	PgOff   *uint64
	Section *string
	Symbol  *string
	Hook    string

	Stack, Mapper []liveFrame
	StackEnd      *string `json:"stack_end"`
	MapperEnd     *string `json:"mapper_end"`
}

// liveHeader is what the header says of the hook.
type liveHeader struct {
	Hook, Reason  string
	Covers, Blind []string
}

type liveSummary struct {
	Seen, Lost, Filtered, Minor, Major, Failed, Untimed uint64

	DurationNS int64 `json:"duration_ns"`
	Hook       string
}

// traced is what one run of trace --json printed.
type traced struct {
	hook    string
	header  liveHeader
	faults  []liveFault
	lost    uint64
	summary liveSummary
	stderr  string
	code    int
}

// words dereferences what JSON may leave null.
func words(s *string) string {
	if s == nil {
		return "null"
	}
	return *s
}

// hooks runs a subtest for every hook. One that this kernel lacks is skipped with
// the reason; the kernel matrix has it elsewhere.
func hooks(t *testing.T, names []string, run func(t *testing.T, hook string)) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the BPF hooks need root")
	}
	verdicts := probeOnce()
	for _, v := range verdicts {
		for _, name := range names {
			if name != string(v.Hook) {
				continue
			}
			t.Run(name, func(t *testing.T) {
				if !v.OK {
					t.Skipf("hook %s: %s", v.Hook, v.Found)
				}
				run(t, name)
			})
		}
	}
}

// someHooks are the BPF hooks for what does not depend on how a fault is heard of: all of
// them on the host. The machines of the kernel matrix are emulated: there each kernel
// has one, and all are had.
func someHooks() []string {
	if hook, ok := map[string]string{
		"5.10": "kprobe", "6.1": "fentry", "6.12": "tracepoint", "7": "kprobe", "6.12-arm64": "fentry",
	}[os.Getenv(guestEnv)]; ok {
		return []string{hook}
	}
	return bpfHooks
}

// someSources are someHooks and hook perf.
func someSources() []string { return append(slices.Clone(someHooks()), "perf") }

var probeOnce = sync.OnceValue(func() []kernel.Verdict {
	f, _ := kernel.Probe()
	return f.Verdicts()
})

var (
	allHooks = []string{"fentry", "kprobe", "tracepoint", "perf"}
	bpfHooks = []string{"fentry", "kprobe", "tracepoint"}
)

// program is the test binary as faultsnoop, with the real sources.
func program(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	return cmd
}

// self is how a traced command line starts the test binary as faultsnoop.
func self(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

// trace runs trace --json with args and parses what it prints.
func trace(t *testing.T, hook string, args ...string) *traced {
	t.Helper()
	return finish(t, hook, start(t, hook, args...))
}

// running is a trace under way.
type running struct {
	cmd            *exec.Cmd
	stdout, stderr bytes.Buffer
	timer          *time.Timer
}

// start starts trace --json; an empty hook lets it choose.
func start(t *testing.T, hook string, args ...string) *running {
	t.Helper()
	all := []string{"trace", "--json"}
	if hook != "" {
		all = append(all, "--hook", hook)
	}
	r := &running{cmd: program(append(all, args...)...)}
	r.cmd.Stdout, r.cmd.Stderr = &r.stdout, &r.stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.timer = time.AfterFunc(6*time.Minute, func() { r.cmd.Process.Kill() })
	return r
}

// startArmed starts a trace without a command and waits until it sees faults.
func startArmed(t *testing.T, hook string, args ...string) *armedTrace {
	t.Helper()
	return arm(t, append([]string{"trace", "--json", "--hook", hook}, args...)...)
}

// startStat does the same with stat.
func startStat(t *testing.T, hook string, args ...string) *armedTrace {
	t.Helper()
	return arm(t, append([]string{"stat", "--json", "--hook", hook}, args...)...)
}

func arm(t *testing.T, args ...string) *armedTrace {
	t.Helper()
	r := &armedTrace{cmd: program(args...)}
	r.cmd.Stderr = &r.stderr
	out := newHeaderWaiter()
	r.cmd.Stdout = out
	r.out = out
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-out.seen:
	case <-time.After(4 * time.Minute):
		r.cmd.Process.Kill()
		t.Fatalf("no header after four minutes: %s", r.stderr.String())
	}
	return r
}

// armedTrace is a trace whose header has been printed: its hook is in place.
type armedTrace struct {
	cmd    *exec.Cmd
	out    *headerWaiter
	stderr bytes.Buffer
}

// stop ends the trace by INT and parses what it printed.
func (a *armedTrace) stop(t *testing.T, hook string) *traced {
	t.Helper()
	if err := a.cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	return a.wait(t, hook)
}

// stopStat does the same with stat.
func (a *armedTrace) stopStat(t *testing.T, hook string) *statRun {
	t.Helper()
	if err := a.cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := exitCode(t, a.cmd.Wait()); code != 0 {
		t.Fatalf("exit code %d: %s", code, a.stderr.String())
	}
	c := parseStat(t, a.out.buf.String(), a.stderr.String())
	if c.whole.Hook != hook {
		t.Errorf("hook %q instead of %q", c.whole.Hook, hook)
	}
	return c
}

func (a *armedTrace) wait(t *testing.T, hook string) *traced {
	t.Helper()
	code := exitCode(t, a.cmd.Wait())
	return parse(t, hook, a.out.buf.Bytes(), a.stderr.String(), code)
}

// waitLines waits until so many lines have been printed.
func (a *armedTrace) waitLines(t *testing.T, n int64) {
	t.Helper()
	waitFor(t, fmt.Sprintf("%d lines of output", n), func() bool { return a.out.lines.Load() >= n })
}

// headerWaiter keeps output, counts lines and tells when the first one is complete.
type headerWaiter struct {
	buf   bytes.Buffer
	lines atomic.Int64
	once  sync.Once
	seen  chan struct{}
}

func newHeaderWaiter() *headerWaiter { return &headerWaiter{seen: make(chan struct{})} }

func (h *headerWaiter) Write(p []byte) (int, error) {
	n, err := h.buf.Write(p)
	if lines := bytes.Count(p, []byte("\n")); lines > 0 {
		h.lines.Add(int64(lines))
		h.once.Do(func() { close(h.seen) })
	}
	return n, err
}

func finish(t *testing.T, hook string, r *running) *traced {
	t.Helper()
	err := r.cmd.Wait()
	if !r.timer.Stop() {
		t.Fatalf("trace did not end within six minutes; stderr:\n%s", r.stderr.String())
	}
	return parse(t, hook, r.stdout.Bytes(), r.stderr.String(), exitCode(t, err))
}

func parse(t *testing.T, hook string, stdout []byte, stderr string, code int) *traced {
	t.Helper()
	out := &traced{hook: hook, stderr: stderr, code: code}
	lines := bytes.Split(bytes.TrimSuffix(stdout, []byte("\n")), []byte("\n"))
	for i, line := range lines {
		if bytes.HasPrefix(line, []byte(`{"type":"fault",`)) { // most of them are
			var f liveFault
			if err := json.Unmarshal(line, &f); err != nil {
				t.Fatalf("line %d is no JSON: %v: %q\nstderr: %s", i, err, line, stderr)
			}
			out.faults = append(out.faults, f)
			continue
		}
		var kind struct{ Type string }
		if err := json.Unmarshal(line, &kind); err != nil {
			t.Fatalf("line %d is no JSON: %v: %q\nstderr: %s", i, err, line, stderr)
		}
		var err error
		switch kind.Type {
		case "header":
			err = json.Unmarshal(line, &out.header)
			if i != 0 {
				t.Errorf("header in line %d", i)
			}
		case "lost":
			var l struct{ Count uint64 }
			err = json.Unmarshal(line, &l)
			out.lost += l.Count
		case "summary":
			err = json.Unmarshal(line, &out.summary)
			if i != len(lines)-1 {
				t.Errorf("summary in line %d of %d", i, len(lines))
			}
		default:
			t.Errorf("unknown line type %q", kind.Type)
		}
		if err != nil {
			t.Fatalf("line %d: %v: %q", i, err, line)
		}
	}
	if out.summary.Hook == "" {
		t.Fatalf("no summary; exit code %d, stderr:\n%s", code, stderr)
	}
	if hook != "" && out.summary.Hook != hook {
		t.Errorf("hook %q instead of %q", out.summary.Hook, hook)
	}
	return out
}

// inRange selects the faults on a report's ranges.
func (tr *traced) inRange(r *workload.Report) []liveFault {
	var in []liveFault
	for _, f := range tr.faults {
		if r.Contains(uint64(f.Address)) {
			in = append(in, f)
		}
	}
	return in
}

// report is the workload's own account in stderr.
func (tr *traced) report(t *testing.T) *workload.Report {
	t.Helper()
	rep, err := workload.Decode(strings.NewReader(tr.stderr))
	if err != nil {
		t.Fatalf("%v; exit code %d, stderr:\n%s", err, tr.code, tr.stderr)
	}
	return rep
}

// tally counts records by how they ended.
type tally struct{ minor, major, failed, unknown int64 }

func count(faults []liveFault) tally {
	var n tally
	for i := range faults {
		f := &faults[i]
		switch {
		case f.Result == nil:
			n.unknown++
		case *f.Result != "ok":
			n.failed++
		case f.Major == nil:
			n.unknown++
		case *f.Major:
			n.major++
		default:
			n.minor++
		}
	}
	return n
}

// spawn runs a command as a child and reports the kernel's count of its faults
// from fork to exit, all of which happen while the caller is traced.
func spawn(args []string) int {
	os.Setenv(mainEnv, "1")
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ru := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	json.NewEncoder(os.Stderr).Encode(spawned{Spawned: true, PID: cmd.ProcessState.Pid(), Minflt: ru.Minflt, Majflt: ru.Majflt})
	return 0
}

type spawned struct {
	Spawned        bool
	PID            int
	Minflt, Majflt int64
}

// decodeSpawned finds the line that spawn printed.
func decodeSpawned(t *testing.T, stderr string) spawned {
	t.Helper()
	for line := range strings.Lines(stderr) {
		var s spawned
		if strings.HasPrefix(line, "{") && json.Unmarshal([]byte(line), &s) == nil && s.Spawned {
			return s
		}
	}
	t.Fatalf("no account of the spawned child in:\n%s", stderr)
	return spawned{}
}
