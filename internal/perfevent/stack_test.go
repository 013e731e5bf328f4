package perfevent

import (
	"encoding/binary"
	"testing"

	"faultsnoop/internal/fault"
)

// TestStacksBeginAnew: with room for a few stacks all of many have one, unless ids are to be
// kept, and a record that waits while stacks begin anew has its own still.
func TestStacksBeginAnew(t *testing.T) {
	const room, all = 8, 100
	for _, keep := range []bool{false, true} {
		var s Session
		s.opt.KeepStacks = keep
		s.decoder.takeChains(room)
		s.stacks = map[stackKey]uint64{}
		waiting := &ring{}
		s.rings = []*ring{waiting}
		t1 := &task{proc: &proc{}}
		stackOf := map[uint64]uint64{} // the address of each, by id
		with := 0
		take := func(rec *record) {
			f := fault.Fault{PID: 1}
			s.stack(t1, &f, rec)
			for _, raw := range s.batch.Stacks {
				if was, known := stackOf[raw.ID]; known && was != raw.User[0] {
					t.Errorf("id %#x is of two stacks", raw.ID)
				}
				stackOf[raw.ID] = raw.User[0]
			}
			if f.StackID == 0 {
				return
			}
			if with++; stackOf[f.StackID] != rec.ip {
				t.Errorf("the fault at %#x has the stack of %#x", rec.ip, stackOf[f.StackID])
			}
		}
		for i := range uint64(all) {
			ip := 0x1000 + i/2
			rec := record{kind: minor, ip: ip, chain: s.decoder.chain(binary.NativeEndian.AppendUint64(nil, ip))}
			waiting.queue = append(waiting.queue, rec)
			if i%5 == 4 { // the last two wait for the next batch
				s.batch.Stacks = nil
				for ; waiting.next < len(waiting.queue)-2; waiting.next++ {
					take(&waiting.queue[waiting.next])
				}
				s.forgetStacks()
			}
		}
		if keep && (with > 2*room || s.tally.Stackless == 0) || !keep && with != waiting.next {
			t.Errorf("keep %v: %d of %d faults have a stack, %d are counted as without", keep, with, waiting.next, s.tally.Stackless)
		}
		if n := len(s.decoder.chains) + len(s.decoder.older); n > 2*room {
			t.Errorf("keep %v: %d stacks are kept, with room for %d", keep, n, room)
		}
	}
}

// TestSplitChain: both parts of a stack share the room for its frames.
func TestSplitChain(t *testing.T) {
	for _, test := range []struct {
		kernel, user int
		end          fault.StackEnd
	}{
		{0, 0, fault.StackNone},
		{0, 126, fault.StackUntold},
		{0, 127, fault.StackTruncated},
		{10, 116, fault.StackUntold},
		{10, 117, fault.StackTruncated},
		{127, 0, fault.StackTruncated},
	} {
		var chain []uint64
		if test.kernel > 0 {
			chain = append(chain, contextKernel)
		}
		for i := range test.kernel {
			chain = append(chain, 0xffffffff81000000+uint64(i))
		}
		chain = append(chain, contextUser)
		for i := range test.user {
			chain = append(chain, 0x1000+uint64(i))
		}
		if s := splitChain(chain); len(s.Kernel) != test.kernel || len(s.User) != test.user || s.End != test.end {
			t.Errorf("%d and %d frames: got %d and %d, end %v, want %v", test.kernel, test.user, len(s.Kernel), len(s.User), s.End, test.end)
		}
	}
}
