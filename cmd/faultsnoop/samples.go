package main

import (
	"slices"
	"time"

	"faultsnoop/internal/fault"
)

// Bounds of what is kept of a run that is counted: nodes of stacks, some 30 bytes each, and
// samples, some 70.
const (
	maxNodes   = 1 << 21
	maxSamples = 1 << 19
)

// stackCounts are samples by stacks with names: equal ones are one, whichever process they are of.
type stackCounts struct {
	at    map[sampleKey]int32
	costs []stackCost
	rest  stackCost // of what found no room
	// tasks are the threads of samples.
	tasks   []sampledTask
	taskIDs map[sampledTask]uint32
}

type sampleKey struct {
	stack int32
	task  uint32
	kind  fault.Kind
	major bool
}

type stackCost struct {
	sampleKey
	faults, bytes uint64
	time          time.Duration
}

type sampledTask struct {
	pid, tid      uint32
	comm, process fault.Comm
}

func newStackCounts() *stackCounts {
	return &stackCounts{at: map[sampleKey]int32{}, taskIDs: map[sampledTask]uint32{}}
}

// add counts a sample of a process of this name, and reports whether there is room for it.
func (c *stackCounts) add(s *fault.RawSample, stack int32, process fault.Comm) bool {
	task := sampledTask{s.PID, s.TID, s.Comm, process}
	id, known := c.taskIDs[task]
	if !known {
		id = uint32(len(c.tasks))
	}
	key := sampleKey{stack, id, s.Kind, s.Major}
	i, ok := c.at[key]
	cost := &c.rest
	switch {
	case ok:
		cost = &c.costs[i]
	case len(c.costs) < maxSamples:
		if !known {
			c.tasks = append(c.tasks, task)
			c.taskIDs[task] = id
		}
		c.at[key] = int32(len(c.costs))
		c.costs = append(c.costs, stackCost{sampleKey: key})
		cost = &c.costs[len(c.costs)-1]
		ok = true
	}
	cost.faults += s.Faults
	cost.time += s.Time
	cost.bytes += s.Bytes
	return ok
}

// appendTo adds the samples to a profile.
func (c *stackCounts) appendTo(p *fault.Profile) {
	p.Samples = slices.Grow(p.Samples, len(c.costs)+1)
	for i := range c.costs {
		cost := &c.costs[i]
		task := &c.tasks[cost.task]
		p.Samples = append(p.Samples, fault.StackSample{
			Stack: cost.stack, PID: task.pid, TID: task.tid, Comm: task.comm, Process: task.process, Kind: cost.kind, Major: cost.major,
			Faults: cost.faults, Time: cost.time, Bytes: cost.bytes,
		})
		p.Faults += cost.faults
	}
	if c.rest.faults > 0 {
		p.Samples = append(p.Samples, fault.StackSample{Faults: c.rest.faults, Time: c.rest.time, Bytes: c.rest.bytes})
		p.Faults += c.rest.faults
	}
}
