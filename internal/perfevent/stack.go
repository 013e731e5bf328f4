package perfevent

import (
	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// stackKey is a stack of one program of one process.
type stackKey struct {
	pid, image, chain uint32
}

// Marks between the parts of a stack (enum perf_callchain_context); all of them are above
// any address.
const (
	contextKernel = ^uint64(128 - 1)
	contextUser   = ^uint64(512 - 1)
	contextMax    = ^uint64(4095 - 1)
)

// stack gives a fault the id of its stack, and hands the stack on if it is new.
func (s *Session) stack(t *task, f *fault.Fault, rec *record) {
	if s.stacks == nil {
		return
	}
	if rec.chain == 0 {
		if rec.kind != entry { // what has not completed has none
			s.tally.Stackless++
		}
		return
	}
	key := stackKey{f.PID, t.proc.image, rec.chain}
	id, known := s.stacks[key]
	if !known {
		if len(s.stacks) >= s.decoder.room {
			s.tally.Stackless++
			return
		}
		id = s.generation<<fault.StackGeneration | uint64(len(s.stacks)+1)
		s.stacks[key] = id
		raw := splitChain(s.decoder.chainAt(rec.chain))
		raw.ID, raw.Time, raw.PID, raw.Image, raw.Process = id, f.End, f.PID, f.Image, f.Process
		s.batch.Stacks = append(s.batch.Stacks, raw)
	}
	f.StackID = id
}

// forgetStacks begins a generation of stacks when there is hardly room for more, as
// [fault.RawStack] has it. A batch is of one of them.
func (s *Session) forgetStacks() {
	d := &s.decoder
	if s.stacks == nil || s.opt.KeepStacks || max(len(s.stacks), len(d.chains)) < d.room*3/4 && d.frames < maxFrames {
		return
	}
	// Records that wait for those of other CPUs may have chains from before the last time.
	for _, r := range s.rings {
		for i := r.next; i < len(r.queue); i++ {
			if c := r.queue[i].chain; c != 0 && d.chains[c] == nil {
				return
			}
		}
	}
	d.forgetChains()
	clear(s.stacks)
	s.generation = (s.generation + 1) & (1<<(64-fault.StackGeneration) - 1)
}

// splitChain divides what the kernel has written (perf_callchain in
// kernel/events/callchain.c). It does not say why it ends, but for its length: both parts
// together have as many frames as fit.
func splitChain(ips []uint64) fault.RawStack {
	const maxStack = 127 // kernel.perf_event_max_stack, unless it was changed
	raw := fault.RawStack{End: fault.StackUntold}
	context := contextUser
	for _, ip := range ips {
		switch {
		case ip >= contextMax:
			context = ip
		case context == contextKernel:
			raw.Kernel = append(raw.Kernel, ip)
		case context == contextUser:
			raw.User = append(raw.User, ip)
		}
	}
	switch n := len(raw.User) + len(raw.Kernel); {
	case n == 0:
		raw.End = fault.StackNone
	case n >= maxStack:
		raw.End = fault.StackTruncated
	}
	return raw
}

// MappingsOf returns what the process pid has mapped, nil if that is not known. It may be
// called for stacks of the latest batch, of processes that have ended too. What was
// unmapped and not replaced meanwhile is there still.
func (s *Session) MappingsOf(pid uint32, _ uint64) *process.Space {
	p := s.tasks.procs[pid]
	if p == nil {
		p = s.tasks.ended[pid]
	}
	if p == nil {
		return nil
	}
	return s.spaceOf(p)
}
