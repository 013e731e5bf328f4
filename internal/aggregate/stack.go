package aggregate

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"faultsnoop/internal/fault"
)

// StackCost is what faults with stacks cost.
type StackCost struct {
	// Faults counts all, Major those of them that were major. A source of stacks does not
	// tell the others apart: they are minor or failed.
	Faults, Major uint64
	// Time is 0 where the source does not measure it.
	Time  time.Duration
	Bytes uint64
}

// Add adds another cost.
func (c *StackCost) Add(o StackCost) {
	c.Faults += o.Faults
	c.Major += o.Major
	c.Time += o.Time
	c.Bytes += o.Bytes
}

// CostOfSample is what the faults of a sample cost.
func CostOfSample(s *fault.StackSample) StackCost {
	c := StackCost{Faults: s.Faults, Time: s.Time, Bytes: s.Bytes}
	if s.Major {
		c.Major = s.Faults
	}
	return c
}

// StackTotal is the sum over the samples of a profile.
func StackTotal(p *fault.Profile) StackCost {
	var sum StackCost
	for i := range p.Samples {
		sum.Add(CostOfSample(&p.Samples[i]))
	}
	return sum
}

// Stacked is how many faults of a profile have a stack.
func Stacked(p *fault.Profile) uint64 {
	var n uint64
	for i := range p.Samples {
		if HasStack(p.Samples[i].Stack) {
			n += p.Samples[i].Faults
		}
	}
	return n
}

// HasStack reports whether a stack was taken.
func HasStack(s *fault.Stack) bool {
	return s != nil && s.End != fault.StackNone && len(s.Frames) > 0
}

// NoStack is the row of the faults whose stack was not taken.
const NoStack = "[no stack]"

// EndName says in words why a stack has no more frames; empty if it is whole.
func EndName(e fault.StackEnd) string {
	switch e {
	case fault.StackTruncated:
		return "(truncated)"
	case fault.StackUnreadable:
		return "(memory not resident)"
	case fault.StackIncomplete:
		return "(incomplete)"
	}
	return ""
}

// StackTree holds stacks by what they have in common, from the outermost frame on.
type StackTree struct {
	// Frames are all different.
	Frames []fault.Frame
	// Nodes begin with the root, which has no frame. A parent comes before its children.
	Nodes []StackNode

	normal   func(*fault.Frame) fault.Frame
	frames   map[fault.Frame]int32
	children map[StackNode]int32
	leaves   map[*fault.Stack]int32
}

// StackNode is a frame below another.
type StackNode struct {
	// Parent is the index of a node, Frame that of a frame; both -1 at the root.
	Parent, Frame int32
}

// NewStackTree returns an empty tree. Frames that normal makes equal are one; nil keeps
// them as they are.
func NewStackTree(normal func(*fault.Frame) fault.Frame) *StackTree {
	return &StackTree{
		Nodes: []StackNode{{-1, -1}}, normal: normal,
		frames: map[fault.Frame]int32{}, children: map[StackNode]int32{}, leaves: map[*fault.Stack]int32{},
	}
}

// Add returns the node of the innermost frame of a stack. Below the root, a stack that is
// not whole has a frame that is called what [EndName] says, and none has one that is called
// [NoStack].
func (t *StackTree) Add(s *fault.Stack) int32 {
	if leaf, ok := t.leaves[s]; ok {
		return leaf
	}
	var leaf int32
	if !HasStack(s) {
		leaf = t.child(leaf, fault.Frame{Func: NoStack})
	} else {
		if end := EndName(s.End); end != "" {
			leaf = t.child(leaf, fault.Frame{Func: end})
		}
		for i := len(s.Frames) - 1; i >= 0; i-- {
			f := s.Frames[i]
			if t.normal != nil {
				f = t.normal(&s.Frames[i])
			}
			leaf = t.child(leaf, f)
		}
	}
	t.leaves[s] = leaf
	return leaf
}

func (t *StackTree) child(parent int32, f fault.Frame) int32 {
	id, ok := t.frames[f]
	if !ok {
		id = int32(len(t.Frames))
		t.Frames = append(t.Frames, f)
		t.frames[f] = id
	}
	node := StackNode{parent, id}
	at, ok := t.children[node]
	if !ok {
		at = int32(len(t.Nodes))
		t.Nodes = append(t.Nodes, node)
		t.children[node] = at
	}
	return at
}

