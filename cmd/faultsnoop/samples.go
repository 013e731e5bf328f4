package main

import "faultsnoop/internal/fault"

// Bounds of what is kept of a run that is counted: nodes of stacks, some 30 bytes each, and
// samples, some 100.
const (
	maxNodes   = 1 << 21
	maxSamples = 1 << 19
)

// stackCounts are samples by stacks with names: equal ones are one, whichever process they are of.
type stackCounts struct {
	samples []fault.StackSample
	rest    fault.StackSample // what found no room
	at      map[sampleKey]int32
	// tasks are numbers of the threads of samples.
	tasks map[sampledTask]uint32
}

type sampleKey struct {
	stack int32
	task  uint32
	kind  fault.Kind
	major bool
}

type sampledTask struct {
	pid, tid      uint32
	comm, process fault.Comm
}

func newStackCounts() *stackCounts {
	return &stackCounts{at: map[sampleKey]int32{}, tasks: map[sampledTask]uint32{}}
}

// add counts a sample of a process of this name, and reports whether there is room for it.
func (c *stackCounts) add(s *fault.RawSample, stack int32, process fault.Comm) bool {
	task := sampledTask{s.PID, s.TID, s.Comm, process}
	id, known := c.tasks[task]
	if !known {
		id = uint32(len(c.tasks))
	}
	key := sampleKey{stack, id, s.Kind, s.Major}
	i, ok := c.at[key]
	sum := &c.rest
	switch {
	case ok:
		sum = &c.samples[i]
	case len(c.samples) < maxSamples:
		c.tasks[task] = id
		c.at[key] = int32(len(c.samples))
		c.samples = append(c.samples, fault.StackSample{
			Stack: stack, PID: s.PID, TID: s.TID, Comm: s.Comm, Process: process, Kind: s.Kind, Major: s.Major,
		})
		sum = &c.samples[len(c.samples)-1]
		ok = true
	}
	sum.Faults += s.Faults
	sum.Time += s.Time
	sum.Bytes += s.Bytes
	return ok
}

// profile is what was counted. Nothing may be added any more.
func (c *stackCounts) profile() *fault.Profile {
	c.at, c.tasks = nil, nil
	p := &fault.Profile{Samples: c.samples}
	if c.rest.Faults > 0 {
		p.Samples = append(p.Samples, c.rest)
	}
	for i := range p.Samples {
		p.Faults += p.Samples[i].Faults
	}
	return p
}
