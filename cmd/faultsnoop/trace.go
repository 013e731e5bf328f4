package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
	"faultsnoop/internal/process"
	"faultsnoop/internal/symbol"
	"faultsnoop/internal/view"
)

// textWidth is what the default columns need and lines are cut to, unless the
// terminal has more room.
const textWidth = 100

func newTraceCmd(open opener) *cobra.Command {
	var o traceOptions
	cmd := &cobra.Command{
		Use:   "trace [flags] [-- COMMAND [ARGS]]",
		Short: "Print one line per page fault, live",
		Long: `Print one line per page fault, live: of the whole machine, of chosen processes, or
of a command that is started for it.

A command is started stopped, traced from its first instruction on with all the
processes it forks, and tracing ends with it. Its exit code is returned, 128+N if
signal N ended it, 127 if it does not exist, 126 if it cannot be executed.
Otherwise the exit code is 0, 2 for a wrong command line and 125 for a failure of
faultsnoop itself, which never ends a command that runs.

With -p and -t, tracing ends when all processes and threads named have ended.
Descendants that outlive them are not waited for.

INT, TERM and HUP end the tracing; with a command they are passed on to it, and its
end ends the tracing. A second signal ends faultsnoop at once. When the reader of
the output goes away, faultsnoop ends quietly with exit code 0, or with the
command's if it has ended; a command that still runs goes on untraced. After -d or
-n the command goes on untraced too, and faultsnoop waits for its exit code.

An unknown fact is "-" in text, empty in CSV and null in JSON. One fault may map
many pages (huge pages, fault-around), so faults times page size is not memory.`,
		Example: `  faultsnoop trace -- python3 app.py              every fault of a program and its children
  faultsnoop trace -c postgres --major            who waits for the disk
  faultsnoop trace -p 4711 --min-latency 100us    slow faults of a running process
  faultsnoop trace --columns pte -c python        CPU, pid, comm, address and page offset
  faultsnoop trace --json -o out.json -- make     the command keeps its own output
  faultsnoop trace --json -d 10s | jq 'select(.type=="fault").address'`,
		DisableFlagsInUseLine: true,
		Args:                  commandArgs,
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		filter, err := o.filter(cmd.Flags(), len(args) > 0)
		if err != nil {
			return err
		}
		t := tracer{
			traceOptions: o,
			open: sourceOptions{
				Filter: filter, Sample: max(o.sample, 1), Hook: o.hook, Command: args, Buffer: o.buffer, Again: o.again, PFN: o.pfn, Stacks: o.stack != "", Mappers: o.mapper,
			},
			out: newOutput(cmd.OutOrStdout()), stderr: cmd.ErrOrStderr(), log: newLogger(cmd.ErrOrStderr()),
		}
		return t.run(cmd.Context(), open, t.follow)
	}
	o.register(cmd)
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// isStackMode reports whether the way to take stacks is an argument of its own: --stack takes
// it behind = only, since it may be left out.
func isStackMode(cmd *cobra.Command, args []string) bool {
	stack := cmd.Flags().Lookup("stack")
	return len(args) > 0 && cmd.ArgsLenAtDash() != 0 && stack != nil && stack.Changed && stack.Value.String() == stack.NoOptDefVal && slices.Contains(stackModes, args[0])
}

// commandArgs wants arguments only behind --.
func commandArgs(cmd *cobra.Command, args []string) error {
	switch dash := cmd.ArgsLenAtDash(); {
	case isStackMode(cmd, args):
		return usagef("unexpected argument %q: write --stack=%[1]s", args[0])
	case dash < 0 && len(args) > 0, dash > 0:
		return usagef("unexpected argument %q: to trace a command write -- in front of it", args[0])
	case dash == 0 && len(args) == 0:
		return usagef("there is no command behind --: write one, or leave -- out")
	}
	return nil
}

// tracer is one run of the trace command.
type tracer struct {
	traceOptions
	open   sourceOptions
	out    *output
	stderr io.Writer
	log    *slog.Logger
	// unwound takes stacks of any language, nil if it cannot or need not.
	unwound *unwound
}

// follower is what a command does with a source to its end.
type follower func(ctx context.Context, end context.CancelCauseFunc, src source, child *command) error

// run starts the command if there is one, opens the source and has it followed. An
// error of its own leaves no process behind that has not become the command yet.
func (t *tracer) run(ctx context.Context, open opener, follow follower) error {
	path, err := t.resolve()
	if err != nil {
		return err
	}
	if t.output != "" {
		if t.out, err = openOutput(t.output); err != nil {
			return err
		}
		defer t.out.close()
	}
	child, err := t.start(path)
	if err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer watchSignals(end, child)()
	if child != nil {
		defer child.Abort()
	}

	if err := t.openUnwinder(ctx); err != nil {
		return err
	}
	if t.unwound != nil {
		defer func() { t.closing(t.unwound.Close()) }()
	}
	tasks := holdNamed(&t.open.Filter, t.log)
	src, err := open(t.open, t.log)
	if err != nil {
		return err
	}
	defer src.Close()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(t.pids)+len(t.tids) > 0 {
		go func() {
			if tasks.await(ctx) {
				end(errors.New("all named processes and threads have ended"))
			}
		}()
	}
	return follow(ctx, end, src, child)
}

// resolve finds the command's program; without a command it returns "".
func (t *tracer) resolve() (string, error) {
	if len(t.open.Command) == 0 {
		return "", nil
	}
	return resolve(t.open.Command[0])
}

// start starts the command with the program at path stopped; without one it returns nil.
func (t *tracer) start(path string) (*command, error) {
	if path == "" {
		return nil, nil
	}
	child, err := startStopped(path, t.open.Command)
	if err != nil {
		return nil, err
	}
	t.open.CommandPID = child.PID()
	return child, nil
}

// follow lets the command run and shows faults until the end, then the summary.
func (t *tracer) follow(ctx context.Context, end context.CancelCauseFunc, src source, child *command) error {
	to := printer{enc: t.encoder(src.Session()), out: t.out, limit: t.count}
	if to.names = resolver(to.enc, src.Session()); to.names != nil {
		defer to.names.Close()
	}
	stacks, err := t.nameStacks(src)
	if err != nil {
		return err
	}
	defer func() { t.closing(stacks.close()) }()
	p := pipeline{src: src, out: t.out, stacks: stacks, take: to.take, done: to.done}
	t.out.buf = to.enc.AppendHeader(t.out.buf)
	t.out.flush()
	if err := t.release(child, end); err != nil {
		return err
	}
	ctx, cancel := t.limit(ctx)
	defer cancel()
	begin := time.Now()
	err = t.runReporting(ctx, &p)
	sum := view.Summary{Printed: to.printed, Stacks: stacks != nil, Stacked: to.stacked, Duration: p.ended.Sub(begin), Session: src.Session()}
	if err := errors.Join(err, t.conclude(&to, src, &sum)); err != nil {
		return t.abandon(err, child)
	}
	return t.result(child)
}

// release lets the command run, whose end is the end of tracing.
func (t *tracer) release(child *command, end context.CancelCauseFunc) error {
	if child == nil {
		return nil
	}
	if err := child.Release(); err != nil {
		return err
	}
	go func() {
		<-child.Ended()
		end(errors.New("the command has ended"))
	}()
	return nil
}

// limit ends ctx after the duration asked for.
func (t *tracer) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.duration == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, t.duration)
}

