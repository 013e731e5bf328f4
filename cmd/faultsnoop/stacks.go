package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
	"faultsnoop/internal/perfevent"
	"faultsnoop/internal/process"
	"faultsnoop/internal/symbol"
)

// The ways to take stacks.
const (
	// stackFull unwinds any language, and falls back to frame pointers.
	stackFull = "full"
	// stackFP follows frame pointers.
	stackFP = "fp"
)

var stackModes = []string{stackFull, stackFP}

// stackFlags are those that say how stacks are taken.
func (o *traceOptions) stackFlags(flags *pflag.FlagSet, usage string) {
	flags.Var(into(&o.stack, oneOf(stackModes, func(s string) (string, bool) { return s, slices.Contains(stackModes, s) })), "stack", usage)
	flags.Lookup("stack").NoOptDefVal = stackFull
	flags.Var(into(&o.stackEvery, parseCount), "stack-every", "with --stack=full: take the stack of every `N`th fault, chosen by chance; adapted to their rate by default")
}

// openUnwinder loads the unwinder of any language if stacks are wanted and not by frame
// pointers, or says why these are followed. The error is that of a signal meanwhile: a machine
// that is busy takes its time to load.
func (t *tracer) openUnwinder(ctx context.Context) error {
	if t.stack != stackFull {
		return nil
	}
	if terminalWidth(t.stderr) > 0 {
		t.log.Info("loading the unwinder, which takes some seconds; --stack=fp does without")
	}
	o := t.open
	u, err := unlessEnded(ctx, func() (*unwound, error) { return openUnwound(&o, t.stackEvery) }, func(u *unwound) { _ = u.Close() })
	if ctx.Err() != nil {
		return err
	}
	t.open = o
	if err != nil {
		t.log.Info(fmt.Sprintf("stacks by frame pointers: %v", err))
		return nil
	}
	t.unwound = u
	t.open.Stacks, t.open.Unwinder = false, u.Shared()
	return nil
}

// unlessEnded returns what open returns or, if ctx ends before, the cause of that. What is
// opened nevertheless is given back.
func unlessEnded[T any](ctx context.Context, open func() (T, error), giveBack func(T)) (T, error) {
	type result struct {
		opened T
		err    error
	}
	done := make(chan result, 1)
	go func() {
		opened, err := open()
		done <- result{opened, err}
	}()
	select {
	case r := <-done:
		if ctx.Err() == nil {
			return r.opened, r.err
		}
		done <- r
	case <-ctx.Done():
	}
	go func() {
		if r := <-done; r.err == nil {
			giveBack(r.opened)
		}
	}()
	var none T
	return none, context.Cause(ctx)
}

// mappings is who knows what processes had mapped when a stack was taken.
type mappings interface {
	// MappingsOf returns nil if that is not known. Times are in nanoseconds of
	// CLOCK_MONOTONIC.
	MappingsOf(pid uint32, at uint64) *process.Space
}

// stackNamer names the frames of stacks soon after the first fault that has them, while
// the process may be there to be asked.
type stackNamer struct {
	maps     mappings
	timeline *perfevent.Timeline // nil if the source follows mappings itself
	resolver *symbol.Resolver
	kernel   *symbol.Kernel // nil if its symbols cannot be read
	named    stackMemory
	compiled compiledStacks
	process  map[uint64]fault.Comm // whose stack it is, if faults are counted by it
	mappers  aggregate.Mappers
	full     *unwound // nil if frame pointers are followed
	// calls wait for the faults before them, which wait for their stacks.
	calls []fault.MappingCall
	src   source
	log   *slog.Logger
}

// stackMemory are stacks by their ids, of the latest generation and of the one before:
// what came earlier is forgotten, so that a long trace does not grow.
type stackMemory [2]struct {
	generation uint64
	stacks     map[uint64]*fault.Stack
}

func (m *stackMemory) add(id uint64, s *fault.Stack) {
	generation := id >> fault.StackGeneration
	in := &m[generation%uint64(len(m))]
	if in.stacks == nil || in.generation != generation {
		in.generation, in.stacks = generation, map[uint64]*fault.Stack{}
	}
	in.stacks[id] = s
}

