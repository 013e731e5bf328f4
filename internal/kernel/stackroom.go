package kernel

import (
	"fmt"

	"github.com/cilium/ebpf"

	"faultsnoop/internal/fault"
)

// stackRoom is the memory for stacks that were sent, which has generations: bpf/stack.h.
type stackRoom struct {
	spec       *ebpf.MapSpec // of one generation; nil if there is one only
	generation uint16
	// sent and frames are what has come of the generation.
	sent, frames int
	// before are bytes in the ring, from before the generation, that are still to be read.
	before int
}

// generations is GENERATIONS of bpf/stack.h.
const generations = 4

// ringHeader is in front of each record, which begins at a multiple of it.
const ringHeader = 8

// read is called for each record.
func (r *stackRoom) read(size int) {
	if r.before > 0 {
		r.before -= ringHeader + (size+ringHeader-1)/ringHeader*ringHeader
	}
}

// add is called for the stacks of each batch.
func (r *stackRoom) add(stacks []fault.RawStack) {
	for i := range stacks {
		if uint16(stacks[i].ID>>fault.StackGeneration) == r.generation {
			r.sent++
			r.frames += len(stacks[i].Kernel) + len(stacks[i].User)
		}
	}
}

// makeRoom gives stacks their first memory. Where faults are counted it stays, since rows are
// known by the ids of stacks.
func (l *Live) makeRoom(stays bool) error {
	if l.plan.Stacks == 0 {
		return nil
	}
	l.stacks.spec = &ebpf.MapSpec{
		Name: "sent_stacks", Type: ebpf.Hash, KeySize: 8, ValueSize: 8, MaxEntries: uint32(l.plan.Stacks),
	}
	if err := l.addRoom(0); err != nil {
		return err
	}
	if stays {
		l.stacks.spec = nil
		return nil
	}
	return l.addRoom(1)
}

func (l *Live) addRoom(generation uint16) error {
	m, err := ebpf.NewMap(l.stacks.spec)
	if err != nil {
		return fmt.Errorf("making room for stacks: %w", err)
	}
	defer m.Close()
	if err := l.coll.Maps[faultMapStacks].Put(uint32(generation%generations), m); err != nil {
		return fmt.Errorf("making room for stacks: %w", err)
	}
	return nil
}

// renewRoom begins a generation when the memory for stacks, here or in the kernel, is
// nearly full.
func (l *Live) renewRoom() error {
	r := &l.stacks
	r.add(l.batch.Stacks)
	if r.spec == nil || l.stopped || r.before > 0 || r.sent < l.plan.Stacks*3/4 && r.frames < maxFrames {
		return nil
	}
	old := r.generation - 1
	r.generation++
	r.sent, r.frames = 0, 0
	if err := l.coll.Variables[faultVarStackGeneration].Set(r.generation); err != nil {
		return fmt.Errorf("making room for stacks: %w", err)
	}
	// When this returns, programs that have begun in the generation before are over
	// (maybe_wait_bpf_programs in kernel/bpf/syscall.c), and what they have sent is in the ring.
	if err := l.addRoom(r.generation + 1); err != nil {
		return err
	}
	r.before = l.reader.AvailableBytes()
	// Empty in the first generation.
	_ = l.coll.Maps[faultMapStacks].Delete(uint32(old % generations))
	return nil
}
