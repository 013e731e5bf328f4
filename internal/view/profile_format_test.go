package view

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/pprof/profile"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// plainProfile is that of stacks without the names that are hostile.
func plainProfile() *fault.Profile {
	p := stacks()
	p.Samples = p.Samples[:len(p.Samples)-len(hostileNames)]
	p.Faults = sumOf(p, Faults)
	return p
}

func pprofOf(t *testing.T, p *fault.Profile) []byte {
	t.Helper()
	b, err := AppendPprof(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestProfileGolden(t *testing.T) {
	p := stacks()
	golden(t, "profile.folded", AppendFolded(nil, p, Faults))
	golden(t, "profile.speedscope", AppendSpeedscope(nil, p))
	golden(t, "profile.svg", AppendSVG(nil, p, Time))
	golden(t, "profile.data", appendFlameData(nil, p, plainProfile()))
	read, err := profile.ParseData(pprofOf(t, p))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "profile.pprof", []byte(read.String()))

	var text, lines []byte
	for i := range p.Samples {
		text = append(appendStackText(text, p.Stacks.Stack(p.Samples[i].Stack), 0), '\n')
		lines = append(append(appendStackJSON(append(lines, `{"type":"fault"`...), "stack", p.Stacks.Stack(p.Samples[i].Stack)), `}`...), 10)
	}
	golden(t, "stack.text", text)
	golden(t, "stack.json", lines)
}

// No file that is shown holds a character that is not printable, or is not UTF-8.
func TestProfileHostileNames(t *testing.T) {
	p := stacks()
	for form, b := range map[string][]byte{
		"folded": AppendFolded(nil, p, Bytes), "speedscope": AppendSpeedscope(nil, p), "svg": AppendSVG(nil, p, Faults), "flame": appendFlameData(nil, p, p),
		"stack": appendStackText(nil, p.Stacks.Stack(p.Samples[len(p.Samples)-5].Stack), 0), "JSON": appendStackJSON(nil, "stack", p.Stacks.Stack(p.Samples[len(p.Samples)-5].Stack)),
	} {
		if !utf8.Valid(b) {
			t.Errorf("%s is not UTF-8", form)
		}
		for line := range strings.Lines(string(b)) {
			for _, r := range strings.TrimSuffix(line, "\n") {
				if !unicode.IsPrint(r) {
					t.Errorf("%s holds %U", form, r)
				}
			}
		}
	}
	read, err := profile.ParseData(pprofOf(t, p))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range read.Function {
		checkPrintable(t, f.Name)
		checkPrintable(t, f.Filename)
	}
	for _, m := range read.Mapping {
		checkPrintable(t, m.File)
		checkPrintable(t, m.BuildID)
	}
}

// The page has the scripts that it came with, and no more.
func TestFlamePage(t *testing.T) {
	page := string(AppendFlame(nil, stacks(), nil))
	if n := strings.Count(strings.ToLower(page), "</script"); n != 3 {
		t.Errorf("%d ends of scripts", n)
	}
	if n := strings.Count(strings.ToLower(page), "<script"); n != 3 {
		t.Errorf("%d scripts", n)
	}
	if strings.Contains(page, "<!--") {
		t.Error("there is a comment")
	}
	if match := regexp.MustCompile(`(?i)(src|href)\s*=\s*"?https?:|@import|url\(`).FindString(page); match != "" {
		t.Errorf("the page refers to something outside: %s", match)
	}
	_, rest, _ := strings.Cut(page, `id="data">`)
	data, _, _ := strings.Cut(rest, "</script>")
	if strings.ContainsAny(data, "<>&") {
		t.Error("the data holds markup")
	}
	var got struct {
		Strings []string
		Frames  []int
		Nodes   []int
		Samples [][]uint64
	}
	if err := json.Unmarshal([]byte(data), &got); err != nil {
		t.Fatal(err)
	}
	var sums [3]uint64
	for i := 0; i < len(got.Samples[0]); i += 6 {
		if node := got.Samples[0][i]; node == 0 || node > uint64(len(got.Nodes)/2) {
			t.Errorf("no node %d", node)
		}
		for v := range sums {
			sums[v] += got.Samples[0][i+3+v]
		}
	}
	for v := range sums {
		if want := sumOf(stacks(), Value(v)); sums[v] != want {
			t.Errorf("%s: %d, want %d", Value(v), sums[v], want)
		}
	}
	for i := 0; i < len(got.Nodes); i += 2 {
		if got.Nodes[i] > i/2 || got.Nodes[i+1] >= len(got.Frames)/6 {
			t.Errorf("node %d has the parent %d and the frame %d", i/2+1, got.Nodes[i], got.Nodes[i+1])
		}
	}
	found := false
	for _, s := range got.Strings {
		found = found || s == hostileNames[0]
	}
	if !found {
		t.Error("a name with markup is not what it was")
	}
}

// The committed bundle is one that a page can hold.
func TestFlameBundle(t *testing.T) {
	for name, text := range map[string]string{"script": flameScript, "style": flameStyle, "licences": flameLicences} {
		if lower := strings.ToLower(text); strings.Contains(lower, "</s") || strings.Contains(lower, "<!--") || strings.Contains(text, "{{") {
			t.Errorf("the %s would end its block", name)
		}
	}
	for _, name := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"} {
		sources, err := filepath.Glob("web/src/*.js")
		if err != nil || len(sources) == 0 {
			t.Fatal("no sources: ", err)
		}
		for _, source := range sources {
			text, err := os.ReadFile(source)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(text, []byte(name)) {
				t.Errorf("%s uses %s", source, name)
			}
		}
	}
}