// of returns nil if a stack is not known.
func (m *stackMemory) of(id uint64) *fault.Stack {
	return m[id>>fault.StackGeneration%uint64(len(m))].stacks[id]
}

// newStackNamer is to be called before the traced command runs, whose mappings are heard
// of from then on.
func newStackNamer(src source, open *sourceOptions, full *unwound, log *slog.Logger) (*stackNamer, error) {
	n := &stackNamer{full: full, src: src, log: log}
	if len(open.Tables) > 0 {
		n.process = map[uint64]fault.Comm{}
	}
	if session, ok := src.(*perfevent.Session); ok {
		n.maps = session
	} else {
		timeline, err := perfevent.OpenTimeline(open.Filter, open.CommandPID)
		if err != nil {
			return nil, fmt.Errorf("naming stacks: %w", err)
		}
		n.maps, n.timeline = timeline, timeline
	}
	n.resolver = symbol.NewResolver(symbol.Options{
		PageSize: uint64(os.Getpagesize()), Symbols: true, Proc: process.ProcIsOurs(), Patient: true, Fetch: fetchWait(open.CountOnly),
	})
	var err error
	if n.kernel, err = symbol.OpenKernel(); err != nil {
		log.Info(fmt.Sprintf("functions of the kernel have no names: %v", err))
	}
	return n, nil
}

// fetchWait is how long naming may wait for a server of debug files. Nobody waits for it where
// faults are counted in the kernel.
func fetchWait(countOnly bool) time.Duration {
	if countOnly {
		return 20 * time.Second
	}
	return time.Second
}

// nameStacks returns what names stacks, nil if none are taken.
func (t *tracer) nameStacks(src source) (*stackNamer, error) {
	if t.stack == "" {
		return nil, nil
	}
	return newStackNamer(src, &t.open, t.unwound, t.log)
}

func (n *stackNamer) close() error {
	if n == nil {
		return nil
	}
	if n.full != nil {
		n.full.tellCounts(n.src, n.log)
	}
	n.resolver.Close()
	if n.timeline == nil {
		return nil
	}
	return n.timeline.Close()
}

// name takes up the new stacks of a batch and gives its faults theirs. end says that it is the
// last one. Unwound stacks come later than faults, which wait for them: the batch then has
// the faults of earlier ones.
func (n *stackNamer) name(batch *fault.Batch, end bool) error {
	if n.timeline != nil {
		if err := n.timeline.Advance(); err != nil {
			return err
		}
	}
	clear(n.compiled.versions)
	n.add(batch.Stacks)
	if n.process != nil {
		n.nameLate()
	}
	until := uint64(1<<64 - 1)
	if n.full != nil {
		until = n.full.join(batch, end)
	}
	for i := range batch.Mappings {
		c := &batch.Mappings[i]
		c.Stack = n.current(c.StackID) // which may be forgotten when it is wanted
		n.calls = append(n.calls, *c)
	}
	for i := range batch.Faults {
		f := &batch.Faults[i]
		n.mapUntil(f.End)
		f.Mapper = n.mappers.Of(f)
		if n.full == nil {
			f.Stack = n.current(f.StackID)
		} else if f.Stack != nil {
			n.full.name(f, n)
		}
	}
	n.mapUntil(until)
	return nil
}

// mapUntil takes up the calls up to a time.
func (n *stackNamer) mapUntil(time uint64) {
	i := 0
	for i < len(n.calls) && n.calls[i].Time <= time {
		n.mappers.Add(&n.calls[i])
		i++
	}
	n.calls = slices.Delete(n.calls, 0, i)
}

// add names stacks, in the order of their times.
func (n *stackNamer) add(stacks []fault.RawStack) {
	for i := range stacks {
		n.named.add(stacks[i].ID, n.stack(&stacks[i]))
		if n.process != nil {
			n.process[stacks[i].ID] = stacks[i].Process
		}
	}
}

