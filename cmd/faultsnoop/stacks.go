package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
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
// the process may be there to be asked. Where prepare runs ahead, it runs beside all else.
type stackNamer struct {
	maps     mappings
	timeline *perfevent.Timeline // nil if the source follows mappings itself
	resolver *symbol.Resolver
	kernel   *symbol.Kernel // nil if its symbols cannot be read
	named    stackMemory
	// tree has the stacks of a run that is counted, nil of others, whole what was counted in all,
	// and recent since it was shown last, nil if only the end is. homeless are faults whose stack
	// found no room here.
	tree          *fault.StackTree
	whole, recent *stackCounts
	homeless      uint64
	// versions are those of the names of compiled code, as of this batch.
	versions map[execution]uint64
	frames   []fault.Frame // that are not in use
	// places are the frames that were asked for in this batch.
	places  map[place][]fault.Frame
	mappers aggregate.Mappers
	full    *unwound // nil if frame pointers are followed
	// calls wait for the faults before them, which wait for their stacks.
	calls []fault.MappingCall
	src   source
	log   *slog.Logger

	gcPercent int // what it was before
}

// rawStack is a stack with all that is needed to name it, whenever that will be.
type rawStack struct {
	fault.RawStack
	// mapped are the mappings that User was in, nil where none is known.
	mapped []*fault.VMA
}

// namedStack is a stack whose frames have names.
type namedStack struct {
	*fault.Stack       // nil if faults are counted
	leaf         int32 // in stackNamer.tree, if faults are counted
	homeless     bool  // it found no room there
	process      fault.Comm
	// raw is kept if frames are in code that the process has made, whose names come late and
	// change: those of version. nil of other stacks, and of what is counted when all have names.
	raw     *rawStack
	version uint64
}

// place is an instruction of a process, which the mapping tells as it is that of one.
type place struct {
	mapped *fault.VMA
	ip     uint64
	caller bool
}

// stackMemory are stacks by their ids, of the latest generations: what came earlier is
// forgotten, so that a long trace does not grow.
type stackMemory []struct {
	generation uint64
	stacks     map[uint64]*namedStack
	late       []*namedStack // those with a raw one, when they were added
}

func (m stackMemory) add(id uint64, s *namedStack) {
	generation := id >> fault.StackGeneration
	in := &m[generation%uint64(len(m))]
	if in.stacks == nil || in.generation != generation {
		in.generation, in.stacks, in.late = generation, map[uint64]*namedStack{}, nil
	}
	in.stacks[id] = s
	if s.raw != nil {
		in.late = append(in.late, s)
	}
}

// of returns nil if a stack is not known.
func (m stackMemory) of(id uint64) *namedStack {
	return m[id>>fault.StackGeneration%uint64(len(m))].stacks[id]
}

// Of a trace stacks are known for as long as ids come. What is counted is named in little
// memory, and its counts come a generation later, or two if it is shown just then.
const (
	tracedGenerations  = 2
	countedGenerations = 4
)

// countingGCPercent is by how much memory may grow, of what is in use, until it is collected.
const countingGCPercent = 30

