// Command bench measures what tracing page faults costs: faultsnoop's own hooks
// beside bpftrace and perf doing the same job on the same workload. It prints
// Markdown tables; `make bench` puts them into docs/overhead.md.
//
// All figures of a table come from one run in which the contenders take turns, each
// right after a run of the workload alone. Absolute times depend on the machine;
// the ratios are the result.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	// The bench starts itself to become the rivals it measures.
	if len(os.Args) > 2 && os.Args[1] == launchCommand {
		exit(launch(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == stacksCommand {
		exit(manyStacks())
	}
	var opt options
	flag.StringVar(&opt.faultsnoop, "faultsnoop", "bin/faultsnoop", "the `binary` to measure")
	flag.IntVar(&opt.pages, "pages", 300_000, "faults in one run of the workload")
	flag.IntVar(&opt.rounds, "rounds", 5, "measured rounds; medians are shown")
	update := flag.String("update", "", "replace the generated part of this Markdown `file`")
	flag.Parse()
	exit(run(opt, *update))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

type options struct {
	faultsnoop    string
	pages, rounds int
}

func run(opt options, update string) error {
	if os.Geteuid() != 0 {
		return errors.New("must run as root: the tracers use BPF and perf events")
	}
	var err error
	if opt.faultsnoop, err = filepath.Abs(opt.faultsnoop); err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "faultsnoop-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)

	b := &bench{options: opt, scratch: scratch, progress: os.Stderr}
	if err := b.measure(); err != nil {
		return err
	}
	b.draw()
	text := b.markdown()
	fmt.Print(text)
	if update == "" {
		return nil
	}
	return replaceGenerated(update, text)
}