func (n *stackNamer) stack(raw *fault.RawStack) *fault.Stack {
	n.compiled.see(raw)
	s := &fault.Stack{End: raw.End}
	for i, ip := range raw.Kernel {
		s.Frames = append(s.Frames, n.inKernel(ip, i > 0))
	}
	s.Frames = outsideHandler(s.Frames)
	if len(raw.User) == 0 {
		return s
	}
	space := n.maps.MappingsOf(raw.PID, raw.Time)
	compiled := compiledStack{pid: raw.PID, image: raw.Image}
	for i, ip := range raw.User {
		in := symbol.Instruction{
			Addr: ip, Caller: i > 0 || len(raw.Kernel) > 0, PID: raw.PID, Image: raw.Image, Time: raw.Time,
		}
		if in.Caller && !returnsTo(space, ip) {
			s.End = fault.StackIncomplete
			break
		}
		frames := n.inProcess(&in, space)
		if in.VMA != nil && compiles(in.VMA) {
			compiled.frames = append(compiled.frames, compiledFrame{len(s.Frames), in})
		}
		s.Frames = append(s.Frames, frames...)
	}
	if len(compiled.frames) > 0 {
		compiled.version = n.version(raw.PID, raw.Image)
		n.compiled.stacks[raw.ID] = &compiled
	}
	return s
}

// returnsTo reports whether an address may be one to return to. What code without frame
// pointers leaves where they should be leads to numbers that are no addresses of code, and
// a thread that is about to become another program has its old registers still.
func returnsTo(space *process.Space, ip uint64) bool {
	if space == nil {
		return true
	}
	m := space.Find(ip - 1)
	return m != nil && m.Flags&fault.PermFlags("--x-") != 0
}

func (n *stackNamer) inKernel(ip uint64, caller bool) fault.Frame {
	if n.kernel == nil {
		return fault.Frame{Addr: ip, Module: "[kernel]", Lang: fault.LangKernel}
	}
	at := ip
	if caller {
		at--
	}
	f := n.kernel.At(at)
	f.Addr = ip
	return f
}

func (n *stackNamer) inProcess(in *symbol.Instruction, space *process.Space) []fault.Frame {
	unknown := []fault.Frame{{Addr: in.Addr}}
	if space == nil {
		return unknown
	}
	at := in.Addr
	if in.Caller {
		at--
	}
	m := space.Find(at)
	if m == nil {
		return unknown
	}
	in.VMA = m.VMA()
	frames, _ := n.resolver.Frames(in)
	return frames
}

// handlerEnds are the functions by which the kernel has entered the handling of a fault on
// x86-64, on arm64, and where another process's memory is touched.
var handlerEnds = []string{"asm_exc_page_fault", "el1h_64_sync", "handle_mm_fault"}

// outsideHandler leaves out the frames of the fault handler itself, which hooks on it see.
func outsideHandler(frames []fault.Frame) []fault.Frame {
	for _, name := range handlerEnds {
		if i := slices.IndexFunc(frames, func(f fault.Frame) bool { return f.Func == name }); i >= 0 {
			return frames[i+1:]
		}
	}
	return frames
}

// of is the stack of an id, nil if it is not known, and whose it is.
func (n *stackNamer) of(id uint64) (*fault.Stack, fault.Comm) {
	if n.full != nil {
		s, _ := n.full.stacks.peek(id)
		return s.Stack, s.process
	}
	return n.named.of(id), n.process[id]
}

// profile is a table by stack or by sample with the stacks' names. What had no row, and
// stacks that nobody has heard of, are faults without a stack.
func (n *stackNamer) profile(t *fault.Table) *fault.Profile {
	none := &fault.Stack{End: fault.StackNone}
	p := &fault.Profile{}
	add := func(s fault.StackSample, c *fault.Cost) {
		s.Faults, s.Time, s.Bytes = c.Faults(), c.Time, c.Bytes
		p.Faults += s.Faults
		p.Samples = append(p.Samples, s)
	}
	for key, cost := range t.Rows {
		s := fault.StackSample{TID: key.ID, PID: key.Process, Comm: key.Name, Kind: key.Kind, Major: key.Major}
		if s.Stack, s.Process = n.of(key.Value); s.Stack == nil {
			s.Stack = none
		}
		add(s, &cost)
	}
	if t.Other.Faults() > 0 {
		add(fault.StackSample{Stack: none}, &t.Other)
	}
	return p
}
