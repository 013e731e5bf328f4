package process

import (
	"slices"
	"sort"
	"strings"
)

// maxMappings bounds the memory of one address space. The kernel allows 65530
// mappings by default (vm.max_map_count); more than that are mostly stale, since
// nothing tells of an munmap.
const maxMappings = 1 << 16

// Space is the mappings of an address space as far as they are known, in ascending
// order and without overlap. What was unmapped stays until something else is mapped
// there. The zero value is empty and ready for use.
type Space struct {
	maps   []Mapping
	shared bool // maps belongs to another Space too
	// confirmed is the time of the list that Confirm saw last.
	confirmed uint64
}

// Len is the number of known mappings.
func (s *Space) Len() int { return len(s.maps) }

// Reset forgets all mappings, as exec does.
func (s *Space) Reset() { *s = Space{} }

// Fork returns a copy, as fork makes one. The mappings themselves are copied only
// when one of the two changes. A list of the parent's mappings confirms none of the
// child's.
func (s *Space) Fork() Space {
	s.shared = true
	return Space{maps: s.maps, shared: true}
}

// Exact reports whether the bounds and flags of a mapping of s are certain for the
// time t. A split, a merge or an munmap is not reported, so they are only between
// two looks at the whole list.
func (s *Space) Exact(m *Mapping, t uint64) bool {
	return m.ExactSince <= t && t <= s.confirmed
}

// Certain reports whether it is certain that at the time t a mapping of s showed its
// object with its rights, whatever its bounds were. Nothing tells that another one was
// moved to its place (mremap), so it is only if a later list has it still.
func (s *Space) Certain(m *Mapping, t uint64) bool {
	return s.confirmed != 0 && m.listed == s.confirmed && m.Since <= t && t <= s.confirmed
}

// Confirmed is the time until which mappings may be exact.
func (s *Space) Confirmed() uint64 { return s.confirmed }

// Find returns the mapping that holds addr, or nil. The result is valid until the
// next change of s.
func (s *Space) Find(addr uint64) *Mapping {
	i := s.after(addr)
	if i < len(s.maps) && s.maps[i].Start <= addr {
		return &s.maps[i]
	}
	return nil
}

// maxParts bounds how many mappings one piece of anonymous memory is looked for in.
const maxParts = 64

// Continued returns the mapping of a file right behind which the memory of m begins,
// which Find has returned, or nil. Parts of that memory may have been given other
// rights or flags.
func (s *Space) Continued(m *Mapping) *Mapping {
	start := m.Start
	last := s.after(m.Start) - 1
	for i := last; i >= 0 && last-i < maxParts && s.maps[i].End == start; i-- {
		if s.maps[i].Inode != 0 {
			return &s.maps[i]
		}
		start = s.maps[i].Start
	}
	return nil
}

// after is the index of the first mapping that ends after addr.
func (s *Space) after(addr uint64) int {
	return sort.Search(len(s.maps), func(i int) bool { return s.maps[i].End > addr })
}

// Insert adds a mapping and cuts away what it overlaps. When the space is full all
// older mappings are forgotten.
func (s *Space) Insert(m Mapping) {
	if m.Start >= m.End {
		return
	}
	if len(s.maps) >= maxMappings {
		s.Reset()
	}
	s.own()
	first := s.after(m.Start)
	last := first
	for last < len(s.maps) && s.maps[last].Start < m.End {
		m.Written = m.Written || s.maps[last].written(&m)
		last++
	}
	var pieces [3]Mapping
	with := pieces[:0]
	if first < last && s.maps[first].Start < m.Start {
		left := s.maps[first]
		left.End = m.Start
		left.ExactSince, left.cut = Never, true
		with = append(with, left)
	}
	with = append(with, m)
	if first < last && s.maps[last-1].End > m.End {
		right := s.maps[last-1]
		right.PgOff = right.pgOffAt(m.End)
		right.Start = m.End
		right.ExactSince, right.cut = Never, true
		with = append(with, right)
	}
	s.maps = slices.Replace(s.maps, first, last, with...)
}

func (s *Space) own() {
	if s.shared {
		s.maps = slices.Clone(s.maps)
		s.shared = false
	}
}

// Confirm compares s with a later and complete list of mappings, taken at the time
// at, in nanoseconds of CLOCK_MONOTONIC. A known mapping
// that is in the list unchanged was exact all the time; one that the kernel has split
// or merged since keeps its page offsets, and its new bounds are exact from the time
// of the list on; what was not known is added. Known mappings that the list has not
// got stay, since faults from before they were removed may still be looked up.
func (s *Space) Confirm(list []Mapping, at uint64) {
	s.own()
	s.confirmed = at
	for _, m := range list {
		m.ExactSince, m.listed = at, at
		m.Since, m.Written = s.history(&m, at)
		if old := s.within(&m); old != nil {
			if old.Start == m.Start && old.End == m.End && !old.cut {
				if old.ExactSince == Never {
					old.ExactSince = 0
				}
				old.listed = at
				continue
			}
			if !m.HasPgOff && old.HasPgOff {
				// Only what is contiguous in its file, too, is merged.
				at := max(m.Start, old.Start)
				m.PgOff, m.HasPgOff = old.pgOffAt(at)-(at-m.Start)/pageSize, true
			}
		}
		s.Insert(m)
	}
}

// history tells since when a mapping of a list of the time at is known to have been what
// it is, and whether it may have been writable before. Code that nobody has heard of
// before is taken for code that was never written to.
func (s *Space) history(m *Mapping, at uint64) (since uint64, written bool) {
	next := m.Start
	for i := s.after(m.Start); next < m.End; i++ {
		if i == len(s.maps) || s.maps[i].Start > next || !s.maps[i].same(m) {
			return at, m.Flags&vmExec == 0
		}
		since, written = max(since, s.maps[i].Since), written || s.maps[i].Written
		next = s.maps[i].End
	}
	return since, written
}

// within is the first known mapping that m may be, or have been split from or merged with.
func (s *Space) within(m *Mapping) *Mapping {
	for i := s.after(m.Start); i < len(s.maps) && s.maps[i].Start < m.End; i++ {
		if s.maps[i].same(m) {
			return &s.maps[i]
		}
	}
	return nil
}

// Mapped returns a mapping of the file that is at a path or was there when it was mapped, or
// nil. The result is valid until the next change of s.
func (s *Space) Mapped(path string) *Mapping {
	i := slices.IndexFunc(s.maps, func(m Mapping) bool { return m.Inode != 0 && strings.TrimSuffix(m.Path, deleted) == path })
	if i < 0 {
		return nil
	}
	return &s.maps[i]
}
