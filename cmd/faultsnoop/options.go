package main

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
	"faultsnoop/internal/perfevent"
	"faultsnoop/internal/view"
)

// traceOptions are the flags of trace. A letter means the same for every command.
type traceOptions struct {
	// target and filter
	pids, tids   []uint32
	comms        []string
	cgroup       string
	uid          *uint32
	children     bool
	self         bool
	major, minor bool
	mode         *fault.Mode
	access       *fault.Access
	kinds        []fault.Kind
	addr         addrRange
	minLatency   time.Duration

	// output
	output     string        // path of a file, empty for stdout
	columns    []view.Column // nil is the default
	json       bool
	csv        bool
	count      uint64
	again      bool
	stack      string // how stacks are taken, empty for none
	stackEvery uint64 // 0 adapts
	stackDepth uint64 // frames in text, 0 for all
	mapper     bool
	pfn        bool
	duration   time.Duration

	// advanced
	sample uint64
	hook   string
	buffer int
}

// flagGroup is a heading of the help text with its flags.
type flagGroup struct {
	title string
	flags *pflag.FlagSet
}

// targetFlags say whose faults.
func (o *traceOptions) targetFlags() *pflag.FlagSet {
	target := pflag.NewFlagSet("target", pflag.ContinueOnError)
	target.VarP(eachInto(&o.pids, parseID), "pid", "p", "trace process `PID` with all its threads (repeatable, or a list with commas)")
	target.VarP(eachInto(&o.tids, parseID), "tid", "t", "trace the single thread `TID` (repeatable)")
	target.StringArrayVarP(&o.comms, "comm", "c", nil, "trace threads whose own or whose process's name contains `NAME`; with more than 15 bytes: whose program's file name does (repeatable)")
	target.Var(into(&o.cgroup, parseCgroup), "cgroup", "trace the cgroup v2 at `PATH` and those below it; PATH is a folder of the cgroup v2 mount, as in /sys/fs/cgroup/system.slice")
	target.Var(intoPtr(&o.uid, parseUser), "uid", "trace tasks of user `NAME` or number")
	target.BoolVar(&o.children, "children", false, "follow forks (the default with -p and with -- COMMAND; --children=false does not)")
	target.BoolVar(&o.self, "self", false, "trace faultsnoop itself too")
	return target
}

// filterFlags say which faults.
func (o *traceOptions) filterFlags() *pflag.FlagSet {
	filter := pflag.NewFlagSet("filter", pflag.ContinueOnError)
	filter.BoolVar(&o.major, "major", false, "major faults only: the page had to be waited for")
	filter.BoolVar(&o.minor, "minor", false, "minor faults only")
	filter.Var(intoPtr(&o.mode, oneOf(fault.Names[fault.Mode](), fault.ParseMode)), "mode", "faults taken in `MODE` user, kernel or remote only")
	filter.Var(intoPtr(&o.access, oneOf(fault.Names[fault.Access](), fault.ParseAccess)), "access", "faults by `ACCESS` read, write or exec only")
	filter.Var(eachInto(&o.kinds, oneOf(fault.Names[fault.Kind](), fault.ParseKind)), "kind", "faults of `KIND` only: "+strings.Join(fault.Names[fault.Kind](), ", ")+" (repeatable, or a list with commas)")
	filter.Var(into(&o.addr, parseRange), "addr", "faults at addresses `START-END` only, in hexadecimal, END not included")
	filter.Var(into(&o.minLatency, parseDuration), "min-latency", "faults that took at least `DURATION` only, as in 100us")
	return filter
}

// advancedFlags say how to hear of them.
func (o *traceOptions) advancedFlags() *pflag.FlagSet {
	advanced := pflag.NewFlagSet("advanced", pflag.ContinueOnError)
	advanced.Var(into(&o.hook, oneOf(hookNames(), parseHook)), "hook", "insist on `HOOK` fentry, kprobe, tracepoint or perf instead of the best that works")
	advanced.Var(into(&o.buffer, parseSize), "buffer", "buffer of `SIZE` between kernel and faultsnoop, as in 16M; a larger one loses less")
	return advanced
}

