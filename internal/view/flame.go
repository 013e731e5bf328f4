package view

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"html"
	"strconv"
	"strings"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// What `make web` makes of web/src, and the page around it.
var (
	//go:embed web/flame.html
	flamePage string
	//go:embed web/dist/flame.js
	flameScript string
	//go:embed web/dist/flame.css
	flameStyle string
	//go:embed web/dist/LICENSES
	flameLicences string
)

// AppendFlame appends one HTML page that draws a profile and needs nothing besides. With
// other it compares the two: how the share of each frame differs from that in other.
func AppendFlame(b []byte, p, other *fault.Profile) []byte {
	for part := range strings.SplitSeq(flamePage, "{{") {
		name, rest, found := strings.Cut(part, "}}")
		if !found {
			b = append(b, part...)
			continue
		}
		switch name {
		case "title":
			b = append(b, html.EscapeString(title(p))...)
		case "policy":
			b = append(b, flamePolicy()...)
		case "style":
			b = append(b, flameStyle...)
		case "licences":
			b = append(b, flameLicences...)
		case "data":
			b = appendFlameData(b, p, other)
		case "script":
			b = append(b, flameScript...)
		}
		b = append(b, rest...)
	}
	return b
}

// flamePolicy lets the page run the one script and the one style that it came with, and
// fetch nothing.
func flamePolicy() string {
	hash := func(text string) string {
		sum := sha256.Sum256([]byte(text))
		return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	return "default-src 'none'; script-src " + hash(flameScript) + "; style-src " + hash(flameStyle) +
		"; img-src data:; base-uri 'none'; form-action 'none'"
}

// flameSample is what the samples of a page tell apart.
type flameSample struct {
	leaf  int32
	kind  fault.Kind
	major bool
}

// appendFlameData appends the profiles as JSON: a table of texts, one of frames, which
// names them by index, one of nodes, each a parent and a frame, and of each run its
// samples. Rows stand one after another in flat arrays; src/profile.js reads them.
func appendFlameData(b []byte, p, other *fault.Profile) []byte {
	runs := []*fault.Profile{p}
	if other != nil {
		runs = append(runs, other)
	}
	tree := aggregate.NewStackTree(place)
	samples := make([][]flameSample, len(runs))
	costs := make([][]aggregate.StackCost, len(runs))
	for i, run := range runs {
		at := map[flameSample]int{}
		add := tree.Merge(&run.Stacks)
		for j := range run.Samples {
			s := &run.Samples[j]
			k := flameSample{add(s.Stack), s.Kind, s.Major}
			n, ok := at[k]
			if !ok {
				n = len(samples[i])
				at[k] = n
				samples[i] = append(samples[i], k)
				costs[i] = append(costs[i], aggregate.StackCost{})
			}
			costs[i][n].Add(aggregate.CostOfSample(s))
		}
	}

	// A script block ends at what looks like its end, in strings too, so no < stands in it.
	begin := len(b)
	b = append(b, `{"runs":[`...)
	for i, run := range runs {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendRun(b, run)
	}
	b = append(b, `],"kinds":[`...)
	for k := fault.KindUnknown; k <= fault.Spurious; k++ {
		b = append(strconv.AppendQuote(b, k.String()), ',')
	}
	b[len(b)-1] = ']'
	b = append(b, `,"languages":[`...)
	for l := fault.LangUnknown; l <= fault.LangBEAM; l++ {
		b = append(strconv.AppendQuote(b, l.String()), ',')
	}
	b[len(b)-1] = ']'

	b = append(b, `,"colours":[`...)
	for _, colour := range langColours {
		b = append(strconv.AppendQuote(b, colour), ',')
	}
	b[len(b)-1] = ']'

	texts := []string{}
	index := map[string]int{}
	text := func(s string) int64 {
		i, ok := index[s]
		if !ok {
			i = len(texts)
			texts = append(texts, s)
			index[s] = i
		}
		return int64(i)
	}
	b = append(b, ",\n\"frames\":["...)
	for i := range tree.Frames {
		f := &tree.Frames[i]
		inlined := int64(0)
		if f.Inlined {
			inlined = 1
		}
		b = appendNumbers(b, text(shownFrame(f)), text(shown(f.File)), int64(f.Line), text(shown(f.Module)), int64(f.Lang), inlined)
	}
	b = append(endNumbers(b), ",\n\"nodes\":["...)
	for _, n := range tree.Nodes[1:] {
		b = appendNumbers(b, int64(n.Parent), int64(n.Frame))
	}
	b = append(endNumbers(b), ",\n\"samples\":["...)
	for i := range runs {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '[')
		for j, s := range samples[i] {
			c := &costs[i][j]
			major := int64(0)
			if s.major {
				major = 1
			}
			b = appendNumbers(b, int64(s.leaf), int64(s.kind), major, int64(c.Faults), int64(c.Time), int64(c.Bytes))
		}
		b = endNumbers(b)
	}
	b = append(b, "],\n\"strings\":"...)
	b = appendStrings(b, texts)
	b = append(b, '}')
	return escapeScript(b, begin)
}

func appendNumbers(b []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		b = append(strconv.AppendInt(b, n, 10), ',')
	}
	return b
}

func endNumbers(b []byte) []byte {
	if b[len(b)-1] == ',' {
		b[len(b)-1] = ']'
		return b
	}
	return append(b, ']')
}

// appendRun appends what the page says of a run.
func appendRun(b []byte, p *fault.Profile) []byte {
	var command, host, kernel, hook, began string
	if s := p.Session; s != nil {
		for i, arg := range s.Command {
			if i > 0 {
				command += " "
			}
			command += shown(arg)
		}
		host, kernel, hook = shown(s.Host), shown(s.Kernel), shown(s.Hook)
	}
	if !p.Begin.IsZero() {
		began = p.Begin.Format("2006-01-02 15:04:05 -07:00")
	}
	b = append(b, '{')
	for _, member := range [...]struct{ key, text string }{
		{"command", command}, {"host", host}, {"kernel", kernel}, {"hook", hook}, {"begin", began},
	} {
		b = append(strconv.AppendQuote(b, member.key), ':')
		b, _ = appendJSONString(b, member.text)
		b = append(b, ',')
	}
	b = appendUint(append(b, `"duration":`...), uint64(max(p.Duration, 0)))
	b = appendUint(append(b, `,"faults":`...), p.Faults)
	b = appendUint(append(b, `,"lost":`...), p.Lost)
	b = appendUint(append(b, `,"stacked":`...), aggregate.Stacked(p))
	b = strconv.AppendBool(append(b, `,"estimated":`...), p.Taken > 0)
	return append(b, '}')
}

// escapeScript writes the characters of the JSON from begin on that mean something in
// HTML as JSON's own escapes. They occur in strings only.
func escapeScript(b []byte, begin int) []byte {
	found := 0
	for _, c := range b[begin:] {
		if c == '<' || c == '>' || c == '&' {
			found++
		}
	}
	if found == 0 {
		return b
	}
	const grows = len(`\u003c`) - 1
	from, to := len(b)-1, len(b)-1+found*grows
	b = append(b, make([]byte, found*grows)...)
	for ; from >= begin; from-- {
		c := b[from]
		if c != '<' && c != '>' && c != '&' {
			b[to] = c
			to--
			continue
		}
		to -= grows
		copy(b[to:], appendRuneEscape(b[to:to], rune(c)))
		to--
	}
	return b
}
