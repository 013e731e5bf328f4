package fault

import (
	"math/rand/v2"
	"reflect"
	"testing"
)

// TestStackTree: what comes out of a tree is what was put in, and equal stacks are one.
func TestStackTree(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var tree StackTree
	if tree.Add(nil) != 0 || tree.Add(&Stack{}) != 0 || tree.Add(&Stack{End: StackNone}) != 0 || tree.Stack(0).End != StackNone {
		t.Error("none is a stack")
	}
	known := map[int32]*Stack{}
	for range 2000 {
		s := &Stack{End: StackEnd(r.IntN(4))}
		for range 1 + r.IntN(5) {
			s.Frames = append(s.Frames, Frame{Func: string(rune('a' + r.IntN(3))), Line: r.Uint32N(2), Inlined: r.IntN(2) == 0})
		}
		at := tree.Add(s)
		if got := tree.Stack(at); !reflect.DeepEqual(got, s) {
			t.Fatalf("%+v, want %+v", got, s)
		}
		if old := known[at]; old != nil && !reflect.DeepEqual(old, s) {
			t.Fatalf("one number for %+v and %+v", old, s)
		}
		known[at] = s
	}
	for at, s := range known {
		if again := tree.Add(s); again != at {
			t.Fatalf("%+v is %d and %d", s, at, again)
		}
	}
	if len(tree.Frames) != 12 {
		t.Errorf("%d frames, want 12", len(tree.Frames))
	}
	// The same function of two processes is one, but not what is in no module.
	for _, f := range []Frame{{Func: "f", Module: "/m", Offset: 5}, {}} {
		one, other := f, f
		one.Addr, other.Addr = 1, 2
		same := tree.Add(&Stack{Frames: []Frame{one}}) == tree.Add(&Stack{Frames: []Frame{other}})
		if same != (f.Module != "") {
			t.Errorf("%+v and %+v: one %v", one, other, same)
		}
	}
}
