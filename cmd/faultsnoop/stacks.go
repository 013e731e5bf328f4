package main

import (
	"fmt"
	"log/slog"
	"os"
	"slices"

	"github.com/spf13/pflag"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
	"faultsnoop/internal/perfevent"
	"faultsnoop/internal/process"
	"faultsnoop/internal/symbol"
)

// The ways to take stacks.
const (
	stackFP = "fp"
)

func addStackFlag(flags *pflag.FlagSet, to *string) {
	flags.Var(into(to, oneOf([]string{stackFP}, parseStackMode)), "stack", "show the functions that led to each fault; `WAY` fp follows frame pointers")
	flags.Lookup("stack").NoOptDefVal = stackFP
}

func parseStackMode(s string) (string, bool) { return s, s == stackFP }

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
	named    map[uint64]*fault.Stack
	process  map[uint64]fault.Comm // whose stack it is
	mappers  aggregate.Mappers
}

// newStackNamer is to be called before the traced command runs, whose mappings are heard
// of from then on.
func newStackNamer(src source, open *sourceOptions, log *slog.Logger) (*stackNamer, error) {
	n := &stackNamer{named: map[uint64]*fault.Stack{}, process: map[uint64]fault.Comm{}}
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
		PageSize: uint64(os.Getpagesize()), Symbols: true, Proc: process.ProcIsOurs(), Patient: true,
	})
	var err error
	if n.kernel, err = symbol.OpenKernel(); err != nil {
		log.Info(fmt.Sprintf("functions of the kernel have no names: %v", err))
	}
	return n, nil
}

func (n *stackNamer) close() error {
	n.resolver.Close()
	if n.timeline == nil {
		return nil
	}
	return n.timeline.Close()
}

// name takes up the new stacks of a batch and gives its faults theirs.
func (n *stackNamer) name(batch *fault.Batch) error {
	if n.timeline != nil {
		if err := n.timeline.Advance(); err != nil {
			return err
		}
	}
	n.add(batch.Stacks)
	calls := batch.Mappings
	for i := range batch.Faults {
		f := &batch.Faults[i]
		for len(calls) > 0 && calls[0].Time <= f.End {
			n.mappers.Add(&calls[0])
			calls = calls[1:]
		}
		f.Stack, f.Mapper = n.named[f.StackID], n.named[n.mappers.Of(f)]
	}
	for i := range calls {
		n.mappers.Add(&calls[i])
	}
	return nil
}

// add names stacks, in the order of their times.
func (n *stackNamer) add(stacks []fault.RawStack) {
	for i := range stacks {
		n.named[stacks[i].ID] = n.stack(&stacks[i])
		n.process[stacks[i].ID] = stacks[i].Process
	}
}

func (n *stackNamer) stack(raw *fault.RawStack) *fault.Stack {
	s := &fault.Stack{End: raw.End}
	for i, ip := range raw.Kernel {
		s.Frames = append(s.Frames, n.inKernel(ip, i > 0))
	}
	s.Frames = outsideHandler(s.Frames)
	if len(raw.User) == 0 {
		return s
	}
	space := n.maps.MappingsOf(raw.PID, raw.Time)
	for i, ip := range raw.User {
		in := symbol.Instruction{
			Addr: ip, Caller: i > 0 || len(raw.Kernel) > 0, PID: raw.PID, Image: raw.Image, Time: raw.Time,
		}
		s.Frames = append(s.Frames, n.inProcess(&in, space)...)
	}
	return s
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
		s := fault.StackSample{
			Stack: n.named[key.Value], Process: n.process[key.Value], TID: key.ID, PID: key.Process, Comm: key.Name, Kind: key.Kind, Major: key.Major,
		}
		if s.Stack == nil {
			s.Stack = none
		}
		add(s, &cost)
	}
	if t.Other.Faults() > 0 {
		add(fault.StackSample{Stack: none}, &t.Other)
	}
	return p
}
