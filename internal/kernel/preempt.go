package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
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
