package perfevent

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

func setPanicOnFault() (undo func()) {
	old := debug.SetPanicOnFault(true)
	return func() { debug.SetPanicOnFault(old) }
}

// open opens a session and closes it at the end of the test.
func open(t *testing.T, opt Options) *Session {
	t.Helper()
	s, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// collect reads until the channel is closed, stops, and returns all faults.
func collect(t *testing.T, s *Session, until <-chan struct{}) ([]fault.Fault, fault.Counters) {
	t.Helper()
	var all []fault.Fault
	for {
		select {
		case <-until:
			if err := s.Stop(); err != nil {
				t.Error(err)
			}
			until = nil
		default:
		}
		b, err := s.Next(context.Background())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b.Faults...)
	}
	c, err := s.Counters()
	if err != nil {
		t.Fatal(err)
	}
	return all, c
}

// run starts a child under a session of its own and returns what both have to say.
func run(t *testing.T, opt Options, args ...string) (*Session, []report, []fault.Fault, fault.Counters) {
	t.Helper()
	c := startChild(t, true, args...)
	opt.CommandPID = c.pid()
	s := open(t, opt)
	done := make(chan struct{})
	var reports []report
	go func() {
		defer close(done)
		c.release()
		reports = c.wait()
	}()
	faults, counters := collect(t, s, done)
	return s, reports, faults, counters
}

func in(r report) func(f *fault.Fault) bool {
	return func(f *fault.Fault) bool { return f.Address >= r.Start && f.Address < r.End }
}

func count(faults []fault.Fault, keep func(*fault.Fault) bool) (n int) {
	for i := range faults {
		if keep(&faults[i]) {
			n++
		}
	}
	return n
}

// TestUserOfEndedCommand lets a command and its child end before anything is read.
func TestUserOfEndedCommand(t *testing.T) {
	uid := uint32(os.Getuid())
	c := startChild(t, true, "family", "1", "100")
	s := open(t, Options{CommandPID: c.pid(), Filter: fault.Filter{UID: &uid, Children: true}})
	c.release()
	r := c.wait()[0]
	done := make(chan struct{})
	close(done)
	faults, counters := collect(t, s, done)
	if got := count(faults, in(r)); got != 100 || counters.Filtered != 0 {
		t.Errorf("%d faults in the range, want 100; %d filtered out", got, counters.Filtered)
	}
}

// TestCommand counts a command from its exec on, exactly.
func TestCommand(t *testing.T) {
	const pages = 5000
	s, reports, faults, c := run(t, Options{}, "touch", "5000")
	r := reports[0]
	if got := count(faults, in(r)); got != pages {
		t.Errorf("%d faults in the range, want %d", got, pages)
	}
	if c.Seen != uint64(len(faults)) || c.Minor+c.Major != c.Seen || c.LostTotal() != 0 || c.Filtered != 0 {
		t.Errorf("%d faults delivered, counters %+v", len(faults), c)
	}
	if info := s.Session(); info.Hook != "perf" || info.CPUs < 1 || info.PageSize != pageSize || !slices.Contains(info.Covers, "user") ||
		!strings.Contains(strings.Join(info.Blind, "; "), "gain privileges") {
		t.Errorf("session %+v", info)
	}
	last, newest := map[uint32]uint64{}, uint64(0)
	for i := range faults {
		f := &faults[i]
		if f.End < last[f.TID] {
			t.Fatalf("a fault of thread %d at %d follows one at %d", f.TID, f.End, last[f.TID])
		}
		last[f.TID] = f.End
		if f.End+maxDelay < newest {
			t.Fatalf("a fault at %d follows one at %d", f.End, newest)
		}
		newest = max(newest, f.End)
		if !in(r)(f) {
			continue
		}
		if !f.OK() || f.Major || f.Mode != fault.User || f.PID != uint32(r.PID) || f.TID != uint32(r.TID) {
			t.Fatalf("fault %+v, child %+v", *f, r)
		}
		if !f.Is(fault.HasLatency|fault.HasLabel|fault.HasPgOff) || f.Latency <= 0 || f.VMA.Label != "[anon]" || f.PgOff != f.Address/pageSize {
			t.Fatalf("fault %+v", *f)
		}
		if f.Is(fault.HasVMA) && (f.VMA.Start > r.Start || f.VMA.End < r.End) {
			t.Fatalf("fault %+v of range %x-%x", *f, r.Start, r.End)
		}
	}
}

