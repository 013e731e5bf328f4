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

// StackTree holds many stacks in little memory, by what they have in common. The zero value is
// empty.
type StackTree struct {
	// Frames are all different but for Addr where the module is known: of code that several
	// processes run it is that of the first.
	Frames []Frame
	// Nodes begin with the root. A parent comes before its children.
	Nodes []StackNode

	frames map[Frame]int32
	// children has the nodes at places that their parents and frames tell, the next free ones if
	// these are taken: a map would need three times as much. 0 is a free place.
	children []int32
}

// StackNode is a frame that was called by another.
type StackNode struct {
	// Parent is the index of a node. Frame is that of a frame or, below the root of stacks that
	// are not whole, the [StackEnd] with a minus sign. Both are -1 at the root.
	Parent, Frame int32
}

// Add returns the node of a stack's innermost frame: the same number for equal stacks, 0 for
// none.
func (t *StackTree) Add(s *Stack) int32 {
	if s == nil || s.End == StackNone || len(s.Frames) == 0 {
		return 0
	}
	if len(t.Nodes) == 0 {
		t.Nodes = []StackNode{{-1, -1}}
		t.frames, t.children = map[Frame]int32{}, make([]int32, 1<<10)
	}
	at := int32(0)
	if s.End != StackWhole {
		at = t.child(at, -int32(s.End))
	}
	for i := len(s.Frames) - 1; i >= 0; i-- {
		key := s.Frames[i]
		if key.Module != "" {
			key.Addr = 0
		}
		frame, ok := t.frames[key]
		if !ok {
			frame = int32(len(t.Frames))
			t.frames[key] = frame
			t.Frames = append(t.Frames, s.Frames[i])
		}
		at = t.child(at, frame)
	}
	return at
}

func (t *StackTree) child(parent, frame int32) int32 {
	node := StackNode{parent, frame}
	place := t.place(node)
	if at := t.children[place]; at != 0 {
		return at
	}
	at := int32(len(t.Nodes))
	t.Nodes = append(t.Nodes, node)
	t.children[place] = at
	if len(t.Nodes) > len(t.children)*3/4 {
		t.children = make([]int32, 2*len(t.children))
		for at := range t.Nodes[1:] {
			t.children[t.place(t.Nodes[at+1])] = int32(at + 1)
		}
	}
	return at
}

// place is where a node is in children, or a free place for it.
func (t *StackTree) place(node StackNode) int {
	const odd = 0x9e3779b97f4a7c15
	mask := uint64(len(t.children) - 1)
	hash := (uint64(uint32(node.Parent))<<32 | uint64(uint32(node.Frame))) * odd
	for i := (hash ^ hash>>32) & mask; ; i = (i + 1) & mask {
		if at := t.children[i]; at == 0 || t.Nodes[at] == node {
			return int(i)
		}
	}
}

// Stack makes the stack of a node that Add has returned.
func (t *StackTree) Stack(at int32) *Stack {
	if at == 0 {
		return &Stack{End: StackNone}
	}
	s := &Stack{}
	for ; at > 0; at = t.Nodes[at].Parent {
		if frame := t.Nodes[at].Frame; frame < 0 {
			s.End = StackEnd(-frame)
		} else {
			s.Frames = append(s.Frames, t.Frames[frame])
		}
	}
	return s
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

// RawSample is what was counted of the faults of one thread, of one kind, with one stack: some of
// them, as there may be more with the same.
type RawSample struct {
	// StackID is that of a RawStack, which has come before, or of none: those have no stack.
	StackID uint64
	// PID, TID, Comm, Kind and Major are zero where they are not told apart.
	PID, TID uint32
	Comm     Comm
	Kind     Kind
	Major    bool

	Faults uint64
	Time   time.Duration
	Bytes  uint64
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
	// Stack is a node of [Profile.Stacks], 0 if none was taken.
	Stack         int32
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
	// Stacks are those of Samples, and maybe others.
	Stacks StackTree
	// Faults is how many faults there were, and Lost how many of the run are in no sample.
	// The sum over Samples is Faults.
	Faults, Lost uint64
	// Taken is how many of Faults had their stack taken, where the others are in samples of
	// these by estimate, and 0 where no sample is an estimate.
	Taken uint64
}