// Place is a frame without what differs between processes that run the same code, for
// [NewStackTree]: where the module is mapped, and where in a function that has a name.
func Place(f *fault.Frame) fault.Frame {
	p := *f
	p.Addr = 0
	if p.Func != "" {
		p.Offset, p.BuildID = 0, ""
	}
	return p
}

// MergeSamples adds up samples that are alike: equal stacks, and what else they say. forget
// clears, in a copy of each sample, what shall not tell them apart; nil clears nothing.
// The order is that in which they were met.
func MergeSamples(samples []fault.StackSample, forget func(*fault.StackSample)) []fault.StackSample {
	type key struct {
		leaf          int32
		pid, tid      uint32
		comm, process fault.Comm
		kind          fault.Kind
		major         bool
	}
	tree := NewStackTree(func(f *fault.Frame) fault.Frame {
		same := *f
		same.Addr = 0 // equal code, wherever it is mapped
		return same
	})
	at := map[key]int{}
	var merged []fault.StackSample
	for i := range samples {
		s := samples[i]
		if forget != nil {
			forget(&s)
		}
		k := key{tree.Add(s.Stack), s.PID, s.TID, s.Comm, s.Process, s.Kind, s.Major}
		if j, ok := at[k]; ok {
			m := &merged[j]
			m.Faults += s.Faults
			m.Time += s.Time
			m.Bytes += s.Bytes
			continue
		}
		at[k] = len(merged)
		merged = append(merged, s)
	}
	return merged
}

// StackBy is what the rows of a table of stacks are of.
type StackBy uint8

const (
	ByFunction StackBy = iota
	ByLine
	ByStack
	ByModule
)

var stackByNames = [...]string{"function", "line", "stack", "module"}

func (b StackBy) String() string {
	if int(b) < len(stackByNames) {
		return stackByNames[b]
	}
	return "unknown"
}

// ParseStackBy is the inverse of [StackBy.String].
func ParseStackBy(s string) (StackBy, bool) {
	i := slices.Index(stackByNames[:], s)
	return StackBy(max(i, 0)), i >= 0
}

// StackRow is a row of a table of stacks.
type StackRow struct {
	// Frame has what the row is of and no more: a function with its module, a line with its
	// function, file and module, or a module. It is zero in a table by stack, and for faults
	// without a stack, which Frame.Func == [NoStack] tells.
	Frame fault.Frame
	// Stack is that of a table by stack.
	Stack *fault.Stack
	StackCost
}

// StackTable divides faults by their stacks. The sum over the rows is that of the profile.
type StackTable struct {
	By StackBy
	// SkipRuntime says that frames of a runtime were passed over; see [Runtime].
	SkipRuntime bool
	Rows        []StackRow
	Total       StackCost
}

// Stacked is the cost of the faults that have a stack.
func (t *StackTable) Stacked() StackCost {
	var sum StackCost
	for i := range t.Rows {
		if t.Rows[i].Frame.Func != NoStack {
			sum.Add(t.Rows[i].StackCost)
		}
	}
	return sum
}

// TableOf counts a profile by the innermost frame of its stacks or, with skipRuntime, by the
// innermost that is not of a runtime; a stack that has no such frame counts with its innermost.
// The most expensive rows come first, and faults without a stack last.
func TableOf(p *fault.Profile, by StackBy, skipRuntime bool) *StackTable {
	t := &StackTable{By: by, SkipRuntime: skipRuntime && by != ByStack}
	type key struct {
		frame fault.Frame
		leaf  int32
	}
	at := map[key]int{}
	keys := map[*fault.Stack]key{}
	tree := NewStackTree(Place)
	for i := range p.Samples {
		s := &p.Samples[i]
		k, ok := keys[s.Stack]
		if !ok {
			switch {
			case !HasStack(s.Stack):
				k.frame.Func = NoStack
			case by == ByStack:
				k.leaf = tree.Add(s.Stack)
			default:
				k.frame = rowFrame(by, self(s.Stack, skipRuntime))
			}
			keys[s.Stack] = k
		}
		j, ok := at[k]
		if !ok {
			j = len(t.Rows)
			at[k] = j
			row := StackRow{Frame: k.frame}
			if k.leaf != 0 {
				row.Stack = s.Stack
			}
			t.Rows = append(t.Rows, row)
		}
		cost := CostOfSample(s)
		t.Rows[j].Add(cost)
		t.Total.Add(cost)
	}
	slices.SortStableFunc(t.Rows, func(a, b StackRow) int {
		if none := b.Frame.Func == NoStack; none != (a.Frame.Func == NoStack) {
			return map[bool]int{false: 1, true: -1}[none]
		}
		return cmp.Or(-cmp.Compare(a.Time, b.Time), -cmp.Compare(a.Faults, b.Faults), compareRows(&a, &b))
	})
	return t
}

