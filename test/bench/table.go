package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// row is one measure of all contenders; lower is better.
type row struct {
	name   string
	value  func(*contender) (v float64, known bool)
	format string
}

var rows = []row{
	{"slow-down of the workload, times", func(c *contender) (float64, bool) {
		return c.median(func(s, alone sample) float64 { return s.elapsed.Seconds() / alone.elapsed.Seconds() }), true
	}, "%.2f"},
	{"time added to one fault, µs", func(c *contender) (float64, bool) {
		return c.median(func(s, alone sample) float64 {
			return float64((s.elapsed - alone.elapsed).Microseconds()) / float64(s.faults)
		}), true
	}, "%.1f"},
	{"of that in its BPF programs, ns", func(c *contender) (float64, bool) {
		return float64(c.timed.inBPF.Nanoseconds()) / float64(c.timed.faults), len(c.timed.progs) > 0
	}, "%.0f"},
	{"CPU time of the tool for a million faults, s", func(c *contender) (float64, bool) {
		return c.median(func(s, _ sample) float64 { return s.cpu.Seconds() / float64(s.faults) * 1e6 }), true
	}, "%.2f"},
	{"CPU time of the tool to start, s", func(c *contender) (float64, bool) {
		return c.median(func(s, _ sample) float64 { return s.start.Seconds() }), true
	}, "%.2f"},
	{"peak memory of the tool, MiB", func(c *contender) (float64, bool) {
		return c.median(func(s, _ sample) float64 { return float64(s.peakRSS) / (1 << 20) }), true
	}, "%.1f"},
}

// median of what f makes of each round.
func (c *contender) median(f func(s, alone sample) float64) float64 {
	values := make([]float64, len(c.samples))
	for i, s := range c.samples {
		values[i] = f(s, c.alone[i])
	}
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}

// markdown is the whole result. In each row the lowest value is bold.
func (b *bench) markdown() string {
	var measured, absent []*contender
	for _, c := range b.all {
		if c.absent == "" {
			measured = append(measured, c)
		} else {
			absent = append(absent, c)
		}
	}
	var t strings.Builder
	fmt.Fprintf(&t, "Measured %s with `%smake bench BENCHFLAGS='-pages %d -rounds %d'` on\n%s. %s\n\n",
		time.Now().UTC().Format(time.DateOnly), priority(), b.pages, b.rounds, machine(), b.quietness())
	t.WriteString("One record for each fault:\n\n")
	writeComparison(&t, slices.DeleteFunc(slices.Clone(measured), func(c *contender) bool { return c.record == nil }))
	t.WriteString("Counts only:\n\n")
	writeComparison(&t, slices.DeleteFunc(slices.Clone(measured), func(c *contender) bool { return c.record != nil || c.byStack }))
	t.WriteString("Counts by stack:\n\n")
	writeComparison(&t, slices.DeleteFunc(slices.Clone(measured), func(c *contender) bool { return !c.byStack }))
	b.writeDrawings(&t)
	writePrograms(&t, measured)
	t.WriteString("What was run, with the workload behind it and standard output to /dev/null:\n\n")
	for _, c := range measured {
		fmt.Fprintf(&t, "* %s: `%s`\n", c.name, c.shown)
	}
	for _, c := range absent {
		fmt.Fprintf(&t, "* %s: not measured: %s\n", c.name, c.absent)
	}
	return t.String()
}

func writeComparison(t *strings.Builder, measured []*contender) {
	t.WriteString("| |")
	for _, c := range measured {
		fmt.Fprintf(t, " %s |", c.name)
	}
	t.WriteString("\n|---|" + strings.Repeat("---:|", len(measured)) + "\n")
	for _, r := range rows {
		cells := make([]string, len(measured))
		best := -1
		var lowest float64
		for i, c := range measured {
			v, known := r.value(c)
			if !known {
				cells[i] = "-"
				continue
			}
			cells[i] = fmt.Sprintf(r.format, v)
			if best < 0 || v < lowest {
				best, lowest = i, v
			}
		}
		if best >= 0 {
			cells[best] = "**" + cells[best] + "**"
		}
		fmt.Fprintf(t, "| %s | %s |\n", r.name, strings.Join(cells, " | "))
	}
	if len(measured) > 0 && measured[0].record != nil {
		t.WriteString("| records for 100 faults |")
		for _, c := range measured {
			fmt.Fprintf(t, " %.1f |", 100*float64(c.records)/float64(c.expect))
		}
		t.WriteString("\n")
	}
	t.WriteString("\n")
}

func writePrograms(t *strings.Builder, measured []*contender) {
	t.WriteString("The BPF programs, timed by the kernel (BPF_ENABLE_STATS), which adds its own two clock readings to each run:\n\n" +
		"| tool | program | runs for one fault | ns for one run | ns for one fault |\n|---|---|---:|---:|---:|\n")
	for _, c := range measured {
		for _, p := range c.timed.progs {
			if p.runs == 0 {
				continue
			}
			faults, ns := float64(c.timed.faults), float64(p.time.Nanoseconds())
			fmt.Fprintf(t, "| %s | %s | %.2f | %.0f | %.0f |\n", c.name, p.name, float64(p.runs)/faults, ns/float64(p.runs), ns/faults)
		}
	}
	t.WriteString("\n")
}

func machine() string {
	var u unix.Utsname
	release := "an unknown kernel"
	if unix.Uname(&u) == nil {
		release = "Linux " + unix.ByteSliceToString(u.Release[:])
	}
	return fmt.Sprintf("%s, %s, %d CPUs", release, runtime.GOARCH, runtime.NumCPU())
}

// priority is how the command line begins if the bench runs at another priority
// than usual, which the contenders inherit.
func priority() string {
	// The system call returns 20 - nice (getpriority in kernel/sys.c).
	p, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil || p == 20 {
		return ""
	}
	return fmt.Sprintf("nice -n %d ", 20-p)
}

// quietness warns of other work on the machine while b measured.
func (b *bench) quietness() string {
	if b.load < 0.5 {
		return "The machine was idle."
	}
	return fmt.Sprintf("The machine was busy with other work (load average %.1f at the start): slow-downs are rough.", b.load)
}

// loadAverage is the number of threads that ran or wanted to during the last minute.
func loadAverage() (float64, error) {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	first, _, _ := bytes.Cut(text, []byte(" "))
	return strconv.ParseFloat(string(first), 64)
}

// The generated part of a document is between these lines.
const (
	beginMark = "<!-- made by make bench: begin -->\n"
	endMark   = "<!-- made by make bench: end -->\n"
)

func replaceGenerated(path, text string) error {
	doc, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok1 := bytes.Cut(doc, []byte(beginMark))
	_, after, ok2 := bytes.Cut(rest, []byte(endMark))
	if !ok1 || !ok2 {
		return fmt.Errorf("%s: has no lines %q and %q", path, strings.TrimSpace(beginMark), strings.TrimSpace(endMark))
	}
	doc = slices.Concat(before, []byte(beginMark), []byte(text), []byte(endMark), after)
	return os.WriteFile(path, doc, 0o644)
}
