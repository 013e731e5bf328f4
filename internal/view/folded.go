package view

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// AppendFolded appends a profile as lines of "process;outermost;...;innermost value", the
// format of Brendan Gregg's tools, in the order of the names. A frame of the kernel ends in
// _[k], one that was inlined in _[i], as flamegraph.pl colours them. Semicolons and whatever
// breaks a line are escaped. Lines whose value is 0 are left out.
func AppendFolded(b []byte, p *fault.Profile, v Value) []byte {
	type key struct {
		process string
		leaf    int32
	}
	tree := aggregate.NewStackTree(place)
	add := tree.Merge(&p.Stacks)
	sums := map[key]uint64{}
	for i := range p.Samples {
		s := &p.Samples[i]
		cost := aggregate.CostOfSample(s)
		sums[key{nameOfProcess(s), add(s.Stack)}] += v.of(&cost)
	}
	names := make([]string, len(tree.Frames))
	for i := range tree.Frames {
		names[i] = foldedName(&tree.Frames[i])
	}
	lines := map[string]uint64{} // frames that differ may be called the same
	var line []string
	for k, n := range sums {
		if n == 0 {
			continue
		}
		line = line[:0]
		for at := k.leaf; at > 0; at = tree.Nodes[at].Parent {
			line = append(line, names[tree.Nodes[at].Frame])
		}
		line = append(line, fold(k.process))
		slices.Reverse(line)
		lines[strings.Join(line, ";")] += n
	}
	for _, text := range slices.Sorted(maps.Keys(lines)) {
		b = append(append(b, text...), ' ')
		b = append(strconv.AppendUint(b, lines[text], 10), '\n')
	}
	return b
}

// foldedStack is the frames of one stack as a line has them, the innermost last, without the
// process; empty if it was not taken.
func foldedStack(s *fault.Stack) string {
	if !aggregate.HasStack(s) {
		return ""
	}
	var names []string
	if end := aggregate.EndName(s.End); end != "" {
		names = append(names, end)
	}
	for _, f := range slices.Backward(s.Frames) {
		names = append(names, foldedName(&f))
	}
	return strings.Join(names, ";")
}

func foldedName(f *fault.Frame) string {
	name := shownFrame(f)
	if f.Line > 0 {
		name += ":" + strconv.FormatUint(uint64(f.Line), 10)
	}
	name = fold(name)
	switch {
	case f.Inlined:
		return name + "_[i]"
	case f.Lang == fault.LangKernel:
		return name + "_[k]"
	}
	return name
}

// fold escapes what divides frames.
func fold(name string) string { return strings.ReplaceAll(name, ";", `\x3b`) }
