package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// A flame graph of many faults with many different stacks.
const (
	flameFaults = 1_000_000
	flameStacks = 10_000
)

// stacksCommand, as the first argument, makes the bench become the workload of a flame graph.
const stacksCommand = "many-stacks"

// drawing is one flame graph.
type drawing struct {
	shown string
	// sample's after is from the end of the workload to that of the tool.
	sample sample
	size   int64 // bytes, of the file
	absent string
}

// draw has flame graphs drawn, one by each way to take stacks.
func (b *bench) draw() {
	for _, way := range []string{"fp", "full"} {
		file := filepath.Join(b.scratch, "flame.html")
		argv := []string{b.faultsnoop, "flame", "--stack=" + way, "-o", file, "--", self(), stacksCommand}
		d := drawing{shown: "faultsnoop flame --stack=" + way}
		fmt.Fprintf(b.progress, "drawing: %s\n", d.shown)
		var err error
		if d.sample, err = execute(append([]string{self(), launchCommand}, argv...), os.Stderr, true); err == nil {
			var info os.FileInfo
			if info, err = os.Stat(file); err == nil {
				d.size = info.Size()
			}
		}
		if err != nil {
			d.absent = err.Error()
		}
		b.drawings = append(b.drawings, d)
	}
}

func (b *bench) writeDrawings(t *strings.Builder) {
	fmt.Fprintf(t, "A flame graph of %d faults with %d different stacks:\n\n"+
		"| | time from the program's end to the tool's, s | CPU time of the tool, s | peak memory, MiB | HTML file, MiB |\n|---|---:|---:|---:|---:|\n", flameFaults, flameStacks)
	for _, d := range b.drawings {
		if d.absent != "" {
			fmt.Fprintf(t, "| %s | not measured: %s | | | |\n", d.shown, d.absent)
			continue
		}
		s := &d.sample
		fmt.Fprintf(t, "| %s | %.2f | %.2f | %.1f | %.1f |\n", d.shown, s.after.Seconds(), (s.start + s.cpu).Seconds(),
			float64(s.peakRSS)/(1<<20), float64(d.size)/(1<<20))
	}
	t.WriteString("\n")
}

// manyStacks takes flameFaults faults, reporting as a workload does.
func manyStacks() error {
	const each = flameFaults / flameStacks
	size := os.Getpagesize()
	mem, err := unix.Mmap(-1, 0, each*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == nil {
		err = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
	}
	if err != nil {
		return fmt.Errorf("mapping memory: %w", err)
	}
	out := json.NewEncoder(os.Stderr)
	if err := out.Encode(workload.Report{Type: "workload", Ready: true}); err != nil {
		return err
	}
	time.Sleep(hold)
	for path := range flameStacks {
		left(mem, size, pathBits, path)
		if err := unix.Madvise(mem, unix.MADV_DONTNEED); err != nil {
			return fmt.Errorf("dropping pages: %w", err)
		}
	}
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return err
	}
	return out.Encode(workload.Report{Type: "workload", Counted: workload.Counted{Minflt: usage.Minflt, Majflt: usage.Majflt}})
}

// pathBits has a bit of a stack's number for each of its frames.
const pathBits = 14

//go:noinline
func left(mem []byte, size, bits, path int) { descend(mem, size, bits, path) }

//go:noinline
func right(mem []byte, size, bits, path int) { descend(mem, size, bits, path) }

//go:noinline
func descend(mem []byte, size, bits, path int) {
	switch {
	case bits == 0:
		for i := 0; i < len(mem); i += size {
			mem[i] = 1
		}
	case path&1 == 0:
		left(mem, size, bits-1, path>>1)
	default:
		right(mem, size, bits-1, path>>1)
	}
}
