package view

import (
	"path"
	"strconv"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// AppendSpeedscope appends a profile in the file format of speedscope: a profile each of
// faults, time and bytes, but for what is not known, over the same frames.
func AppendSpeedscope(b []byte, p *fault.Profile) []byte {
	tree := aggregate.NewStackTree(place)
	add := tree.Merge(&p.Stacks)
	var leaves []int32
	var costs []aggregate.StackCost
	at := map[int32]int{}
	for i := range p.Samples {
		s := &p.Samples[i]
		leaf := add(s.Stack)
		j, ok := at[leaf]
		if !ok {
			j = len(leaves)
			at[leaf] = j
			leaves = append(leaves, leaf)
			costs = append(costs, aggregate.StackCost{})
		}
		costs[j].Add(aggregate.CostOfSample(s))
	}
	b = append(b, `{"$schema":"https://www.speedscope.app/file-format-schema.json","exporter":"faultsnoop","name":`...)
	b, _ = appendJSONString(b, title(p))
	b = append(b, `,"activeProfileIndex":0,"shared":{"frames":[`...)
	for i := range tree.Frames {
		f := &tree.Frames[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, "\n{\"name\":"...)
		b, _ = appendJSONString(b, shownFrame(f))
		file := f.File
		if file == "" {
			file = f.Module
		}
		if file != "" {
			b = append(b, `,"file":`...)
			b, _ = appendJSONString(b, shown(file))
		}
		if f.Line > 0 {
			b = append(b, `,"line":`...)
			b = appendUint(b, uint64(f.Line))
		}
		b = append(b, '}')
	}
	b = append(b, "]},\"profiles\":["...)
	total := aggregate.StackTotal(p)
	units := [...]string{"none", "nanoseconds", "bytes"}
	for v := Faults; v <= Bytes; v++ {
		sum := v.of(&total)
		if v != Faults {
			if sum == 0 {
				continue
			}
			b = append(b, ',')
		}
		b = append(b, "\n{\"type\":\"sampled\",\"name\":\""...)
		b = append(b, v.String()...)
		b = append(b, `","unit":"`...)
		b = append(b, units[v]...)
		b = append(b, `","startValue":0,"endValue":`...)
		b = appendUint(b, sum)
		b = append(b, `,"samples":[`...)
		var stack []int32
		for i, leaf := range leaves {
			stack = stack[:0]
			for at := leaf; at > 0; at = tree.Nodes[at].Parent {
				stack = append(stack, tree.Nodes[at].Frame)
			}
			if i > 0 {
				b = append(b, ',')
			}
			b = append(b, '[')
			for j := len(stack) - 1; j >= 0; j-- {
				b = strconv.AppendInt(b, int64(stack[j]), 10)
				b = append(b, ',')
			}
			b[len(b)-1] = ']'
		}
		b = append(b, `],"weights":[`...)
		for i := range costs {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendUint(b, v.of(&costs[i]))
		}
		b = append(b, "]}"...)
	}
	return append(b, "]}\n"...)
}

// title says in a few words what a profile is of.
func title(p *fault.Profile) string {
	name := "page faults"
	if p.Session == nil {
		return name
	}
	if len(p.Session.Command) > 0 {
		name += " of " + shown(path.Base(p.Session.Command[0]))
		for _, arg := range p.Session.Command[1:] {
			name += " " + shown(arg)
		}
	}
	if p.Session.Host != "" {
		name += " on " + shown(p.Session.Host)
	}
	return name
}
