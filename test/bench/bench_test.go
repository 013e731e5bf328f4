package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestRecordPatterns(t *testing.T) {
	// One line of each contender's output, as printed by the versions in Debian 12.
	lines := map[string]string{
		"faultsnoop, perf":              `{"type":"fault","time":"2026-11-30T03:10:00.000000001Z"}`,
		"bpftrace, a line":              `812345678901 12127 12127 1 touch`,
		"bpftrace, address and latency": `812345678901 12127 12127 1 touch 7f0012345000 401196 6 1234`,
		"perf record + script":          `touch 12127/12127 812.345678:          1 page-faults:     7f0012345000           401196 work`,
		"perf trace":                    `  2462.083 ( 0.000 ms): touch/12131 minfault [work+0x2bb] => //anon@0x1901ec (d.)`,
	}
	other := []string{
		"", "Attaching 1 probe...", "Lost 12 events", `{"type":"header"}`, `{"type":"summary","seen":1}`,
	}
	b := &bench{options: options{faultsnoop: "faultsnoop", pages: 1}}
	for _, c := range b.contenders() {
		if c.record == nil {
			continue // it counts
		}
		if line, ok := lines[c.name]; ok && !c.record.MatchString(line) {
			t.Errorf("%s: does not count %q", c.name, line)
		}
		delete(lines, c.name)
		for _, line := range other {
			if c.record.MatchString(line) {
				t.Errorf("%s: counts %q", c.name, line)
			}
		}
	}
	for name := range lines {
		t.Errorf("no contender %q", name)
	}
}

func TestMarkdown(t *testing.T) {
	made := func(name string, factor int) *contender {
		tracing := func(i int) sample {
			return sample{faults: 1000, elapsed: time.Duration(factor*i) * time.Millisecond, cpu: time.Duration(factor) * time.Millisecond, peakRSS: 1 << 20}
		}
		alone := sample{faults: 1000, elapsed: time.Millisecond}
		return &contender{
			name: name, record: regexp.MustCompile("fault"), records: 999, expect: 1000,
			// The median of 1, 2 and 9 times the factor.
			samples: []sample{tracing(9), tracing(1), tracing(2)}, alone: []sample{alone, alone, alone},
			timed: &sample{faults: 1000, inBPF: 500 * time.Microsecond, progs: []progTime{{"enter", 1000, 500 * time.Microsecond}}},
		}
	}
	counter := made("counter", 1)
	counter.record = nil
	b := &bench{
		options:  options{pages: 1000, rounds: 3},
		all:      []*contender{made("slow", 3), made("fast", 2), counter, {name: "gone", absent: "not installed"}},
		drawings: []drawing{{shown: "flame fp", sample: sample{after: 1500 * time.Millisecond, start: time.Second, cpu: 2 * time.Second, peakRSS: 3 << 20}, size: 1 << 19}},
	}
	got := b.markdown()
	for _, want := range []string{
		"| | slow | fast |\n",
		"| slow-down of the workload, times | 6.00 | **4.00** |\n",
		"| time added to one fault, µs | 5.0 | **3.0** |\n",
		"| CPU time of the tool for a million faults, s | 3.00 | **2.00** |\n",
		"| records for 100 faults | 99.9 | 99.9 |\n",
		"| slow | enter | 1.00 | 500 | 500 |\n",
		"| | counter |\n",
		"| flame fp | 1.50 | 3.00 | 3.0 | 0.5 |\n",
		"* gone: not measured: not installed\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no line %q in\n%s", want, got)
		}
	}
}

func TestReplaceGenerated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "doc.md")
	write := func(s string) {
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("above\n" + beginMark + "old\n" + endMark + "below\n")
	if err := replaceGenerated(path, "new\n"); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if want := "above\n" + beginMark + "new\n" + endMark + "below\n"; string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
	write("no marks\n")
	if replaceGenerated(path, "new\n") == nil {
		t.Error("a document without the marks was accepted")
	}
}

func TestCPUTime(t *testing.T) {
	before, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); {
	}
	after, err := cpuTime(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if after <= before {
		t.Errorf("CPU time went from %v to %v while this test spun for 100 ms", before, after)
	}
}
