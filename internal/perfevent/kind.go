package perfevent

import "faultsnoop/internal/fault"

// backing is what stands behind a mapping, as enum backing in bpf/fault.h.
type backing uint8

const (
	unknownBacking backing = iota
	anon
	file // a page cache that can be written back
	shmem
	hugetlb
	device // a driver, or the kernel itself as for [vdso]
)

// Tells reports whether this hook can ever tell that a fault is of a kind.
func Tells(kind fault.Kind) bool {
	switch kind {
	case fault.File, fault.Shmem, fault.HugeTLB, fault.Device:
		return true
	case fault.Swap:
		return !hasUserfaultfd()
	}
	return false
}

// evidence is what the kind of a fault is concluded from: much less than BPF programs
// have. A fault of it was resolved.
type evidence struct {
	backing backing
	flags   uint64 // of the mapping, as fault.PermFlags
	major   bool
	// written: the mapping was writable before, or may have been.
	written bool
	// uffd: the kernel has userfaultfd. server: the process has one, or may have.
	uffd, server bool
	// numa: the kernel takes permissions of pages away to hear of their use.
	numa bool
}

// kind is the rules of infer in bpf/classify.h without the access: where it matters the
// kind is unknown. What else may have happened, and is known there, counts as a doubt too.
func (e *evidence) kind() fault.Kind {
	read, write, shared := e.has("r"), e.has("-w"), e.has("---s")
	// A private page that was written to is anonymous: it may be copied, reused or in swap.
	private := !shared && (write || e.written)
	switch {
	case !read && !write && !e.has("--x"):
		return fault.KindUnknown // no access could be resolved here: something else is mapped
	case e.backing == device:
		return fault.Device
	case e.backing == anon:
		// Both swap and a server of a userfaultfd make a fault major. Minor ones are of six kinds.
		if e.major && !e.uffd {
			return fault.Swap
		}
		return fault.KindUnknown
	case e.backing == hugetlb && !e.served():
		return fault.HugeTLB
	case e.numa && (write || !read):
		// task_numa_work in kernel/sched/fair.c leaves out what of files can only be read.
		return fault.KindUnknown
	case e.backing == shmem && !private && !e.served():
		return fault.Shmem
	case e.backing == file && !private && !write:
		return fault.File
	}
	return fault.KindUnknown
}

func (e *evidence) has(perm string) bool { return e.flags&fault.PermFlags(perm) != 0 }

// served reports whether the fault may have been left to the server of a userfaultfd
// (vma_can_userfault in include/linux/userfaultfd_k.h: anonymous memory, shmem and
// hugetlbfs). Until the server has the page it is tried again, which makes it major, but
// since Linux 6.7 not always: not if it began under the mapping's own lock.
func (e *evidence) served() bool { return e.uffd && (e.major || e.server) }
