package perfevent

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	paranoidFile = "/proc/sys/kernel/perf_event_paranoid"
	mlockFile    = "/proc/sys/kernel/perf_event_mlock_kb"
)

// readInt reads a sysctl.
func readInt(file string) (int, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// The size of the rings when nothing limits them: at the highest rate of faults that
// was seen on one CPU, 8 MiB hold what happens in about half a second.
const (
	maxOrder      = 11       // 8 MiB of 4 KiB pages
	totalRingSize = 64 << 20 // for all CPUs of a large machine
	minRingSize   = 1 << 20
)

// ringOrder chooses the log2 of a ring's data pages for a number of CPUs. What a user
// without CAP_IPC_LOCK may pin is perf_event_mlock_kb for each online CPU and
// RLIMIT_MEMLOCK on top (perf_mmap in kernel/events/core.c); every ring needs one
// page more than its data.
func ringOrder(cpus int, mlockKB int, memlock uint64, unlimited bool) int {
	want := max(totalRingSize/uint64(cpus), minRingSize) / pageSize
	if !unlimited {
		budget := uint64(mlockKB)*1024/pageSize*uint64(cpus) + memlock/pageSize
		// Half of it, so that the same user can trace something else beside this.
		want = min(want, max(budget/2/uint64(cpus), 2)-1)
	}
	return min(bits.Len64(want)-1, maxOrder)
}

func memlockLimit() uint64 {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) != nil {
		return 0
	}
	// RLIM_INFINITY must not overflow in sums.
	return min(lim.Cur, 1<<40)
}

func chooseOrder(cpus int) int {
	mlockKB, err := readInt(mlockFile)
	if err != nil {
		mlockKB = 0
	}
	return ringOrder(cpus, mlockKB, memlockLimit(), os.Geteuid() == 0)
}

// explainMap says why a ring could not be mapped.
func explainMap(err error, cpu int, pages int) error {
	what := fmt.Sprintf("mapping a perf ring of %d pages for CPU %d", pages, cpu)
	if !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%s: %w", what, err)
	}
	mlockKB, _ := readInt(mlockFile)
	return fmt.Errorf("%s: %w: a user may pin perf_event_mlock_kb = %d KiB per CPU and RLIMIT_MEMLOCK = %d KiB, "+
		"which this or the user's other perf sessions have used up: end those, ask for fewer pages, or raise kernel.perf_event_mlock_kb",
		what, err, mlockKB, memlockLimit()/1024)
}

// explainOpen says why an event could not be opened, and the remedy. paranoid is the
// value of perf_event_paranoid, negative if it could not be read.
func explainOpen(err error, sc scope, tid, paranoid int) error {
	const what = "opening a page-fault event"
	switch {
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("%s: no thread %d (%w): it may have ended; check the id", what, tid, err)
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		var lim unix.Rlimit
		_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &lim)
		return fmt.Errorf("%s: %w: every thread needs three descriptors per CPU and the limit is %d: raise it with ulimit -n or choose fewer threads",
			what, err, lim.Cur)
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.ENOENT) && sc != cgroupScope:
		return fmt.Errorf("%s: %w: this kernel was built without CONFIG_PERF_EVENTS: use another --hook", what, err)
	case !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: %w", what, err)
	case sc != taskScope && paranoid > 0:
		return fmt.Errorf("%s: perf_event_paranoid is %d and watching all processes needs 0 or less (%w): "+
			"name a process or a command, run as root, or set kernel.perf_event_paranoid=0", what, paranoid, err)
	case paranoid > 2:
		return fmt.Errorf("%s: perf_event_paranoid is %d and needs to be 2 or less (%w): "+
			"run as root or set kernel.perf_event_paranoid=2", what, paranoid, err)
	case sc == taskScope && errors.Is(err, unix.EACCES):
		return fmt.Errorf("%s: thread %d belongs to another user or may not be inspected (%w): run as its owner or as root", what, tid, err)
	}
	return fmt.Errorf("%s: perf_event_open is refused (%w) though perf_event_paranoid is %d: "+
		"a container's seccomp profile or a security module forbids it; allow it or add CAP_PERFMON", what, err, paranoid)
}