// register adds the flags to cmd in the groups of its help text.
func (o *traceOptions) register(cmd *cobra.Command) {
	output := pflag.NewFlagSet("output", pflag.ContinueOnError)
	output.VarP(into(&o.output, parsePath), "output", "o", "write to `FILE` instead of stdout, where the command's own output goes; the summary stays on stderr")
	output.Var(into(&o.columns, parseColumns), "columns", "show these columns or presets: `A,B,C` as listed below")
	output.BoolVar(&o.json, "json", false, "one JSON object a line: header, faults, losses, summary")
	output.BoolVar(&o.csv, "csv", false, "comma-separated values with a header line")
	output.BoolVar(&o.pfn, "pfn", false, "tell where in the machine's memory each page is, for columns pfn and node (needs CAP_SYS_ADMIN)")
	output.BoolVar(&o.again, "again", false, "remember the pages of up to 1,048,576 faults, for column again")
	o.stackFlags(output, "show the functions that led to each fault, by `WAY` full, with any language, or fp, by frame pointers")
	output.Uint64Var(&o.stackDepth, "stack-depth", 32, "with --stack: show the innermost `N` frames in text, 0 all; JSON and CSV have all")
	output.BoolVar(&o.mapper, "mapper", false, "with --stack: show too who has mapped the memory (mmap, mremap, brk)")
	output.VarP(into(&o.count, parseCount), "count", "n", "stop after `N` records")
	output.VarP(into(&o.duration, parseDuration), "duration", "d", "stop after `DURATION`, as in 5s")

	advanced := o.advancedFlags()
	advanced.Var(into(&o.sample, parseCount), "sample", "show every `N`th record only; the counts stay exact")

	o.addGroups(cmd, []flagGroup{
		{"TARGET", o.targetFlags()}, {"FILTER", o.filterFlags()}, {"OUTPUT", output}, {"ADVANCED", advanced},
	}, true)
	complete(cmd, "columns", view.Names())
}

// addGroups adds the flags to cmd, and the columns to its help if it has them.
func (o *traceOptions) addGroups(cmd *cobra.Command, groups []flagGroup, columns bool) {
	for _, g := range groups {
		g.flags.SortFlags = false
		cmd.Flags().AddFlagSet(g.flags)
	}
	setGroupedHelp(cmd, groups, columns)
	for flag, words := range map[string][]string{
		"mode": fault.Names[fault.Mode](), "access": fault.Names[fault.Access](), "kind": fault.Names[fault.Kind](), "hook": hookNames(),
	} {
		complete(cmd, flag, words)
	}
}

