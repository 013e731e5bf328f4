// Package fault is the vocabulary of faultsnoop: what one page fault is, what a
// stream of them is, and how losses are counted. It imports the standard library
// only, starts no goroutine and touches no kernel.
package fault

import (
	"bytes"
	"time"
)

// Field is a set of facts about a [Fault] that the hook was able to know.
// A fact outside the set is unknown, never a default.
type Field uint32

// The facts that not every hook, kernel or moment can supply.
const (
	HasLatency  Field = 1 << iota // Latency
	HasMode                       // Mode
	HasAccess                     // Access
	HasMajor                      // Major
	HasFlags                      // Flags is all that the kernel passed
	HasSomeFlag                   // Flags holds only the bits implied by the x86 error code
	HasAttempts                   // Attempts
	HasResult                     // Result
	HasIP                         // IP
	HasVMA                        // VMA.Start, End, Flags, PgOff
	HasPgOff                      // PgOff
	HasLabel                      // VMA.Label
	HasIDs                        // HostPID and HostTID
	HasInnerIDs                   // InnerPID and InnerTID
	HasKind                       // Kind
	HasBefore                     // EntryBefore
	HasAgain                      // Again
	HasPFN                        // PFN and Node
	HasOffCPU                     // OffCPU, and Wait if it is not 0
	HasReclaim                    // Reclaim and Compaction
	HasAfter                      // EntryAfter, Level and Pages
)

// Fault is one page fault, from the first entry into the kernel's handler to the
// last exit, however often it was retried in between.
type Fault struct {
	// End is when the fault was complete, in nanoseconds of CLOCK_MONOTONIC. For a
	// fault whose completion was not seen it is when it began.
	End uint64
	// Latency is the time from the first entry to the last exit.
	Latency time.Duration
	// OffCPU is the part of Latency in which the thread was not running, and Wait why
	// for the most of it.
	OffCPU time.Duration
	Wait   Wait
	// Reclaim and Compaction are the parts of Latency in which the thread freed memory
	// itself, of the machine or of its cgroup, and made room for a large page.
	Reclaim, Compaction time.Duration

	// PID is the thread group id and TID the thread id in the pid namespace of the
	// observer. They are 0 for a task that has no id there.
	PID, TID uint32
	// HostPID and HostTID are the same ids in the initial pid namespace.
	HostPID, HostTID uint32
	// InnerPID and InnerTID are the ids in the task's own, innermost pid namespace.
	InnerPID, InnerTID uint32
	CPU                uint32
	// Comm is the name of the thread, Process the name of its thread group leader.
	Comm, Process Comm
	// Image is another number after each exec of the process, and of a later process with
	// the same id.
	Image uint32

	// Sampled is when another library's unwinder was asked for the stack, in nanoseconds of
	// CLOCK_MONOTONIC, 0 if it was not: at the end of the fault, or before the handler began.
	Sampled uint64
	// Stands is for how many faults, itself among them, it was chosen by chance then.
	Stands uint64
	// StackID is that of the stack, 0 if none was taken.
	StackID uint64
	// Stack is the same with names, if somebody has named it.
	Stack *Stack
	// Mapper is the stack of the call that has mapped the memory, if that is known.
	Mapper *Stack

	// Cause is why a fault ended with SIGSEGV, NoCause for others.
	Cause Cause

	Known  Field
	Mode   Mode
	Access Access
	Result Result
	// Major is the kernel's own distinction, as counted in ru_majflt: the fault
	// returned VM_FAULT_MAJOR or had to be tried again (mm_account_fault in mm/memory.c).
	Major bool
	// Attempts is how often handle_mm_fault was entered for this one fault.
	Attempts uint16
	// Flags are the FAULT_FLAG_* bits of the first attempt, in the running kernel's numbering.
	Flags uint32
	// Address is the faulting address with its offset in the page.
	Address uint64
	// IP is the instruction that faulted; in mode kernel a kernel address.
	IP uint64
	// PgOff is the page's offset in its file, in pages, as the kernel computes it
	// (linear_page_index in include/linux/pagemap.h); for anonymous memory likewise.
	PgOff uint64
	VMA   VMA
	// Continues is the mapping of a file that the anonymous memory of the fault begins
	// behind, if the source knows it: that of a program's .data comes before its .bss.
	Continues *VMA

	// Section is the section of an ELF file that holds the address, and Symbol the object or
	// function there, which begins SymbolOffset bytes before it. Empty if there is none
	// or it is not known. The file says so, and may be hostile.
	Section, Symbol string
	SymbolOffset    uint64

	// Kind is what the kernel did. KindExact says that it was told by the page table,
	// not concluded from the mapping and the access alone.
	Kind      Kind
	KindExact bool
	// Again: the page has faulted before in this run, since its process's last exec.
	Again bool
	// EntryBefore and EntryAfter are the page-table entries for the address when the
	// fault began and was complete, as the architecture defines them: of the lowest
	// table there was.
	EntryBefore, EntryAfter uint64
	// PFN is the frame of the page afterwards, and Node the NUMA node that it is on, -1 if
	// that is not known. Both only if they were asked for.
	PFN  uint64
	Node int
	// Level is that of EntryAfter: 0 for a page, 1 for 2 MiB, 2 for 1 GiB.
	Level uint8
	// Pages were mapped by the fault, of the 16 aligned ones around the address. With
	// those of other threads that faulted among them at the same time.
	Pages uint16
	// Folio of these have frames that follow each other: in anonymous memory, those of
	// one large folio (multi-size THP).
	Folio uint16
}

