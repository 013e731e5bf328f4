package kernel

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// TestFrames compares the frames of records with those that /proc/self/pagemap tells.
func TestFrames(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		const pages = 16
		f, opt := needHook(t, hook)
		if f.PageTables, f.Witness = probePageTables(); !f.Witness.OK {
			t.Fatalf("%+v", f.Witness)
		}
		mem := region(t, pages)
		opt.Filter = fault.Filter{
			PIDs: []uint32{uint32(os.Getpid())}, Self: true,
			AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem)),
		}
		opt.PFN = true
		l := openHook(t, f, opt)
		for i := range pages {
			mem[i*os.Getpagesize()] = 1
		}
		// Else one could move before its frame is asked for.
		if err := unix.Mlock(mem); err != nil {
			t.Fatal(err)
		}
		faults := drain(t, l)
		if len(faults) != pages {
			t.Fatalf("%d records of %d faults", len(faults), pages)
		}
		for i := range faults {
			f := &faults[i]
			physical, err := frameOf(f.Address)
			if err != nil {
				t.Fatal(err)
			}
			if !f.Is(fault.HasPFN) || f.PFN != physical/4096 || f.Node < 0 || f.Kind != fault.Anon || !f.KindExact || f.PageSize() != 4096 {
				t.Errorf("frame %#x on node %d, kind %v of %d bytes; want frame %#x", f.PFN, f.Node, f.Kind, f.PageSize(), physical/4096)
			}
		}
	})
}
