package view

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"slices"
	"strings"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

const (
	svgWidth  = 1200
	svgMargin = 10
	svgRow    = 18
	svgTop    = 78
	// svgLeast is the width of the narrowest frame that is drawn.
	svgLeast = 0.3
	// svgChar is about the width of a character.
	svgChar = 6.6
)

type svgFrame struct {
	node     int32
	value    uint64
	children []*svgFrame
}

// AppendSVG appends a picture of a profile, the outermost frames on top: what AppendFlame
// draws, without controls.
func AppendSVG(b []byte, p *fault.Profile, v Value) []byte {
	tree := aggregate.NewStackTree(place)
	add := tree.Merge(&p.Stacks)
	values := make([]uint64, 1)
	for i := range p.Samples {
		s := &p.Samples[i]
		leaf := add(s.Stack)
		for len(values) < len(tree.Nodes) {
			values = append(values, 0)
		}
		cost := aggregate.CostOfSample(s)
		values[leaf] += v.of(&cost)
	}
	for i := len(tree.Nodes) - 1; i > 0; i-- {
		values[tree.Nodes[i].Parent] += values[i]
	}
	total := values[0]
	frames := make([]svgFrame, len(tree.Nodes))
	least := float64(total) * svgLeast / (svgWidth - 2*svgMargin)
	names := make([]string, len(tree.Frames))
	for i := range tree.Frames {
		names[i] = frameLabel(&tree.Frames[i])
	}
	depths := make([]int, len(tree.Nodes))
	depth := 0
	for i := range tree.Nodes {
		frames[i] = svgFrame{node: int32(i), value: values[i]}
		if i == 0 || values[i] == 0 || float64(values[i]) < least {
			continue
		}
		parent := tree.Nodes[i].Parent
		depths[i] = depths[parent] + 1
		depth = max(depth, depths[i])
		frames[parent].children = append(frames[parent].children, &frames[i])
	}

	height := svgTop + (depth+1)*svgRow + svgMargin
	b = fmt.Appendf(b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="system-ui, 'DejaVu Sans', sans-serif">
<style>text{fill:#1a1d21;font-size:11px;direction:ltr;unicode-bidi:isolate}rect{stroke:#fff}.p{stroke:none;fill:#fff}.h{font-size:16px;font-weight:600}.q{fill:#5b6470;font-size:12px}</style>
<rect class="p" width="100%%" height="100%%"/>
`, svgWidth, height)
	line := func(class string, y int, text string) {
		b = fmt.Appendf(b, `<text class="%s" x="%d" y="%d">`, class, svgMargin, y)
		b = appendXML(b, clip(text, (svgWidth-2*svgMargin)/svgChar))
		b = append(b, "</text>\n"...)
	}
	line("h", 24, title(p))
	line("q", 43, v.format(total)+" in all; "+Coverage(p))
	b = appendSVGLegend(b, tree.Frames)

	var draw func(f *svgFrame, x float64, y int)
	draw = func(f *svgFrame, x float64, y int) {
		width := float64(f.value) / float64(max(total, 1)) * (svgWidth - 2*svgMargin)
		name, colour := "all", langColours[fault.LangUnknown]
		if f.node > 0 {
			at := tree.Nodes[f.node].Frame
			name = names[at]
			if lang := tree.Frames[at].Lang; int(lang) < len(langColours) {
				colour = langColours[lang]
			}
		}
		b = append(b, "<g><title>"...)
		b = appendXML(b, name)
		b = fmt.Appendf(b, ", %s, %s</title>", v.format(f.value), percent(f.value, total))
		b = fmt.Appendf(b, `<rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s"/>`, x, y, width, svgRow-1, colour)
		if text := clip(name, (width-6)/svgChar); text != "" {
			b = fmt.Appendf(b, `<text x="%.2f" y="%d">`, x+3, y+13)
			b = append(appendXML(b, text), "</text>"...)
		}
		b = append(b, "</g>\n"...)
		slices.SortFunc(f.children, func(a, b *svgFrame) int {
			return cmp.Or(strings.Compare(names[tree.Nodes[a.node].Frame], names[tree.Nodes[b.node].Frame]), cmp.Compare(a.node, b.node))
		})
		for _, c := range f.children {
			draw(c, x, y+svgRow)
			x += float64(c.value) / float64(max(total, 1)) * (svgWidth - 2*svgMargin)
		}
	}
	if total > 0 {
		draw(&frames[0], svgMargin, svgTop)
	}
	return append(b, "</svg>\n"...)
}

func appendSVGLegend(b []byte, frames []fault.Frame) []byte {
	var used [len(langColours)]bool
	for i := range frames {
		if lang := frames[i].Lang; int(lang) < len(used) {
			used[lang] = true
		}
	}
	x := svgMargin
	for lang, u := range used {
		if !u {
			continue
		}
		name := fault.Lang(lang).String()
		if fault.Lang(lang) == fault.LangUnknown {
			name = "other"
		}
		b = fmt.Appendf(b, `<rect x="%d" y="54" width="12" height="12" fill="%s"/><text x="%d" y="64">%s</text>`+"\n", x, langColours[lang], x+17, name)
		x += 17 + int(float64(len(name))*svgChar) + 16
	}
	return b
}

// frameLabel is a frame's name with the place in its source.
func frameLabel(f *fault.Frame) string { return shownFrame(f) + string(appendSource(nil, f)) }

// clip cuts a text to as many characters as fit; what would be too short is empty.
func clip(text string, room float64) string {
	const dots, least = "..", 3
	n := int(room)
	switch {
	case n < least:
		return ""
	case columnsOf([]byte(text)) <= n:
		return text
	}
	width := 0
	for i, r := range text {
		if width += columnsOf([]byte(string(r))); width > n-len(dots) {
			return text[:i] + dots
		}
	}
	return text
}

// appendXML appends text that is printable already.
func appendXML(b []byte, text string) []byte {
	var out strings.Builder
	_ = xml.EscapeText(&out, []byte(text)) // a Builder takes everything
	return append(b, out.String()...)
}
