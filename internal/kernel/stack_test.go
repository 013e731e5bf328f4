package kernel

import (
	"os"
	"runtime"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
)

//go:noinline
func touchDeep(mem []byte, depth int) int {
	if depth == 0 {
		mem[0] = 1
		return 1
	}
	return touchDeep(mem, depth-1) + 1
}

// stackOf returns the stack of the one fault on mem that touch takes.
func stackOf(t *testing.T, hook Hook, touch func(mem []byte)) fault.RawStack {
	t.Helper()
	feat, opt := needHook(t, hook)
	mem := region(t, 1)
	opt.Stacks = true
	opt.Filter = fault.Filter{PIDs: []uint32{uint32(os.Getpid())}, Self: true, AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem))}
	l := openHook(t, feat, opt)
	touch(mem)
	faults, stacks := drainStacks(t, l)
	if len(faults) != 1 || len(stacks) != 1 || faults[0].StackID == 0 || faults[0].StackID != stacks[0].ID {
		t.Fatalf("faults %+v, stacks %+v", faults, stacks)
	}
	return stacks[0]
}

func drainStacks(t *testing.T, l *Live) (faults []fault.Fault, stacks []fault.RawStack) {
	t.Helper()
	if err := l.Stop(); err != nil {
		t.Fatal(err)
	}
	for {
		batch, err := l.Next(t.Context())
		if err != nil {
			return faults, stacks
		}
		faults = append(faults, batch.Faults...)
		stacks = append(stacks, batch.Stacks...)
	}
}

func TestStackOfOwnFunctions(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		for _, depth := range []int{0, 20, 125, 300} {
			s := stackOf(t, hook, func(mem []byte) { touchDeep(mem, depth) })
			n := 0
			for _, pc := range s.User {
				if f := runtime.FuncForPC(uintptr(pc) - 1); f != nil && strings.HasSuffix(f.Name(), ".touchDeep") {
					n++
				}
			}
			want, end := depth+1, fault.StackWhole
			if depth+1 > 120 {
				want, end = min(depth+1, 127), fault.StackTruncated
			}
			if n != want || s.End != end || len(s.Kernel) != 0 {
				t.Errorf("depth %d: %d frames of the function, end %v, %d kernel frames", depth, n, s.End, len(s.Kernel))
				for _, pc := range s.User {
					t.Log(runtime.FuncForPC(uintptr(pc) - 1).Name())
				}
			}
		}
	})
}
