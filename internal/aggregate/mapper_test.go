package aggregate

import (
	"slices"
	"testing"
	"unsafe"

	"faultsnoop/internal/fault"
)

func TestMappers(t *testing.T) {
	var m Mappers
	if got := m.Of(&fault.Fault{PID: 1}); got != nil {
		t.Errorf("mapped by %v, and no call was heard of", got)
	}
	var stacks [14]*fault.Stack // the first one stands for none
	for i := 1; i < len(stacks); i++ {
		stacks[i] = &fault.Stack{}
	}
	for _, c := range []fault.MappingCall{
		{PID: 1, Image: 5, Start: 0x1000, End: 0x9000, StackID: 1},
		{PID: 1, Image: 5, Start: 0x3000, End: 0x4000, StackID: 2},              // in the middle
		{PID: 1, Image: 5, Start: 0x8000, End: 0xa000, StackID: 3},              // over the end
		{PID: 1, Image: 5, Start: 0xb000, End: 0xb000, StackID: 4},              // nothing
		{PID: 2, Image: 5, Start: 0x1000, End: 0x9000, StackID: 5},              // another process
		{PID: 1, Image: 6, Start: 0x1000, End: 0x2000, StackID: 6},              // after an exec
		{PID: 1, Image: 5, Start: 0x10000, End: 0x11000, StackID: 7, Brk: true}, // asks
		{PID: 1, Image: 5, Start: 0x10000, End: 0x14000, StackID: 8, Brk: true}, // grows
		{PID: 1, Image: 5, Start: 0x10000, End: 0x12000, StackID: 9, Brk: true}, // shrinks
		{PID: 1, Image: 5, Start: 0x10000, End: 0x13000, StackID: 10, Brk: true},
		{PID: 4, Image: 7, Parent: 1, ParentImage: 5},
		{PID: 5, Image: 8, Parent: 4, ParentImage: 7},
		{PID: 6, Image: 9, Parent: 9, ParentImage: 9}, // of a stranger
		{PID: 4, Image: 7, Start: 0x2000, End: 0x3000, StackID: 11},
		{PID: 4, Image: 7, Start: 0x10000, End: 0x14000, StackID: 12, Brk: true},
		{PID: 1, Image: 5, Start: 0x1000, End: 0x2000, StackID: 13},
	} {
		c.Stack = stacks[c.StackID]
		m.Add(&c)
	}
	for _, test := range []struct {
		pid, image uint32
		address    uint64
		stack      int
	}{
		{1, 5, 0xfff, 0},
		{1, 5, 0x1000, 13},
		{1, 5, 0x2fff, 1},
		{1, 5, 0x3000, 2},
		{1, 5, 0x4000, 1},
		{1, 5, 0x7fff, 1},
		{1, 5, 0x8000, 3},
		{1, 5, 0x9fff, 3},
		{1, 5, 0xa000, 0},
		{1, 5, 0xb000, 0},
		{2, 5, 0x3000, 5},
		{1, 6, 0x1000, 6},
		{1, 6, 0x3000, 0},
		{3, 5, 0x1000, 0},
		{1, 5, 0x10fff, 0},
		{1, 5, 0x11000, 8},
		{1, 5, 0x12000, 10},
		{4, 7, 0x1000, 1}, // a child
		{4, 7, 0x2000, 11},
		{4, 7, 0x3000, 2},
		{4, 7, 0x12000, 10},
		{4, 7, 0x13000, 12},
		{5, 8, 0x1000, 1}, // and its child
		{5, 8, 0x2000, 1},
		{5, 8, 0x13000, 8},
		{6, 9, 0x1000, 0},
	} {
		if got := m.Of(&fault.Fault{PID: test.pid, Image: test.image, Address: test.address}); got != stacks[test.stack] {
			t.Errorf("process %d, image %d: %#x is mapped by %d, want %d", test.pid, test.image, test.address, slices.Index(stacks[:], got), test.stack)
		}
	}
}

// TestMappersBounded: however many programs map memory, each with stacks of its own, what is
// kept is bounded, and what was asked for last is known.
func TestMappersBounded(t *testing.T) {
	for _, test := range []struct{ programs, calls, frames, known int }{
		{3 * maxMappedBy, 1, 10, maxMappedBy},
		{100, 100, 1000, 3},
		{1, 1000, 1000, 1},
	} {
		var m Mappers
		var last *fault.Stack
		asked := &fault.Fault{PID: 1, Image: 1, Address: 0x1000}
		for pid := range uint32(test.programs) {
			for i := range uint64(test.calls) {
				last = &fault.Stack{Frames: make([]fault.Frame, test.frames)}
				m.Add(&fault.MappingCall{PID: pid + 1, Image: 1, Start: 0x1000 * (i + 1), End: 0x1000 * (i + 2), Stack: last})
			}
			// Its children have all that it has.
			m.Add(&fault.MappingCall{PID: 1 << 20, Image: pid, Parent: pid + 1, ParentImage: 1})
			if m.Of(asked); m.size > maxMappedBytes || len(m.programs) > maxMappedBy {
				t.Fatalf("%d programs and %d bytes are kept", len(m.programs), m.size)
			}
		}
		size := 0
		kept := map[*mappedParts]int{}
		for _, e := range m.programs {
			kept[e.Value.(*mapped).mappedParts]++
		}
		stacks := map[*fault.Stack]bool{}
		for p, users := range kept {
			if p.users != users {
				t.Errorf("parts of %d programs are said to be of %d", users, p.users)
			}
			size += len(p.list) * int(unsafe.Sizeof(mappedPart{}))
			for _, part := range p.list {
				stacks[part.stack] = true
			}
		}
		if size += len(stacks) * test.frames * int(unsafe.Sizeof(fault.Frame{})); size != m.size || len(stacks) != len(m.stacks) {
			t.Errorf("%d bytes are kept, said to be %d", size, m.size)
		}
		if got := m.Of(&fault.Fault{PID: uint32(test.programs), Image: 1, Address: 0x1000 * uint64(test.calls)}); got != last {
			t.Errorf("%d programs: the latest mapping is not known", test.programs)
		}
		if test.programs > 1 && m.Of(asked) == nil {
			t.Errorf("%d programs: the one that was asked for all the time is not known", test.programs)
		}
		if len(m.programs) < test.known {
			t.Errorf("%d programs: %d are known", test.programs, len(m.programs))
		}
	}
}
