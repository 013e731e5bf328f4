package kernel

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"faultsnoop/internal/fault"
)

// Options is what the user wants of a live source.
type Options struct {
	Filter fault.Filter
	// Sample keeps every Nth record; 0 and 1 keep all. Counts stay exact.
	Sample uint64
	// Hook insists on one hook; empty chooses.
	Hook Hook
	// CommandPID is a child of ours that waits for its exec, from which on it is
	// traced; 0 if there is none.
	CommandPID uint32
	Command    []string
	// RingBytes is the size of the ring buffer, a power of two; 0 is the default.
	RingBytes int
	// Again remembers pages, to tell which fault again.
	Again bool
	// Stacks takes the stack of each fault.
	Stacks bool
	// Mappers tells of the calls that map memory, with their stacks.
	Mappers bool
	// PFN tells the frame and the node of each page, for which the caller needs
	// CAP_SYS_ADMIN.
	PFN bool
	// Unwinder is asked for the stacks of some faults, nil if there is none.
	Unwinder UnwinderMaps
	// CountOnly counts in the kernel, with a table for each of Tables (at most
	// [fault.MaxTables]), and sends no records but those whose stack Unwinder was asked for.
	CountOnly bool
	Tables    []fault.By
}

// UnwinderMaps are what an unwinder shares with the programs that record faults, by the names
// of bpf/rendezvous.h.
type UnwinderMaps map[string]*ebpf.Map

// Limits of the BPF side (bpf/fault.h).
const (
	maxCommPatterns = 16
	maxExePatterns  = 4
	// maxExePattern is the longest pattern for an executable's name, in bytes.
	maxExePattern = 64
	// defaultRingBytes holds about 50,000 records: a third of a second of the
	// fastest storm that two CPUs can make.
	defaultRingBytes = 8 << 20
	// maxPages is how many pages are remembered: 4 GiB of memory, in about 80 MiB.
	maxPages = 1 << 20
	// maxStacks is how many different stacks are told apart, in about 3 MiB.
	maxStacks = 1 << 15
	// maxFrames is how many frames may come before stacks begin anew: who names them needs
	// about 100 bytes for each.
	maxFrames = 1 << 18
	// The reader, which looks by itself every 50 ms, is woken when this part of the
	// ring is full, or this many bytes.
	wakeFraction = 8
	maxWakeBytes = 256 << 10
)

// The values of enum unwinding in bpf/rendezvous.h that are set.
const unwindAtEnd, unwindAtBegin = uint8(1), uint8(2)

// Plan is what to load and attach for one hook. It is plain data.
type Plan struct {
	Hook Hook
	// Programs are names in the BPF object, in the order of attachment: whatever
	// ends a fault comes before what begins one. Two of them are not attached but
	// run, at the beginning and at the end.
	Programs []string
	// Variables are the read-only settings of the BPF side.
	Variables map[string]any
	RingBytes int
	// StatRows is how many rows all tables have together, StackRows of them for that by stack.
	StatRows, StackRows int
	// Pages is how many pages are remembered.
	Pages int
	// Stacks is how many different stacks there may be; 0: none are taken.
	Stacks int
	// Unwound says that an unwinder shares its maps.
	Unwound bool
	// TaskStorage keeps a thread's fault in flight in task storage, else in a hash.
	TaskStorage bool
	// PTEFault is the function whose struct vm_fault the self-test is compared with,
	// empty if there is none.
	PTEFault string
	// Covers, Blind and Unseen are those of [fault.Session].
	Covers, Blind, Unseen []string
	FlagNames             []fault.BitName
}

// Verdict is whether one hook can be used and why.
type Verdict struct {
	Hook Hook
	Support
}

// Verdicts judges every hook, in the order of preference.
func (f *Features) Verdicts() []Verdict {
	v := make([]Verdict, 0, len(Hooks))
	for _, h := range Hooks {
		v = append(v, Verdict{h, f.support(h)})
	}
	return v
}

