package kernel

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// attachPoints are all programs of the BPF object with the one name each is attached
// to; those attached to an event of perf have none.
var attachPoints = map[string]struct {
	kind ebpf.ProgramType
	to   string
}{
	faultProgFentryHandleMmFault:    {ebpf.Tracing, "handle_mm_fault"},
	faultProgFexitHandleMmFault:     {ebpf.Tracing, "handle_mm_fault"},
	faultProgKprobeHandleMmFault:    {ebpf.Kprobe, "handle_mm_fault"},
	faultProgKretprobeHandleMmFault: {ebpf.Kprobe, "handle_mm_fault"},
	"enter_page_fault_user":         {ebpf.Tracing, "page_fault_user"},
	"enter_page_fault_kernel":       {ebpf.Tracing, "page_fault_kernel"},
	"announce_page_fault_kernel":    {ebpf.Tracing, "page_fault_kernel"},
	faultProgExitMinor:              {ebpf.PerfEvent, ""},
	faultProgExitMajor:              {ebpf.PerfEvent, ""},
	faultProgRefuse:                 {ebpf.Tracing, "signal_generate"},
	faultProgFollowFork:             {ebpf.Tracing, "sched_wakeup_new"},
	faultProgNoteMapping:            {ebpf.Tracing, "sys_exit"},
	faultProgNoteFork:               {ebpf.Tracing, "sched_wakeup_new"},
	faultProgLeave:                  {ebpf.Tracing, "sched_process_exit"},
	faultProgLeaveCpu:               {ebpf.Tracing, "sched_switch"},
	faultProgBeginReclaim:           {ebpf.Tracing, "mm_vmscan_direct_reclaim_begin"},
	faultProgEndReclaim:             {ebpf.Tracing, "mm_vmscan_direct_reclaim_end"},
	faultProgBeginCgroupReclaim:     {ebpf.Tracing, "mm_vmscan_memcg_reclaim_begin"},
	faultProgEndCgroupReclaim:       {ebpf.Tracing, "mm_vmscan_memcg_reclaim_end"},
	faultProgBeginCompaction:        {ebpf.Tracing, "mm_compaction_begin"},
	faultProgEndCompaction:          {ebpf.Tracing, "mm_compaction_end"},
	faultProgTakeBaseline:           {ebpf.Tracing, "task"},
	faultProgSettleAll:              {ebpf.Tracing, "task"},
}

// Programs attach to exactly the expected names: never to a copy that the compiler has
// split off (.cold, .part), changed (.isra, .constprop) or padded (__pfx_), and to no
// function that it may inline: of functions, handle_mm_fault alone is relied on.
// https://github.com/sched-ext/scx/issues/823
func TestAttachPoints(t *testing.T) {
	spec, err := loadFault()
	if err != nil {
		t.Fatal(err)
	}
	exact := regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	for name, p := range spec.Programs {
		want, ok := attachPoints[name]
		switch {
		case !ok:
			t.Errorf("program %s attaches to %q: not in the list", name, p.AttachTo)
		case p.Type != want.kind || p.AttachTo != want.to:
			t.Errorf("program %s: %v attached to %q, want %v to %q", name, p.Type, p.AttachTo, want.kind, want.to)
		case want.to != "" && (!exact.MatchString(p.AttachTo) || strings.HasPrefix(p.AttachTo, "__pfx_")):
			t.Errorf("program %s attaches to %q", name, p.AttachTo)
		}
	}
	if handleMMFault != "handle_mm_fault" {
		t.Errorf("kprobes are set on %q", handleMMFault)
	}
}

// The kernel's own list of kprobes, while there are ours.
// https://github.com/sched-ext/scx/issues/823
func TestKprobesOnExactName(t *testing.T) {
	f, opt := needHook(t, Kprobe)
	const list = "/sys/kernel/debug/kprobes/list"
	if _, err := os.Stat(list); err != nil {
		t.Skip("debugfs is not mounted: ", err)
	}
	openHook(t, f, opt)
	b, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	// "ffffffff8132a4f0  k  handle_mm_fault+0x0    [FTRACE]"; r is a return probe.
	// arm64 sets them behind the instruction that begins a function.
	probe := regexp.MustCompile(`(?m)^\S+\s+([kr])\s+(\S*handle_mm_fault\S*)\+0x\S+`)
	kinds := map[string]bool{}
	for _, m := range probe.FindAllStringSubmatch(string(b), -1) {
		kinds[m[1]] = true
		if m[2] != "handle_mm_fault" {
			t.Errorf("a kprobe on %q", m[2])
		}
	}
	if !kinds["k"] {
		t.Errorf("no kprobe on handle_mm_fault in %q", b)
	}
}
