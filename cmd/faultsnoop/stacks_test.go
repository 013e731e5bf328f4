package main

import (
	"testing"

	"faultsnoop/internal/fault"
)

// TestStackMemory: stacks are known until those of the generation after the next come, also
// where the number of generations begins anew.
func TestStackMemory(t *testing.T) {
	var m stackMemory
	var last uint64
	stacks := map[uint64]*fault.Stack{}
	for _, generation := range []uint64{0, 1, 2, 3, 0xfffe, 0xffff, 0, 1} {
		for i := range uint64(100) {
			id := generation<<fault.StackGeneration | (i + 1)
			stacks[id] = &fault.Stack{}
			m.add(id, stacks[id])
		}
		for id, s := range stacks {
			g := id >> fault.StackGeneration
			if kept := g == generation || g == last; kept != (m.of(id) == s) {
				t.Errorf("in generation %#x, after %#x: stack %#x kept %v", generation, last, id, !kept)
			}
		}
		if n := len(m[0].stacks) + len(m[1].stacks); n > 200 {
			t.Errorf("%d stacks are kept of generations of 100", n)
		}
		last = generation
	}
	if m.of(0) != nil {
		t.Error("0 has a stack")
	}
}
