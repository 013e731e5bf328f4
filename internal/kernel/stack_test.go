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

// TestStackOfAllFrames: a stack of as many frames as fit is whole, and one of one more is not.
func TestStackOfAllFrames(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		const fit, some = 127, 20
		at := func(depth int) fault.RawStack {
			return stackOf(t, hook, func(mem []byte) { touchDeep(mem, depth) })
		}
		deepest := some + fit - len(at(some).User)
		for _, test := range []struct {
			depth, frames int
			end           fault.StackEnd
		}{
			{deepest - 1, fit - 1, fault.StackWhole},
			{deepest, fit, fault.StackWhole},
			{deepest + 1, fit, fault.StackTruncated},
		} {
			if s := at(test.depth); len(s.User) != test.frames || s.End != test.end {
				t.Errorf("depth %d: %d frames, end %v, want %d and %v", test.depth, len(s.User), s.End, test.frames, test.end)
			}
		}
	})
}

// TestStacksBeginAnew: a trace that sees more stacks than there is room for goes on to get
// them, each id means one stack, and what found no room meanwhile is counted.
func TestStacksBeginAnew(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		feat, opt := needHook(t, hook)
		const room, depths, rounds = 16, 50, 2
		pageSize := os.Getpagesize()
		mem := region(t, rounds*depths+2*room)
		opt.Stacks = true
		opt.Filter = fault.Filter{PIDs: []uint32{uint32(os.Getpid())}, Self: true, AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem))}
		plans, err := feat.Plans(opt)
		if err != nil {
			t.Fatal(err)
		}
		plans[0].Stacks = room
		l, err := Open(plans[0], opt)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()

		depthOf, told := map[uint64]int{}, map[uint64]int{} // by id
		seen, without := 0, 0
		wanted := func(f *fault.Fault) int {
			page := int(f.Address-addressOf(mem)) / pageSize
			if page >= rounds*depths {
				return page - rounds*depths
			}
			return page % depths
		}
		take := func(batch *fault.Batch) {
			for i := range batch.Stacks {
				s, n := &batch.Stacks[i], 0
				for _, pc := range s.User {
					if f := runtime.FuncForPC(uintptr(pc) - 1); f != nil && strings.HasSuffix(f.Name(), ".touchDeep") {
						n++
					}
				}
				if d, known := depthOf[s.ID]; known && d != n-1 {
					t.Errorf("id %#x is of stacks of depth %d and %d", s.ID, d, n-1)
				}
				depthOf[s.ID] = n - 1
				told[s.ID]++
			}
			for i := range batch.Faults {
				f := &batch.Faults[i]
				seen++
				if f.StackID == 0 {
					without++
				} else if d, known := depthOf[f.StackID]; !known || d != wanted(f) {
					t.Errorf("fault of depth %d has id %#x, known %v, of depth %d", wanted(f), f.StackID, known, d)
				}
			}
		}
		next := func() {
			batch, err := l.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			take(batch)
		}
		for i := range rounds * depths {
			touchDeep(mem[i*pageSize:], i%depths)
			if i%4 == 3 { // so that there is always room
				next()
			}
		}
		if next(); without > 0 || seen != rounds*depths {
			t.Errorf("%d of %d faults have no stack though there was time to make room", without, seen)
		}
		if len(depthOf) != rounds*depths {
			t.Errorf("%d ids, want one for each of %d depths in each of %d rounds", len(depthOf), depths, rounds)
		}
		burst := 2 * room
		for i := range burst {
			touchDeep(mem[(rounds*depths+i)*pageSize:], i)
		}
		next()
		c, err := l.Counters()
		if err != nil {
			t.Fatal(err)
		}
		if without == 0 || c.Stackless != uint64(without) || seen != rounds*depths+burst {
			t.Errorf("%d faults, %d without a stack, %d of them counted; a burst of %d stacks finds room for %d", seen, without, c.Stackless, burst, room)
		}
		faults, stacks := drainStacks(t, l)
		take(&fault.Batch{Faults: faults, Stacks: stacks})
		for id, n := range told {
			if n > 1 {
				t.Errorf("stack %#x was sent %d times", id, n)
			}
		}
	})
}

