package main

import (
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"runtime"
	"slices"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
	"faultsnoop/internal/perfevent"
)

// sourceOptions says what to trace and how to hear of it.
type sourceOptions struct {
	Filter fault.Filter
	Sample uint64
	// Hook insists on one hook; empty chooses the best that works.
	Hook string
	// CommandPID is the stopped child that will become Command, 0 for none.
	CommandPID int
	Command    []string
	// Buffer is the size of the ring buffer in bytes, 0 for the default.
	Buffer int
	// Again remembers which pages have faulted.
	Again bool
	// Stacks takes the stack of each fault, and Mappers that of each call that maps memory.
	Stacks, Mappers bool
	// PFN tells frames and nodes.
	PFN bool
	// CountOnly has faults counted where they happen, with these tables.
	CountOnly bool
	Tables    []fault.By
	// Unwinder is asked for stacks, nil if there is none.
	Unwinder kernel.UnwinderMaps

	features *kernel.Features // nil before it is known what works
	planned  kernel.Hook      // for which Unwinder was made
}

// kernelOptions are o for the hooks of package kernel.
func (o *sourceOptions) kernelOptions() kernel.Options {
	return kernel.Options{
		Filter: o.Filter, Sample: o.Sample, Hook: kernel.Hook(o.Hook),
		CommandPID: uint32(o.CommandPID), Command: o.Command, RingBytes: ringBytes(o.Buffer),
		Again: o.Again, PFN: o.PFN, CountOnly: o.CountOnly, Tables: o.Tables, Stacks: o.Stacks, Mappers: o.Mappers, Unwinder: o.Unwinder,
	}
}

// plans are the hooks to try, best first. With an unwinder they are of the kind that it was
// made for.
func (o *sourceOptions) plans() ([]kernel.Plan, error) {
	if o.features == nil {
		var only []kernel.Hook
		if o.Hook != "" {
			only = append(only, kernel.Hook(o.Hook))
		}
		features, _ := kernel.Probe(only...)
		o.features = &features
	}
	plans, err := o.features.Plans(o.kernelOptions())
	if o.Unwinder != nil {
		plans = slices.DeleteFunc(plans, func(p kernel.Plan) bool {
			return p.Hook == kernel.Perf || p.Hook.UnwindsAtBegin() != o.planned.UnwindsAtBegin()
		})
	}
	return plans, err
}

// plannedHook is the hook that openSource will try first.
func (o *sourceOptions) plannedHook() (kernel.Hook, error) {
	plans, err := o.plans()
	if err != nil {
		return "", err
	}
	o.planned = plans[0].Hook
	return o.planned, nil
}

// openSource opens the best hook that works, or the one insisted on. A hook that
// was promising and failed is reported to log before the next one is tried.
func openSource(o sourceOptions, log *slog.Logger) (source, error) {
	plans, err := o.plans()
	if err != nil {
		return nil, err
	}
	opt := o.kernelOptions()
	var rejected []kernel.Verdict
	for _, v := range o.features.Verdicts() {
		if v.Hook == plans[0].Hook {
			break
		}
		rejected = append(rejected, v)
	}
	for i, plan := range plans {
		src, err := openPlan(plan, opt, o)
		if err == nil {
			src.Session().Reason = reason(o.Hook, rejected)
			if o.Hook == "" && len(rejected) > 0 {
				log.Info(fmt.Sprintf("using hook %s (%s)", plan.Hook, kernel.Reasons(rejected)))
			}
			return src, nil
		}
		if i == len(plans)-1 {
			if o.Unwinder != nil && o.Hook == "" {
				return nil, fmt.Errorf("%w; with --stack=fp more hooks can be tried", err)
			}
			return nil, err
		}
		log.Warn(fmt.Sprintf("%v; trying hook %s", err, plans[i+1].Hook))
		rejected = append(rejected, kernel.Verdict{Hook: plan.Hook, Support: kernel.Support{Found: err.Error()}})
	}
	return nil, fmt.Errorf("choosing a hook: none works here; see faultsnoop doctor")
}

func openPlan(plan kernel.Plan, opt kernel.Options, o sourceOptions) (source, error) {
	if plan.Hook != kernel.Perf {
		return kernel.Open(plan, opt)
	}
	if o.Again {
		return nil, errors.New("remembering pages: hook perf does not, and no other works here: leave --again out")
	}
	if o.Mappers {
		return nil, errors.New("finding who has mapped memory: hook perf does not, and no other works here: leave --mapper out")
	}
	return perfevent.Open(perfevent.Options{
		Filter: o.Filter, Sample: o.Sample, CommandPID: o.CommandPID, Command: o.Command,
		BufferPages: ringPages(o.Buffer), Stacks: o.Stacks, KeepStacks: o.CountOnly,
	})
}

// ringBytes rounds a buffer up to a power of two, as the BPF ring buffer wants it.
func ringBytes(size int) int {
	if size == 0 {
		return 0
	}
	return 1 << bits.Len(uint(size-1))
}

// ringPages divides a buffer among the perf rings, of which each CPU has one. Their
// sizes are powers of two, in pages.
func ringPages(size int) int {
	if size == 0 {
		return 0
	}
	pages := max(1, size/os.Getpagesize()/runtime.NumCPU())
	return 1 << (bits.Len(uint(pages)) - 1)
}

func reason(insisted string, rejected []kernel.Verdict) string {
	switch {
	case insisted != "":
		return "asked for"
	case len(rejected) == 0:
		return "the best hook works here"
	}
	return kernel.Reasons(rejected)
}
