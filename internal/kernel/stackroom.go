package kernel

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"faultsnoop/internal/fault"
)

// stackRoom is the memory for stacks that were sent, which has generations: bpf/stack.h.
type stackRoom struct {
	spec       *ebpf.MapSpec // of one generation; nil if no stacks are taken
	generation uint16
	// sent and frames are what has come of the generation, and rows how many rows by stack had
	// been made when it began.
	sent, frames int
	rows         uint64
	// before are bytes in the ring, from before the generation, that are still to be read.
	before int
	// reaped are the rows of generations before, for when their stacks have been read.
	reaped []fault.RawSample
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

// makeRoom gives stacks their first memory.
func (l *Live) makeRoom() error {
	if l.plan.Stacks == 0 {
		return nil
	}
	l.stacks.spec = &ebpf.MapSpec{
		Name: "sent_stacks", Type: ebpf.Hash, KeySize: 8, ValueSize: 8, MaxEntries: uint32(l.plan.Stacks),
	}
	if err := l.addRoom(0); err != nil {
		return err
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

// byStack is the table that counts by stacks of ours.
func (l *Live) byStack() (table int, ok bool) {
	for i, by := range l.tables {
		if by == fault.ByStack || by == fault.BySample {
			return i, l.stacks.spec != nil
		}
	}
	return 0, false
}

// renewRoom begins a generation when the memory for stacks, here or in the kernel, or that
// for rows by stack is nearly full.
func (l *Live) renewRoom() error {
	r := &l.stacks
	r.add(l.batch.Stacks)
	if r.spec == nil || l.stopped || r.before > 0 {
		return nil
	}
	l.batch.Samples, r.reaped = r.reaped, nil
	crowded := r.sent >= l.plan.Stacks*3/4 || r.frames >= maxFrames
	if _, ok := l.byStack(); ok && !crowded {
		rows, err := l.rowsMade()
		if err != nil {
			return err
		}
		crowded = rows-r.rows >= uint64(l.plan.StackRows)*3/4
	}
	if !crowded {
		return nil
	}
	return l.beginGeneration()
}

// rowsMade is how many rows by stack there have been.
func (l *Live) rowsMade() (uint64, error) {
	perCPU, err := readMapped[faultCounters](l.counts)
	if err != nil {
		return 0, fmt.Errorf("reading the counters: %w", err)
	}
	var n uint64
	for i := range perCPU {
		n += perCPU[i].StackRows
	}
	return n, nil
}

func (l *Live) beginGeneration() error {
	r := &l.stacks
	old := r.generation - 1
	r.generation++
	r.sent, r.frames = 0, 0
	if err := l.coll.Variables[faultVarStackGeneration].Set(r.generation); err != nil {
		return fmt.Errorf("making room for stacks: %w", err)
	}
	// When this returns, programs that have begun in the generation before are over
	// (maybe_wait_bpf_programs in kernel/bpf/syscall.c): what they have sent is in the ring, and
	// what they have counted is in its row.
	if err := l.addRoom(r.generation + 1); err != nil {
		return err
	}
	r.before = l.reader.AvailableBytes()
	// Empty in the first generation.
	_ = l.coll.Maps[faultMapStacks].Delete(uint32(old % generations))
	return l.harvest()
}

// harvest takes the rows by stack out of the kernel, but for those of the generation in which
// faults are counted now: all of them when nothing is counted any more.
func (l *Live) harvest() error {
	table, ok := l.byStack()
	if !ok {
		return nil
	}
	r := &l.stacks
	var err error
	if r.rows, err = l.rowsMade(); err != nil {
		return err
	}
	rows := l.coll.Maps[faultMapStatRows]
	keys, values := make([]faultStatKey, rowsAtATime), make([]faultCost, rowsAtATime)
	var failed error
	err = eachBatch(rows.BatchLookup, keys, values, func(n int) {
		old := keys[:0]
		for i := range keys[:n] {
			k := keys[i]
			if int(k.Table) == table && (l.stopped || uint16(k.Value>>fault.StackGeneration) != r.generation) {
				r.reaped = append(r.reaped, l.sample(&k, &values[i]))
				old = append(old, k)
			}
		}
		if len(old) > 0 && failed == nil {
			failed = unpreempted(func() error {
				_, err := rows.BatchDelete(old, nil)
				return err
			})
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("reading the table of stacks: %w", err)
	}
	return nil
}

func (l *Live) sample(k *faultStatKey, c *faultCost) fault.RawSample {
	s := fault.RawSample{StackID: k.Value, Time: time.Duration(c.Ns), Bytes: c.Bytes}
	for _, n := range c.Tally.Faults {
		s.Faults += n
	}
	if l.tables[k.Table] == fault.BySample {
		key := l.decoder.key(fault.BySample, k)
		s.PID, s.TID, s.Comm, s.Kind, s.Major = key.Process, key.ID, key.Name, key.Kind, key.Major
	}
	return s
}
