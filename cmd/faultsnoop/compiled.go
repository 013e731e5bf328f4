package main

import (
	"slices"
	"strings"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/symbol"
)

// compiledStacks are stacks with code in them that a process has compiled while it runs.
// It lists its functions as it likes, mostly after they have run for the first time, and throws
// them away: so such frames are named again when the list has grown.
type compiledStacks struct {
	stacks     map[uint64]*compiledStack // by id
	generation uint64
	// images are what processes were last: a list may be asked only for the program that
	// has written it. Versions are those of lists, in this batch. Both are by process.
	images   map[uint32]uint32
	versions map[uint32]uint64
}

type compiledStack struct {
	pid, image uint32
	version    uint64 // of the list when it was asked last
	frames     []compiledFrame
}

// compiledFrame is one that the list may name: the index of it in the stack.
type compiledFrame struct {
	index int
	in    symbol.Instruction
}

// compiles reports whether code in a mapping may be what a process has compiled.
func compiles(m *fault.VMA) bool {
	return m.Inode == 0 && m.Label != "[vdso]" || strings.HasPrefix(m.Path, "/memfd:")
}

// see takes note of a stack. What has an id of a generation that is forgotten by now is too.
func (c *compiledStacks) see(raw *fault.RawStack) {
	generation := raw.ID >> fault.StackGeneration
	if c.stacks == nil {
		c.stacks, c.images, c.versions = map[uint64]*compiledStack{}, map[uint32]uint32{}, map[uint32]uint64{}
		c.generation = generation
	}
	if generation != c.generation {
		for id := range c.stacks {
			if id>>fault.StackGeneration != c.generation {
				delete(c.stacks, id)
			}
		}
		clear(c.images)
		c.generation = generation
	}
	c.images[raw.PID] = raw.Image
}

// version is that of the list of a process, as it is now; 0 if it has none or has become
// another program.
func (n *stackNamer) version(pid, image uint32) uint64 {
	c := &n.compiled
	if c.images[pid] != image {
		return 0
	}
	v, known := c.versions[pid]
	if !known {
		v = n.resolver.MapVersion(pid, image)
		c.versions[pid] = v
	}
	return v
}

// current is the stack of an id with the names that its code has now, nil if it is not known.
func (n *stackNamer) current(id uint64) *fault.Stack {
	s := n.named.of(id)
	c := n.compiled.stacks[id]
	if s == nil || c == nil {
		return s
	}
	v := n.version(c.pid, c.image)
	if v == 0 || v == c.version {
		return s
	}
	c.version = v
	again := fault.Stack{End: s.End, Frames: slices.Clone(s.Frames)}
	for i := range c.frames {
		f := &c.frames[i]
		frames, _ := n.resolver.Frames(&f.in)
		again.Frames[f.index] = frames[0]
	}
	n.named.add(id, &again)
	return &again
}

// nameLate names what was listed only after stacks were counted. What has a name keeps it:
// nobody can tell which faults of a row were of another function at the same place.
func (n *stackNamer) nameLate() {
	for id, c := range n.compiled.stacks {
		s := n.named.of(id)
		if s == nil {
			continue
		}
		c.frames = slices.DeleteFunc(c.frames, func(f compiledFrame) bool { return s.Frames[f.index].Func != "" })
		if len(c.frames) == 0 {
			delete(n.compiled.stacks, id)
			continue
		}
		n.current(id)
	}
}