// support is the first prerequisite of hook that is not met, or OK.
func (f *Features) support(hook Hook) Support {
	var needs []Support
	switch hook {
	case Fentry:
		needs = []Support{f.BPF, f.BTF, f.RingBuffer, f.SafeFexit, f.Trampolines, f.Undisturbed}
	case Kprobe:
		needs = []Support{f.BPF, f.BTF, f.RingBuffer, f.Kprobes}
	case Tracepoint:
		needs = []Support{f.BPF, f.BTF, f.RingBuffer, f.Tracepoints, f.PerfBPF}
	case Perf:
		if f.PerfAll.OK {
			return f.PerfAll
		}
		return f.PerfOwn
	}
	for _, n := range needs {
		if !n.OK {
			return n
		}
	}
	return Support{OK: true, Found: "works"}
}

// Plans returns what to try, best first. Hooks that cannot work are left out; why
// is in Verdicts. A plan for Perf carries only its name and
// the modes it covers. An insisted hook that
// cannot work is an [UnsupportedError].
func (f *Features) Plans(opt Options) ([]Plan, error) {
	if opt.Hook != "" {
		if s := f.support(opt.Hook); !s.OK {
			return nil, &UnsupportedError{opt.Hook, s}
		}
		p, err := f.plan(opt.Hook, opt)
		if err != nil {
			return nil, err
		}
		if s := f.answers(&p, &opt.Filter); !s.OK {
			s.Remedy = cmp.Or(s.Remedy, "leave --hook out")
			return nil, &UnsupportedError{opt.Hook, s}
		}
		return []Plan{p}, nil
	}
	var plans []Plan
	var rejected []Verdict
	for _, v := range f.Verdicts() {
		if v.OK {
			p, err := f.plan(v.Hook, opt)
			if err != nil {
				return nil, err
			}
			if v.Support = f.answers(&p, &opt.Filter); v.OK {
				plans = append(plans, p)
				continue
			}
		}
		// What the BPF hooks need says what to do; perf_event_paranoid has no such words.
		if v.Hook == Perf && v.Remedy != "" {
			v.Found += " (" + v.Remedy + ")"
		}
		rejected = append(rejected, v)
	}
	if len(plans) == 0 {
		return nil, fmt.Errorf("choosing a hook: none will do here: %s", Reasons(rejected))
	}
	return plans, nil
}

// answers tells whether a hook that works can tell what a filter asks for.
func (f *Features) answers(p *Plan, flt *fault.Filter) Support {
	switch {
	case p.Hook == Perf && flt.Access != nil:
		return Support{Found: "does not tell read, write and exec apart"}
	case flt.Mode == nil || slices.Contains(p.Covers, flt.Mode.String()):
		return Support{OK: true, Found: "works"}
	case p.Hook == Perf && *flt.Mode == fault.Kernel:
		return f.PerfKernel
	}
	return Support{Found: fmt.Sprintf("does not see faults of mode %s", *flt.Mode)}
}

// Reasons is what was found of hooks in one line, those with the same reason together.
func Reasons(verdicts []Verdict) string {
	var lines []string
	told := map[string]bool{}
	for _, v := range verdicts {
		if told[v.Found] {
			continue
		}
		told[v.Found] = true
		var same []string
		for _, o := range verdicts {
			if o.Found == v.Found {
				same = append(same, string(o.Hook))
			}
		}
		lines = append(lines, strings.Join(same, ", ")+": "+v.Found)
	}
	return strings.Join(lines, "; ")
}

// CheckPatterns reports what is wrong with the patterns of a filter on names.
func CheckPatterns(patterns []string) error {
	return setPatterns(map[string]any{}, patterns)
}

// statRows is room for as many processes, files or mappings as a machine has, and for
// the pages that a gigabyte has.
func statRows(tables []fault.By) int {
	rows := 1 // a map must have some
	for _, by := range tables {
		switch by {
		case fault.ByPage:
			rows += 1 << 18
		case fault.ByStack, fault.BySample:
			rows += 2 * maxStacks
		case fault.ByMapping, fault.ByThread, fault.ByFile, fault.ByProcess:
			rows += 1 << 14
		default:
			rows += 1 << 11
		}
	}
	return rows
}