// runReporting runs the pipeline while losses are reported beside it.
func (t *tracer) runReporting(ctx context.Context, p *pipeline) error {
	reporting, end := context.WithCancel(context.WithoutCancel(ctx))
	var reporter sync.WaitGroup
	reporter.Go(func() { reportLosses(reporting, p.src, t.log) })
	defer reporter.Wait()
	defer end()
	return p.run(ctx)
}

// conclude writes the summary, also when something has failed before.
func (t *tracer) conclude(to *printer, src source, sum *view.Summary) error {
	counters, err := src.Counters()
	if err != nil {
		return errors.Join(t.out.failure(), fmt.Errorf("reading the counters: %w", err))
	}
	sum.Counters = counters
	t.out.buf = to.enc.AppendSummary(t.out.buf, sum)
	t.out.flush()
	t.out.close()
	if !t.out.readerGone() {
		fmt.Fprintln(t.stderr, sum.Line())
		t.tellUnseen(src.Session())
		t.tellStackless(src, nil)
		t.tellUnmapped(&counters)
		t.explainNothing(&counters)
	}
	return t.out.failure()
}

// closing reports an error of giving back what is not needed any more, which is no failure.
func (t *tracer) closing(err error) {
	if err != nil {
		t.log.Warn(err.Error())
	}
}

