package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/view"
)

// flameFormats are what flame writes. The first is the default.
var flameFormats = []string{"html", "svg", "folded", "speedscope", "pprof"}

// flameSingle are those that are drawn of one value.
var flameSingle = []string{"svg", "folded"}

// flameValues are what svg and folded are drawn of.
var flameValues = []string{view.Faults.String(), view.Time.String(), view.Bytes.String()}

// flameOptions are the flags of flame beside those of trace.
type flameOptions struct {
	format string
	value  view.Value
}

func newFlameCmd(open opener) *cobra.Command {
	var t traceOptions
	o := flameOptions{format: flameFormats[0]}
	cmd := &cobra.Command{
		Use:   "flame [flags] [-- COMMAND [ARGS]] | FILE [FILE]",
		Short: "Draw a flame graph of the code that takes page faults",
		Long: `Draw a flame graph of the code that takes page faults: of the whole machine, of chosen
processes, or of a command that is started for it. Faults are counted by their stacks in
the kernel, and drawn when the tracing ends.

The page of the default format html is one file that needs no network. It shows faults,
their time or the memory that they mapped, of all kinds or of some. Formats svg and
folded show one of these (--value); speedscope and pprof have all three, for
speedscope.app and go tool pprof.

With one FILE, which flame --format pprof has written before, that run is drawn; with two
what has changed from the first to the second, by shares of all faults.

A command is started, signals are handled and the exit code is as in trace.`,
		Example: `  faultsnoop flame -o flame.html -- python3 app.py
  faultsnoop flame -p 4711 -d 10s --format pprof -o faults.pb.gz
  faultsnoop flame -o change.html before.pb.gz after.pb.gz
  faultsnoop flame --kind cow --format folded -- ./server | sort -k2`,
		DisableFlagsInUseLine: true,
		Args:                  flameArgs,
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if cmd.Flags().Changed("value") && !slices.Contains(flameSingle, o.format) {
			return usagef("--value: %s shows all values: leave it out, or choose --format %s", o.format, strings.Join(flameSingle, " or "))
		}
		if len(args) > 0 && cmd.ArgsLenAtDash() < 0 {
			return o.redraw(cmd, &t, args)
		}
		if t.stack == "" {
			t.stack = stackFull
		}
		filter, err := t.filter(cmd.Flags(), len(args) > 0)
		if err != nil {
			return err
		}
		f := flamer{
			tracer: tracer{
				traceOptions: t,
				open: sourceOptions{
					Filter: filter, Sample: 1, Hook: t.hook, Command: args, Buffer: t.buffer,
					CountOnly: true, Tables: []fault.By{fault.BySample}, Stacks: true,
				},
				out: newOutput(cmd.OutOrStdout()), stderr: cmd.ErrOrStderr(), log: newLogger(cmd.ErrOrStderr()),
			},
			flameOptions: o,
		}
		if t.output == "" && f.out.width > 0 && o.format != "folded" {
			return usagef("writing %s to a terminal shows nothing: give a file with -o", o.format)
		}
		return f.run(cmd.Context(), open, f.follow)
	}
	o.register(cmd, &t)
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// flameArgs wants a command behind --, or one or two files.
func flameArgs(cmd *cobra.Command, args []string) error {
	if isStackMode(cmd, args) {
		return commandArgs(cmd, args)
	}
	if i := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "-") }); i > 0 && cmd.ArgsLenAtDash() < 0 {
		return usagef("%s: flags come before files", args[i])
	}
	if len(args) > 2 && cmd.ArgsLenAtDash() < 0 {
		return usagef("%d files: one is drawn, and two are compared; to trace a command write -- in front of it", len(args))
	}
	if len(args) > 0 && cmd.ArgsLenAtDash() < 0 {
		return nil
	}
	return commandArgs(cmd, args)
}

// redraw draws profiles that were written before.
func (o *flameOptions) redraw(cmd *cobra.Command, t *traceOptions, files []string) error {
	var other string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains([]string{"output", "format", "value"}, f.Name) {
			other = f.Name
		}
	})
	if other != "" {
		return usagef("--%s: %s is drawn as it is: leave the flag out, or write -- in front of a command to trace it", other, files[0])
	}
	profiles := make([]*fault.Profile, len(files))
	for i, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return fmt.Errorf("opening a profile: %w; to trace a command write -- in front of it", err)
		}
		profiles[i], err = view.ReadPprof(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	newest := profiles[len(profiles)-1]
	var before *fault.Profile
	if len(profiles) > 1 {
		if before = profiles[0]; o.format != "html" {
			return usagef("--format %s: only html shows what has changed between two files", o.format)
		}
	}
	out := newOutput(cmd.OutOrStdout())
	if t.output != "" {
		var err error
		if out, err = openOutput(t.output); err != nil {
			return err
		}
	} else if out.width > 0 && o.format != "folded" {
		return usagef("writing %s to a terminal shows nothing: give a file with -o", o.format)
	}
	var err error
	if out.buf, err = o.encode(out.buf, newest, before); err != nil {
		return err
	}
	out.replace()
	out.flush()
	out.close()
	return out.failure()
}

