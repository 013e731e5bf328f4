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

// Stacked is how many faults of a profile have a stack of their own.
func Stacked(p *fault.Profile) uint64 {
	if p.Taken > 0 {
		return p.Taken
	}
	var n uint64
	for i := range p.Samples {
		if p.Samples[i].Stack != 0 {
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
	Nodes []fault.StackNode

	normal   func(*fault.Frame) fault.Frame
	frames   map[fault.Frame]int32
	children map[fault.StackNode]int32
}

// NewStackTree returns an empty tree. Frames that normal makes equal are one; nil keeps
// them as they are.
func NewStackTree(normal func(*fault.Frame) fault.Frame) *StackTree {
	return &StackTree{
		Nodes: []fault.StackNode{{Parent: -1, Frame: -1}}, normal: normal,
		frames: map[fault.Frame]int32{}, children: map[fault.StackNode]int32{},
	}
}

// Merge returns a function that adds stacks of another tree and returns the node of their
// innermost frame. Below the root, a stack that is not whole has a frame that is called what
// [EndName] says, and none has one that is called [NoStack].
func (t *StackTree) Merge(from *fault.StackTree) (add func(at int32) int32) {
	frames := make([]int32, len(from.Frames)) // ours plus one
	nodes := make([]int32, len(from.Nodes))
	var path []int32
	return func(at int32) int32 {
		if at == 0 {
			return t.child(0, t.frame(&fault.Frame{Func: NoStack}))
		}
		path = path[:0]
		for ; at > 0 && nodes[at] == 0; at = from.Nodes[at].Parent {
			path = append(path, at)
		}
		to := nodes[at]
		for _, at := range slices.Backward(path) {
			i := from.Nodes[at].Frame
			if i < 0 {
				if end := EndName(fault.StackEnd(-i)); end != "" {
					to = t.child(to, t.frame(&fault.Frame{Func: end}))
				}
				continue
			}
			if frames[i] == 0 {
				f := &from.Frames[i]
				if t.normal != nil {
					normal := t.normal(f)
					f = &normal
				}
				frames[i] = t.frame(f) + 1
			}
			to = t.child(to, frames[i]-1)
			nodes[at] = to
		}
		return to
	}
}

func (t *StackTree) frame(f *fault.Frame) int32 {
	id, ok := t.frames[*f]
	if !ok {
		id = int32(len(t.Frames))
		t.Frames = append(t.Frames, *f)
		t.frames[*f] = id
	}
	return id
}

func (t *StackTree) child(parent, frame int32) int32 {
	node := fault.StackNode{Parent: parent, Frame: frame}
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

// MergeSamples adds up samples of a profile that are alike: equal stacks, and what else they say. forget
// clears, in a copy of each sample, what shall not tell them apart; nil clears nothing.
// The order is that in which they were met.
func MergeSamples(p *fault.Profile, forget func(*fault.StackSample)) []fault.StackSample {
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
	add := tree.Merge(&p.Stacks)
	at := map[key]int{}
	var merged []fault.StackSample
	for i := range p.Samples {
		s := p.Samples[i]
		if forget != nil {
			forget(&s)
		}
		k := key{add(s.Stack), s.PID, s.TID, s.Comm, s.Process, s.Kind, s.Major}
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
	// Stack is that of a table by stack, a node of [StackTable.Stacks]; else 0.
	Stack int32
	StackCost
}

// StackTable divides faults by their stacks. The sum over the rows is that of the profile.
type StackTable struct {
	By StackBy
	// SkipRuntime says that frames of a runtime were passed over; see [Runtime].
	SkipRuntime bool
	Rows        []StackRow
	// Stacks are those of the profile.
	Stacks *fault.StackTree
	Total  StackCost
	// Taken is that of the profile.
	Taken uint64
}

// Stacked is the cost of the faults that have a stack, if only by estimate.
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
	t := &StackTable{By: by, SkipRuntime: skipRuntime && by != ByStack, Stacks: &p.Stacks, Taken: p.Taken}
	type key struct {
		frame fault.Frame
		leaf  int32
	}
	at := map[key]int{}
	rows := make([]int32, max(len(p.Stacks.Nodes), 1)) // by node, plus one
	var add func(int32) int32
	if by == ByStack {
		add = NewStackTree(Place).Merge(&p.Stacks)
	}
	runtimes := make([]bool, len(p.Stacks.Frames))
	for i := range runtimes {
		runtimes[i] = skipRuntime && Runtime(&p.Stacks.Frames[i])
	}
	for i := range p.Samples {
		s := &p.Samples[i]
		j := int(rows[s.Stack]) - 1
		if j < 0 {
			var k key
			switch {
			case s.Stack == 0:
				k.frame.Func = NoStack
			case by == ByStack:
				k.leaf = add(s.Stack)
			default:
				k.frame = rowFrame(by, self(&p.Stacks, s.Stack, runtimes))
			}
			var ok bool
			if j, ok = at[k]; !ok {
				j = len(t.Rows)
				at[k] = j
				row := StackRow{Frame: k.frame}
				if k.leaf != 0 {
					row.Stack = s.Stack
				}
				t.Rows = append(t.Rows, row)
			}
			rows[s.Stack] = int32(j + 1)
		}
		cost := CostOfSample(s)
		t.Rows[j].Add(cost)
		t.Total.Add(cost)
	}
	slices.SortStableFunc(t.Rows, func(a, b StackRow) int {
		if none := b.Frame.Func == NoStack; none != (a.Frame.Func == NoStack) {
			return map[bool]int{false: 1, true: -1}[none]
		}
		return cmp.Or(-cmp.Compare(a.Time, b.Time), -cmp.Compare(a.Faults, b.Faults), t.compareRows(&a, &b))
	})
	return t
}

// self is the frame that a stack's faults are counted for: the innermost that is not passed over.
func self(t *fault.StackTree, leaf int32, passed []bool) *fault.Frame {
	for at := leaf; at > 0; at = t.Nodes[at].Parent {
		if f := t.Nodes[at].Frame; f >= 0 && !passed[f] {
			return &t.Frames[f]
		}
	}
	return &t.Frames[t.Nodes[leaf].Frame]
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
func (t *StackTable) compareRows(a, b *StackRow) int {
	if order := compareFrames(&a.Frame, &b.Frame); order != 0 {
		return order
	}
	x, y := a.Stack, b.Stack
	for x != y && x > 0 && y > 0 {
		m, n := t.Stacks.Nodes[x], t.Stacks.Nodes[y]
		switch {
		case m.Frame < 0 || n.Frame < 0:
			if order := cmp.Compare(m.Frame, n.Frame); order != 0 {
				return order
			}
		case m.Frame != n.Frame:
			if order := compareFrames(&t.Stacks.Frames[m.Frame], &t.Stacks.Frames[n.Frame]); order != 0 {
				return order
			}
		}
		x, y = m.Parent, n.Parent
	}
	return cmp.Compare(x, y)
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
	find := func(t *StackTable, add func(int32) int32, r *StackRow) *StackChange {
		k := key{frame: r.Frame}
		if r.Stack != 0 {
			k.leaf = add(r.Stack)
		}
		i, ok := at[k]
		if !ok {
			i = len(changes)
			at[k] = i
			changes = append(changes, StackChange{Frame: r.Frame})
			if r.Stack != 0 {
				changes[i].Stack = t.Stacks.Stack(r.Stack)
			}
		}
		return &changes[i]
	}
	add := tree.Merge(before.Stacks)
	for i := range before.Rows {
		find(before, add, &before.Rows[i]).Before.Add(before.Rows[i].StackCost)
	}
	add = tree.Merge(after.Stacks)
	for i := range after.Rows {
		find(after, add, &after.Rows[i]).After.Add(after.Rows[i].StackCost)
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