// tellUnseen names the faults that neither the records nor the losses include.
func (t *tracer) tellUnseen(s *fault.Session) {
	if len(s.Unseen) > 0 {
		t.log.Info(fmt.Sprintf("hook %s does not see: %s", s.Hook, strings.Join(s.Unseen, "; ")))
	}
}

// tellStackless says how many faults have no stack, and for want of what.
func (t *tracer) tellStackless(src source, stacks *stackNamer) {
	c, err := src.Counters()
	if err != nil {
		return
	}
	if stacks != nil {
		c.Stackless += stacks.homeless
	}
	if c.Stackless > 0 {
		t.log.Warn(fmt.Sprintf("%d faults have no stack: there was no room for so many different ones at a time", c.Stackless))
	}
	if c.StacksLost > 0 {
		t.log.Warn(fmt.Sprintf("%d faults have no stack: the ring buffer was full; --buffer makes it larger", c.StacksLost))
	}
}

// tellUnmapped says how many calls were not heard of that have mapped memory.
func (t *tracer) tellUnmapped(c *fault.Counters) {
	if c.MappingsLost > 0 {
		t.log.Warn(fmt.Sprintf("%d calls that map memory or fork were not heard of, as the buffer was full (see --buffer): what they have mapped has an earlier mapper or none", c.MappingsLost))
	}
}

// explainNothing says why a filter on names may have selected nothing.
func (t *tracer) explainNothing(c *fault.Counters) {
	if c.Seen > 0 || len(t.comms) == 0 {
		return
	}
	why := "names of more than 15 bytes are compared with the program's file name, which for a script is its interpreter's"
	if !slices.ContainsFunc(t.comms, func(name string) bool { return len(name) > fault.MaxComm }) {
		why = "it must be part of a name that ps -eLo comm shows, compared case-sensitively"
	}
	t.log.Info(fmt.Sprintf("no fault matched -c %s: %s", strings.Join(quoted(t.comms), ", "), why))
}

func quoted(names []string) []string {
	q := make([]string, len(names))
	for i, name := range names {
		q[i] = strconv.Quote(name)
	}
	return q
}

// abandon says what becomes of a command that runs when tracing has failed.
func (t *tracer) abandon(err error, child *command) error {
	if child == nil {
		return err
	}
	select {
	case <-child.Ended():
		return err
	default:
		return fmt.Errorf("%w; the command (process %d) goes on untraced", err, child.PID())
	}
}

// result is the command's exit status as an error, nil for 0.
func (t *tracer) result(child *command) error {
	if child == nil {
		return nil
	}
	select {
	case <-child.Ended():
	default:
		if t.out.readerGone() {
			return nil
		}
		t.log.Info(fmt.Sprintf("tracing has ended, waiting for the command (process %d)", child.PID()))
	}
	if status := child.Wait(); status != 0 {
		return &exitError{code: status}
	}
	return nil
}

// resolver returns what finds sections and symbols, if they are shown.
func resolver(enc *view.Encoder, s *fault.Session) *symbol.Resolver {
	symbols := enc.Shows("symbol")
	if !symbols && !enc.Shows("section") {
		return nil
	}
	return symbol.NewResolver(symbol.Options{
		PageSize: s.PageSize, Symbols: symbols, Timeline: s.Hook == string(kernel.Perf), Proc: process.ProcIsOurs(),
	})
}

func (t *tracer) encoder(s *fault.Session) *view.Encoder {
	o := view.Options{Format: t.format(), Columns: t.columns, Stacks: t.stack != "", StackDepth: int(min(t.stackDepth, math.MaxInt32)), Mappers: t.open.Mappers}
	if t.columns == nil {
		o.Width = max(textWidth, t.out.width)
	}
	o.Color = t.out.width > 0 && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	return view.NewEncoder(s, o)
}
