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

// Names are the words a filter accepts, in the order of their values.
func Names[T Mode | Access | Result]() []string {
	var v T
	switch any(v).(type) {
	case Mode:
		return modeNames[:]
	case Access:
		return accessNames[:]
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
