package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// mainEnv makes the test binary the program: "1" with the real sources, "spawn" and
// "stage" helpers of the live tests, else with the fake source of that name.
const mainEnv = "FAULTSNOOP_MAIN"

func TestMain(m *testing.M) {
	beShim()
	time.Local = time.UTC // golden files hold local times
	switch name := os.Getenv(mainEnv); name {
	case "":
		// Under nohup the programs started here would ignore HUP too. A signal that is
		// caught, unlike one that is ignored, has its usual meaning after exec.
		if signal.Ignored(unix.SIGHUP) {
			signal.Notify(make(chan os.Signal, 1), unix.SIGHUP)
		}
		os.Exit(m.Run())
	case "1":
		main()
	case "spawn":
		os.Exit(spawn(os.Args[1:]))
	case "stage":
		os.Exit(stage(os.Args[1:]))
	default:
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr, fakes[name]))
	}
}

// faultsnoop returns the test binary as the program with a fake source. One that hangs
// is killed, which its exit code tells.
func faultsnoop(t *testing.T, fake string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	// A binary with the race detector would sleep for a second before its end.
	cmd.Env = append(os.Environ(), mainEnv+"="+fake, "GORACE=atexit_sleep_ms=0")
	return cmd
}

// exitCode is the code as a shell shows it.
func exitCode(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	t.Fatal(err)
	return -1
}

// runWith runs the program in this process.
func runWith(open opener, args ...string) (code int, stdout, stderr string) {
	var out, talk bytes.Buffer
	code = run(context.Background(), args, &out, &talk, open)
	return code, out.String(), talk.String()
}

// fakes are the sources that the test binary can be started with.
var fakes = map[string]opener{
	"few":   script(fakeSource{batches: []fault.Batch{{Faults: sampleFaults()}}}),
	"quiet": script(fakeSource{}),
	"storm": script(fakeSource{batches: []fault.Batch{{Faults: manyFaults(500)}}, endless: true}),
	"stuck": script(fakeSource{deaf: true}),
	"broken": func(sourceOptions, *slog.Logger) (source, error) {
		return nil, errors.New("opening the hook: operation not permitted;\n  run it as root")
	},
}

// script makes an opener of a fake.
func script(f fakeSource) opener {
	return func(o sourceOptions, _ *slog.Logger) (source, error) {
		s := f
		s.mu = new(sync.Mutex)
		s.session = fakeSession()
		s.session.Command = o.Command
		return &s, nil
	}
}

// fakeSource yields batches without a kernel.
type fakeSource struct {
	session fault.Session
	batches []fault.Batch
	endless bool // batches repeat
	deaf    bool // Stop does not help
	err     error

	stopped, closed bool
	mu              *sync.Mutex // guards counters
	counters        fault.Counters
}

func (s *fakeSource) Session() *fault.Session { return &s.session }

func (s *fakeSource) Next(ctx context.Context) (*fault.Batch, error) {
	switch {
	case s.stopped && s.endless, len(s.batches) == 0 && s.stopped && !s.deaf:
		return nil, io.EOF
	case len(s.batches) > 0:
		b := s.batches[0]
		if !s.endless {
			s.batches = s.batches[1:]
		}
		s.count(&b)
		return &b, nil
	case s.err != nil:
		return nil, s.err
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(50 * time.Millisecond):
		return &fault.Batch{}, nil
	}
}

func (s *fakeSource) count(b *fault.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range b.Faults {
		f := &b.Faults[i]
		s.counters.Seen++
		switch {
		case f.Is(fault.HasResult) && f.Result != fault.OK:
			s.counters.Failed++
		case f.Is(fault.HasMajor) && f.Major:
			s.counters.Major++
		case f.Is(fault.HasMajor):
			s.counters.Minor++
		}
	}
	s.counters.Lost = append(s.counters.Lost, b.Lost...)
}

func (s *fakeSource) Stop() error { s.stopped = true; return nil }

func (s *fakeSource) Counters() (fault.Counters, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.counters
	c.Lost = slices.Clone(c.Lost)
	return c, nil
}

