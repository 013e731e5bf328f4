package view

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/google/pprof/profile"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// AppendPprof appends a profile as a compressed profile.proto, which `go tool pprof` and what
// understands its files can open.
func AppendPprof(b []byte, p *fault.Profile) ([]byte, error) {
	// The process is the mapping of its addresses; all that is told apart are the labels.
	samples := aggregate.MergeSamples(p, func(s *fault.StackSample) {
		s.PID, s.Process = 0, fault.Comm{}
	})
	w := pprofWriter{
		out: &profile.Profile{
			SampleType: []*profile.ValueType{
				{Type: "faults", Unit: "count"}, {Type: "time", Unit: "nanoseconds"}, {Type: "bytes", Unit: "bytes"},
			},
			DefaultSampleType: "faults",
			PeriodType:        &profile.ValueType{Type: "faults", Unit: "count"},
			Period:            1,
			TimeNanos:         p.Begin.UnixNano(),
			DurationNanos:     int64(p.Duration),
			Comments:          pprofComments(p),
		},
		functions: map[functionKey]*profile.Function{}, locations: map[locationKey]*profile.Location{},
		stacks: map[int32][]*profile.Location{}, tree: &p.Stacks,
	}
	w.layOut(samples)
	for i := range samples {
		w.add(&samples[i])
	}
	if err := w.out.CheckValid(); err != nil {
		return b, fmt.Errorf("making a profile: %w", err)
	}
	var buf bytes.Buffer
	z, err := gzip.NewWriterLevel(&buf, gzip.BestSpeed)
	if err == nil {
		err = w.out.WriteUncompressed(z)
	}
	if err == nil {
		err = z.Close()
	}
	if err != nil {
		return b, fmt.Errorf("encoding a profile: %w", err)
	}
	return append(b, buf.Bytes()...), nil
}

func pprofComments(p *fault.Profile) []string {
	comments := []string{title(p)}
	if s := p.Session; s != nil {
		comments = append(comments, "kernel "+shown(s.Kernel)+", hook "+shown(s.Hook))
	}
	return append(comments, Coverage(p))
}

// estimated stands before how many stacks were taken, in [Coverage].
const estimated = "estimated from the stacks of "

// Coverage says how much of a run its stacks show.
func Coverage(p *fault.Profile) string {
	stacked := aggregate.Stacked(p)
	if p.Taken > 0 {
		return fmt.Sprintf("%s, %s%s (%s); %s lost", plural(p.Faults, "fault"), estimated, group(stacked),
			percent(stacked, p.Faults), group(p.Lost))
	}
	return fmt.Sprintf("%s, %s (%s) with a stack; %s lost", plural(p.Faults, "fault"), group(stacked),
		percent(stacked, p.Faults), group(p.Lost))
}

type (
	moduleKey   struct{ path, buildID string }
	functionKey struct{ name, file string }
	locationKey struct {
		module moduleKey
		// offset in the module; interpreted code has none and no module.
		offset uint64
		// lines are the functions there, innermost first.
		lines string
	}
)

// pprofModule is where the addresses of a module are put.
type pprofModule struct {
	mapping *profile.Mapping
	// base is the address of offset 0.
	base     uint64
	based    bool
	low, top uint64 // the offsets seen
}

type pprofWriter struct {
	out       *profile.Profile
	modules   map[moduleKey]*pprofModule
	functions map[functionKey]*profile.Function
	locations map[locationKey]*profile.Location
	tree      *fault.StackTree
	stacks    map[int32][]*profile.Location // by node of tree
	key       []byte
}

const pprofPage = 4096

// inModule reports whether a frame has a place in a module.
func inModule(f *fault.Frame) bool { return f.Module != "" && (f.Addr != 0 || f.Offset != 0) }