// encode appends the picture of a run or, of format html, what has changed since another.
func (o *flameOptions) encode(b []byte, p, before *fault.Profile) ([]byte, error) {
	switch o.format {
	case "svg":
		return view.AppendSVG(b, p, o.value), nil
	case "folded":
		return view.AppendFolded(b, p, o.value), nil
	case "speedscope":
		return view.AppendSpeedscope(b, p), nil
	case "pprof":
		return view.AppendPprof(b, p)
	}
	return view.AppendFlame(b, p, before), nil
}

func (o *flameOptions) register(cmd *cobra.Command, t *traceOptions) {
	output := pflag.NewFlagSet("output", pflag.ContinueOnError)
	output.VarP(into(&t.output, parsePath), "output", "o", "write to `FILE` instead of stdout, where the command's own output goes")
	output.Var(into(&o.format, oneOf(flameFormats, parseFlameFormat)), "format", "`FORMAT` html (the default), svg, folded, speedscope or pprof")
	output.Var(into(&o.value, oneOf(flameValues, view.ParseValue)), "value", "draw `WHAT` of each stack in svg and folded: faults (the default), time or bytes")
	t.stackFlags(output, "take stacks by `WAY` full, with any language (the default), or fp, by frame pointers")
	output.VarP(into(&t.duration, parseDuration), "duration", "d", "stop after `DURATION`, as in 5s")
	t.addGroups(cmd, []flagGroup{
		{"TARGET", t.targetFlags()}, {"FILTER", t.filterFlags()}, {"OUTPUT", output}, {"ADVANCED", t.advancedFlags()},
	}, false)
	complete(cmd, "format", flameFormats)
	complete(cmd, "value", flameValues)
}

func parseFlameFormat(s string) (string, bool) {
	return s, slices.Contains(flameFormats, s)
}

// flamer is one run of the flame command.
type flamer struct {
	tracer
	flameOptions
}

// follow lets the command run, counts until the end and draws.
func (f *flamer) follow(ctx context.Context, end context.CancelCauseFunc, src source, child *command) error {
	stacks, err := f.nameStacks(src)
	if err != nil {
		return err
	}
	defer func() { f.closing(stacks.close()) }()
	if err := f.release(child, end); err != nil {
		return err
	}
	ctx, cancel := f.limit(ctx)
	defer cancel()
	c := newCounts(src, &f.open, f.unwound)
	session := src.Session()
	p := pipeline{src: src, out: f.out, stacks: stacks, take: c.take, done: func() bool { return f.out.err != nil }}
	begin := session.Started
	err = f.runReporting(ctx, &p)
	// Also when something has failed, what was counted before is drawn.
	err = errors.Join(err, f.draw(c, stacks, &fault.Profile{Session: session, Begin: begin, Duration: p.ended.Sub(begin)}))
	f.out.close()
	if err := errors.Join(err, f.out.failure()); err != nil {
		return f.abandon(err, child)
	}
	f.tellUnseen(session)
	f.tellStackless(c, stacks)
	return f.result(child)
}

// draw writes what was counted.
func (f *flamer) draw(c *counts, stacks *stackNamer, run *fault.Profile) error {
	rows, r, err := c.final(stacks)
	if err != nil {
		return err
	}
	p := stacks.profile(&rows.Tables[0], false)
	p.Session, p.Begin, p.Duration, p.Lost = run.Session, run.Begin, run.Duration, r.counters.LostTotal()
	if f.out.buf, err = f.encode(f.out.buf, p, nil); err != nil {
		return err
	}
	f.out.replace()
	f.out.flush()
	f.summarize(p)
	return nil
}

// summarize says on stderr what the picture is of.
func (f *flamer) summarize(p *fault.Profile) {
	if f.out.readerGone() {
		return
	}
	fmt.Fprintln(f.stderr, view.Coverage(p))
}