func TestFolded(t *testing.T) {
	for v := Faults; v <= Bytes; v++ {
		p := stacks()
		var sum uint64
		for line := range strings.Lines(string(AppendFolded(nil, p, v))) {
			at := strings.LastIndexByte(line, ' ')
			n, err := strconv.ParseUint(strings.TrimSpace(line[at+1:]), 10, 64)
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			sum += n
		}
		if want := sumOf(p, v); sum != want {
			t.Errorf("%s: %d, want %d", v, sum, want)
		}
	}
	text := string(AppendFolded(nil, plainProfile(), Faults))
	for _, want := range []string{
		"python3;__libc_start_main;main:31;touch_pages(long):22;std::fill<char*>(char*, char*):9_[i] 500\n",
		"python3;__libc_start_main;<module>:31;_PyEval_EvalFrameDefault;__memset_avx2_unaligned_erms;_copy_to_iter_[k] 60\n",
		"python3;(truncated);main:31;touch_pages(long):22 30\n", "python3;[no stack] 80\n",
		"python3;(memory not resident);[anon]+0xabc;stripped.so+0x999 20\n",
		`a\x3bb\n\xff;__libc_start_main;<module>:31;make_block:8;_PyEval_EvalFrameDefault;__memset_avx2_unaligned_erms 1` + "\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no line %q in\n%s", want, text)
		}
	}
}

// The rules of speedscope's file format.
func TestSpeedscope(t *testing.T) {
	p := stacks()
	type frame struct {
		Name *string
		File *string
		Line *int
		Col  *int
	}
	var got struct {
		Schema             string `json:"$schema"`
		Exporter, Name     string
		ActiveProfileIndex *int
		Shared             *struct{ Frames []frame }
		Profiles           []struct {
			Type, Name, Unit     string
			StartValue, EndValue *uint64
			Samples              [][]int
			Weights              []uint64
		}
	}
	d := json.NewDecoder(bytes.NewReader(AppendSpeedscope(nil, p)))
	d.DisallowUnknownFields()
	if err := d.Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.Schema != "https://www.speedscope.app/file-format-schema.json" || got.Shared == nil || len(got.Profiles) != 3 {
		t.Fatalf("%+v", got)
	}
	for i, unit := range []string{"none", "nanoseconds", "bytes"} {
		s := got.Profiles[i]
		want := sumOf(p, Value(i))
		if s.Type != "sampled" || s.Unit != unit || s.StartValue == nil || *s.StartValue != 0 || s.EndValue == nil || *s.EndValue != want || len(s.Samples) != len(s.Weights) {
			t.Errorf("%s: %+v", unit, s)
		}
		for j, stack := range s.Samples {
			want -= s.Weights[j]
			if len(stack) == 0 {
				t.Errorf("%s: an empty stack", unit)
			}
			for _, f := range stack {
				if f < 0 || f >= len(got.Shared.Frames) {
					t.Errorf("%s: no frame %d", unit, f)
				}
			}
		}
		if want != 0 {
			t.Errorf("%s: the weights are %d short", unit, want)
		}
	}
	for i, f := range got.Shared.Frames {
		if f.Name == nil || *f.Name == "" {
			t.Errorf("frame %d has no name", i)
		}
	}
	untimed := plainProfile()
	for i := range untimed.Samples {
		untimed.Samples[i].Time = 0
	}
	if text := string(AppendSpeedscope(nil, untimed)); strings.Contains(text, "nanoseconds") {
		t.Error("a profile of times that are not known")
	}
}

