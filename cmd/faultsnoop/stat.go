package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
	"faultsnoop/internal/process"
	"faultsnoop/internal/view"
)

// statOptions are the flags of stat beside those of trace.
type statOptions struct {
	by       []fault.By
	stackBy  []aggregate.StackBy
	skip     bool // frames of runtimes
	top      uint64
	hist     bool
	interval time.Duration
}

func newStatCmd(open opener) *cobra.Command {
	var t traceOptions
	var o statOptions
	cmd := &cobra.Command{
		Use:   "stat [flags] [-- COMMAND [ARGS]]",
		Short: "count page faults: kinds, latencies, the dearest files, mappings, pages ...",
		Long: `Count page faults and what they cost: of the whole machine, of chosen processes, or
of a command that is started for it. The counting is done in the kernel, so it costs
a fraction of what trace does; hook perf, which has no programs there, counts here.

The run time is that of the tracing. Times are of all threads added up, so several
that wait at once can spend more than the run time. Percentiles are upper bounds,
at most 3.2 % too large. Mapped memory is what page tables showed, not faults times
page size: one fault may map many pages, and may map again what was mapped before.

Tables that are full count the rest in [other]. A command is started, signals are
handled and the exit code is as in trace.`,
		Example: `  faultsnoop stat -- python3 app.py             kinds of faults, their time, percentiles
  faultsnoop stat --by file -- cp BIG /dev/null  which files
  faultsnoop stat -p 4711 --by page --top 20     the hottest pages
  faultsnoop stat -i 1s                          the whole machine, every second`,
		DisableFlagsInUseLine: true,
		Args:                  commandArgs,
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(o.stackBy) > 0 && t.stack == "" {
			t.stack = stackFull
		}
		filter, err := t.filter(cmd.Flags(), len(args) > 0)
		if err != nil {
			return err
		}
		tables := distinct(o.by)
		if o.stackBy = distinct(o.stackBy); len(o.stackBy) > 0 {
			tables = append(tables, fault.ByStack) // one for all of them
		}
		if len(tables) > fault.MaxTables {
			return usagef("--by: %d tables, at most %d are counted at a time", len(tables), fault.MaxTables)
		}
		if len(o.stackBy) == 0 && t.stack != "" {
			return usagef("--stack: there is no table that needs stacks: add --by function, line, stack or module")
		}
		if cmd.Flags().Changed("skip-runtime") && len(o.stackBy) == 0 {
			return usagef("--skip-runtime: there is no table by function or line: add --by line")
		}
		s := statter{
			tracer: tracer{
				traceOptions: t,
				open: sourceOptions{
					Filter: filter, Sample: 1, Hook: t.hook, Command: args, Buffer: t.buffer, CountOnly: true, Tables: tables, Stacks: t.stack != "",
				},
				out: newOutput(cmd.OutOrStdout()), stderr: cmd.ErrOrStderr(), log: newLogger(cmd.ErrOrStderr()),
			},
			statOptions: o,
		}
		return s.run(cmd.Context(), open, s.follow)
	}
	o.register(cmd, &t)
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// distinct leaves out what was named before: a table twice would be added up.
func distinct[T comparable](by []T) []T {
	var list []T
	for _, b := range by {
		if !slices.Contains(list, b) {
			list = append(list, b)
		}
	}
	return list
}

func (o *statOptions) register(cmd *cobra.Command, t *traceOptions) {
	output := pflag.NewFlagSet("output", pflag.ContinueOnError)
	output.VarP(into(&t.output, parsePath), "output", "o", "write to `FILE` instead of stdout, where the command's own output goes")
	output.Var(each(o.addTable), "by", "add a table by `WHAT`: process, thread, kind, file, mapping, page, cgroup, uid, cpu, access, mode or result, or, of the code that faulted, by function, line, stack or module (repeatable, or a list with commas; at most "+strconv.Itoa(fault.MaxTables)+", of which those of code are one)")
	output.BoolVar(&o.skip, "skip-runtime", true, "count faults for the innermost function that is not of the kernel, libc, an allocator or an interpreter; --skip-runtime=false counts them for the innermost of all")
	t.stackFlags(output, "for tables of code: take stacks by `WAY` full, with any language (the default), or fp, by frame pointers")
	output.Uint64Var(&o.top, "top", 10, "show the dearest `N` rows of each table, 0 all")
	output.BoolVar(&o.hist, "hist", false, "draw a histogram of the latencies of each kind")
	output.VarP(into(&o.interval, parseDuration), "interval", "i", "show the counts of every `DURATION`, as in 1s, and those of the whole run at the end")
	output.BoolVar(&t.json, "json", false, "one JSON object a line: header, intervals, counts of the whole run")
	output.BoolVar(&t.csv, "csv", false, "comma-separated values with a header line")
	output.VarP(into(&t.duration, parseDuration), "duration", "d", "stop after `DURATION`, as in 5s")
	t.addGroups(cmd, []flagGroup{
		{"TARGET", t.targetFlags()}, {"FILTER", t.filterFlags()}, {"OUTPUT", output}, {"ADVANCED", t.advancedFlags()},
	}, false)
	complete(cmd, "by", tableNames())
}

// tableNames are the words for --by.
func tableNames() []string {
	var names []string
	for by := fault.ByProcess; by <= fault.ByResult; by++ {
		names = append(names, by.String())
	}
	for by := aggregate.ByFunction; by <= aggregate.ByModule; by++ {
		names = append(names, by.String())
	}
	return names
}

func (o *statOptions) addTable(word string) error {
	if by, ok := aggregate.ParseStackBy(word); ok && by != aggregate.ByStack || word == aggregate.ByStack.String() {
		o.stackBy = append(o.stackBy, by)
		return nil
	}
	by, ok := fault.ParseBy(word)
	if !ok || by > fault.ByResult {
		return fmt.Errorf("unknown word%s; valid are %s", suggestion(word, tableNames()), strings.Join(tableNames(), ", "))
	}
	o.by = append(o.by, by)
	return nil
}

// statter is one run of the stat command.
type statter struct {
	tracer
	statOptions
}

// maxRecordRows bounds the rows that are kept here: as many as in the kernel.
const maxRecordRows = 1 << 18

// counts are the rows of a run, counted in the kernel or, where that sends records, here.
type counts struct {
	source
	live    *kernel.Live
	counter *aggregate.Counter
	// unwound knows the stacks of the last table, nil if the source does.
	unwound *unwound
	// interval is that of due, 0 if nothing is due, and last when something was.
	interval time.Duration
	last     time.Time
}

func newCounts(src source, o *sourceOptions, full *unwound) *counts {
	c := &counts{source: src, unwound: full}
	var ok bool
	if c.live, ok = src.(*kernel.Live); !ok {
		c.counter = aggregate.NewCounter(o.Tables, maxRecordRows)
	}
	return c
}

// take counts the records of a batch, if there are any.
func (c *counts) take(batch *fault.Batch) error {
	if c.counter != nil {
		for i := range batch.Faults {
			c.counter.Add(&batch.Faults[i])
		}
	} else if c.unwound != nil {
		c.unwound.count(batch)
	}
	return nil
}

// Counters adds what has no stack for want of room here.
func (c *counts) Counters() (fault.Counters, error) {
	out, err := c.source.Counters()
	if c.unwound != nil {
		out.Stackless += c.unwound.counter.Rows().Tables[0].Other.Faults()
	}
	return out, err
}

// reading is what was counted up to a moment.
type reading struct {
	rows     *fault.Rows // nil if they are counted here
	stacks   []rawStack  // those of rows
	counters fault.Counters
	at       time.Time
}

// read reads what the source has counted so far.
func (c *counts) read() (*reading, error) {
	r := &reading{at: time.Now()}
	var err error
	if c.live != nil {
		if r.rows, err = c.live.Rows(); err != nil {
			return nil, err
		}
	}
	if r.counters, err = c.Counters(); err != nil {
		return nil, fmt.Errorf("reading the counters: %w", err)
	}
	return r, nil
}

// due reads the counts once in an interval.
func (c *counts) due() (*reading, error) {
	if c.interval == 0 || time.Since(c.last) < c.interval {
		return nil, nil
	}
	c.last = time.Now()
	return c.read()
}

// rows are what was counted when r was read. Its stacks get their names.
func (c *counts) rows(r *reading, n *stackNamer) *fault.Rows {
	if r.rows == nil {
		return c.counter.Rows()
	}
	if n != nil {
		n.add(r.stacks)
		n.count(r.rows.Samples)
	}
	if c.unwound != nil {
		last := &r.rows.Tables[len(r.rows.Tables)-1]
		*last = aggregate.WithStacks(last, &c.unwound.counter.Rows().Tables[0])
	}
	return r.rows
}

// final are the rows of the whole run, after the pipeline has ended.
func (c *counts) final(n *stackNamer) (*fault.Rows, *reading, error) {
	r, err := c.read()
	if err != nil {
		return nil, nil, err
	}
	if n != nil && r.rows != nil {
		n.begin()
		r.stacks = n.prepare(r.rows.Stacks)
	}
	return c.rows(r, n), r, nil
}

// follow lets the command run and shows what was counted, at intervals and in the end.
func (s *statter) follow(ctx context.Context, end context.CancelCauseFunc, src source, child *command) error {
	stacks, err := s.nameStacks(src)
	if err != nil {
		return err
	}
	defer func() { s.closing(stacks.close()) }()
	if stacks != nil && s.interval > 0 {
		stacks.recent = newStackCounts()
	}
	m := meter{statter: s, stacks: stacks, users: map[uint32]string{}}
	s.begin(src.Session())
	if err := s.release(child, end); err != nil {
		return err
	}
	ctx, cancel := s.limit(ctx)
	defer cancel()
	m.src, m.begin = newCounts(src, &s.open, s.unwound), time.Now()
	m.last = m.begin
	m.src.interval, m.src.last = s.interval, m.begin
	p := pipeline{
		src: src, out: s.out, stacks: stacks, take: m.src.take, due: m.src.due, show: m.tick, done: func() bool { return s.out.err != nil },
	}
	err = s.runReporting(ctx, &p)
	// Also when something has failed, what was counted before is shown.
	whole, ended := view.Run, p.ended
	if ended.Before(m.last) { // while an interval was shown
		ended = m.last
	}
	rows, last, ferr := m.src.final(stacks)
	if err = errors.Join(err, ferr); ferr == nil {
		if s.interval > 0 { // what is left of the last one
			err = errors.Join(err, m.show(rows, last, &m.before, m.last, ended, view.Interval))
			whole = view.Intervals
		}
		err = errors.Join(err, m.show(rows, last, &aggregate.Snapshot{}, m.begin, ended, whole))
	}
	s.out.close()
	if err := errors.Join(err, s.out.failure()); err != nil {
		return s.abandon(err, child)
	}
	s.tellUnseen(src.Session())
	s.tellStackless(m.src, stacks)
	return s.result(child)
}

// begin writes what comes before the first counts, as soon as counting has begun.
func (s *statter) begin(session *fault.Session) {
	switch {
	case s.json:
		s.out.buf = s.encoder(session).AppendHeader(s.out.buf)
	case s.csv:
		s.out.buf = view.AppendCSVHeader(s.out.buf)
	}
	s.out.flush()
}

// meter shows counts from time to time.
type meter struct {
	*statter
	src         *counts
	begin, last time.Time
	before      aggregate.Snapshot
	stacks      *stackNamer // nil if none are taken
	// users are the names that were asked for.
	users map[uint32]string
}

// user names a user; the answer may have come from a server.
func (m *meter) user(uid uint32) string {
	name, ok := m.users[uid]
	if !ok {
		name = process.UserName(uid)
		m.users[uid] = name
	}
	return name
}

// tick shows an interval.
func (m *meter) tick(r *reading) error {
	return m.show(m.src.rows(r, m.stacks), r, &m.before, m.last, r.at, view.Interval)
}

// show writes what was counted from begin, when it was since, to end.
func (m *meter) show(rows *fault.Rows, r *reading, since *aggregate.Snapshot, begin, end time.Time, part view.Part) error {
	now := aggregate.Snapshot{Rows: rows, Counters: r.counters}
	if part == view.Interval && m.src.unwound != nil {
		now.KeepStackless(since)
	}
	diff := now.Since(since)
	m.last = end
	cgroups := sync.OnceValue(process.CgroupNames)
	st := view.Stat{
		Part: part, Session: m.src.Session(), Rows: aggregate.Named(diff.Rows), Counters: diff.Counters, Duration: end.Sub(begin), End: end,
		Top: int(m.top), Hist: m.hist, User: m.user, Cgroup: func(id uint64) string { return cgroups()[id] },
	}
	m.before = now.Copy()
	m.divideByCode(&st)
	var err error
	switch {
	case m.json:
		m.out.buf, err = st.AppendJSON(m.out.buf)
	case m.csv:
		m.out.buf, err = st.AppendCSV(m.out.buf)
	default:
		width := 0 // of a file or pipe: names are whole
		if m.out.width > 0 {
			width = max(textWidth, m.out.width)
		}
		m.out.buf = st.AppendText(m.out.buf, width)
		if m.interval > 0 {
			m.out.buf = append(m.out.buf, '\n')
		}
	}
	m.out.flush()
	return err
}

// divideByCode puts the tables of the code that faulted in place of that by stack.
func (m *meter) divideByCode(st *view.Stat) {
	if m.stacks == nil {
		return
	}
	last := len(st.Rows.Tables) - 1
	p := m.stacks.profile(&st.Rows.Tables[last], st.Part == view.Interval)
	st.Rows.Tables = st.Rows.Tables[:last]
	for _, by := range m.stackBy {
		st.Stacks = append(st.Stacks, aggregate.TableOf(p, by, m.skip))
	}
}
