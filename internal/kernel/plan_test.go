package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

var yes = Support{OK: true, Found: "works"}

// fullFeatures is a kernel on which everything works.
func fullFeatures() Features {
	return Features{
		BPF: yes, BTF: yes, Trampolines: yes, Kprobes: yes, Tracepoints: yes, PerfBPF: yes,
		PerfOwn: yes, PerfKernel: yes, PerfAll: yes, RingBuffer: yes, SafeFexit: yes, Undisturbed: yes, TaskStorage: true,
		Args: stockArgs, FaultFlags: flagTable, Returns: returnTable,
	}
}

func TestPlansInOrder(t *testing.T) {
	no := Support{Found: "refused"}
	for _, tt := range []struct {
		name string
		mend func(f *Features)
		want []Hook
	}{
		{"all", func(*Features) {}, []Hook{Fentry, Kprobe, Tracepoint, Perf}},
		{"no trampolines", func(f *Features) { f.Trampolines = no }, []Hook{Kprobe, Tracepoint, Perf}},
		{"unsafe fexit", func(f *Features) { f.SafeFexit = no }, []Hook{Kprobe, Tracepoint, Perf}},
		{"preemptible", func(f *Features) { f.Undisturbed = no }, []Hook{Kprobe, Tracepoint, Perf}},
		{"no kprobes", func(f *Features) { f.Trampolines, f.Kprobes = no, no }, []Hook{Tracepoint, Perf}},
		{"no tracepoints", func(f *Features) { f.Trampolines, f.Kprobes, f.Tracepoints = no, no, no }, []Hook{Perf}},
		{"no BTF", func(f *Features) { f.BTF = no }, []Hook{Perf}},
		{"no ring buffer", func(f *Features) { f.RingBuffer = no }, []Hook{Perf}},
		{"unprivileged", func(f *Features) { f.BPF, f.PerfAll = no, no }, []Hook{Perf}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := fullFeatures()
			tt.mend(&f)
			plans, err := f.Plans(Options{})
			if err != nil {
				t.Fatal(err)
			}
			var got []Hook
			for _, p := range plans {
				got = append(got, p.Hook)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("hooks %v, want %v", got, tt.want)
			}
		})
	}
}

func TestInsistedHook(t *testing.T) {
	f := fullFeatures()
	f.Kprobes = Support{Found: "no CONFIG_KPROBES", Remedy: "use another kernel"}
	_, err := f.Plans(Options{Hook: Kprobe})
	var unsupported *UnsupportedError
	if !errors.As(err, &unsupported) || unsupported.Hook != Kprobe {
		t.Fatalf("error %v, want an UnsupportedError for kprobe", err)
	}
	if want := "using hook kprobe: no CONFIG_KPROBES; use another kernel"; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}

func TestPlansSeeTheWantedMode(t *testing.T) {
	remote := fault.Remote
	opt := Options{Filter: fault.Filter{Mode: &remote}}
	f := fullFeatures()
	plans, err := f.Plans(opt)
	if err != nil || len(plans) != 2 || plans[0].Hook != Fentry || plans[1].Hook != Kprobe {
		t.Errorf("%d plans, %v; want fentry and kprobe", len(plans), err)
	}
	f.Trampolines, f.Kprobes = Support{Found: "refused"}, Support{Found: "refused"}
	if _, err := f.Plans(opt); err == nil || !strings.HasSuffix(err.Error(), "fentry, kprobe: refused; tracepoint, perf: does not see faults of mode remote") {
		t.Errorf("error %v, want one that names the mode", err)
	}
	opt.Hook = Tracepoint
	if _, err := f.Plans(opt); err == nil || !strings.Contains(err.Error(), "mode remote") {
		t.Errorf("error %v, want one that names the mode", err)
	}
}

// TestUnprivileged: the cause is what only root can do, and the remedy is named.
func TestUnprivileged(t *testing.T) {
	f := fullFeatures()
	f.BPF = Support{Found: "needs root"}
	f.PerfKernel = Support{Found: "faults of mode kernel: paranoid is 2", Remedy: "run as root, or sysctl kernel.perf_event_paranoid=1"}
	kernelMode, write := fault.Kernel, fault.Write
	for want, opt := range map[string]Options{
		"kprobe, tracepoint: needs root; perf: faults of mode kernel: paranoid is 2 (run as root, or sysctl kernel.perf_event_paranoid=1)": {Filter: fault.Filter{Mode: &kernelMode}},
		"using hook perf: faults of mode kernel: paranoid is 2; run as root, or sysctl kernel.perf_event_paranoid=1":                       {Filter: fault.Filter{Mode: &kernelMode}, Hook: Perf},
		"kprobe, tracepoint: needs root; perf: does not tell read, write and exec apart":                                                   {Filter: fault.Filter{Access: &write}},
	} {
		if plans, err := f.Plans(opt); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%d plans, error %v, want %s", len(plans), err, want)
		}
	}
}

