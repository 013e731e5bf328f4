package kernel

import (
	"os"
	"testing"

	"faultsnoop/internal/fault"
)

// The bits of enum backing and of the mapping's flags, as in bpf/fault.h and
// bpf/classify.h.
const (
	anonMemory = 1 + iota
	fileMemory
	shmemMemory
	hugetlbMemory
	deviceMemory
)

const (
	vmRead, vmWrite, vmExec, vmShared = 0x1, 0x2, 0x4, 0x8
	vmUffdMissing, vmUffdWP           = 0x200, 0x1000
	vmPFNMap, vmHugeTLB, vmMixedMap   = 0x400, 0x400000, 0x10000000
)

func witness(t *testing.T) *witnessObjects {
	t.Helper()
	spec, err := loadWitness()
	if err != nil {
		t.Fatal(err)
	}
	w := &witnessObjects{}
	if err := spec.LoadAndAssign(w, nil); err != nil {
		if os.Geteuid() != 0 {
			t.Skipf("needs root to run BPF programs: %v", err)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// TestClassify asks the BPF side what it would call faults whose traces are given.
func TestClassify(t *testing.T) {
	w := witness(t)
	const (
		a, b        = 0x12345000, 0x6789a000
		rw, ro      = vmRead | vmWrite, vmRead
		shared      = rw | vmShared
		r, wr, exec = fault.Read, fault.Write, fault.Exec
	)
	none := uint64(0)
	type seen struct {
		value uint64
		level uint8
	}
	at := func(v uint64) seen { return seen{value: v} }
	pmd := func(v uint64) seen { return seen{value: huge(v), level: 1} }
	unknown := seen{level: 9}
	for _, test := range []struct {
		name          string
		backing       uint8
		flags         uint64
		access        fault.Access
		before, after seen
		major, uffd   bool
		want          fault.Kind
	}{
		{"first write", anonMemory, rw, wr, at(none), at(dirty(mapped(a, true))), false, false, fault.Anon},
		{"first write of a table", anonMemory, rw, wr, seen{level: 2}, at(dirty(mapped(a, true))), false, false, fault.Anon},
		{"first read", anonMemory, rw, r, at(none), at(special(mapped(a, false))), false, false, fault.Zero},
		{"first read of memory not to be written", anonMemory, ro, r, at(none), at(special(mapped(a, false))), false, false, fault.Zero},
		{"first read without zero page", anonMemory, rw, r, at(none), at(mapped(a, true)), false, false, fault.Anon},
		{"first fetch", anonMemory, rw | vmExec, exec, at(none), at(mapped(a, true)), false, false, fault.Anon},
		{"huge page", anonMemory, rw, wr, seen{level: 1}, pmd(dirty(mapped(a, true))), false, false, fault.THP},
		{"huge zero page", anonMemory, rw, r, seen{level: 1}, pmd(mapped(a, false)), false, false, fault.Zero},
		{"first write, after unseen", anonMemory, rw, wr, at(none), unknown, false, false, fault.KindUnknown},
		{"first write, taken away again", anonMemory, rw, wr, at(none), at(swapped(0, 9)), false, false, fault.KindUnknown},

		{"write after fork", anonMemory, rw, wr, at(dirty(mapped(a, false))), at(dirty(mapped(b, true))), false, false, fault.Cow},
		{"write over the zero page", anonMemory, rw, wr, at(special(mapped(a, false))), at(dirty(mapped(b, true))), false, false, fault.Cow},
		{"write after the child's end", anonMemory, rw, wr, at(dirty(mapped(a, false))), at(dirty(mapped(a, true))), false, false, fault.Reuse},
		{"huge page split, part copied", anonMemory, rw, wr, pmd(dirty(mapped(a&^0x1fffff, false))), at(dirty(mapped(b, true))), false, false, fault.Cow},
		{"huge page split, part reused", anonMemory, rw, wr, pmd(dirty(mapped(a&^0x1fffff, false))), at(dirty(mapped(a&^0x1fffff|0x6000, true))), false, false, fault.Reuse},
		{"huge page reused", anonMemory, rw, wr, pmd(dirty(mapped(a&^0x1fffff, false))), pmd(dirty(mapped(a&^0x1fffff, true))), false, false, fault.Reuse},

		{"read of a file", fileMemory, ro | vmShared, r, at(none), at(mapped(a, false)), false, false, fault.File},
		{"read from disk", fileMemory, ro, r, at(none), at(mapped(a, false)), true, false, fault.File},
		{"fetch", fileMemory, ro | vmExec, exec, at(none), at(mapped(a, false)), false, false, fault.File},
		{"huge page of a file", fileMemory, ro | vmExec, exec, seen{level: 1}, pmd(mapped(a, false)), false, false, fault.File},
		{"end of a file", fileMemory, ro, r, at(none), unknown, false, false, fault.File},
		{"write to a private file", fileMemory, rw, wr, at(none), at(dirty(mapped(a, true))), false, false, fault.CowFile},
		{"write after read", fileMemory, rw, wr, at(mapped(a, false)), at(dirty(mapped(b, true))), false, false, fault.CowFile},
		{"write after write and fork", fileMemory, rw, wr, at(dirty(mapped(a, false))), at(dirty(mapped(b, true))), false, false, fault.Cow},
		{"and after the child's end", fileMemory, rw, wr, at(dirty(mapped(a, false))), at(dirty(mapped(a, true))), false, false, fault.Reuse},
		{"write to a shared file", fileMemory, shared, wr, at(none), at(dirty(mapped(a, true))), false, false, fault.MkWrite},
		{"the same after read", fileMemory, shared, wr, at(mapped(a, false)), at(dirty(mapped(a, true))), false, false, fault.MkWrite},

		{"shared memory", shmemMemory, shared, wr, at(none), at(dirty(mapped(a, true))), false, false, fault.Shmem},
		{"huge shared memory", shmemMemory, shared, wr, seen{level: 1}, pmd(dirty(mapped(a, true))), false, false, fault.Shmem},
		{"tmpfs, private read", shmemMemory, rw, r, at(none), at(mapped(a, false)), false, false, fault.Shmem},
		{"tmpfs, private write", shmemMemory, rw, wr, at(none), at(dirty(mapped(a, true))), false, false, fault.CowFile},
		{"shared memory made writable", shmemMemory, shared, wr, at(mapped(a, false)), at(mapped(a, true)), false, false, fault.Shmem},

		{"swapped out", anonMemory, rw, r, at(swapped(0, 77)), at(mapped(a, true)), true, false, fault.Swap},
		{"in the swap cache, third device", anonMemory, rw, wr, at(swapped(2, 1<<20)), at(mapped(a, true)), false, false, fault.Swap},
		{"shared memory swapped out", shmemMemory, shared, wr, at(none), at(mapped(a, true)), true, false, fault.Shmem},
		{"migration", anonMemory, rw, r, at(swapped(30, 5)), at(mapped(a, true)), false, false, fault.KindUnknown},

		{"hugetlb", hugetlbMemory, rw | vmHugeTLB, wr, seen{level: 1}, pmd(dirty(mapped(a, true))), false, false, fault.HugeTLB},
		{"hugetlb after fork", hugetlbMemory, rw | vmHugeTLB, wr, pmd(mapped(a, false)), pmd(dirty(mapped(b, true))), false, false, fault.HugeTLB},

		{"NUMA hint", anonMemory, rw, r, at(noAccess(mapped(a, true))), at(mapped(a, true)), false, false, fault.NUMA},
		{"NUMA hint on a huge page", anonMemory, rw, wr, pmd(noAccess(mapped(a, true))), pmd(mapped(a, true)), false, false, fault.NUMA},
		{"NUMA hint in a file", fileMemory, ro, r, at(noAccess(mapped(a, false))), at(mapped(a, false)), false, false, fault.NUMA},
		{"memory without permission", anonMemory, 0, r, at(noAccess(mapped(a, true))), unknown, false, false, fault.KindUnknown},

		{"userfaultfd, missing", anonMemory, rw | vmUffdMissing, wr, at(none), at(mapped(a, true)), false, true, fault.Uffd},
		{"userfaultfd, shared memory", shmemMemory, shared | vmUffdMissing, wr, at(none), at(mapped(a, true)), true, true, fault.KindUnknown},
		{"userfaultfd, hugetlb", hugetlbMemory, rw | vmHugeTLB | vmUffdMissing, wr, seen{level: 1}, pmd(mapped(a, true)), true, true, fault.Uffd},
		{"userfaultfd, hugetlb, minor", hugetlbMemory, rw | vmHugeTLB | vmUffdMissing, wr, seen{level: 1}, pmd(mapped(a, true)), false, true, fault.KindUnknown},
		{"userfaultfd, minor mode", shmemMemory, shared, wr, at(none), at(mapped(a, true)), true, true, fault.KindUnknown},
		{"userfaultfd for writes alone, shared memory", shmemMemory, shared | vmUffdWP, wr, at(none), at(mapped(a, true)), false, true, fault.Shmem},
		{"userfaultfd for writes alone", anonMemory, rw | vmUffdWP, wr, at(none), at(mapped(a, true)), false, true, fault.Anon},
		{"userfaultfd, page there", anonMemory, rw | vmUffdMissing, wr, at(mapped(a, false)), at(mapped(b, true)), false, true, fault.Cow},
		{"userfaultfd, write protection", anonMemory, rw | vmUffdWP, wr, at(uffdWP(mapped(a, false))), at(mapped(a, true)), false, true, fault.Uffd},
		{"the same, lifted", anonMemory, rw | vmUffdWP, wr, at(dirty(mapped(a, false))), at(mapped(a, true)), false, true, fault.Reuse},

		{"driver", deviceMemory, shared, wr, at(none), at(mapped(a, true)), false, false, fault.Device},
		{"frames of a driver", fileMemory, shared | vmPFNMap, r, at(none), at(special(mapped(a, true))), false, false, fault.Device},
		{"pages and frames", anonMemory, shared | vmMixedMap, r, at(none), at(mapped(a, true)), false, false, fault.Device},

		{"another thread was faster", anonMemory, rw, wr, at(mapped(a, true)), at(mapped(a, true)), false, false, fault.Spurious},
		{"read of what is there", fileMemory, ro, r, at(mapped(a, false)), at(mapped(a, false)), false, false, fault.Spurious},

		{"unread: write to anonymous memory", anonMemory, rw, wr, unknown, unknown, false, false, fault.KindUnknown},
		{"unread: major fault in it", anonMemory, rw, r, unknown, unknown, true, false, fault.Swap},
		{"unread: the same with a userfaultfd", anonMemory, rw, r, unknown, unknown, true, true, fault.KindUnknown},
		{"unread: program", fileMemory, ro | vmExec, exec, unknown, unknown, true, false, fault.File},
		{"unread: private, perhaps written before", fileMemory, ro, r, unknown, unknown, false, false, fault.KindUnknown},
		{"unread: private, writable", fileMemory, rw, r, unknown, unknown, true, false, fault.KindUnknown},
		{"unread: private write", fileMemory, rw, wr, unknown, unknown, false, false, fault.KindUnknown},
		{"unread: shared read", fileMemory, ro | vmShared, r, unknown, unknown, false, false, fault.File},
		{"unread: shared write", fileMemory, shared, wr, unknown, unknown, false, false, fault.MkWrite},
		{"unread: shared memory", shmemMemory, shared, wr, unknown, unknown, false, false, fault.Shmem},
		{"unread: hugetlb", hugetlbMemory, rw | vmHugeTLB, wr, unknown, unknown, false, false, fault.HugeTLB},
		{"unread: driver", deviceMemory, shared, wr, unknown, unknown, false, false, fault.Device},
	} {
		e := witnessEvidence{
			Address: 0x7f0000006123, VmaFlags: test.flags, Backing: test.backing, Access: uint8(test.access), Major: test.major, Uffd: test.uffd,
		}
		e.Before.Value, e.Before.Level, e.Before.Known = test.before.value, test.before.level, test.before != unknown
		e.After.Value, e.After.Level, e.After.Known = test.after.value, test.after.level, test.after != unknown
		if got := classify(t, w, e); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// What an attempt more and NUMA balancing make doubtful.
func TestClassifyDoubts(t *testing.T) {
	w := witness(t)
	const shared = vmRead | vmWrite | vmShared
	for _, test := range []struct {
		name    string
		backing uint8
		flags   uint64
		change  func(e *witnessEvidence)
		want    fault.Kind
	}{
		{"shared memory with a userfaultfd", shmemMemory, shared | vmUffdMissing, served(1), fault.Shmem},
		{"the same, tried again", shmemMemory, shared | vmUffdMissing, served(2), fault.KindUnknown},
		{"hugetlb with a userfaultfd", hugetlbMemory, shared | vmHugeTLB | vmUffdMissing, served(1), fault.HugeTLB},
		{"NUMA balancing, shared memory", shmemMemory, shared, balanced, fault.KindUnknown},
		{"NUMA balancing, file to be read only", fileMemory, vmRead | vmShared, balanced, fault.File},
		{"NUMA balancing, file to be executed only", fileMemory, vmExec, balanced, fault.KindUnknown},
	} {
		e := witnessEvidence{Backing: test.backing, VmaFlags: test.flags}
		test.change(&e)
		if got := classify(t, w, e); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

func served(attempts uint8) func(e *witnessEvidence) {
	return func(e *witnessEvidence) { e.Before.Known, e.Uffd, e.Attempts = true, true, attempts }
}

func balanced(e *witnessEvidence) { e.Numa = true }

// classify runs the kernel's side of it.
func classify(t *testing.T, w *witnessObjects, e witnessEvidence) fault.Kind {
	t.Helper()
	if err := w.Shown.Set(e); err != nil {
		t.Fatal(err)
	}
	if err := runOnce(w.TryClassify); err != nil {
		t.Fatal(err)
	}
	var got uint8
	if err := w.Answer.Get(&got); err != nil {
		t.Fatal(err)
	}
	return fault.Kind(got)
}

// TestPageTables finds the page tables, as the tool does, and reads one page more.
func TestPageTables(t *testing.T) {
	witness(t)
	tables, support := probePageTables()
	if !support.OK {
		t.Fatalf("%+v", support)
	}
	t.Logf("%+v", tables)
}
