// Package kernel hears of page faults through BPF programs. It is the only
// package that loads any: it probes what the running kernel allows (Features),
// computes from that what to load (Plan, plain data), and runs it (Live).
//
// Live starts no goroutine; the caller of Next does all work. The package must
// not import anything that prints or decides for the user.
package kernel

import (
	"fmt"

	"faultsnoop/internal/fault"
)

// Hook is one way of hearing about faults.
type Hook string

// The hooks, best first. Perf needs no BPF and is run by package perfevent; it is
// named here because a plan may say that nothing better works.
const (
	Fentry     Hook = "fentry"
	Kprobe     Hook = "kprobe"
	Tracepoint Hook = "tracepoint"
	Perf       Hook = "perf"
)

// UnwindsAtBegin reports whether an unwinder takes stacks before the hook hears of the fault,
// outside of the latency that it measures, and not after that.
func (h Hook) UnwindsAtBegin() bool { return h == Fentry || h == Kprobe }

// Hooks lists all of them in the order of preference.
var Hooks = [...]Hook{Fentry, Kprobe, Tracepoint, Perf}

// Support is whether one prerequisite is met. The zero value is "no, unknown why".
type Support struct {
	OK bool `json:"ok"`
	// Found says what was looked at and seen, in a few words.
	Found string `json:"found"`
	// Remedy is what the user can do; empty if there is nothing to do.
	Remedy string `json:"remedy,omitempty"`
}

// Args are the positions of the arguments of handle_mm_fault, counted from 0.
type Args struct {
	VMA, Address, Flags, Regs uint8
	// Count is how many there are; the return value stands behind them.
	Count uint8
}

// stockArgs is the signature since Linux 5.9 (commit bce617edecad):
// handle_mm_fault(vma, address, flags, regs).
var stockArgs = Args{VMA: 0, Address: 1, Flags: 2, Regs: 3, Count: 4}

// Features is what the running kernel and the caller's privilege allow. It is
// plain data, so that plans can be tested without a kernel.
type Features struct {
	// BPF is whether programs can be loaded at all.
	BPF Support
	// BTF is whether the kernel describes its types.
	BTF Support
	// Trampolines is whether a fentry program really attaches to handle_mm_fault.
	Trampolines Support
	// Kprobes is whether the kernel has them and lets one be set.
	Kprobes Support
	// Tracepoints is whether exceptions:page_fault_user and _kernel exist.
	Tracepoints Support
	// PerfBPF is whether a program can be attached to a page-fault event of a CPU.
	PerfBPF Support
	// PerfOwn and PerfAll are whether page-fault events can be opened for one's
	// own processes and for all CPUs.
	PerfOwn, PerfAll Support
	// PerfKernel is whether the events of own processes may hear of kernel mode too.
	PerfKernel Support
	// RingBuffer is whether BPF ring buffers exist (5.8).
	RingBuffer Support
	// SafeFexit is false on kernels where fexit on a function that sleeps could
	// crash (before 5.12, commit e21aa341785c).
	SafeFexit Support
	// Undisturbed is false where the kernel may preempt a fentry program, which then
	// misses the faults of the task that runs instead.
	Undisturbed Support

	Args Args
	// ArgsFrom is "BTF", or "table" with the reason.
	ArgsFrom string
	// FaultFlags and Returns are the running kernel's enum fault_flag and enum
	// vm_fault_reason, without their prefixes.
	FaultFlags []fault.BitName
	FlagsFrom  string
	Returns    []fault.BitName

	// Reclaim is whether the tracepoints of direct reclaim, of cgroups too, and of
	// compaction exist.
	Reclaim Support
	// NUMAHints: the kernel takes permissions of pages away to balance NUMA nodes, or may.
	NUMAHints bool
	// SwitchHasState: sched_switch hands over the state of the task that leaves (5.18).
	SwitchHasState bool
	// TaskPTRegs: bpf_task_pt_regs (5.15), which tells with what registers a thread has left
	// user mode.
	TaskPTRegs bool
	// TaskStorage: task-local storage in tracing programs (5.13).
	TaskStorage bool
	// Witness is whether page tables can be read, and PageTables how.
	Witness    Support
	PageTables PageTables
	// PTEFault is whether the kernel exposes handle_pte_fault, which stock kernels
	// inline, and programs can be attached to it.
	PTEFault Support
}

// flagTable is FAULT_FLAG_* as in Linux 5.9 to 5.13, when they were macros and so
// in no BTF (include/linux/mm.h); the enum came with 5.14, commit da2f5eb3d344.
var flagTable = []fault.BitName{
	{Bit: 0x1, Name: "WRITE"},
	{Bit: 0x2, Name: "MKWRITE"},
	{Bit: 0x4, Name: "ALLOW_RETRY"},
	{Bit: 0x8, Name: "RETRY_NOWAIT"},
	{Bit: 0x10, Name: "KILLABLE"},
	{Bit: 0x20, Name: "TRIED"},
	{Bit: 0x40, Name: "USER"},
	{Bit: 0x80, Name: "REMOTE"},
	{Bit: 0x100, Name: "INSTRUCTION"},
	{Bit: 0x200, Name: "INTERRUPTIBLE"},
}

// returnTable is enum vm_fault_reason as in Linux 5.10 (include/linux/mm_types.h).
var returnTable = []fault.BitName{
	{Bit: 0x1, Name: "OOM"},
	{Bit: 0x2, Name: "SIGBUS"},
	{Bit: 0x4, Name: "MAJOR"},
	{Bit: 0x10, Name: "HWPOISON"},
	{Bit: 0x20, Name: "HWPOISON_LARGE"},
	{Bit: 0x40, Name: "SIGSEGV"},
	{Bit: 0x400, Name: "RETRY"},
}

func bit(names []fault.BitName, name string) uint32 {
	for _, n := range names {
		if n.Name == name {
			return n.Bit
		}
	}
	return 0
}

// UnsupportedError says that a hook cannot be used here, why, and what would help.
type UnsupportedError struct {
	Hook Hook
	Support
}

func (e *UnsupportedError) Error() string {
	if e.Remedy == "" {
		return fmt.Sprintf("using hook %s: %s", e.Hook, e.Found)
	}
	return fmt.Sprintf("using hook %s: %s; %s", e.Hook, e.Found, e.Remedy)
}