func TestSVG(t *testing.T) {
	for _, p := range []*fault.Profile{stacks(), {}} {
		d := xml.NewDecoder(bytes.NewReader(AppendSVG(nil, p, Faults)))
		elements := map[string]int{}
		for {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if e, ok := token.(xml.StartElement); ok {
				elements[e.Name.Local]++
			}
		}
		for name := range elements {
			if !strings.Contains(" svg style rect text g title ", " "+name+" ") {
				t.Errorf("a name became the element %s", name)
			}
		}
		if elements["g"] != elements["title"] || p.Faults > 0 && elements["g"] < 20 {
			t.Errorf("%v", elements)
		}
	}
}

func TestClip(t *testing.T) {
	for _, test := range []struct {
		text string
		room float64
		want string
	}{
		{"abcdef", 2.9, ""}, {"abcdef", 6, "abcdef"}, {"abcdef", 5.9, "abc.."}, {"漢字漢字", 7, "漢字.."}, {"", 10, ""}, {"x", -1, ""},
	} {
		if got := clip(test.text, test.room); got != test.want {
			t.Errorf("%q in %v: %q, want %q", test.text, test.room, got, test.want)
		}
	}
}

func TestPprof(t *testing.T) {
	p := stacks()
	read, err := profile.ParseData(pprofOf(t, p))
	if err != nil {
		t.Fatal(err)
	}
	if err := read.CheckValid(); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"faults count", "time nanoseconds", "bytes bytes"} {
		if got := read.SampleType[i].Type + " " + read.SampleType[i].Unit; got != want {
			t.Errorf("sample type %d is %s", i, got)
		}
	}
	if read.DefaultSampleType != "faults" || read.Period != 1 || read.PeriodType.Type != "faults" || read.TimeNanos != p.Begin.UnixNano() || read.DurationNanos != int64(p.Duration) {
		t.Errorf("%+v", read)
	}
	var sums [3]uint64
	kinds := map[string]uint64{}
	for _, s := range read.Sample {
		for i, n := range s.Value {
			sums[i] += uint64(n)
		}
		kinds[s.Label["kind"][0]+" "+s.Label["major"][0]] += uint64(s.Value[0])
		if len(s.Label["thread"]) != 1 || len(s.Label["comm"]) != 1 {
			t.Errorf("labels %v", s.Label)
		}
		for _, l := range s.Location {
			if len(l.Line) == 0 {
				t.Errorf("location %#x has no name", l.Address)
			}
			if m := l.Mapping; m == nil && l.Address != 0 || m != nil && (l.Address < m.Start || l.Address >= m.Limit) {
				t.Errorf("%#x is not in its mapping %+v", l.Address, m)
			}
		}
	}
	for i, sum := range sums {
		if want := sumOf(p, Value(i)); sum != want {
			t.Errorf("%s: %d, want %d", Value(i), sum, want)
		}
	}
	if kinds["file true"] != 60 || kinds["thp false"] != 4 || kinds["swap true"] != 20 || kinds["unknown false"] != 10 {
		t.Errorf("kinds %v", kinds)
	}
	files := map[string]*profile.Mapping{}
	for i, m := range read.Mapping {
		key := m.File + " " + m.BuildID
		if files[key] != nil {
			t.Errorf("two mappings of %s", key)
		}
		files[key] = m
		if !m.HasFunctions {
			t.Errorf("pprof would look for the functions of %s", m.File)
		}
		for _, o := range read.Mapping[:i] {
			if m.Start < o.Limit && o.Start < m.Limit {
				t.Errorf("%s and %s overlap", m.File, o.File)
			}
		}
	}
	// One process had the file there: its addresses are those that it had.
	if m := files["/home/me/bin/touch pages bb22"]; m == nil || m.Start != 0x550000001000 || m.Limit != 0x550000002000 || m.Offset != 0x1000 || !m.HasFilenames || !m.HasLineNumbers || !m.HasInlineFrames {
		t.Errorf("mapping %+v", m)
	}
	if m := files["/opt/stripped.so "]; m == nil || m.HasFilenames || m.HasLineNumbers || m.HasInlineFrames {
		t.Errorf("mapping %+v", m)
	}
	// What was inlined is a line of the location of that which it is in.
	for _, l := range read.Location {
		if l.Line[0].Function.Name == "std::fill<char*>(char*, char*)" {
			if len(l.Line) != 2 || l.Line[1].Function.Name != "touch_pages(long)" || l.Line[0].Line != 9 || l.Line[1].Line != 22 || l.Address != 0x55000000123a {
				t.Errorf("%+v", l)
			}
		}
	}
}