// newStackNamer is to be called before the traced command runs, whose mappings are heard
// of from then on.
func newStackNamer(src source, open *sourceOptions, full *unwound, log *slog.Logger) (*stackNamer, error) {
	n := &stackNamer{
		named: make(stackMemory, tracedGenerations), versions: map[execution]uint64{}, places: map[place][]fault.Frame{},
		full: full, src: src, log: log,
	}
	if len(open.Tables) > 0 {
		n.named = make(stackMemory, countedGenerations)
		n.tree, n.whole = &fault.StackTree{}, newStackCounts()
		// What is kept is most of the memory then, and little is thrown away.
		n.gcPercent = debug.SetGCPercent(countingGCPercent)
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
	if n.tree != nil {
		debug.SetGCPercent(n.gcPercent)
	}
	if n.timeline == nil {
		return nil
	}
	return n.timeline.Close()
}

// runsAhead reports whether sources are read while stacks are named. Stacks of full, which come
// and are joined meanwhile, ask for mappings when they are named.
func (n *stackNamer) runsAhead() bool { return n != nil && n.full == nil }

// advance takes note of what processes have mapped meanwhile. It is to be called for each batch
// of a source.
func (n *stackNamer) advance() error {
	if n.timeline == nil {
		return nil
	}
	return n.timeline.Advance()
}

// prepare adds to new stacks what was mapped then.
func (n *stackNamer) prepare(stacks []fault.RawStack) []rawStack {
	if len(stacks) == 0 {
		return nil
	}
	prepared := make([]rawStack, len(stacks))
	var known []*fault.VMA // of the process of the stack before
	for i := range stacks {
		raw := &prepared[i]
		raw.RawStack = stacks[i]
		if i > 0 && (raw.PID != stacks[i-1].PID || raw.Image != stacks[i-1].Image) {
			known = nil
		}
		if len(raw.User) == 0 {
			continue
		}
		space := n.maps.MappingsOf(raw.PID, raw.Time)
		if space == nil {
			continue
		}
		raw.mapped = make([]*fault.VMA, 0, len(raw.User))
		for j, ip := range raw.User {
			at, caller := ip, j > 0 || len(raw.Kernel) > 0
			if caller {
				at--
			}
			m := space.Find(at)
			if caller && !returnsTo(m) {
				raw.User, raw.End = raw.User[:j], fault.StackIncomplete
				break
			}
			var vma *fault.VMA
			if m != nil {
				vma, known = shareVMA(known, m)
			}
			raw.mapped = append(raw.mapped, vma)
		}
	}
	return prepared
}

// shareVMA returns the mapping as one of known, to which it is added if need be.
func shareVMA(known []*fault.VMA, m *process.Mapping) (*fault.VMA, []*fault.VMA) {
	for _, v := range known {
		if v.Start == m.Start && v.End == m.End && v.PgOff == m.PgOff && v.Inode == m.Inode && v.Dev == m.Dev && v.Flags == m.Flags && v.Label == m.Label {
			return v, known
		}
	}
	const most = 16
	if len(known) >= most {
		known = nil
	}
	vma := m.VMA()
	return vma, append(known, vma)
}

// name takes up the new stacks of a batch and gives its faults theirs. end says that it is the
// last one. Unwound stacks come later than faults, which wait for them: the batch then has
// the faults of earlier ones.
func (n *stackNamer) name(batch *fault.Batch, stacks []rawStack, end bool) {
	n.begin()
	n.add(stacks)
	n.count(batch.Samples)
	until := uint64(1<<64 - 1)
	if n.full != nil {
		until = n.full.join(batch, end)
	}
	for i := range batch.Mappings {
		c := &batch.Mappings[i]
		c.Stack = n.of(c.StackID).Stack // which may be forgotten when it is wanted
		n.calls = append(n.calls, *c)
	}
	for i := range batch.Faults {
		f := &batch.Faults[i]
		n.mapUntil(f.End)
		f.Mapper = n.mappers.Of(f)
		if n.full == nil {
			f.Stack = n.of(f.StackID).Stack
		} else if f.Stack != nil {
			n.full.name(f, n)
		}
	}
	n.mapUntil(until)
}

// begin begins a batch, in which nobody asks twice whether a file has changed.
func (n *stackNamer) begin() {
	n.resolver.Begin()
	clear(n.versions)
	clear(n.places)
	if n.tree != nil {
		n.nameLate()
	}
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
func (n *stackNamer) add(stacks []rawStack) {
	for i := range stacks {
		raw := &stacks[i]
		s := &namedStack{process: raw.Process}
		if slices.ContainsFunc(raw.mapped, func(v *fault.VMA) bool { return v != nil && symbol.Compiled(v) }) {
			kept := *raw
			s.raw, s.version = &kept, n.version(raw)
		}
		n.rename(s, raw)
		n.named.add(raw.ID, s)
	}
}

// of is the stack of an id with the names that are known by now, an empty one if it is not known.
func (n *stackNamer) of(id uint64) *namedStack {
	s := n.named.of(id)
	if s == nil {
		return &namedStack{}
	}
	n.update(s)
	return s
}

// update names a stack again if its process has listed more of its code since.
func (n *stackNamer) update(s *namedStack) {
	if s.raw == nil {
		return
	}
	if v := n.version(s.raw); v != 0 && v != s.version {
		s.version = v
		n.rename(s, s.raw)
	}
}

// nameLate names what was listed only after stacks were counted, while the process is there to
// be asked.
func (n *stackNamer) nameLate() {
	for i := range n.named {
		in := &n.named[i]
		in.late = slices.DeleteFunc(in.late, func(s *namedStack) bool {
			n.update(s)
			return s.raw == nil
		})
	}
}

func (n *stackNamer) version(raw *rawStack) uint64 {
	of := execution{raw.PID, raw.Image}
	v, ok := n.versions[of]
	if !ok {
		v = n.resolver.MapVersion(raw.PID, raw.Image)
		n.versions[of] = v
	}
	return v
}

// rename names a stack. What is counted keeps the names that it has: nobody can tell which faults
// of a row were of another function at the same place.
func (n *stackNamer) rename(s *namedStack, raw *rawStack) {
	stack, listed := n.stack(raw)
	if n.tree == nil {
		s.Stack = stack
		return
	}
	if before := n.tree.Stack(s.leaf).Frames; len(before) == len(stack.Frames) {
		for i := range before {
			if before[i].Func != "" {
				stack.Frames[i] = before[i]
			}
		}
	}
	if listed {
		s.raw = nil
	}
	s.leaf, s.homeless = n.leaf(stack)
}

// leaf puts a stack in the tree, if there is room.
func (n *stackNamer) leaf(s *fault.Stack) (leaf int32, homeless bool) {
	if len(n.tree.Nodes) >= maxNodes {
		return 0, true
	}
	return n.tree.Add(s), false
}

// count takes up what the source has counted by stack.
func (n *stackNamer) count(samples []fault.RawSample) {
	for i := range samples {
		sample := &samples[i]
		s := n.of(sample.StackID)
		if n.recent != nil {
			n.recent.add(sample, s.leaf, s.process)
		}
		if room := n.whole.add(sample, s.leaf, s.process); s.homeless || !room && s.leaf != 0 {
			n.homeless += sample.Faults
		}
	}
}

// stack names a stack, and reports whether its process has listed all that it has made. Of a run
// that is counted the frames are valid until the next call.
func (n *stackNamer) stack(raw *rawStack) (s *fault.Stack, listed bool) {
	s, listed = &fault.Stack{End: raw.End}, true
	if n.tree != nil {
		s.Frames = n.frames[:0]
		defer func() { n.frames = s.Frames[:0] }()
	}
	for i, ip := range raw.Kernel {
		s.Frames = append(s.Frames, n.inKernel(ip, i > 0))
	}
	s.Frames = outsideHandler(s.Frames)
	for i, ip := range raw.User {
		in := symbol.Instruction{
			Addr: ip, Caller: i > 0 || len(raw.Kernel) > 0, PID: raw.PID, Image: raw.Image, Time: raw.Time,
		}
		if raw.mapped != nil {
			in.VMA = raw.mapped[i]
		}
		if in.VMA == nil {
			s.Frames = append(s.Frames, fault.Frame{Addr: ip})
			continue
		}
		key := place{in.VMA, ip, in.Caller}
		frames, ok := n.places[key]
		if !ok {
			frames, _ = n.resolver.Frames(&in)
			n.places[key] = frames
		}
		listed = listed && (frames[0].Func != "" || !symbol.Compiled(in.VMA))
		s.Frames = append(s.Frames, frames...)
	}
	return s, listed
}

// returnsTo reports whether an address in a mapping, nil if it is in none, may be one to return
// to. What code without frame pointers leaves where they should be leads to numbers that are no
// addresses of code, and a thread that is about to become another program has its old registers
// still.
func returnsTo(m *process.Mapping) bool {
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

// profile is a table by stack or by sample with the stacks' names, and what was counted by stacks
// in the whole run, to be asked for once, or, if recently, since the last such call. What had no
// row, and stacks that nobody has heard of, are faults without a stack.
func (n *stackNamer) profile(t *fault.Table, recently bool) *fault.Profile {
	counts := n.whole
	if recently && n.recent != nil {
		counts, n.recent = n.recent, newStackCounts()
	}
	p := counts.profile()
	add := func(s fault.StackSample, c *fault.Cost) {
		s.Faults, s.Time, s.Bytes = c.Faults(), c.Time, c.Bytes
		p.Faults += s.Faults
		p.Samples = append(p.Samples, s)
	}
	if n.full != nil {
		taken := stacked(t)
		if estimated := aggregate.Estimated(t); taken < stacked(&estimated) {
			t, p.Taken = &estimated, taken
		}
	}
	for key, cost := range t.Rows {
		s := fault.StackSample{TID: key.ID, PID: key.Process, Comm: key.Name, Kind: key.Kind, Major: key.Major}
		if n.full != nil {
			counted, _ := n.full.stacks.peek(key.Value)
			s.Stack, _ = n.leaf(counted.Stack)
			s.Process = counted.process
		} else {
			named := n.of(key.Value)
			s.Stack, s.Process = named.leaf, named.process
		}
		add(s, &cost)
	}
	if t.Other.Faults() > 0 {
		add(fault.StackSample{}, &t.Other)
	}
	p.Stacks = *n.tree
	return p
}

// stacked is how many faults of a table have a stack.
func stacked(t *fault.Table) uint64 {
	var n uint64
	for key, cost := range t.Rows {
		if key.Value != 0 && key.Value != fault.Stackless {
			n += cost.Faults()
		}
	}
	return n
}
