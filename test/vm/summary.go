package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// commandStatus returns the exit status of -cmd: the first one that is not 0.
func commandStatus(results []result) int {
	for _, r := range results {
		if p := r.report.program("cmd"); r.err == nil && p != nil {
			if p.status != 0 {
				return p.status
			}
			continue
		}
		fmt.Fprintf(os.Stderr, "vm: kernel %s: %v (console in %s)\n", r.kernel.name, r.err, r.log)
		return 1
	}
	return 0
}

// counts are the outcomes of tests, subtests included.
type counts struct {
	passed, failed, skipped int
}

func (r *report) counts() counts {
	var c counts
	for _, p := range r.programs {
		for _, t := range p.tests {
			switch t.outcome {
			case "PASS":
				c.passed++
			case "FAIL":
				c.failed++
			case "SKIP":
				c.skipped++
			}
		}
	}
	return c
}

// problems returns everything that makes a kernel's run a failure.
func (r result) problems() []string {
	var all []string
	if r.err != nil {
		all = append(all, r.err.Error())
	}
	for _, p := range r.report.programs {
		switch {
		case !p.ended:
			all = append(all, p.name+" never ended")
		case p.status != 0:
			all = append(all, fmt.Sprintf("%s: exit status %d", p.name, p.status))
		}
		for _, t := range p.tests {
			if t.outcome == "FAIL" {
				all = append(all, fmt.Sprintf("%s: %s: %s", p.name, t.name, t.reason))
			}
		}
	}
	if c := r.report.counts(); c.passed+c.failed+c.skipped == 0 {
		all = append(all, "no test ran")
	}
	for _, line := range r.report.trouble {
		all = append(all, "kernel: "+line)
	}
	return all
}

// announce prints what became of one kernel, with the whole console if it failed.
func announce(w io.Writer, r result) {
	problems := r.problems()
	if len(problems) == 0 {
		c := r.report.counts()
		fmt.Fprintf(w, "ok   %-10s %s: %d passed, %d skipped in %v\n",
			r.kernel.name, r.release, c.passed, c.skipped, r.took.Round(time.Second))
		return
	}
	fmt.Fprintf(w, "---- console of %s\n", r.kernel.name)
	if log, err := os.ReadFile(r.log); err == nil {
		for line := range strings.Lines(string(log)) {
			fmt.Fprintln(w, printable(strings.TrimRight(line, "\r\n")))
		}
	}
	fmt.Fprintf(w, "FAIL %-10s %s in %v (console in %s)\n", r.kernel.name, r.release, r.took.Round(time.Second), r.log)
	for _, p := range problems {
		fmt.Fprintf(w, "     %s\n", p)
	}
}

// summarize prints the tables over all kernels and reports whether all is well.
func summarize(w io.Writer, results []result) bool {
	var (
		total counts
		ok    = true
	)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\nKERNEL\tRELEASE\tPASSED\tFAILED\tSKIPPED\tTIME\tVERDICT")
	for _, r := range results {
		c := r.report.counts()
		total.passed += c.passed
		total.failed += c.failed
		total.skipped += c.skipped
		verdict := "ok"
		if len(r.problems()) > 0 {
			verdict, ok = "FAIL", false
			if c.failed == 0 {
				// A machine that hung must show up in the last line too.
				total.failed++
			}
		}
		fmt.Fprintf(table, "%s\t%s\t%d\t%d\t%d\t%v\t%s\n",
			r.kernel.name, r.release, c.passed, c.failed, c.skipped, r.took.Round(time.Second), verdict)
	}
	table.Flush()
	printSkips(w, results)
	fmt.Fprintf(w, "\n%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped)
	return ok
}

// printSkips prints which kernels skipped a test, and why, and marks tests that
// were skipped by every one of them: those are covered nowhere.
func printSkips(w io.Writer, results []result) {
	type skip struct{ test, reason string }
	kernels := map[skip][]string{}
	passed := map[string]bool{}
	var order []skip
	for _, r := range results {
		for _, p := range r.report.programs {
			for _, t := range p.tests {
				test := p.name + " " + t.name
				passed[test] = passed[test] || t.outcome == "PASS"
				if t.outcome != "SKIP" {
					continue
				}
				s := skip{test, t.reason}
				if kernels[s] == nil {
					order = append(order, s)
				}
				kernels[s] = append(kernels[s], r.kernel.name)
			}
		}
	}
	if len(order) == 0 {
		return
	}
	slices.SortStableFunc(order, func(a, b skip) int { return strings.Compare(a.test, b.test) })
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\nSKIPPED\tON\tBECAUSE")
	for _, s := range order {
		on := strings.Join(kernels[s], " ")
		if !passed[s.test] {
			on += " (passed on none)"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\n", s.test, on, s.reason)
	}
	table.Flush()
}
