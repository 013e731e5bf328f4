package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// preemption is how the kernel preempts itself: none, voluntary, lazy, full or rt;
// empty if it cannot be told. version is what uname -v prints, debugfs where that is
// mounted.
func preemption(version, debugfs string) string {
	words := strings.Fields(version)
	switch {
	case slices.Contains(words, "PREEMPT_RT"):
		return "rt"
	case slices.Contains(words, "PREEMPT"):
		return "full"
	case !slices.Contains(words, "PREEMPT_DYNAMIC"):
		return "voluntary" // at most
	case debugfs == "":
		return ""
	}
	// "none voluntary (full) lazy": since Linux 5.13 (kernel/sched/debug.c).
	b, err := os.ReadFile(filepath.Join(debugfs, "sched/preempt"))
	if err != nil {
		return ""
	}
	return chosen(string(b))
}

var inParentheses = regexp.MustCompile(`\(([a-z]+)\)`)

func chosen(modes string) string {
	m := inParentheses.FindStringSubmatch(modes)
	if m == nil {
		return ""
	}
	return m[1]
}

// probeUndisturbed tells whether a fentry or fexit program, once begun, ends before
// another task runs on its CPU. A program that is interrupted by another task is
// skipped for that one's faults (prog->active in kernel/bpf/trampoline.c): as many as a
// third of them in a trial on 7.2. Kprobes and tracepoints do not let that happen.
func probeUndisturbed(sys *System) Support {
	switch sys.Preemption {
	case "none", "voluntary":
		return Support{OK: true, Found: "kernel preemption: " + sys.Preemption}
	case "":
		return Support{
			Found:  "kernel preemption: cannot be told, and where there is any fentry programs miss faults",
			Remedy: "mount -t debugfs nodev /sys/kernel/debug, or use another hook",
		}
	}
	return Support{
		Found:  fmt.Sprintf("kernel preemption: %s, under which fentry programs miss faults", sys.Preemption),
		Remedy: "use another hook",
	}
}

// unpreempted calls do, which makes one bpf(2) call on a map, by a thread that no ordinary
// task preempts. Within such a call programs of kprobes and perf events are off on its CPU
// (bpf_disable_instrumentation), and a task that ran there meanwhile would have faults that
// nobody hears of. Without CAP_SYS_NICE that may happen; such faults are counted as lost.
func unpreempted(do func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if before, err := unix.SchedGetAttr(0, 0); err == nil {
		fifo := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
		if unix.SchedSetAttr(0, &fifo, 0) == nil {
			defer func() { _ = unix.SchedSetAttr(0, before, 0) }() // what it was before cannot be refused
		}
	}
	return do()
}