func (f *Features) plan(hook Hook, opt Options) (Plan, error) {
	if hook == Perf {
		p := Plan{Hook: Perf, Covers: []string{"user"}}
		if f.PerfKernel.OK {
			p.Covers = append(p.Covers, "kernel")
		}
		return p, nil
	}
	vars, err := f.variables(opt)
	if err != nil {
		return Plan{}, err
	}
	p := Plan{
		Hook:        hook,
		Variables:   vars,
		RingBytes:   opt.RingBytes,
		StatRows:    statRows(opt.Tables),
		StackRows:   2 * maxStacks,
		Pages:       1, // a map must have some
		Unwound:     opt.Unwinder != nil,
		TaskStorage: f.TaskStorage,
		FlagNames:   f.FaultFlags,
	}
	if p.Unwound {
		p.Variables[faultVarUnwinding] = unwindAtEnd
		if hook.UnwindsAtBegin() {
			p.Variables[faultVarUnwinding] = unwindAtBegin
		}
	}
	if opt.Again {
		p.Pages = maxPages
	}
	if opt.Stacks || opt.Mappers {
		p.Stacks = maxStacks
	}
	if f.PTEFault.OK {
		p.PTEFault = handlePTEFault
	}
	if p.RingBytes == 0 {
		p.RingBytes = defaultRingBytes
	}
	p.Variables[faultVarWakeBytes] = uint64(min(p.RingBytes/wakeFraction, maxWakeBytes))
	p.Programs = []string{
		faultProgTakeBaseline, faultProgSettleAll,
		faultProgLeave, faultProgFollowFork, faultProgRefuse, faultProgLeaveCpu,
	}
	if f.Reclaim.OK {
		p.Programs = append(p.Programs, faultProgEndReclaim, faultProgBeginReclaim,
			faultProgEndCgroupReclaim, faultProgBeginCgroupReclaim, faultProgEndCompaction, faultProgBeginCompaction)
	}
	if opt.Mappers {
		p.Programs = append(p.Programs, faultProgNoteMapping, faultProgNoteFork)
	}
	p.Covers = []string{"user", "kernel", "remote", "failed"}
	switch hook {
	case Fentry:
		p.Programs = append(p.Programs, faultProgFexitHandleMmFault, faultProgFentryHandleMmFault)
	case Kprobe:
		p.Programs = append(p.Programs, faultProgKretprobeHandleMmFault, faultProgKprobeHandleMmFault)
	case Tracepoint:
		p.Programs = append(p.Programs, faultProgExitMinor, faultProgExitMajor)
		p.Programs = append(p.Programs, tracepointEntries...)
		p.Covers = []string{"user", "kernel", "failed"}
		p.Blind = []string{
			"faults taken by get_user_pages (remote, mlock, direct I/O) are counted as lost, not shown",
			"FAULT_FLAG bits beyond WRITE, USER and INSTRUCTION are unknown",
			"the number of attempts is unknown",
		}
		return p, nil
	}
	if f.Tracepoints.OK {
		p.Programs = append(p.Programs, announceKernel...)
	} else {
		p.Unseen = []string{"accesses by the kernel to addresses without a mapping (EFAULT)"}
		p.Blind = p.Unseen
	}
	return p, nil
}