// complete has a shell offer words for a flag.
func complete(cmd *cobra.Command, flag string, words []string) {
	// It fails only for a flag that does not exist.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

func hookNames() []string {
	return []string{string(kernel.Fentry), string(kernel.Kprobe), string(kernel.Tracepoint), string(kernel.Perf)}
}

func parseHook(text string) (string, bool) { return text, slices.Contains(hookNames(), text) }

func parseColumns(list string) ([]view.Column, error) {
	columns, err := view.ParseColumns(list)
	var unknown *view.UnknownColumnError
	if errors.As(err, &unknown) {
		return nil, fmt.Errorf("%w%s; valid are %s", err, suggestion(unknown.Name, view.Names()), strings.Join(view.Names(), ", "))
	}
	return columns, err
}

// checkColumns refuses columns that are empty without another flag, unless a preset has
// brought them.
func (o *traceOptions) checkColumns(list string) error {
	for word := range strings.SplitSeq(list, ",") {
		flag := map[string]string{"again": "--again", "pfn": "--pfn", "node": "--pfn"}[strings.TrimSpace(word)]
		if flag == "--again" && !o.again || flag == "--pfn" && !o.pfn {
			return usagef("column %s is empty without %s: add it, or leave the column out", strings.TrimSpace(word), flag)
		}
	}
	return nil
}

// filter checks the flags against each other and against the tasks there are,
// and turns them into a filter. Errors are for the user.
func (o *traceOptions) filter(flags *pflag.FlagSet, withCommand bool) (fault.Filter, error) {
	if err := o.contradiction(withCommand); err != nil {
		return fault.Filter{}, err
	}
	if flags.Changed("stack-depth") && (o.stack == "" || o.json || o.csv) {
		return fault.Filter{}, usagef("--stack-depth is for stacks in text: add --stack, without --json or --csv")
	}
	if f := flags.Lookup("columns"); f != nil {
		if err := o.checkColumns(f.Value.String()); err != nil {
			return fault.Filter{}, err
		}
	}
	if err := o.checkTasks(); err != nil {
		return fault.Filter{}, err
	}
	f := fault.Filter{
		PIDs: o.pids, TIDs: o.tids, Comms: o.comms, Cgroup: o.cgroup, UID: o.uid, Mode: o.mode, Access: o.access, Kinds: o.kinds,
		AddrStart: o.addr.start, AddrEnd: o.addr.end, MinLatency: o.minLatency, Children: o.children, Self: o.self,
	}
	if o.major || o.minor {
		f.Major = &o.major
	}
	if !flags.Changed("children") {
		f.Children = withCommand || len(o.pids) > 0
	}
	return f, nil
}

func (o *traceOptions) contradiction(withCommand bool) error {
	switch {
	case o.json && o.csv:
		return usagef("--json and --csv contradict each other: leave one out")
	case o.major && o.minor:
		return usagef("--major and --minor contradict each other: leave both out to see all faults")
	case withCommand && len(o.pids) > 0:
		return usagef("-p and a command contradict each other: leave -p out, the command's process is traced")
	case withCommand && len(o.tids) > 0:
		return usagef("-t and a command contradict each other: leave -t out, all threads of the command are traced")
	case slices.Contains(o.comms, ""):
		return usagef("an empty name for -c selects nothing: write a part of a name, or leave -c out")
	case o.hook == string(kernel.Perf) && o.access != nil:
		return usagef("--hook perf does not know how memory is accessed: leave --access out, or --hook")
	case o.pfn && !mayKnowFrames():
		return usagef("--pfn: frames are for those with CAP_SYS_ADMIN only: run as root, or leave --pfn out")
	case o.hook == string(kernel.Perf) && o.pfn:
		return usagef("--hook perf does not know frames: leave --pfn out, or --hook")
	case o.hook == string(kernel.Perf) && o.again:
		return usagef("--hook perf does not remember pages: leave --again out, or --hook")
	case o.stackEvery != 0 && o.stack == "":
		return usagef("--stack-every: no stacks are taken: add --stack or, with stat, --by function, line, stack or module")
	case o.stackEvery != 0 && o.stack != stackFull:
		return usagef("--stack-every: only --stack=full takes the stacks of some faults")
	case o.mapper && o.stack == "":
		return usagef("--mapper shows a second stack beside the first: add --stack")
	case o.mapper && o.hook == string(kernel.Perf):
		return usagef("--hook perf does not hear of who maps memory: leave --mapper out, or --hook")
	case o.hook == string(kernel.Perf) && len(o.kinds) > 0 && !slices.ContainsFunc(o.kinds, perfevent.Tells):
		return usagef("--hook perf cannot tell any of these kinds: leave --kind out, or --hook")
	}
	if err := kernel.CheckPatterns(o.comms); err != nil {
		return usagef("%w", err)
	}
	return nil
}

// mayKnowFrames reports whether the kernel would tell frames by itself.
func mayKnowFrames() bool {
	sys := kernel.ReadSystem()
	return sys.HasCap(unix.CAP_SYS_ADMIN)
}

// checkTasks refuses ids that would silently select nothing.
func (o *traceOptions) checkTasks() error {
	for _, pid := range o.pids {
		group, err := threadGroup(pid)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return usagef("no process %d: it may have ended; pgrep -a NAME lists processes", pid)
		case err != nil:
			return usagef("looking up process %d: %w", pid, err)
		case group != pid:
			return usagef("%d is a thread of process %d: write -t %d for the thread or -p %d for the process", pid, group, pid, group)
		}
	}
	for _, tid := range o.tids {
		group, err := threadGroup(tid)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return usagef("no thread %d: it may have ended; ps -eL lists threads", tid)
		case err != nil:
			return usagef("looking up thread %d: %w", tid, err)
		case len(o.pids) > 0 && !slices.Contains(o.pids, group):
			return usagef("thread %d belongs to process %d, which -p leaves out: nothing would match", tid, group)
		}
	}
	return nil
}

// format is the notation of the output.
func (o *traceOptions) format() view.Format {
	switch {
	case o.json:
		return view.JSON
	case o.csv:
		return view.CSV
	}
	return view.Text
}