func (s *fakeSource) Close() error { s.closed = true; return nil }

func fakeSession() fault.Session {
	return fault.Session{
		Hook: "tracepoint", Reason: "fentry: refused", Covers: []string{"user", "kernel", "failed"}, Blind: []string{"remote faults"},
		Kernel: "6.18.0", Host: "box", CPUs: 2, PageSize: 4096,
		Started: time.Date(2026, 11, 30, 3, 2, 1, 0, time.UTC), MonoStarted: 1_000_000_000,
		FlagNames: []fault.BitName{{Bit: 1, Name: "WRITE"}, {Bit: 0x40, Name: "USER"}, {Bit: 0x100, Name: "INSTRUCTION"}},
	}
}

// sampleFaults are one of everything: ordinary, all unknown, hostile, big numbers.
func sampleFaults() []fault.Fault {
	const most = fault.HasLatency | fault.HasMode | fault.HasAccess | fault.HasMajor | fault.HasFlags | fault.HasAttempts |
		fault.HasResult | fault.HasIP | fault.HasVMA | fault.HasPgOff | fault.HasLabel | fault.HasKind | fault.HasBefore | fault.HasAfter
	plain := fault.Fault{
		End: 1_000_250_000, Latency: 12_345, PID: 4711, TID: 4711, CPU: 1, Comm: fault.MakeComm("python3"), Process: fault.MakeComm("python3"),
		Known: most, Access: fault.Write, Attempts: 1, Flags: 0x41, Address: 0x7f12345671a8, IP: 0x55d0c0ffee00, PgOff: 0x7f1234567,
		VMA:  fault.VMA{Start: 0x7f1234500000, End: 0x7f1234600000, PgOff: 0x7f1234500, Flags: fault.PermFlags("rw-p"), Label: "[anon]"},
		Kind: fault.Anon, KindExact: true, EntryAfter: 0x8000000000000867, Pages: 1,
	}
	major := plain
	major.End, major.Latency, major.TID, major.Comm = 1_000_900_000, 2_345_678, 4712, fault.MakeComm("pool-worker")
	major.Major, major.Access, major.Flags, major.Attempts = true, fault.Exec, 0x80000140, 2
	major.Address, major.PgOff = 0x7f9912345000, 0x45
	major.VMA = fault.VMA{Start: 0x7f9912300000, End: 0x7f9912400000, Flags: fault.PermFlags("r-xp"), Label: "libc.so.6"}
	major.Kind, major.EntryAfter, major.Pages = fault.File, 0x25, 16
	nothing := fault.Fault{End: 2_000_000_000, CPU: 0, Comm: fault.MakeComm("x"), Address: 0x10}
	hostile := plain
	hostile.End, hostile.Comm, hostile.Process = 2_100_000_000, fault.MakeComm("=a\"b\\\x1b[2J\xff\n"), fault.MakeComm("漢字\u202e")
	hostile.Kind, hostile.Level, hostile.EntryAfter = fault.THP, 1, 0x80000000000008e7
	hostile.VMA.Label = "@evil\x1b]0;x\a,\"名前"
	big := plain
	big.End, big.PID, big.TID, big.CPU, big.Address = 2_200_000_000, 4194303, 4194304, 127, 0xffffffffff600400
	big.Result, big.Mode, big.Known = fault.SIGSEGV, fault.Kernel, most&^(fault.HasVMA|fault.HasLabel|fault.HasPgOff|fault.HasFlags|fault.HasKind|fault.HasBefore|fault.HasAfter)|fault.HasSomeFlag
	return []fault.Fault{plain, major, nothing, hostile, big}
}

func manyFaults(n int) []fault.Fault {
	faults := make([]fault.Fault, n)
	for i := range faults {
		faults[i] = sampleFaults()[0]
	}
	return faults
}

// oneLineOf fails unless text is one line that names the program.
func oneLineOf(t *testing.T, text string) {
	t.Helper()
	if !strings.HasPrefix(text, "faultsnoop: ") || strings.Count(text, "\n") != 1 || !strings.HasSuffix(text, "\n") {
		t.Errorf("not one line of ours: %q", text)
	}
}