// Two processes had different files at the same place, and code at both ends of memory.
func TestPprofOverlap(t *testing.T) {
	p := &fault.Profile{Faults: 8}
	for i, f := range []fault.Frame{
		{Addr: 0x401000, Offset: 0x401000, Module: "/bin/a"},
		{Addr: 0x409000, Offset: 0x409000, Module: "/bin/a"},
		{Addr: 0x402000, Offset: 0x402000, Module: "/bin/b"},
		{Addr: 0x401fff, Offset: 0x401fff, Module: "/bin/c"},
		{Addr: 0xffffffffffffe000, Offset: 1, Module: "[x]"},
		{Addr: 0xffffffffffffffff, Offset: 0xffffffffffffffff, Module: "[y]"},
		{Addr: 1, Module: "/bin/d"},
		{Offset: 5, Module: "/bin/e"},
	} {
		p.Samples = append(p.Samples, fault.StackSample{Stack: p.Stacks.Add(&fault.Stack{Frames: []fault.Frame{f}}), Faults: uint64(i)})
	}
	read, err := profile.ParseData(pprofOf(t, p))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range read.Location {
		if l.Address < l.Mapping.Start || l.Address >= l.Mapping.Limit && l.Mapping.Limit > l.Mapping.Start {
			t.Errorf("%#x is not in %+v", l.Address, l.Mapping)
		}
	}
}

// The tool that comes with Go shows the same from a folder that knows nothing of the program.
func TestPprofTool(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("no go in PATH")
	}
	file := filepath.Join(t.TempDir(), "p.pb.gz")
	if err := os.WriteFile(file, pprofOf(t, plainProfile()), 0o644); err != nil {
		t.Fatal(err)
	}
	tool := func(args ...string) string {
		cmd := exec.Command("go", append(append([]string{"tool", "pprof"}, args...), file)...)
		cmd.Dir = t.TempDir()
		cmd.Env = append(os.Environ(), "PPROF_TMPDIR="+cmd.Dir)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, stderr.String())
		}
		if warned := stderr.String(); strings.Contains(warned, "binary") || strings.Contains(warned, "symbol") {
			t.Errorf("%v: %s", args, warned)
		}
		return string(out)
	}
	top := tool("-top")
	for _, want := range []string{"Type: faults", "Duration: 2.50s", "Total samples = 1605", "__memset_avx2_unaligned_erms"} {
		if !strings.Contains(top, want) {
			t.Errorf("no %q in\n%s", want, top)
		}
	}
	if !regexp.MustCompile(`(?m)^ *905 +[0-9.]+% +[0-9.]+% +965 +[0-9.]+% +__memset_avx2_unaligned_erms$`).MatchString(top) {
		t.Errorf("the first function is wrong:\n%s", top)
	}
	if lines := tool("-top", "-lines", "-cum"); !strings.Contains(lines, "make_block /srv/app/alloc.py:8") {
		t.Errorf("no line of Python in\n%s", lines)
	}
	if times := tool("-top", "-sample_index=time", "-unit=us"); !strings.Contains(times, "Type: time") {
		t.Errorf("no times:\n%s", times)
	}
	if raw := tool("-raw"); !regexp.MustCompile(`0x550000001000/0x550000002000/0x1000 /home/me/bin/touch pages bb22 \[FN\]\[FL\]\[LN\]\[IN\]`).MatchString(raw) {
		t.Errorf("no mapping of the program in\n%s", raw)
	}
	if tags := tool("-tags"); !strings.Contains(tags, "kind:") || !strings.Contains(tags, "thp") {
		t.Errorf("no tags in\n%s", tags)
	}
}

