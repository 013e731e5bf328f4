package aggregate

import (
	"container/list"
	"slices"
	"sort"
	"unsafe"

	"faultsnoop/internal/fault"
)

// Bounds of what is known of mappings: how many of one program, which is what the kernel
// allows by default (vm.max_map_count), how many programs, and how many bytes of all.
const (
	maxMapped      = 1 << 16
	maxMappedBy    = 1 << 12
	maxMappedBytes = 32 << 20
)

// Mappers knows which call has mapped what memory, by the calls that were heard of. The
// zero value is ready for use. Its memory is bounded: programs that nobody has asked for and
// that have made no call for the longest time are forgotten.
type Mappers struct {
	programs map[program]*list.Element
	order    list.List            // of *mapped, those used last behind
	stacks   map[*fault.Stack]int // how many parts have each
	size     int                  // bytes, about
}

// program is a process between two execs.
type program struct{ pid, image uint32 }

// mapped is what calls of a program have mapped.
type mapped struct {
	*mappedParts
	of  program
	brk uint64 // the end of the heap, 0 before the first call
}

// mappedParts are in ascending order without overlap.
type mappedParts struct {
	list []mappedPart
	// users is how many programs have them: a parent and its children, until one changes.
	users int
}

type mappedPart struct {
	start, end uint64
	stack      *fault.Stack
}

// Add takes up a call. Calls come in the order of their times.
func (m *Mappers) Add(c *fault.MappingCall) {
	if m.programs == nil {
		m.programs, m.stacks = map[program]*list.Element{}, map[*fault.Stack]int{}
	}
	of := program{c.PID, c.Image}
	if c.Parent != 0 {
		// One that has mapped nothing that was heard of hands nothing on.
		if from := m.find(program{c.Parent, c.ParentImage}); from != nil {
			from.users++
			m.put(&mapped{mappedParts: from.mappedParts, of: of, brk: from.brk})
		}
		return
	}
	p := m.find(of)
	if p == nil {
		p = &mapped{mappedParts: &mappedParts{users: 1}, of: of}
		m.put(p)
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
	if part.start < part.end {
		m.add(p, part)
	}
}

// find returns a program that is used now, nil if it is not known.
func (m *Mappers) find(of program) *mapped {
	e := m.programs[of]
	if e == nil {
		return nil
	}
	m.order.MoveToBack(e)
	return e.Value.(*mapped)
}

func (m *Mappers) put(p *mapped) {
	if old := m.programs[p.of]; old != nil {
		m.forget(old)
	}
	m.programs[p.of] = m.order.PushBack(p)
	m.bound(p)
}

func (m *Mappers) forget(e *list.Element) {
	p := m.order.Remove(e).(*mapped)
	delete(m.programs, p.of)
	m.leave(p)
}

func (m *Mappers) add(p *mapped, part mappedPart) {
	if len(p.list) >= maxMapped {
		m.leave(p)
	}
	if p.users > 1 {
		p.users--
		p.mappedParts = &mappedParts{list: slices.Clone(p.list), users: 1}
		m.account(p.list, 1)
	}
	first := sort.Search(len(p.list), func(i int) bool { return p.list[i].end > part.start })
	last := first
	for last < len(p.list) && p.list[last].start < part.end {
		last++
	}
	with := make([]mappedPart, 0, 3)
	if first < last && p.list[first].start < part.start {
		with = append(with, mappedPart{p.list[first].start, part.start, p.list[first].stack})
	}
	with = append(with, part)
	if first < last && p.list[last-1].end > part.end {
		with = append(with, mappedPart{part.end, p.list[last-1].end, p.list[last-1].stack})
	}
	m.account(p.list[first:last], -1)
	m.account(with, 1)
	p.list = slices.Replace(p.list, first, last, with...)
	m.bound(p)
}

// account takes note of parts that are kept, or of their end if by is -1.
func (m *Mappers) account(parts []mappedPart, by int) {
	m.size += by * len(parts) * int(unsafe.Sizeof(mappedPart{}))
	for i := range parts {
		s := parts[i].stack
		if s == nil {
			continue
		}
		had := m.stacks[s]
		if m.stacks[s] = had + by; had == 0 || had+by == 0 {
			m.size += by * len(s.Frames) * int(unsafe.Sizeof(fault.Frame{}))
		}
		if had+by == 0 {
			delete(m.stacks, s)
		}
	}
}

// leave ends the use of its parts by a program.
func (m *Mappers) leave(p *mapped) {
	if p.users--; p.users == 0 {
		m.account(p.list, -1)
	}
	p.mappedParts = &mappedParts{users: 1}
}

// bound forgets what was used longest ago, and all parts of the last one, p, if they alone
// are too much.
func (m *Mappers) bound(p *mapped) {
	for len(m.programs) > 1 && (m.size > maxMappedBytes || len(m.programs) > maxMappedBy) {
		m.forget(m.order.Front())
	}
	if m.size > maxMappedBytes {
		m.leave(p)
	}
}

// Of is the stack of the call that has mapped the memory of a fault, nil if it is not known.
func (m *Mappers) Of(f *fault.Fault) *fault.Stack {
	p := m.find(program{f.PID, f.Image})
	if p == nil {
		return nil
	}
	i := sort.Search(len(p.list), func(i int) bool { return p.list[i].end > f.Address })
	if i == len(p.list) || p.list[i].start > f.Address {
		return nil
	}
	return p.list[i].stack
}