func TestNoEntries(t *testing.T) {
	s, reports, faults, _ := run(t, Options{NoEntries: true}, "touch", "1000")
	if got := count(faults, in(reports[0])); got != 1000 {
		t.Errorf("%d faults in the range, want 1000", got)
	}
	if n := count(faults, func(f *fault.Fault) bool { return f.Is(fault.HasLatency) }); n != 0 {
		t.Errorf("%d faults have a latency", n)
	}
	if info := s.Session(); !slices.Contains(info.Blind, "latency") || slices.Contains(info.Covers, "failed") {
		t.Errorf("session %+v", info)
	}
}

// TestExistingThreads attaches to a process that has threads already.
func TestExistingThreads(t *testing.T) {
	c := startChild(t, false, "wait", "200", "4")
	if got := c.line(); got != "ready" {
		t.Fatal(got)
	}
	s := open(t, Options{Filter: fault.Filter{PIDs: []uint32{uint32(c.pid())}, Children: true}})
	reports, faults := finish(t, s, c)
	if len(reports) != 4 {
		t.Fatalf("%d reports", len(reports))
	}
	for _, r := range reports {
		got := count(faults, func(f *fault.Fault) bool { return in(r)(f) && f.PID == uint32(r.PID) && f.TID == uint32(r.TID) })
		if got != 200 || r.TID == r.PID {
			t.Errorf("thread %d of %d: %d faults, want 200", r.TID, r.PID, got)
		}
	}
}

// finish releases a child that waits and reads the session until the child ends.
func finish(t *testing.T, s *Session, c *child) ([]report, []fault.Fault) {
	t.Helper()
	done := make(chan struct{})
	var reports []report
	go func() {
		defer close(done)
		c.release()
		reports = c.wait()
	}()
	faults, _ := collect(t, s, done)
	return reports, faults
}

// TestThread attaches to one thread of several.
func TestThread(t *testing.T) {
	c := startChild(t, false, "wait", "100", "3")
	c.line()
	tids, err := process.Threads(c.pid())
	if err != nil {
		t.Fatal(err)
	}
	var total int
	// Which of the threads will touch is not known yet; try all with one session each.
	var sessions []*Session
	for _, tid := range tids {
		sessions = append(sessions, open(t, Options{Filter: fault.Filter{TIDs: []uint32{uint32(tid)}}, BufferPages: 16}))
	}
	c.release()
	reports := c.wait()
	done := make(chan struct{})
	close(done)
	for i, s := range sessions {
		faults, _ := collect(t, s, done)
		for _, r := range reports {
			got := count(faults, in(r))
			if got != 0 && tids[i] != r.TID {
				t.Errorf("thread %d: %d faults of thread %d", tids[i], got, r.TID)
			}
			total += got
		}
	}
	if total != 300 {
		t.Errorf("%d faults, want 300", total)
	}
}

// TestThreadNames matches the names of threads and of the process.
func TestThreadNames(t *testing.T) {
	for _, test := range []struct {
		comm string
		want int
	}{
		{"pool-worker", 400},
		{"exe", 400}, // the process's name, though the threads have another
		{"nosuch", 0},
	} {
		opt := Options{Filter: fault.Filter{Comms: []string{test.comm}, Children: true}}
		_, reports, faults, c := run(t, opt, "touch", "100", "4", "pool-worker")
		var got int
		for _, r := range reports {
			got += count(faults, func(f *fault.Fault) bool { return in(r)(f) && f.Comm.String() == "pool-worker" })
		}
		if got != test.want {
			failed := count(faults, func(f *fault.Fault) bool { return !f.OK() })
			t.Errorf("%s: %d faults, want %d; %d failed in all", test.comm, got, test.want, failed)
		}
		if test.want == 0 && (c.Seen != 0 || c.Filtered < 400) {
			t.Errorf("%s: counters %+v", test.comm, c)
		}
	}
}

