package main

import (
	"context"
	"errors"
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

// TestUnlessEnded: nobody waits for what is slow to open after a signal, nor is it left open.
func TestUnlessEnded(t *testing.T) {
	signal, failure := errors.New("a signal"), errors.New("a failure")
	for name, c := range map[string]struct {
		ended, slow bool
		fails, want error
		given       bool
	}{
		"opened":              {},
		"fails":               {fails: failure, want: failure},
		"ended while opening": {ended: true, slow: true, want: signal, given: true},
		"ended before":        {ended: true, want: signal, given: true},
		"ended, then fails":   {ended: true, slow: true, fails: failure, want: signal},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, end := context.WithCancelCause(t.Context())
			defer end(nil)
			hold, given := make(chan struct{}), make(chan int, 1)
			if !c.slow {
				close(hold)
			}
			if c.ended {
				end(signal)
			}
			got, err := unlessEnded(ctx, func() (int, error) {
				<-hold
				if c.fails != nil {
					return 0, c.fails
				}
				return 7, nil
			}, func(n int) { given <- n })
			if !errors.Is(err, c.want) || (got == 7) != (err == nil) {
				t.Errorf("%d, %v", got, err)
			}
			if c.slow {
				close(hold)
			}
			if c.given {
				if n := <-given; n != 7 {
					t.Errorf("%d was given back", n)
				}
			}
		})
	}
}
