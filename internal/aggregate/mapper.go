package aggregate

import (
	"slices"
	"sort"

	"faultsnoop/internal/fault"
)

// What is kept of one program, and how many programs are known at a time.
const (
	maxMapped   = 1 << 16
	maxMappedBy = 1 << 12
)

// Mappers knows which call has mapped what memory, by the calls that were heard of. The
// zero value is ready for use.
type Mappers struct {
	programs map[program]*mapped
}

// program is a process between two execs.
type program struct{ pid, image uint32 }

// mapped is what calls of a program have mapped, in ascending order without overlap.
type mapped struct {
	parts []mappedPart
	brk   uint64 // the end of the heap, 0 before the first call
	// shared: parts belongs to a parent or a child too.
	shared bool
}

type mappedPart struct {
	start, end uint64
	stack      *fault.Stack
}

// Add takes up a call. Calls come in the order of their times.
func (m *Mappers) Add(c *fault.MappingCall) {
	if m.programs == nil {
		m.programs = map[program]*mapped{}
	}
	of := program{c.PID, c.Image}
	if c.Parent != 0 {
		// One that has mapped nothing that was heard of hands nothing on.
		if from := m.programs[program{c.Parent, c.ParentImage}]; from != nil {
			from.shared = true
			m.put(of, &mapped{parts: from.parts, brk: from.brk, shared: true})
		}
		return
	}
	p := m.programs[of]
	if p == nil {
		p = &mapped{}
		m.put(of, p)
	}
	part := mappedPart{c.Start, c.End, c.Stack}
	if c.Brk {
		// The first call only asks where the heap ends, and what was there is nobody's.
		before := p.brk
		if p.brk = c.End; before == 0 || c.End <= before {
			return
		}
		part.start = before
	}
	p.add(part)
}

func (m *Mappers) put(of program, p *mapped) {
	if len(m.programs) >= maxMappedBy {
		clear(m.programs)
	}
	m.programs[of] = p
}

func (p *mapped) add(part mappedPart) {
	if part.start >= part.end {
		return
	}
	if len(p.parts) >= maxMapped {
		p.parts, p.shared = nil, false
	}
	if p.shared {
		p.parts, p.shared = slices.Clone(p.parts), false
	}
	first := sort.Search(len(p.parts), func(i int) bool { return p.parts[i].end > part.start })
	last := first
	for last < len(p.parts) && p.parts[last].start < part.end {
		last++
	}
	with := make([]mappedPart, 0, 3)
	if first < last && p.parts[first].start < part.start {
		with = append(with, mappedPart{p.parts[first].start, part.start, p.parts[first].stack})
	}
	with = append(with, part)
	if first < last && p.parts[last-1].end > part.end {
		with = append(with, mappedPart{part.end, p.parts[last-1].end, p.parts[last-1].stack})
	}
	p.parts = slices.Replace(p.parts, first, last, with...)
}

// Of is the stack of the call that has mapped the memory of a fault, nil if it is not known.
func (m *Mappers) Of(f *fault.Fault) *fault.Stack {
	p := m.programs[program{f.PID, f.Image}]
	if p == nil {
		return nil
	}
	i := sort.Search(len(p.parts), func(i int) bool { return p.parts[i].end > f.Address })
	if i == len(p.parts) || p.parts[i].start > f.Address {
		return nil
	}
	return p.parts[i].stack
}