func TestFamily(t *testing.T) {
	for _, children := range []bool{true, false} {
		_, reports, faults, c := run(t, Options{Filter: fault.Filter{Children: children}}, "family", "3", "300")
		if len(reports) != 3 {
			t.Fatalf("%d reports", len(reports))
		}
		for _, r := range reports {
			want := 0
			if children {
				want = 300
			}
			got := count(faults, func(f *fault.Fault) bool { return in(r)(f) && f.PID == uint32(r.PID) })
			if got != want {
				t.Errorf("children %v: %d faults of process %d, want %d", children, got, r.PID, want)
			}
		}
		if !children && c.Filtered < 900 {
			t.Errorf("%d faults filtered, want 900 at least", c.Filtered)
		}
	}
}

// TestMajor reads a file that is not in the page cache.
func TestMajor(t *testing.T) {
	const pages = 64
	path := filepath.Join(t.TempDir(), "cold-file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, (pages+1)*int(pageSize))); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	_, reports, faults, c := run(t, Options{}, "file", path)
	r := reports[0]
	if r.Maj == 0 {
		t.Skipf("the file system of %s keeps the file in memory: no major fault can be had", path)
	}
	var major int
	for i := range faults {
		f := &faults[i]
		if !in(r)(f) {
			continue
		}
		if f.Major {
			major++
		}
		// The file is mapped from its second page on.
		if want := (f.Address-r.Start)/pageSize + 1; f.PgOff != want || f.VMA.Label != "cold-file" {
			t.Errorf("page offset %d in %q, want %d", f.PgOff, f.VMA.Label, want)
		}
	}
	if major != int(r.Maj) || c.Major < uint64(major) {
		t.Errorf("%d major faults in the range, the child counts %d, counters %+v", major, r.Maj, c)
	}
	only := true
	_, reports, faults, c = run(t, Options{Filter: fault.Filter{Major: &only}}, "file", path)
	if got := count(faults, in(reports[0])); got != int(reports[0].Maj) || c.Minor != 0 || c.Filtered == 0 {
		t.Errorf("%d major faults, the child counts %d, counters %+v", got, reports[0].Maj, c)
	}
}

// TestKernelMode counts faults that read(2) takes on a fresh buffer.
func TestKernelMode(t *testing.T) {
	const pages = 256
	s, reports, faults, _ := run(t, Options{}, "read", "256")
	want := pages
	if s.userOnly {
		want = 0
		if slices.Contains(s.Session().Covers, "kernel") {
			t.Errorf("covers %v", s.Session().Covers)
		}
	}
	got := count(faults, func(f *fault.Fault) bool { return in(reports[0])(f) && f.Mode == fault.Kernel })
	if got != want {
		t.Errorf("%d faults in kernel mode, want %d", got, want)
	}
}

// TestFailed counts accesses that end in a signal.
func TestFailed(t *testing.T) {
	_, reports, faults, c := run(t, Options{}, "bad", "20")
	got := count(faults, func(f *fault.Fault) bool { return in(reports[0])(f) && !f.Is(fault.HasResult) && !f.Is(fault.HasMajor) })
	if got != 20 {
		t.Errorf("%d failed faults, want 20", got)
	}
	if c.Seen != c.Minor+c.Major+20 {
		t.Errorf("counters %+v", c)
	}
}

func TestSample(t *testing.T) {
	_, reports, faults, c := run(t, Options{Sample: 10}, "touch", "5000")
	if c.Seen < 5000 || uint64(len(faults)) != (c.Seen+9)/10 {
		t.Errorf("%d faults kept, counters %+v", len(faults), c)
	}
	// Faults of the child's other threads come in between.
	others := int(c.Seen) - 5000
	if n := count(faults, in(reports[0])); n < 499-others || n > 501+others {
		t.Errorf("%d faults of 5000 kept, want a tenth; %d others", n, others)
	}
}

// TestCPUComesOnline takes away a CPU's events and waits for them to come back, as
// they do when a CPU comes online.
func TestCPUComesOnline(t *testing.T) {
	c := startChild(t, false, "wait", "500", "4")
	c.line()
	s := open(t, Options{Filter: fault.Filter{PIDs: []uint32{uint32(c.pid())}}})
	last := len(s.rings) - 1
	gone := s.rings[last]
	s.rings = s.rings[:last]
	if err := s.retire(gone.cpu); err != nil {
		t.Fatal(err)
	}
	if err := gone.close(); err != nil {
		t.Fatal(err)
	}
	s.nextCPUs = 0
	if _, err := s.Next(context.Background()); err != nil {
		t.Fatal(err)
	}
	if len(s.rings) != last+1 {
		t.Fatalf("%d rings, want %d", len(s.rings), last+1)
	}
	reports, faults := finish(t, s, c)
	for _, r := range reports {
		if got := count(faults, in(r)); got != 500 {
			t.Errorf("%d faults of thread %d, want 500", got, r.TID)
		}
	}
}

func TestNextReturns(t *testing.T) {
	c := startChild(t, true, "touch", "10")
	s := open(t, Options{CommandPID: c.pid()})
	if b, err := s.Next(context.Background()); err != nil || len(b.Faults) != 0 {
		t.Errorf("got %+v, %v before anything has happened", b, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancel: %v", err)
	}
}

func TestNoSuchTask(t *testing.T) {
	for _, flt := range []fault.Filter{{PIDs: []uint32{1<<22 + 1}}, {TIDs: []uint32{1<<22 + 1}}} {
		if _, err := Open(Options{Filter: flt}); err == nil || !strings.Contains(err.Error(), "check the id") {
			t.Errorf("%+v: %v", flt, err)
		}
	}
	if _, err := Open(Options{Filter: fault.Filter{Cgroup: "/proc"}}); err == nil || !strings.Contains(err.Error(), "cgroup") {
		t.Errorf("cgroup: %v", err)
	}
}

// TestDescriptors opens and closes sessions and counts what is left.
func TestDescriptors(t *testing.T) {
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	before := open()
	self := []uint32{uint32(os.Getpid())}
	for range 3 {
		s, err := Open(Options{Filter: fault.Filter{PIDs: self, Self: true}})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(Options{Filter: fault.Filter{PIDs: []uint32{self[0], 1<<22 + 1}}}); err == nil {
			t.Fatal("attached to a process that cannot be")
		}
	}
	if after := open(); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// TestUnprivileged runs the tests above as an ordinary user.
func TestUnprivileged(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to become another user; as an ordinary user all other tests are this one")
	}
	if paranoid, err := readInt(paranoidFile); err != nil || paranoid > 2 {
		t.Skipf("perf_event_paranoid is %d (%v): ordinary users may not use perf events", paranoid, err)
	}
	const nobody = 65534
	program := copyProgram(t, "perfevent.test")
	dir := filepath.Dir(program)
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	roomForRings(t)
	cmd := exec.Command(program, "-test.run", "Test(Command|NoEntries|Existing|Thread|Family|Major|Kernel|Failed|Lost|Sample|CPU|Next|NoSuch|Refused|Descriptors|Kind|Filter|Backings)")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("as user nobody: %v\n%s", err, b)
	}
}

// roomForRings lets an ordinary user pin what later kernels allow by default (8 MiB
// since 5.16): 64 KiB leave no room for the second session that some tests open.
func roomForRings(t *testing.T) {
	t.Helper()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	const room = 8 << 20
	if old.Cur >= room {
		return
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: room, Max: max(room, old.Max)}); err != nil {
		t.Skipf("RLIMIT_MEMLOCK is %d and may not be raised: %v", old.Cur, err)
	}
	t.Cleanup(func() { unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old) })
}

// TestRefused asks for what an ordinary user may not have.
func TestRefused(t *testing.T) {
	paranoid, err := readInt(paranoidFile)
	if os.Geteuid() == 0 || err != nil || paranoid < 2 {
		t.Skip("nothing is refused to root or at perf_event_paranoid below 2; TestUnprivileged runs this")
	}
	kernel := fault.Kernel
	for _, test := range []struct {
		flt  fault.Filter
		want string
	}{
		{fault.Filter{}, "watching all processes needs 0 or less"},
		{fault.Filter{PIDs: []uint32{1}}, "belongs to another user"},
		{fault.Filter{PIDs: []uint32{uint32(os.Getpid())}, Mode: &kernel}, "kernel mode"},
	} {
		if _, err := Open(Options{Filter: test.flt}); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.flt, err, test.want)
		}
	}
}