// self is the frame that a stack's faults are counted for.
func self(s *fault.Stack, skipRuntime bool) *fault.Frame {
	if skipRuntime {
		for i := range s.Frames {
			if !Runtime(&s.Frames[i]) {
				return &s.Frames[i]
			}
		}
	}
	return &s.Frames[0]
}

// rowFrame leaves of a frame what a row is of.
func rowFrame(by StackBy, f *fault.Frame) fault.Frame {
	if by == ByModule {
		return fault.Frame{Module: moduleOf(f), BuildID: f.BuildID}
	}
	row := Place(f)
	row.Inlined, row.Module = false, moduleOf(f)
	if by == ByFunction {
		row.Line = 0
	}
	return row
}

// moduleOf is the module of a frame: of code that was compiled as it ran, or not at all, the
// source file.
func moduleOf(f *fault.Frame) string {
	if f.File != "" && (f.Module == "" || strings.HasPrefix(f.Module, "[anon")) {
		return f.File
	}
	return f.Module
}

// compareRows orders rows whose cost is the same, in one way every time.
func compareRows(a, b *StackRow) int {
	if order := compareFrames(&a.Frame, &b.Frame); order != 0 || a.Stack == nil || b.Stack == nil {
		return order
	}
	return cmp.Or(slices.CompareFunc(a.Stack.Frames, b.Stack.Frames, func(x, y fault.Frame) int {
		return compareFrames(&x, &y)
	}), cmp.Compare(a.Stack.End, b.Stack.End))
}

func compareFrames(a, b *fault.Frame) int {
	return cmp.Or(
		strings.Compare(a.Func, b.Func), strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), strings.Compare(a.Module, b.Module),
		cmp.Compare(a.Offset, b.Offset), strings.Compare(a.BuildID, b.BuildID), cmp.Compare(a.Lang, b.Lang),
	)
}

// StackChange is a row in two profiles.
type StackChange struct {
	Frame         fault.Frame
	Stack         *fault.Stack
	Before, After StackCost
	// Faults, Time and Bytes are by how much the row's share of the whole has grown: from -1
	// to 1, and 0 in sum.
	Faults, Time, Bytes float64
}

// Changes compares two tables of the same kind, each row as its share of its table, since
// runs differ in length. The greatest changes of time, or of faults where no time is
// known, come first.
func Changes(before, after *StackTable) []StackChange {
	type key struct {
		frame fault.Frame
		leaf  int32
	}
	tree := NewStackTree(Place)
	at := map[key]int{}
	var changes []StackChange
	find := func(r *StackRow) *StackChange {
		k := key{frame: r.Frame}
		if r.Stack != nil {
			k.leaf = tree.Add(r.Stack)
		}
		i, ok := at[k]
		if !ok {
			i = len(changes)
			at[k] = i
			changes = append(changes, StackChange{Frame: r.Frame, Stack: r.Stack})
		}
		return &changes[i]
	}
	for i := range before.Rows {
		find(&before.Rows[i]).Before.Add(before.Rows[i].StackCost)
	}
	for i := range after.Rows {
		find(&after.Rows[i]).After.Add(after.Rows[i].StackCost)
	}
	share := func(part, whole uint64) float64 { return float64(part) / float64(max(whole, 1)) }
	a, b := &before.Total, &after.Total
	for i := range changes {
		c := &changes[i]
		c.Faults = share(c.After.Faults, b.Faults) - share(c.Before.Faults, a.Faults)
		c.Time = share(uint64(c.After.Time), uint64(b.Time)) - share(uint64(c.Before.Time), uint64(a.Time))
		c.Bytes = share(c.After.Bytes, b.Bytes) - share(c.Before.Bytes, a.Bytes)
	}
	size := func(c *StackChange) float64 {
		if a.Time > 0 && b.Time > 0 {
			return max(c.Time, -c.Time)
		}
		return max(c.Faults, -c.Faults)
	}
	slices.SortStableFunc(changes, func(x, y StackChange) int { return -cmp.Compare(size(&x), size(&y)) })
	return changes
}