// All formats, and tables of all sorts, add up to the same, whatever the stacks are.
func TestProfileSums(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 50 {
		p := &fault.Profile{Session: &session, Lost: 5}
		for range r.IntN(60) {
			var frames []fault.Frame
			for range r.IntN(6) {
				frames = append(frames, fault.Frame{
					Addr: uint64(r.IntN(3)), Func: hostileNames[r.IntN(len(hostileNames))][:r.IntN(2)], File: hostileNames[r.IntN(3)], Line: uint32(r.IntN(3)),
					Module: hostileNames[r.IntN(3)], Offset: uint64(r.IntN(3)) << (r.IntN(2) * 60), Lang: fault.Lang(r.IntN(20)), Inlined: r.IntN(3) == 0,
				})
			}
			s := &fault.Stack{Frames: frames, End: fault.StackEnd(r.IntN(6))}
			if r.IntN(20) == 0 {
				s = nil
			}
			p.Samples = append(p.Samples, fault.StackSample{
				Stack: p.Stacks.Add(s), Kind: fault.Kind(r.IntN(int(fault.Spurious) + 1)), Major: r.IntN(2) == 0, Faults: uint64(1 + r.IntN(100)), Time: time.Duration(r.IntN(1000)), Bytes: uint64(r.IntN(1 << 20)), TID: uint32(r.IntN(3)),
			})
		}
		p.Faults = sumOf(p, Faults)
		read, err := profile.ParseData(pprofOf(t, p))
		if err != nil {
			t.Fatal(err)
		}
		var sums [3]uint64
		for _, s := range read.Sample {
			for i, n := range s.Value {
				sums[i] += uint64(n)
			}
		}
		for v := Faults; v <= Bytes; v++ {
			want := sumOf(p, v)
			var folded uint64
			for line := range strings.Lines(string(AppendFolded(nil, p, v))) {
				n, err := strconv.ParseUint(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				folded += n
			}
			if sums[v] != want || folded != want {
				t.Errorf("%s: pprof %d, folded %d, want %d", v, sums[v], folded, want)
			}
		}
		if !json.Valid(AppendSpeedscope(nil, p)) || !json.Valid(appendFlameData(nil, p, nil)) {
			t.Error("not JSON")
		}
		for by := aggregate.ByFunction; by <= aggregate.ByModule; by++ {
			s := Stat{Session: &session, Rows: &fault.Rows{}, Top: 3, Stacks: []*aggregate.StackTable{aggregate.TableOf(p, by, r.IntN(2) == 0)}}
			for line := range strings.Lines(string(s.AppendText(nil, 80))) {
				checkPrintable(t, strings.TrimSuffix(line, "\n"))
			}
			var got struct {
				Tables []struct {
					Rows []struct{ Faults uint64 }
					More struct{ Faults uint64 }
				}
			}
			if err := json.Unmarshal(appended(t, s.AppendJSON), &got); err != nil {
				t.Fatal(err)
			}
			sum := got.Tables[0].More.Faults
			for _, row := range got.Tables[0].Rows {
				sum += row.Faults
			}
			if sum != p.Faults {
				t.Errorf("by %s: %d faults, want %d", by, sum, p.Faults)
			}
		}
	}
}

func TestStackTablesGolden(t *testing.T) {
	p := plainProfile()
	s := &Stat{Session: &session, Rows: &fault.Rows{}, End: time.Date(2026, 11, 30, 3, 2, 4, 0, time.UTC), Duration: p.Duration, Top: 6}
	for by := aggregate.ByFunction; by <= aggregate.ByModule; by++ {
		s.Stacks = append(s.Stacks, aggregate.TableOf(p, by, false))
	}
	s.Stacks = append(s.Stacks, aggregate.TableOf(p, aggregate.ByLine, true))
	golden(t, "stacks.text", s.AppendText(nil, 100))
	golden(t, "stacks.json", appended(t, s.AppendJSON))
	golden(t, "stacks.csv", appended(t, func(b []byte) ([]byte, error) { return s.AppendCSV(AppendCSVHeader(b)) }))
}
