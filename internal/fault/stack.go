package fault

import "time"

// Lang is the language that a frame's code was written in, as far as that is known.
type Lang uint8

const (
	LangUnknown Lang = iota
	// LangKernel is the kernel's own code, LangNative what a compiler made and nothing
	// better is known of.
	LangKernel
	LangNative
	LangCPP
	LangRust
	LangGo
	LangPython
	LangJava
	LangNode
	LangRuby
	LangPerl
	LangPHP
	LangDotNet
	LangBEAM
)

var langNames = [...]string{
	"unknown", "kernel", "native", "c++", "rust", "go", "python", "java", "node", "ruby", "perl", "php", "dotnet", "beam",
}

func (l Lang) String() string { return name(langNames[:], l) }

// Frame is one function of a stack. What is not known is zero. All texts may be chosen by
// the traced process.
type Frame struct {
	// Addr is the instruction in the address space of the process or the kernel: that which
	// faulted, or the one to return to. 0 of interpreted code.
	Addr uint64
	// Func is the function's name for people, demangled.
	Func string
	// File and Line of the source.
	File string
	Line uint32
	// Module is the path of the mapped file, or [kernel], [NAME] of a kernel module, [vdso],
	// [anon] and the like.
	Module string
	// Offset is the address in the module: a virtual address as its ELF file has it, or the
	// distance from the mapping's start where there is no file.
	Offset uint64
	// BuildID of the module, in hexadecimal.
	BuildID string
	Lang    Lang
	// Inlined: the compiler has put the function into that of the next frame.
	Inlined bool
}

// StackEnd says why a stack has no more frames.
type StackEnd uint8

const (
	// StackWhole: the outermost frame was reached.
	StackWhole StackEnd = iota
	// StackTruncated: there are more than fit.
	StackTruncated
	// StackUnreadable: the memory that holds the next frame could not be read, as it is not
	// resident.
	StackUnreadable
	// StackIncomplete: what should lead to the next frame does not; the code keeps no frame
	// pointers, for example.
	StackIncomplete
	// StackNone: none was taken.
	StackNone
	// StackUntold: the source does not tell why it ends.
	StackUntold
)

var stackEndNames = [...]string{"whole", "truncated", "unreadable", "incomplete", "none", "unknown"}

func (e StackEnd) String() string { return name(stackEndNames[:], e) }

// Stack is the functions that led to a fault, the innermost first: of the kernel, if the
// fault was taken there, and of the process. It is not changed once it is made.
type Stack struct {
	Frames []Frame
	End    StackEnd
}

// StackGeneration is the number of the lowest of the 16 bits of an id that are its generation.
const StackGeneration = 48

// RawStack is a stack before anybody has named its frames.
type RawStack struct {
	// ID is that of [Fault.StackID], never 0. What is above [StackGeneration] counts how often
	// the source has begun anew to send stacks. Once one of generation N has come, ids of
	// N-2 and before do not come any more.
	ID uint64
	// Time is when the first fault with it was complete, in nanoseconds of CLOCK_MONOTONIC.
	Time uint64
	// PID, HostPID, Image and Process are those of a [Fault].
	PID, HostPID, Image uint32
	Process             Comm
	// Kernel and User are instructions, the innermost first: where the fault was taken, and
	// those to return to. They are the holder's to keep.
	Kernel, User []uint64
	End          StackEnd
}

// MappingCall is a system call of a process that has mapped memory, or that has begun a
// process with copies of its own.
type MappingCall struct {
	PID, Image uint32 // those of a [Fault]
	// Time is when it returned, in nanoseconds of CLOCK_MONOTONIC.
	Time uint64
	// Start and End are what it has mapped or, of Brk, the whole heap after it.
	Start, End uint64
	Brk        bool
	// StackID is that of the call, 0 if there was no room for it, and Stack is nil until
	// somebody names it.
	StackID uint64
	Stack   *Stack
	// Parent and ParentImage are the PID and Image of the process that has begun PID by fork;
	// Start, End and the stack are 0 then. Parent is 0 of other calls.
	Parent, ParentImage uint32
}

// StackSample is what the faults of one thread, of one kind, with one stack cost.
type StackSample struct {
	Stack         *Stack
	PID, TID      uint32
	Comm, Process Comm
	Kind          Kind
	Major         bool

	Faults uint64
	Time   time.Duration
	Bytes  uint64
}

// Profile is a run by its stacks.
type Profile struct {
	Session *Session
	// Begin is the wall clock at the beginning, and Duration how long faults were counted.
	Begin    time.Time
	Duration time.Duration
	Samples  []StackSample
	// Faults is how many faults there were, and Lost how many of the run are in no sample.
	// The sum over Samples is Faults; those without a stack have one that ends in StackNone.
	Faults, Lost uint64
}
