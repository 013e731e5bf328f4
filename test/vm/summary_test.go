package main

import (
	"errors"
	"strings"
	"testing"
)

func passing(name string) result {
	return result{kernel: kernel{name: name}, report: report{ready: true, done: true, programs: []*programReport{
		{name: "p", ended: true, tests: []testReport{{"TestA", "PASS", ""}, {"TestB", "SKIP", "no swap"}}},
	}}}
}

func TestSummarize(t *testing.T) {
	tests := []struct {
		name   string
		spoil  func(r *result)
		ok     bool
		last   string
		phrase string // somewhere in the problems
	}{
		{"all well", func(*result) {}, true, "2 passed, 0 failed, 2 skipped", ""},
		{"test failed", func(r *result) {
			p := r.report.programs[0]
			p.status = 1
			p.tests = append(p.tests, testReport{"TestC", "FAIL", "3, want 4"})
		}, false, "2 passed, 1 failed, 2 skipped", "TestC: 3, want 4"},
		{
			"machine hung", func(r *result) { r.err = errors.New("machine did not power off in time") },
			false, "2 passed, 1 failed, 2 skipped", "power off",
		},
		{
			"program without end", func(r *result) { r.report.programs[0].ended = false },
			false, "2 passed, 1 failed, 2 skipped", "p never ended",
		},
		{
			"crash after the tests", func(r *result) { r.report.programs[0].status = 139 },
			false, "2 passed, 1 failed, 2 skipped", "exit status 139",
		},
		{
			"no test ran", func(r *result) { r.report.programs[0].tests = nil },
			false, "1 passed, 1 failed, 1 skipped", "no test ran",
		},
		{
			"kernel bug", func(r *result) { r.report.trouble = []string{"BUG: x"} },
			false, "2 passed, 1 failed, 2 skipped", "BUG: x",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			results := []result{passing("5.10"), passing("6.12")}
			tt.spoil(&results[1])
			var out strings.Builder
			if ok := summarize(&out, results); ok != tt.ok {
				t.Errorf("ok = %v, want %v", ok, tt.ok)
			}
			if !strings.HasSuffix(out.String(), "\n"+tt.last+"\n") {
				t.Errorf("last line is not %q:\n%s", tt.last, out.String())
			}
			if problems := strings.Join(results[1].problems(), "\n"); !strings.Contains(problems, tt.phrase) {
				t.Errorf("problems %q lack %q", problems, tt.phrase)
			}
		})
	}
}

func TestPrintSkips(t *testing.T) {
	a, b := passing("5.10"), passing("6.12")
	b.report.programs[0].tests = []testReport{{"TestA", "SKIP", "too new"}, {"TestB", "SKIP", "no swap"}}
	var out strings.Builder
	printSkips(&out, []result{a, b})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines:\n%s", len(lines), out.String())
	}
	if got := strings.Join(strings.Fields(lines[1]), " "); got != "p TestA 6.12 too new" {
		t.Errorf("got %q", got)
	}
	if got := strings.Join(strings.Fields(lines[2]), " "); got != "p TestB 5.10 6.12 (passed on none) no swap" {
		t.Errorf("got %q", got)
	}
}
