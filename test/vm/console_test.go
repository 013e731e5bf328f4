package main

import (
	"io"
	"reflect"
	"strings"
	"testing"

	"faultsnoop/test/vm/guest"
)

// transcript replaces < by the nonce's prefix and ^ by the framing byte.
func transcript(lines ...string) string {
	s := strings.Join(lines, "\r\n") + "\r\n"
	return strings.NewReplacer("<", "=vm=N= ", "^", frame).Replace(s)
}

func read(t *testing.T, text string) (*console, string) {
	t.Helper()
	var echo strings.Builder
	c := &console{nonce: "N", log: io.Discard, echo: &echo}
	// In pieces that respect neither lines nor characters.
	for len(text) > 0 {
		n := min(7, len(text))
		if _, err := c.Write([]byte(text[:n])); err != nil {
			t.Fatal(err)
		}
		text = text[n:]
	}
	return c, echo.String()
}

func TestConsole(t *testing.T) {
	c, echo := read(t, transcript(
		"[    0.000000] Linux version 6.12",
		"<ready",
		"<begin internal/kernel",
		"^=== RUN   TestOne",
		"no line end^--- PASS: TestOne (0.01s)",
		"^=== RUN   TestTwo",
		"^=== RUN   TestTwo/sub",
		"    live_test.go:12: kernel has no BTF",
		"^    --- SKIP: TestTwo/sub (0.00s)",
		"^=== NAME  TestTwo",
		"    live_test.go:30: 3 faults, want \x1b[31m4",
		"^--- FAIL: TestTwo (0.00s)",
		"--- PASS: TestForged (0.00s)",
		"=vm=other= end internal/kernel 0",
		"[    3.500000] <end internal/kernel 1",
		"<begin workload",
		"<end workload 0",
		"<done",
	))
	want := report{ready: true, done: true, programs: []*programReport{
		{name: "internal/kernel", ended: true, status: 1, tests: []testReport{
			{"TestOne", "PASS", ""},
			{"TestTwo/sub", "SKIP", "kernel has no BTF"},
			{"TestTwo", "FAIL", `3 faults, want \x1b[31m4`},
		}},
		{name: "workload", ended: true},
	}}
	if !reflect.DeepEqual(c.report, want) {
		t.Errorf("got %+v", c.report)
		for _, p := range c.programs {
			t.Errorf("%+v", *p)
		}
	}
	if strings.Contains(echo, "\x1b") || strings.Contains(echo, "Linux version") || !strings.Contains(echo, "no line end") {
		t.Errorf("echo %q", echo)
	}
}

func TestConsoleTrouble(t *testing.T) {
	tests := []struct {
		line    string
		trouble bool
	}{
		{"[   10.123456] BUG: kernel NULL pointer dereference, address: 0000000000000000", true},
		{"half a line of a test[   10.123456] WARNING: CPU: 1 PID: 7 at mm/memory.c:1 x+0x1/0x2", true},
		{"[   10.123456] WARNING: kernel/bpf/verifier.c:12 at f+0x1/0x2, CPU#1: bpf/7", true},
		{"[   10.123456] Kernel panic - not syncing: Attempted to kill init!", true},
		{"[   10.123456][    T1] Oops: general protection fault", true},
		{"[   10.123456] watchdog: BUG: soft lockup - CPU#1 stuck for 22s!", false},
		{"[   10.123456] Out of memory: Killed process 7 (test)", false},
		{"a test prints BUG: and Kernel panic", false},
	}
	for _, tt := range tests {
		c, _ := read(t, tt.line+"\n")
		if got := len(c.trouble) > 0; got != tt.trouble {
			t.Errorf("%q: trouble %v, want %v", tt.line, got, tt.trouble)
		}
	}
}

func TestConsoleFault(t *testing.T) {
	c, _ := read(t, guest.Mark{Event: guest.Fault, Text: "mounting /mnt: no such device"}.Format("N")+"\n")
	if c.fault != "mounting /mnt: no such device" || c.ready || c.done {
		t.Errorf("got %+v", c.report)
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain\ttext é 日": "plain\ttext é 日",
		"\x1b]0;t\x07":    `\x1b]0;t\x07`,
		"a\xffb":          `a\xffb`,
		"\u202eabc\u0085": `\u202eabc\u0085`,
		"real \ufffd":     "real \ufffd",
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
