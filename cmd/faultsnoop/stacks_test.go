package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
	"faultsnoop/internal/symbol"
)

// TestStackMemory: stacks are known until those of the generation after the next come, also
// where the number of generations begins anew.
func TestStackMemory(t *testing.T) {
	m := make(stackMemory, tracedGenerations)
	var last uint64
	stacks := map[uint64]*namedStack{}
	for _, generation := range []uint64{0, 1, 2, 3, 0xfffe, 0xffff, 0, 1} {
		for i := range uint64(100) {
			id := generation<<fault.StackGeneration | (i + 1)
			stacks[id] = &namedStack{}
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

// fixedMappings are those of every process.
type fixedMappings struct{ process.Space }

func (m *fixedMappings) MappingsOf(uint32, uint64) *process.Space { return &m.Space }

// TestNamesOfCompiledCode: a stack is named as its process lists it by the time of a fault; where
// faults are counted the first name stays.
func TestNamesOfCompiledCode(t *testing.T) {
	for _, counted := range []bool{false, true} {
		cmd := exec.CommandContext(t.Context(), "sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}()
		pid := uint32(cmd.Process.Pid)
		list := fmt.Sprintf("/tmp/perf-%d.map", pid)
		defer os.Remove(list)
		write := func(text string) {
			t.Helper()
			f, err := os.OpenFile(list, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteString(text); err != nil {
				t.Fatal(err)
			}
		}
		var maps fixedMappings
		maps.Insert(process.Mapping{Start: 0x700000000000, End: 0x700000010000, Label: "[anon]", Flags: fault.PermFlags("r-xp")})
		n := &stackNamer{
			maps: &maps, resolver: symbol.NewResolver(symbol.Options{PageSize: 4096, Symbols: true, Proc: true, Patient: true}),
			named: make(stackMemory, tracedGenerations), versions: map[execution]uint64{}, places: map[place][]fault.Frame{},
		}
		defer n.resolver.Close()
		if counted {
			n.tree, n.whole = &fault.StackTree{}, newStackCounts()
		}
		const id = 7
		next := func(stacks ...fault.RawStack) string {
			t.Helper()
			batch := fault.Batch{Faults: []fault.Fault{{PID: pid, StackID: id}}}
			n.name(&batch, n.prepare(stacks), false)
			s := batch.Faults[0].Stack
			if counted { // though nothing was counted yet
				s = n.tree.Stack(n.named.of(id).leaf)
			}
			if len(s.Frames) != 2 {
				t.Fatalf("frames %+v", s.Frames)
			}
			return s.Frames[0].Func + " " + s.Frames[1].Func
		}
		later := func(want string) {
			t.Helper()
			got := next()
			for end := time.Now().Add(20 * time.Second); got != want && time.Now().Before(end); got = next() {
				time.Sleep(10 * time.Millisecond)
			}
			if got != want {
				t.Errorf("counted %v: named %q, want %q", counted, got, want)
			}
		}
		raw := fault.RawStack{ID: id, PID: pid, Time: process.Now(), User: []uint64{0x700000000010, 0x700000001010}}
		if got := next(raw); got != " " {
			t.Errorf("nothing is listed, and the stack is named %q", got)
		}
		write("700000001000 100 caller\n")
		later(" caller")
		write("700000000000 100 first\n")
		later("first caller")
		write("700000000000 100 second\n700000008000 10 other\n")
		if counted {
			if got := next(); got != "first caller" {
				t.Errorf("what was counted as first is named %q", got)
			}
			continue
		}
		later("second caller")
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
