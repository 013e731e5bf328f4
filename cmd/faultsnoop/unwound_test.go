package main

import (
	"maps"
	"testing"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// A stack has one id however often it is made, and one that is forgotten leaves its faults
// among those that had no room.
func TestUnwoundIDs(t *testing.T) {
	stack := func(line uint32) *fault.Stack {
		return &fault.Stack{Frames: []fault.Frame{{Func: "f", Line: line}, {Func: "main"}}}
	}
	w := newUnwound(nil, nil, []fault.By{fault.ByStack})
	w.stacks.limit = 10
	name := fault.MakeComm("p")
	first := w.id(stack(1), name)
	if w.id(stack(1), name) != first {
		t.Error("an equal stack has another id")
	}
	if w.id(stack(2), name) == first || w.id(stack(1), fault.MakeComm("q")) == first {
		t.Error("another stack, or one of another process, has the same id")
	}
	w.count(&fault.Batch{Faults: []fault.Fault{{StackID: first, Sampled: 1}, {}}})
	for line := range uint32(30) {
		w.id(stack(line+10), name)
	}
	if _, ok := w.stacks.peek(first); ok {
		t.Error("the oldest stack is not forgotten")
	}
	all := fault.Table{Rows: map[fault.Key]fault.Cost{{}: {Unknown: 2}}}
	table := &w.counter.Rows().Tables[0]
	got := aggregate.WithStacks(&all, table)
	if len(table.Rows) != 0 || table.Other.Faults() != 1 || len(got.Rows) != 1 || got.Rows[fault.Key{}].Unknown != 2 {
		t.Errorf("%d rows, %d other faults, shown as %v", len(table.Rows), table.Other.Faults(), got.Rows)
	}
}

// What is used is kept, and what is forgotten was not used for the longest time.
func TestRecent(t *testing.T) {
	forgotten := map[int]string{}
	r := recent[int, string]{limit: 10, forgotten: func(m map[int]string) { maps.Copy(forgotten, m) }}
	for i := range 100 {
		if _, ok := r.get(i); ok {
			t.Fatalf("%d is known before it was put", i)
		}
		r.put(i, "x")
		if _, ok := r.get(3); i >= 3 && !ok {
			t.Fatalf("3 is forgotten after %d, though it is used all the time", i)
		}
		if n := len(r.latest) + len(r.older); n > 20 || n+len(forgotten) != i+1 {
			t.Fatalf("%d are known and %d forgotten of %d", n, len(forgotten), i+1)
		}
	}
	for i := 90; i < 100; i++ {
		if _, ok := r.peek(i); !ok {
			t.Errorf("%d is forgotten", i)
		}
	}
	if _, ok := forgotten[3]; ok {
		t.Error("what was used is said to be forgotten")
	}
}
