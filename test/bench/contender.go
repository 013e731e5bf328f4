package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// contender is one way of getting one record per fault.
type contender struct {
	// name heads its column.
	name string
	// shown is the command line for the reader, without the workload.
	shown string
	// trace is the command line with the workload.
	trace []string
	// print, if not nil, turns what trace recorded into one line per fault. Its
	// costs are added to the tracer's.
	print []string
	// record matches the lines that stand for one fault each; nil if faults are counted
	// instead of listed.
	record *regexp.Regexp
	// byStack: faults are counted by their stacks.
	byStack bool
	// absent says why it could not be measured, if it could not.
	absent string

	samples []sample
	alone   []sample // the workload right before each of samples
	timed   *sample  // a run with the BPF programs' times taken
	records int      // lines for one run of the workload
	expect  int64    // faults in that run
}

// launchCommand, as the first argument, makes the bench become a rival.
const launchCommand = "launch-rival"

func (b *bench) workload() []string {
	return []string{
		b.faultsnoop, "workload", "touch", "--threads", "1",
		"--pages", fmt.Sprint(b.pages), "--hold", hold.String(),
	}
}

func (b *bench) contenders() []*contender {
	var all []*contender
	for _, hook := range []string{"fentry", "kprobe", "tracepoint", "perf"} {
		all = append(all, b.own(hook))
	}
	for _, hook := range []string{"fentry", "kprobe", "tracepoint", "perf"} {
		all = append(all, b.ownCounting("stat", hook))
		all = append(all, b.ownCounting("stat by", hook, "--by", "process,mapping"))
	}
	for _, hook := range []string{"fentry", "kprobe", "tracepoint"} {
		all = append(all, b.ownStacks(hook))
	}
	all = append(all, b.ownUnwound())
	const (
		line = `software:page-faults:1 /pid == cpid/ ` +
			`{ printf("%llu %d %d %d %s\n", nsecs, pid, tid, cpu, comm); }`
		whole = `tracepoint:exceptions:page_fault_user /pid == cpid/ ` +
			`{ @t[tid] = nsecs; @a[tid] = args->address; @i[tid] = args->ip; @e[tid] = args->error_code; } ` +
			`software:minor-faults:1, software:major-faults:1 /@t[tid]/ ` +
			`{ printf("%llu %d %d %d %s %llx %llx %d %llu\n", ` +
			`nsecs, pid, tid, cpu, comm, @a[tid], @i[tid], @e[tid], nsecs - @t[tid]); ` +
			`delete(@t[tid]); delete(@a[tid]); delete(@i[tid]); delete(@e[tid]); }`
		stacks = `software:page-faults:1 /pid == cpid/ { @[ustack] = count(); }`
		counts = `tracepoint:exceptions:page_fault_user /pid == cpid/ { @t[tid] = nsecs; } ` +
			`software:minor-faults:1, software:major-faults:1 /@t[tid]/ ` +
			`{ @faults[comm] = count(); @ns = hist(nsecs - @t[tid]); delete(@t[tid]); }`
	)
	data := filepath.Join(b.scratch, "perf.data")
	return append(all,
		b.bpftrace("bpftrace, a line", line),
		b.bpftrace("bpftrace, address and latency", whole),
		b.bpftraceCounting("bpftrace, count and hist", counts, false),
		b.bpftraceCounting("bpftrace, ustack", stacks, true),
		b.rival(contender{
			name:   "perf record + script",
			trace:  []string{"perf", "record", "-q", "-e", "page-faults", "-c", "1", "-d", "-o", data, "--"},
			print:  []string{"perf", "script", "-i", data, "-F", "comm,pid,tid,time,event,addr,ip"},
			record: regexp.MustCompile(`page-faults:`),
		}),
		b.rival(contender{
			name:   "perf trace",
			trace:  []string{"perf", "trace", "-F", "all", "--no-syscalls", "-o", "/dev/stdout", "--"},
			record: regexp.MustCompile(`(min|maj)fault \[`),
		}))
}

func (b *bench) own(hook string) *contender {
	argv := []string{b.faultsnoop, "trace", "--hook", hook, "--json", "--"}
	return &contender{
		name:   "faultsnoop, " + hook,
		shown:  "faultsnoop " + strings.Join(argv[1:len(argv)-1], " "),
		trace:  append(argv, b.workload()...),
		record: regexp.MustCompile(`^{"type":"fault"`),
	}
}

// ownCounting counts by kind, and in tables if flags ask for them, instead of listing.
func (b *bench) ownCounting(name, hook string, flags ...string) *contender {
	argv := append(append([]string{b.faultsnoop, "stat", "--hook", hook}, flags...), "--")
	return &contender{
		name:  "faultsnoop " + name + ", " + hook,
		shown: "faultsnoop " + strings.Join(argv[1:len(argv)-1], " "),
		trace: append(argv, b.workload()...),
	}
}

// ownStacks counts by stack, by frame pointers.
func (b *bench) ownStacks(hook string) *contender {
	argv := []string{b.faultsnoop, "stat", "--hook", hook, "--by", "stack", "--stack=fp", "--"}
	return &contender{
		name:    "faultsnoop, fp, " + hook,
		shown:   "faultsnoop " + strings.Join(argv[1:len(argv)-1], " "),
		trace:   append(argv, b.workload()...),
		byStack: true,
	}
}

// ownUnwound counts by stack with the unwinder of any language, which wants the limit of
// locked memory raised as bpftrace does.
func (b *bench) ownUnwound() *contender {
	c := b.rival(contender{name: "faultsnoop, full", trace: []string{b.faultsnoop, "stat", "--by", "stack", "--stack=full", "--"}, byStack: true})
	c.shown = "faultsnoop stat --by stack --stack=full"
	return c
}

func (b *bench) bpftraceCounting(name, script string, byStack bool) *contender {
	c := b.bpftrace(name, script)
	c.record, c.byStack = nil, byStack
	return c
}

func (b *bench) bpftrace(name, script string) *contender {
	c := b.rival(contender{
		name:   name,
		trace:  []string{"bpftrace", "-e", script, "-c", strings.Join(b.workload(), " ")},
		record: regexp.MustCompile(`^\d+ \d+`),
	})
	c.shown = "bpftrace -e '" + strings.ReplaceAll(script, "\n", `\n`) + "'"
	return c
}

// rival completes a contender: its trace may end in "--" for the workload to follow.
func (b *bench) rival(c contender) *contender {
	if _, err := exec.LookPath(c.trace[0]); err != nil {
		c.absent = "not installed"
	}
	c.shown = strings.Join(c.trace, " ")
	if last := len(c.trace) - 1; c.trace[last] == "--" {
		c.shown = strings.Join(c.trace[:last], " ")
		c.trace = append(c.trace, b.workload()...)
	}
	if c.print != nil {
		c.shown += " and " + strings.Join(c.print, " ")
	}
	c.shown = strings.ReplaceAll(c.shown, b.scratch+"/", "")
	c.trace = append([]string{self(), launchCommand}, c.trace...)
	return &c
}

// self is the bench's own binary, also when it is called by another program.
func self() string {
	path, err := os.Executable()
	if err != nil {
		return "/proc/self/exe"
	}
	return path
}
