package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

const handleMMFault = "handle_mm_fault"

// Probe finds out what works here by trying it. It leaves nothing attached and
// needs no privilege; what is refused is recorded with its cause. Given hooks, it
// tries only what these need, which makes a start quicker.
func Probe(hooks ...Hook) (Features, System) {
	wants := func(h Hook) bool { return len(hooks) == 0 || slices.Contains(hooks, h) }
	sys := ReadSystem()
	var f Features
	// Only kernels before 5.11 charge maps to RLIMIT_MEMLOCK; elsewhere this does nothing.
	memlockErr := rlimit.RemoveMemlock()

	f.Undisturbed = probeUndisturbed(&sys)
	f.BPF = probeBPF(&sys, memlockErr)
	f.probeTypes()
	if wants(Perf) {
		f.PerfOwn, f.PerfKernel, f.PerfAll = probePerf(&sys)
	}
	if !f.BPF.OK {
		return f, sys
	}
	f.RingBuffer = found(features.HaveMapType(ebpf.RingBuf), "BPF ring buffer", "needs Linux 5.8")
	f.TaskStorage = features.HaveMapType(ebpf.TaskStorage) == nil &&
		features.HaveProgramHelper(ebpf.RawTracepoint, asm.FnTaskStorageGet) == nil &&
		features.HaveProgramHelper(ebpf.RawTracepoint, asm.FnGetCurrentTaskBtf) == nil
	f.TaskPTRegs = f.TaskStorage && features.HaveProgramHelper(ebpf.PerfEvent, asm.FnTaskPtRegs) == nil
	f.PageTables, f.Witness = probePageTables()
	numa, err := process.BalancesNUMA()
	f.NUMAHints = numa || err != nil
	if f.PTEFault.OK {
		f.PTEFault = probeVMFault(&sys, handlePTEFault)
	}
	if wants(Fentry) {
		f.Trampolines = probeTrampoline(&sys)
	}
	if wants(Kprobe) {
		f.Kprobes = probeKprobe(&sys)
	}
	if wants(Tracepoint) {
		f.PerfBPF = probePerfBPF(&sys)
	}
	return f, sys
}

func found(err error, what, remedy string) Support {
	if err != nil {
		return Support{Found: what + ": missing", Remedy: remedy}
	}
	return Support{OK: true, Found: what}
}

// returnZero is the smallest program.
func returnZero() asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}
}

func probeBPF(sys *System, memlockErr error) Support {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.RawTracepoint, Instructions: returnZero(), License: "GPL"})
	if err != nil {
		if memlockErr != nil && errors.Is(err, unix.EPERM) && sys.HasCap(unix.CAP_SYS_ADMIN, unix.CAP_BPF) {
			return Support{
				Found:  "loading a BPF program: this kernel (before 5.11) charges it to RLIMIT_MEMLOCK, which may not be raised",
				Remedy: "raise it with ulimit -l unlimited",
			}
		}
		return sys.refusal("loading a BPF program", err)
	}
	p.Close()
	// Every kernel with a BPF ring buffer has this helper. Lockdown hides it, and a
	// verifier that does not find it says nothing of the cause.
	if features.HaveProgramHelper(ebpf.RawTracepoint, asm.FnProbeReadKernel) != nil {
		return sys.mayNotRead()
	}
	return Support{OK: true, Found: "programs can be loaded"}
}

// probeTypes reads what BTF says of the functions and enums that matter.
func (f *Features) probeTypes() {
	f.Args, f.ArgsFrom = stockArgs, "table: no BTF"
	f.FaultFlags, f.FlagsFrom, f.Returns = flagTable, "table: no BTF", returnTable
	f.PTEFault = Support{Found: "unknown: no BTF"}
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		f.BTF = Support{
			Found:  "/sys/kernel/btf/vmlinux: missing or unreadable",
			Remedy: "use a kernel with CONFIG_DEBUG_INFO_BTF, or --hook perf",
		}
		return
	}
	f.BTF = Support{OK: true, Found: "/sys/kernel/btf/vmlinux"}
	if args, err := argsOf(spec); err != nil {
		f.BTF = Support{Found: err.Error()}
	} else {
		f.Args, f.ArgsFrom = args, "BTF"
	}
	if names := enumNames(spec, "fault_flag", "FAULT_FLAG_"); names != nil {
		f.FaultFlags, f.FlagsFrom = names, "BTF"
	} else {
		f.FlagsFrom = "table: no enum fault_flag before Linux 5.14"
	}
	if names := enumNames(spec, "vm_fault_reason", "VM_FAULT_"); names != nil {
		f.Returns = names
	}
	f.Tracepoints = tracepoints(spec)
	f.Reclaim = reclaimTracepoints(spec)
	f.SwitchHasState = switchHasState(spec)
	f.SafeFexit = safeFexit(spec)
	f.PTEFault = describedVMFault(spec, handlePTEFault)
}