// layOut makes the mappings. A frame says where it is in its module and in its process, but
// not where the mapping ends, so a mapping is what holds all addresses of its module that
// occur. It stands where the first process that occurs had it; modules of several
// processes that would overlap are moved apart.
func (w *pprofWriter) layOut(samples []fault.StackSample) {
	w.modules = map[moduleKey]*pprofModule{}
	seen := make([]bool, len(w.tree.Nodes))
	for i := range samples {
		for at := samples[i].Stack; at > 0 && !seen[at]; at = w.tree.Nodes[at].Parent {
			seen[at] = true
			frame := w.tree.Nodes[at].Frame
			if frame < 0 {
				continue
			}
			f := &w.tree.Frames[frame]
			if !inModule(f) {
				continue
			}
			k := moduleKey{f.Module, f.BuildID}
			m := w.modules[k]
			if m == nil {
				m = &pprofModule{low: f.Offset, top: f.Offset, mapping: &profile.Mapping{File: shown(f.Module), BuildID: shown(f.BuildID)}}
				w.modules[k] = m
			}
			m.low, m.top = min(m.low, f.Offset), max(m.top, f.Offset)
			if !m.based && f.Addr != 0 {
				m.base, m.based = f.Addr-f.Offset, true
			}
			// What has no name here has none that a reader of the file could find: its
			// module and offset stand in for it. So all is told, and pprof, which may not even
			// have the same file, does not look again.
			m.mapping.HasFunctions = true
			m.mapping.HasFilenames = m.mapping.HasFilenames || f.File != ""
			m.mapping.HasLineNumbers = m.mapping.HasLineNumbers || f.Line != 0
			m.mapping.HasInlineFrames = m.mapping.HasInlineFrames || f.Inlined
		}
	}
	ordered := slices.SortedFunc(maps.Keys(w.modules), func(a, b moduleKey) int {
		return cmp.Or(cmp.Compare(w.modules[a].base+w.modules[a].low, w.modules[b].base+w.modules[b].low),
			cmp.Compare(a.path, b.path), cmp.Compare(a.buildID, b.buildID))
	})
	var end uint64 // of the last mapping
	for _, k := range ordered {
		m := w.modules[k]
		size := m.top&^(pprofPage-1) - m.low&^(pprofPage-1) + pprofPage
		if !m.based {
			m.base = 0
		}
		start := (m.base + m.low) &^ (pprofPage - 1)
		if start < end {
			start = end
		}
		if start+size < start { // beyond the last address
			start = -size &^ (pprofPage - 1)
		}
		m.base = start - m.low&^(pprofPage-1)
		m.mapping.Start, m.mapping.Limit = start, start+size
		m.mapping.Offset = m.low &^ (pprofPage - 1)
		end = max(end, start+size)
		m.mapping.ID = uint64(len(w.out.Mapping) + 1)
		w.out.Mapping = append(w.out.Mapping, m.mapping)
	}
}

func (w *pprofWriter) add(s *fault.StackSample) {
	major := strconv.FormatBool(s.Major)
	out := &profile.Sample{
		Location: w.stack(s.Stack),
		Value:    []int64{int64(s.Faults), int64(s.Time), int64(s.Bytes)},
		Label:    map[string][]string{"kind": {s.Kind.String()}, "major": {major}},
	}
	if comm := s.Comm.Bytes(); len(comm) > 0 {
		out.Label["comm"] = []string{shown(string(comm))}
	}
	if s.TID != 0 {
		out.Label["thread"] = []string{strconv.FormatUint(uint64(s.TID), 10)}
	}
	w.out.Sample = append(w.out.Sample, out)
}

// stack returns the locations of a stack; functions that were inlined are lines of the
// location of that which they are in.
func (w *pprofWriter) stack(at int32) []*profile.Location {
	if l, ok := w.stacks[at]; ok {
		return l
	}
	var locations []*profile.Location
	s := w.tree.Stack(at)
	if at == 0 {
		locations = append(locations, w.location([]fault.Frame{{Func: aggregate.NoStack}}))
	} else {
		for from := 0; from < len(s.Frames); {
			to := from
			for to < len(s.Frames)-1 && s.Frames[to].Inlined {
				to++
			}
			locations = append(locations, w.location(s.Frames[from:to+1]))
			from = to + 1
		}
		if end := aggregate.EndName(s.End); end != "" {
			locations = append(locations, w.location([]fault.Frame{{Func: end}}))
		}
	}
	w.stacks[at] = locations
	return locations
}

// location returns that of frames at one instruction, the innermost first.
func (w *pprofWriter) location(frames []fault.Frame) *profile.Location {
	at := &frames[len(frames)-1]
	var k locationKey
	if inModule(at) {
		k.module, k.offset = moduleKey{at.Module, at.BuildID}, at.Offset
	}
	w.key = w.key[:0]
	for i := range frames {
		f := &frames[i]
		w.key = append(append(w.key, shownFrame(f)...), 0)
		w.key = append(append(w.key, f.File...), 0)
		w.key = append(appendUint(w.key, uint64(f.Line)), 0)
	}
	k.lines = string(w.key)
	if l, ok := w.locations[k]; ok {
		return l
	}
	l := &profile.Location{ID: uint64(len(w.out.Location) + 1)}
	if m := w.modules[k.module]; m != nil && inModule(at) {
		l.Mapping, l.Address = m.mapping, m.base+at.Offset
	}
	for i := range frames {
		f := &frames[i]
		l.Line = append(l.Line, profile.Line{Function: w.function(f), Line: int64(f.Line)})
	}
	w.locations[k] = l
	w.out.Location = append(w.out.Location, l)
	return l
}

func (w *pprofWriter) function(f *fault.Frame) *profile.Function {
	k := functionKey{shownFrame(f), shown(f.File)}
	if fn, ok := w.functions[k]; ok {
		return fn
	}
	fn := &profile.Function{ID: uint64(len(w.out.Function) + 1), Name: k.name, SystemName: k.name, Filename: k.file}
	w.functions[k] = fn
	w.out.Function = append(w.out.Function, fn)
	return fn
}
