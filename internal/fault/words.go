package fault

// Mode says on whose behalf the kernel handled the fault.
type Mode uint8

const (
	// User: the CPU was in user mode.
	User Mode = iota
	// Kernel: the kernel itself touched the task's memory, in copy_to_user and
	// friends or by get_user_pages on the current address space.
	Kernel
	// Remote: get_user_pages on another task's memory (FAULT_FLAG_REMOTE), for
	// example process_vm_readv, ptrace or the argument pages of exec.
	Remote
)

var modeNames = [...]string{"user", "kernel", "remote"}

func (m Mode) String() string { return name(modeNames[:], m) }

// ParseMode is the inverse of [Mode.String].
func ParseMode(s string) (Mode, bool) { return parse[Mode](modeNames[:], s) }

// Access is what the faulting instruction wanted to do.
type Access uint8

const (
	Read Access = iota
	Write
	Exec
)

var accessNames = [...]string{"read", "write", "exec"}

func (a Access) String() string { return name(accessNames[:], a) }

// ParseAccess is the inverse of [Access.String].
func ParseAccess(s string) (Access, bool) { return parse[Access](accessNames[:], s) }

// Result is how the fault ended.
type Result uint8

const (
	// OK: the page was mapped and the kernel counted the fault.
	OK Result = iota
	// SIGBUS: for example beyond the end of a mapped file.
	SIGBUS
	// SIGSEGV: no mapping at the address, or one that forbids the access.
	SIGSEGV
	// OOM: no memory for the page.
	OOM
	// HWPoison: the page is bad memory.
	HWPoison
	// Interrupted: a signal arrived before the fault was complete.
	Interrupted
	// EFAULT: an access by the kernel that could not be resolved; the system
	// call sees EFAULT and no signal is sent.
	EFAULT
)

var resultNames = [...]string{"ok", "sigbus", "sigsegv", "oom", "hwpoison", "interrupted", "efault"}

func (r Result) String() string { return name(resultNames[:], r) }

// Cause is why a SIGSEGV was sent: its si_code (include/uapi/asm-generic/siginfo.h).
type Cause uint8

const (
	NoCause Cause = 0
	// MapErr: there is no mapping at the address.
	MapErr Cause = 1
	// AccErr: the mapping forbids the access.
	AccErr Cause = 2
	// PkuErr: a protection key forbids it.
	PkuErr Cause = 4
)

var causeNames = [...]string{"", "maperr", "accerr", "bnderr", "pkuerr"}

func (c Cause) String() string { return name(causeNames[:], c) }

// Kind is what the kernel did for a fault.
type Kind uint8

// The order is that of enum kind in bpf/fault.h.
const (
	// KindUnknown: not enough could be seen.
	KindUnknown Kind = iota
	// Anon: first write to private anonymous memory, a zeroed page was allocated.
	Anon
	// Zero: first read of anonymous memory, the shared zero page was mapped.
	Zero
	// THP: a huge anonymous page was mapped at once.
	THP
	// File: a page of the page cache was mapped for reading or executing.
	File
	// CowFile: first write to a page of a private file mapping, it was copied.
	CowFile
	// Cow: write to a shared anonymous page, after a fork or over the zero page; copied.
	Cow
	// Reuse: a write-protected page was made writable again without a copy.
	Reuse
	// MkWrite: a page of a shared file mapping was made writable.
	MkWrite
	// Shmem: tmpfs, memfd, System V or shared anonymous memory.
	Shmem
	// Swap: the page was in swap, or still in the swap cache.
	Swap
	// HugeTLB: a page of hugetlbfs.
	HugeTLB
	// NUMA: a hint of NUMA balancing, the page was there.
	NUMA
	// Uffd: the fault was handed to a userfaultfd server.
	Uffd
	// Device: a mapping of a driver or of the kernel itself.
	Device
	// Spurious: the entry was already fine.
	Spurious
)

var kindNames = [...]string{
	"unknown", "anon", "zero", "thp", "file", "cow-file", "cow", "reuse", "mkwrite", "shmem",
	"swap", "hugetlb", "numa", "uffd", "device", "spurious",
}

func (k Kind) String() string { return name(kindNames[:], k) }

// ParseKind is the inverse of [Kind.String].
func ParseKind(s string) (Kind, bool) {
	k, ok := parse[Kind](kindNames[Anon:], s)
	return k + Anon, ok
}

// Wait is why a thread was off its CPU while it was in a fault.
type Wait uint8

// The order is that of enum wait in bpf/fault.h.
const (
	// Preempted: it could have gone on, but another thread ran.
	Preempted Wait = iota
	// IO: for the disk, or for a page that somebody else reads or writes (io_schedule).
	IO
	// Lock: uninterruptible and not for I/O: a lock of memory management, direct reclaim.
	Lock
	// Sleep: it could be ended by a signal, as the wait for a userfaultfd server or FUSE.
	Sleep
	// Throttled: it could have gone on, but the CPU quota of its cgroup was used up. On
	// kernels since 6.18 that waits for the end of the fault.
	Throttled
)

var waitNames = [...]string{"preempted", "io", "lock", "sleep", "throttled"}

func (w Wait) String() string { return name(waitNames[:], w) }

// Names are the words a filter accepts, in the order of their values.
func Names[T Mode | Access | Result | Kind | By]() []string {
	var v T
	switch any(v).(type) {
	case Mode:
		return modeNames[:]
	case Access:
		return accessNames[:]
	case By:
		return byNames[:]
	case Kind:
		return kindNames[Anon:] // unknown is no kind that a fault has
	default:
		return resultNames[:]
	}
}

func name[T ~uint8](names []string, v T) string {
	if int(v) < len(names) {
		return names[v]
	}
	return "unknown"
}

func parse[T ~uint8](names []string, s string) (T, bool) {
	for i, n := range names {
		if n == s {
			return T(i), true
		}
	}
	return 0, false
}