// switchHasState reports whether sched_switch hands over the state of the task that leaves
// its CPU, behind the two tasks.
func switchHasState(spec *btf.Spec) bool {
	var t *btf.Typedef
	if spec.TypeByName("btf_trace_sched_switch", &t) != nil {
		return false
	}
	p, ok := t.Type.(*btf.Pointer)
	if !ok {
		return false
	}
	// The first parameter is the tracepoint's own.
	proto, ok := p.Target.(*btf.FuncProto)
	if !ok || len(proto.Params) != 5 {
		return false
	}
	_, ok = btf.UnderlyingType(proto.Params[2].Type).(*btf.Pointer)
	return ok
}

func tracepoints(spec *btf.Spec) Support {
	if missing := missingTracepoint(spec, "page_fault_user", "page_fault_kernel"); missing != "" {
		return Support{Found: "tracepoint exceptions:" + missing + ": not in this kernel"}
	}
	if len(tracepointEntries) == 0 {
		return Support{Found: "tracepoint exceptions:page_fault_user: not used on this architecture"}
	}
	return Support{OK: true, Found: "exceptions:page_fault_user and _kernel"}
}

// missingTracepoint is the first of these names that is not in the kernel.
func missingTracepoint(spec *btf.Spec, names ...string) string {
	for _, name := range names {
		var t *btf.Typedef
		if err := spec.TypeByName("btf_trace_"+name, &t); err != nil {
			return name
		}
	}
	return ""
}

// reclaimTracepoints are those between which a thread frees memory itself.
func reclaimTracepoints(spec *btf.Spec) Support {
	if missing := missingTracepoint(spec,
		"mm_vmscan_direct_reclaim_begin", "mm_vmscan_direct_reclaim_end",
		"mm_vmscan_memcg_reclaim_begin", "mm_vmscan_memcg_reclaim_end",
		"mm_compaction_begin", "mm_compaction_end"); missing != "" {
		return Support{Found: "tracepoint " + missing + ": not in this kernel"}
	}
	return Support{OK: true, Found: "vmscan and compaction"}
}

// argsOf finds the arguments of handle_mm_fault by their names, so that a kernel
// that adds or moves one is read correctly or refused.
func argsOf(spec *btf.Spec) (Args, error) {
	var fn *btf.Func
	if err := spec.TypeByName(handleMMFault, &fn); err != nil {
		return Args{}, fmt.Errorf("finding %s in BTF: %w", handleMMFault, err)
	}
	proto, ok := fn.Type.(*btf.FuncProto)
	if !ok {
		return Args{}, fmt.Errorf("finding the arguments of %s: not a function in BTF", handleMMFault)
	}
	return argsByName(proto.Params)
}

func argsByName(params []btf.FuncParam) (Args, error) {
	a := Args{Count: uint8(len(params))}
	for name, pos := range map[string]*uint8{"vma": &a.VMA, "address": &a.Address, "flags": &a.Flags, "regs": &a.Regs} {
		i := slices.IndexFunc(params, func(p btf.FuncParam) bool { return p.Name == name })
		if i < 0 || i > 4 {
			return Args{}, fmt.Errorf("finding the arguments of %s: no %q among the first five; this kernel is too new or too old", handleMMFault, name)
		}
		*pos = uint8(i)
	}
	return a, nil
}

// enumNames lists the single-bit values of an enum without their prefix.
func enumNames(spec *btf.Spec, enum, prefix string) []fault.BitName {
	var e *btf.Enum
	if err := spec.TypeByName(enum, &e); err != nil {
		return nil
	}
	var names []fault.BitName
	for _, v := range e.Values {
		name, ok := strings.CutPrefix(v.Name, prefix)
		if ok && v.Value != 0 && v.Value&(v.Value-1) == 0 {
			names = append(names, fault.BitName{Bit: uint32(v.Value), Name: name})
		}
	}
	slices.SortFunc(names, func(a, b fault.BitName) int { return cmp.Compare(a.Bit, b.Bit) })
	return names
}

