package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// bench is one whole measurement.
type bench struct {
	options
	scratch  string // a folder for what the contenders write
	progress io.Writer
	load     float64 // of the machine before the first run
	all      []*contender
	drawings []drawing
}

// measure lets the contenders take turns. One that fails in its trial is left out
// with the reason; a later failure is an error.
func (b *bench) measure() error {
	var err error
	if b.load, err = loadAverage(); err != nil {
		return fmt.Errorf("reading the load of the machine: %w", err)
	}
	b.all = b.contenders()
	for _, c := range b.all {
		if c.absent != "" {
			continue
		}
		fmt.Fprintf(b.progress, "trial: %s\n", c.name)
		if err := b.trial(c); err != nil {
			c.absent = err.Error()
			fmt.Fprintf(b.progress, "left out: %s: %v\n", c.name, err)
		}
	}
	for round := range b.rounds {
		for _, c := range b.all {
			if c.absent != "" {
				continue
			}
			fmt.Fprintf(b.progress, "round %d of %d: %s\n", round+1, b.rounds, c.name)
			if err := b.measureOne(c); err != nil {
				return fmt.Errorf("measuring %s: %w", c.name, err)
			}
		}
	}
	return nil
}

// trial runs a contender once with its output kept, to count its records, and once
// with the run times of BPF programs taken, which costs time itself.
func (b *bench) trial(c *contender) error {
	path := filepath.Join(b.scratch, "output")
	s, err := b.trace(c, path)
	if err != nil {
		return err
	}
	c.expect = s.faults
	if c.record != nil {
		if c.records, err = countLines(path, c.record); err != nil {
			return err
		}
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return fmt.Errorf("switching on BPF run times: %w", err)
	}
	defer stats.Close()
	s, err = b.trace(c, os.DevNull)
	c.timed = &s
	return err
}

func (b *bench) measureOne(c *contender) error {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	alone, err := execute(b.workload(), null, true)
	if err != nil {
		return fmt.Errorf("running the workload alone: %w", err)
	}
	s, err := b.trace(c, os.DevNull)
	if err != nil {
		return err
	}
	c.alone = append(c.alone, alone)
	c.samples = append(c.samples, s)
	return nil
}

// trace runs a contender, and what prints its records, with output to a file.
func (b *bench) trace(c *contender, output string) (sample, error) {
	out, err := os.OpenFile(output, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return sample{}, err
	}
	defer out.Close()
	s, err := execute(c.trace, out, true)
	if err != nil || c.print == nil {
		return s, err
	}
	printing, err := execute(c.print, out, false)
	if err != nil {
		return sample{}, fmt.Errorf("printing what was recorded: %w", err)
	}
	s.cpu += printing.cpu
	s.peakRSS = max(s.peakRSS, printing.peakRSS)
	return s, nil
}

func countLines(path string, record *regexp.Regexp) (int, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n := 0
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if record.Match(lines.Bytes()) {
			n++
		}
	}
	return n, lines.Err()
}