// VMA is the memory mapping that holds the faulting address.
type VMA struct {
	Start, End uint64 // [Start, End), bytes
	PgOff      uint64 // offset of Start in the file, pages
	Flags      uint64 // VM_* bits
	Inode      uint64
	Dev        uint32 // kernel dev_t: major << 20 | minor
	// Label is the name of the mapped file without its folder, or a name in
	// brackets: [heap], [stack], [anon], [vdso]; [stack:TID] for an address on the stack
	// of the thread TID if that is not its process's first. Its bytes come from the
	// traced process and may be hostile.
	Label string
	// Path of the mapped file as its mount namespace has it, empty if it has none there
	// (a memfd, for example) or the hook does not tell. Deleted says that the file had
	// lost its name when it was first seen. As hostile as Label.
	Path    string
	Deleted bool
}

// Name is the path of the mapping's file, or its label if there is none.
func (v *VMA) Name() string {
	if v.Path != "" {
		return v.Path
	}
	return v.Label
}

// The VM_* bits that make up a permission string; fixed since Linux 2.6
// (include/linux/mm.h).
const (
	vmRead     = 0x1
	vmWrite    = 0x2
	vmExec     = 0x4
	vmMayShare = 0x80
)

// Perm is the mapping's permission string as in /proc/PID/maps, for example "rw-p".
func (v *VMA) Perm() string {
	perm := [4]byte{'-', '-', '-', 'p'}
	for i, bit := range [...]uint64{vmRead, vmWrite, vmExec, vmMayShare} {
		if v.Flags&bit != 0 {
			perm[i] = "rwxs"[i]
		}
	}
	return string(perm[:])
}

// vmFlagNames are the bits of VMA.Flags that have kept their places since Linux 5.10, by
// the names of show_smap_vma_flags in fs/proc/task_mmu.c.
var vmFlagNames = [...]struct {
	bit  uint64
	name string
}{
	{0x1, "rd"},
	{0x2, "wr"},
	{0x4, "ex"},
	{0x8, "sh"},
	{0x10, "mr"},
	{0x20, "mw"},
	{0x40, "me"},
	{0x80, "ms"},
	{0x100, "gd"},
	{0x200, "um"},
	{0x400, "pf"},
	{0x1000, "uw"},
	{0x2000, "lo"},
	{0x4000, "io"},
	{0x8000, "sr"},
	{0x10000, "rr"},
	{0x20000, "dc"},
	{0x40000, "de"},
	{0x80000, "lf"},
	{0x100000, "ac"},
	{0x200000, "nr"},
	{0x400000, "ht"},
	{0x800000, "sf"},
	{0x1000000, "ar"},
	{0x2000000, "wf"},
	{0x4000000, "dd"},
	{0x8000000, "sd"},
	{0x10000000, "mm"},
	{0x20000000, "hg"},
	{0x40000000, "nh"},
	{0x80000000, "mg"},
}

// AppendFlags appends the names of the mapping's flags as in VmFlags of
// /proc/PID/smaps. Bits above the 32nd, whose places differ between kernels, are left out.
func (v *VMA) AppendFlags(b []byte) []byte {
	sep := ""
	for _, n := range vmFlagNames {
		if v.Flags&n.bit != 0 {
			b = append(append(b, sep...), n.name...)
			sep = " "
		}
	}
	return b
}

// PermFlags is the inverse of [VMA.Perm] for the four bits that a permission
// string shows.
func PermFlags(perm string) uint64 {
	var flags uint64
	for i, bit := range [...]uint64{vmRead, vmWrite, vmExec, vmMayShare} {
		if i < len(perm) && perm[i] == "rwxs"[i] {
			flags |= bit
		}
	}
	return flags
}

// Is reports whether all facts of want are known.
func (f *Fault) Is(want Field) bool { return f.Known&want == want }

// PageSize is what the entry of the page table maps that the fault left, in bytes, or
// all entries together that map one large folio, up to 64 KiB; 0 if it is not known. Tables are only read where pages have 4 KiB and a table has 512
// entries.
func (f *Fault) PageSize() uint64 {
	if !f.Is(HasAfter) {
		return 0
	}
	if f.Kind == Anon && f.Level == 0 && f.Folio > 1 {
		return 4096 * uint64(f.Folio)
	}
	return 4096 << (9 * f.Level)
}

// FileOffset is where in the mapped file the address is, in bytes, with pages of
// pageSize.
func (f *Fault) FileOffset(pageSize uint64) uint64 {
	return f.PgOff*pageSize + f.Address%pageSize
}

// Mapped is how many bytes the fault has mapped, 0 if that is not known.
func (f *Fault) Mapped() uint64 {
	if f.Level > 0 && f.Pages > 0 || !f.Is(HasAfter) {
		return f.PageSize()
	}
	return 4096 * uint64(f.Pages)
}

// OK reports whether the kernel resolved the fault and so counted it in
// ru_minflt or ru_majflt.
func (f *Fault) OK() bool { return f.Is(HasResult) && f.Result == OK }

// Comm is a task name as the kernel stores it: at most 15 bytes and a NUL. Its
// bytes are chosen by the task.
type Comm [16]byte

// MakeComm cuts name to what a kernel task name can hold.
func MakeComm(name string) Comm {
	var c Comm
	copy(c[:len(c)-1], name)
	return c
}

// Bytes are the name without the terminating NUL; they alias c.
func (c *Comm) Bytes() []byte {
	if i := bytes.IndexByte(c[:], 0); i >= 0 {
		return c[:i]
	}
	return c[:]
}

func (c Comm) String() string { return string(c.Bytes()) }