func TestStaleProbes(t *testing.T) {
	list := "r4096:faultsnoop_0ab1/r_handle_mm_fault handle_mm_fault\np:kprobes/mine do_sys_open\nr:faultsnoop_2/x y\nr16:other/faultsnoop_3 z\n"
	want := []string{"faultsnoop_0ab1/r_handle_mm_fault", "faultsnoop_2/x"}
	if got := staleProbes(list); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestNoHookNamesEveryCause(t *testing.T) {
	f := Features{
		BPF:     Support{Found: "needs root"},
		PerfOwn: Support{Found: "paranoid is 3", Remedy: "sysctl kernel.perf_event_paranoid=2"},
	}
	_, err := f.Plans(Options{})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"fentry, kprobe, tracepoint: needs root", "perf: paranoid is 3", "perf_event_paranoid=2"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q lacks %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
}

func TestPlanPrograms(t *testing.T) {
	f := fullFeatures()
	plans, err := f.Plans(Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range plans {
		if p.Hook == Perf || p.Hook == Tracepoint && len(tracepointEntries) == 0 {
			continue // no programs, or no kernel of this architecture where the hook works
		}
		spec, err := loadFault()
		if err != nil {
			t.Fatal(err)
		}
		if err := p.apply(spec); err != nil {
			t.Errorf("hook %s: %v", p.Hook, err)
		}
		if len(spec.Programs) != len(p.Programs) {
			t.Errorf("hook %s: %d programs left of %v", p.Hook, len(spec.Programs), p.Programs)
		}
		// Whoever hears of ends must be there before beginnings are heard of.
		if last := p.Programs[len(p.Programs)-1]; strings.Contains(last, "exit") {
			t.Errorf("hook %s: %s is attached last", p.Hook, last)
		}
	}
}

func TestVariables(t *testing.T) {
	f := fullFeatures()
	uid, mode, access, major := uint32(7), fault.Remote, fault.Exec, true
	plans, err := f.Plans(Options{Hook: Fentry, Sample: 10, Filter: fault.Filter{
		PIDs: []uint32{1}, TIDs: []uint32{2}, UID: &uid, Mode: &mode, Access: &access, Major: &major,
		AddrStart: 0x1000, AddrEnd: 0x2000, MinLatency: time.Microsecond, Children: true, Self: true,
		Comms: []string{"abc", "a name longer than a comm"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]any{
		faultVarFilterPid: true, faultVarFilterTid: true, faultVarFilterUid: true, faultVarWantedUid: uid,
		faultVarFilterMode: true, faultVarWantedMode: uint8(2), faultVarFilterAccess: true, faultVarWantedAccess: uint8(2),
		faultVarFilterMajor: true, faultVarWantedMajor: true, faultVarAddrStart: uint64(0x1000), faultVarAddrEnd: uint64(0x2000),
		faultVarMinLatencyNs: uint64(1000), faultVarFollowChildren: true, faultVarTraceSelf: true, faultVarSample: uint64(10),
		faultVarCommPatterns: uint32(1), faultVarExePatterns: uint32(1),
		faultVarFlagTried: uint32(0x20), faultVarFlagVmaLock: uint32(0), faultVarRetRetry: uint32(0x400), faultVarRetHwpoison: uint32(0x30),
	} {
		if got := plans[0].Variables[name]; got != want {
			t.Errorf("%s is %v (%T), want %v (%T)", name, got, got, want, want)
		}
	}
}

func TestPatterns(t *testing.T) {
	text, mask := words("abcdefghij", 2)
	if text[0] != 0x6867666564636261 || text[1] != 0x6a69 || mask[0] != ^uint64(0) || mask[1] != 0xffff {
		t.Errorf("words %#x, masks %#x", text, mask)
	}
	for _, bad := range [][]string{{""}, {strings.Repeat("x", maxExePattern+1)}, slices.Repeat([]string{"x"}, maxCommPatterns+1)} {
		if err := setPatterns(map[string]any{}, bad); err == nil {
			t.Errorf("patterns %q are accepted", bad)
		}
	}
}

func TestArgsByName(t *testing.T) {
	params := func(names ...string) []btf.FuncParam {
		var p []btf.FuncParam
		for _, n := range names {
			p = append(p, btf.FuncParam{Name: n})
		}
		return p
	}
	for _, tt := range []struct {
		names []string
		want  Args
		ok    bool
	}{
		{[]string{"vma", "address", "flags", "regs"}, stockArgs, true},
		{[]string{"mm", "vma", "address", "flags", "regs"}, Args{VMA: 1, Address: 2, Flags: 3, Regs: 4, Count: 5}, true},
		{[]string{"vma", "address", "flags"}, Args{}, false},         // before 5.9
		{[]string{"mm", "vma", "address", "flags"}, Args{}, false},   // before 4.8
		{[]string{"vmf", "address", "flags", "regs"}, Args{}, false}, // some day
		{[]string{"a", "b", "vma", "address", "flags", "regs"}, Args{}, false},
	} {
		got, err := argsByName(params(tt.names...))
		if (err == nil) != tt.ok || tt.ok && got != tt.want {
			t.Errorf("%v: %+v, %v", tt.names, got, err)
		}
	}
}

// The library suspects RLIMIT_MEMLOCK behind every EPERM; the user must not read that.
func TestRefusalNamesTheCause(t *testing.T) {
	eperm := fmt.Errorf("load program: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)", unix.EPERM)
	root := System{Caps: 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_BPF | 1<<unix.CAP_PERFMON}
	locked := root
	locked.Lockdown = "confidentiality"
	for _, tt := range []struct {
		sys  System
		err  error
		want string
	}{
		{System{}, eperm, "needs root, or CAP_BPF and CAP_PERFMON"},
		{root, eperm, "operation not permitted by this kernel"},
		{locked, eperm, "kernel lockdown (confidentiality)"},
		{root, unix.ENOSYS, "no bpf(2)"},
		{root, errors.New("odd"), "odd"},
	} {
		s := tt.sys.refusal("doing it", tt.err)
		if s.OK || !strings.HasPrefix(s.Found, "doing it: ") || !strings.Contains(s.Found, tt.want) || strings.Contains(s.Found+s.Remedy, "MEMLOCK") {
			t.Errorf("%v with caps %#x: %+v, want %q", tt.err, tt.sys.Caps, s, tt.want)
		}
	}
}