// safeFexit looks for bpf_tramp_image, which came with the fix that lets a traced
// function sleep (commit e21aa341785c, Linux 5.12, also in later 5.10 and 5.11).
func safeFexit(spec *btf.Spec) Support {
	var t *btf.Struct
	if spec.TypeByName("bpf_tramp_image", &t) != nil {
		return Support{Found: "fexit on a function that sleeps is not safe before Linux 5.12"}
	}
	return Support{OK: true, Found: "fexit may sleep"}
}

func probeTrampoline(sys *System) Support {
	doing := "attaching to " + handleMMFault
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.Tracing, AttachType: ebpf.AttachTraceFEntry, AttachTo: handleMMFault,
		Instructions: returnZero(), License: "GPL",
	})
	if err != nil {
		return sys.refusal(doing, err)
	}
	defer p.Close()
	l, err := link.AttachTracing(link.TracingOptions{Program: p})
	if err != nil {
		return sys.refusal(doing, err)
	}
	l.Close()
	return Support{OK: true, Found: "BPF trampolines attach to " + handleMMFault}
}

func probeKprobe(sys *System) Support {
	doing := "setting a kprobe on " + handleMMFault
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.Kprobe, Instructions: returnZero(), License: "GPL"})
	if err != nil {
		return sys.refusal(doing, err)
	}
	defer p.Close()
	l, err := link.Kprobe(handleMMFault, p, nil)
	if err != nil {
		return sys.kprobeRefusal(doing, err)
	}
	l.Close()
	return Support{OK: true, Found: "kprobes attach to " + handleMMFault}
}

func (s *System) kprobeRefusal(doing string, err error) Support {
	// The event source exists wherever kprobes do (since Linux 4.17).
	if _, serr := os.Stat("/sys/bus/event_source/devices/kprobe"); serr != nil {
		return Support{Found: "the kernel has no kprobes (CONFIG_KPROBES)"}
	}
	return s.refusal(doing, err)
}

func probePerfBPF(sys *System) Support {
	doing := "attaching a program to a page-fault event"
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.PerfEvent, Instructions: returnZero(), License: "GPL"})
	if err != nil {
		return sys.refusal(doing, err)
	}
	defer p.Close()
	cpus, err := process.OnlineCPUs()
	if err != nil || len(cpus) == 0 {
		return Support{Found: fmt.Sprintf("%s: listing the online CPUs: %v", doing, err)}
	}
	e, err := attachPageFaults(unix.PERF_COUNT_SW_PAGE_FAULTS_MIN, cpus[0], p)
	if err != nil {
		return sys.refusal(doing, err)
	}
	e.Close()
	return Support{OK: true, Found: "programs attach to page-fault events"}
}

// probePerf opens page-fault events without BPF.
func probePerf(sys *System) (own, kernelMode, all Support) {
	attr := unix.PerfEventAttr{
		Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_PAGE_FAULTS_MIN,
		Bits: unix.PerfBitDisabled | unix.PerfBitExcludeKernel | unix.PerfBitExcludeHv,
	}
	own = openable(sys, &attr, 0, -1, "page-fault events of own processes", 2)
	inKernel := attr
	inKernel.Bits = unix.PerfBitDisabled
	kernelMode = openable(sys, &inKernel, 0, -1, "faults of mode kernel", 1)
	cpus, err := process.OnlineCPUs()
	if err != nil || len(cpus) == 0 {
		return own, kernelMode, Support{Found: "page-fault events of all processes: no online CPU found"}
	}
	return own, kernelMode, openable(sys, &attr, -1, cpus[0], "page-fault events of all processes", 0)
}

func openable(sys *System, attr *unix.PerfEventAttr, pid, cpu int, what string, paranoid int) Support {
	fd, err := unix.PerfEventOpen(attr, pid, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err == nil {
		unix.Close(fd)
		return Support{OK: true, Found: what}
	}
	if sys.PerfParanoid != nil && *sys.PerfParanoid > paranoid {
		return Support{
			Found:  fmt.Sprintf("%s: kernel.perf_event_paranoid is %d, %d or less is needed without privilege", what, *sys.PerfParanoid, paranoid),
			Remedy: fmt.Sprintf("run as root, or sysctl kernel.perf_event_paranoid=%d", paranoid),
		}
	}
	return Support{Found: fmt.Sprintf("%s: %v", what, err)}
}