// variables are the settings that do not depend on the hook. What identifies the
// tool itself is added when the plan is carried out.
func (f *Features) variables(opt Options) (map[string]any, error) {
	flt := &opt.Filter
	hwpoison := bit(f.Returns, "HWPOISON") | bit(f.Returns, "HWPOISON_LARGE")
	vars := map[string]any{
		faultVarTaskStorage:     f.TaskStorage,
		faultVarArgVma:          f.Args.VMA,
		faultVarArgAddress:      f.Args.Address,
		faultVarArgFlags:        f.Args.Flags,
		faultVarArgRegs:         f.Args.Regs,
		faultVarArgCount:        f.Args.Count,
		faultVarFlagWrite:       bit(f.FaultFlags, "WRITE"),
		faultVarFlagTried:       bit(f.FaultFlags, "TRIED"),
		faultVarFlagUser:        bit(f.FaultFlags, "USER"),
		faultVarFlagRemote:      bit(f.FaultFlags, "REMOTE"),
		faultVarFlagInstruction: bit(f.FaultFlags, "INSTRUCTION"),
		faultVarFlagVmaLock:     bit(f.FaultFlags, "VMA_LOCK"),
		faultVarRetOom:          bit(f.Returns, "OOM"),
		faultVarRetSigbus:       bit(f.Returns, "SIGBUS"),
		faultVarRetMajor:        bit(f.Returns, "MAJOR"),
		faultVarRetHwpoison:     hwpoison,
		faultVarRetSigsegv:      bit(f.Returns, "SIGSEGV"),
		faultVarRetRetry:        bit(f.Returns, "RETRY"),
		faultVarSample:          opt.Sample,
		faultVarTraceSelf:       flt.Self,
		faultVarFilterPid:       len(flt.PIDs) > 0 || opt.CommandPID != 0,
		faultVarFilterTid:       len(flt.TIDs) > 0,
		faultVarFollowChildren:  flt.Children,
		faultVarFilterCgroup:    flt.Cgroup != "",
		faultVarAddrStart:       flt.AddrStart,
		faultVarAddrEnd:         flt.AddrEnd,
		faultVarMinLatencyNs:    uint64(flt.MinLatency),
		faultVarDirectMap:       f.PageTables.DirectMap,
		faultVarTableLevels:     f.PageTables.Levels,
		faultVarNumaHints:       f.NUMAHints,
		faultVarSwitchHasState:  f.SwitchHasState,
		faultVarCountOnly:       opt.CountOnly,
		faultVarRememberPages:   opt.Again,
		faultVarTakeStacks:      opt.Stacks,
		faultVarHasTaskPtRegs:   f.TaskPTRegs,
		faultVarStatTables:      uint8(len(opt.Tables)),
	}
	var tables [fault.MaxTables]uint8
	for i, by := range opt.Tables {
		tables[i] = uint8(by)
	}
	vars[faultVarTablesBy] = tables
	var kinds uint32
	for _, k := range flt.Kinds {
		kinds |= 1 << k
	}
	vars[faultVarWantedKinds] = kinds
	if flt.UID != nil {
		vars[faultVarFilterUid] = true
		vars[faultVarWantedUid] = *flt.UID
	}
	if flt.Mode != nil {
		vars[faultVarFilterMode] = true
		vars[faultVarWantedMode] = uint8(*flt.Mode)
	}
	if flt.Access != nil {
		vars[faultVarFilterAccess] = true
		vars[faultVarWantedAccess] = uint8(*flt.Access)
	}
	if flt.Major != nil {
		vars[faultVarFilterMajor] = true
		vars[faultVarWantedMajor] = *flt.Major
	}
	return vars, setPatterns(vars, flt.Comms)
}

// setPatterns lays out the patterns of -c for word-wise comparison.
func setPatterns(vars map[string]any, patterns []string) error {
	var comms [maxCommPatterns]faultCommPattern
	var exes [maxExePatterns]faultExePattern
	var nComm, nExe int
	for _, p := range patterns {
		switch {
		case p == "":
			return fmt.Errorf("compiling the filter on comm: an empty pattern matches nothing useful; leave -c out")
		case len(p) <= fault.MaxComm && nComm < maxCommPatterns:
			text, mask := words(p, 2)
			comms[nComm] = faultCommPattern{Lo: text[0], Hi: text[1], LoMask: mask[0], HiMask: mask[1]}
			nComm++
		case len(p) > fault.MaxComm && len(p) <= maxExePattern && nExe < maxExePatterns:
			text, mask := words(p, maxExePattern/8)
			copy(exes[nExe].Text[:], text)
			copy(exes[nExe].Mask[:], mask)
			nExe++
		case len(p) > maxExePattern:
			return fmt.Errorf("compiling the filter on comm: %q has %d bytes, at most %d are compared; give a shorter part of the name", p, len(p), maxExePattern)
		default:
			return fmt.Errorf("compiling the filter on comm: at most %d patterns, of which %d longer than %d bytes", maxCommPatterns, maxExePatterns, fault.MaxComm)
		}
	}
	vars[faultVarCommPatterns] = uint32(nComm)
	vars[faultVarExePatterns] = uint32(nExe)
	vars[faultVarCommPatternList] = comms
	vars[faultVarExePatternList] = exes
	return nil
}

// words lays a string out as n native words and tells which bytes of them count.
func words(s string, n int) (text, mask []uint64) {
	t, m := make([]byte, 8*n), make([]byte, 8*n)
	copy(t, s)
	for i := range len(s) {
		m[i] = 0xff
	}
	for i := range n {
		text = append(text, binary.NativeEndian.Uint64(t[8*i:]))
		mask = append(mask, binary.NativeEndian.Uint64(m[8*i:]))
	}
	return text, mask
}