// TestSamplesAddUp: where faults are counted by stack, with far more stacks and threads than there
// is room for at a time, each is counted once and with its own stack, as long as somebody reads;
// what finds no room in a burst is counted too.
func TestSamplesAddUp(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		feat, opt := needHook(t, hook)
		const room, depths, rounds, burst = 16, 50, 4, 64
		pageSize := os.Getpagesize()
		mem := region(t, rounds*depths*2+burst)
		opt.Stacks, opt.CountOnly, opt.Tables = true, true, []fault.By{fault.ByAccess, fault.BySample}
		opt.Filter = fault.Filter{PIDs: []uint32{uint32(os.Getpid())}, Self: true, AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem))}
		plans, err := feat.Plans(opt)
		if err != nil {
			t.Fatal(err)
		}
		plans[0].Stacks, plans[0].StackRows, plans[0].StatRows = room, room, room+8
		l, err := Open(plans[0], opt)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()

		depthOf := map[uint64]int{} // by id
		got := map[int]uint64{}     // faults by depth, -1 without a stack
		take := func(stacks []fault.RawStack, samples []fault.RawSample) {
			for i := range stacks {
				n := 0
				for _, pc := range stacks[i].User {
					if f := runtime.FuncForPC(uintptr(pc) - 1); f != nil && strings.HasSuffix(f.Name(), ".touchDeep") {
						n++
					}
				}
				depthOf[stacks[i].ID] = n - 1
			}
			for i := range samples {
				s := &samples[i]
				if s.PID != uint32(os.Getpid()) || s.TID == 0 || s.Comm == (fault.Comm{}) {
					t.Errorf("sample of %d, thread %d", s.PID, s.TID)
				}
				depth, ok := depthOf[s.StackID]
				if !ok {
					depth = -1
					if s.StackID<<(64-fault.StackGeneration) != 0 {
						t.Errorf("stack %#x has not come", s.StackID)
					}
				}
				got[depth] += s.Faults
			}
		}
		next := func() {
			batch, err := l.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			take(batch.Stacks, batch.Samples)
		}
		var rows *fault.Rows
		read := func() {
			if rows, err = l.Rows(); err != nil {
				t.Fatal(err)
			}
			take(rows.Stacks, rows.Samples)
			if len(rows.Tables[1].Rows) != 0 {
				t.Errorf("%d rows are in the table too", len(rows.Tables[1].Rows))
			}
		}
		page := 0
		touch := func(depth int) {
			touchDeep(mem[page*pageSize:], depth)
			page++
		}
		for i := range rounds * depths {
			touch(i % depths)
			touch(i % depths)
			if i%4 == 3 { // so that there is always room
				next()
			}
			if i%70 == 69 {
				read()
			}
		}
		read()
		for d := range depths {
			if got[d] != 2*rounds {
				t.Errorf("%d faults of depth %d, want %d", got[d], d, 2*rounds)
			}
		}
		if n := got[-1] + rows.Tables[1].Other.Faults(); n != 0 {
			t.Errorf("%d faults have no stack though there was time to make room", n)
		}
		for i := range burst {
			touch(i)
		}
		if err := l.Stop(); err != nil {
			t.Fatal(err)
		}
		for {
			batch, err := l.Next(t.Context())
			if err != nil {
				break
			}
			take(batch.Stacks, batch.Samples)
		}
		read()
		var sum uint64
		for _, n := range got {
			sum += n
		}
		other := rows.Tables[1].Other.Faults()
		if sum+other != uint64(page) {
			t.Errorf("%d faults in samples and %d in none, want %d", sum, other, page)
		}
		c, err := l.Counters()
		if err != nil {
			t.Fatal(err)
		}
		if without := got[-1] + other; without == 0 || c.Stackless != without || c.StacksLost != 0 {
			t.Errorf("%d faults have no stack, %d are said to have found no room and %d a full ring", without, c.Stackless, c.StacksLost)
		}
	})
}
