package view

import (
	"encoding/csv"
	"fmt"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
)

func deep(n int) *fault.Stack {
	s := &fault.Stack{End: fault.StackIncomplete}
	for i := range n {
		s.Frames = append(s.Frames, fault.Frame{Func: fmt.Sprintf("f%d", i), Lang: fault.LangNative})
	}
	return s
}

// TestStackDepth: text has the innermost frames, and says how many more there are.
func TestStackDepth(t *testing.T) {
	for _, c := range []struct {
		frames, depth, shown int
		more                 string
	}{
		{5, 0, 5, ""},
		{5, 5, 5, ""},
		{5, 6, 5, ""},
		{5, 4, 4, "    ... 1 more frame\n"},
		{2349, 32, 32, "    ... 2,317 more frames\n"},
	} {
		e := NewEncoder(&fault.Session{}, Options{Stacks: true, Mappers: true, StackDepth: c.depth})
		_, stack, _ := strings.Cut(string(e.AppendFault(nil, &fault.Fault{Stack: deep(c.frames), Mapper: deep(c.frames)})), "\n")
		one, mapper, _ := strings.Cut(stack, "  mapped by\n")
		if strings.Count(one, "#") != c.shown || !strings.HasSuffix(one, fmt.Sprintf(" f%d\n%s    (incomplete)\n", c.shown-1, c.more)) || one != mapper {
			t.Errorf("%d of %d frames:\n%s", c.depth, c.frames, stack)
		}
	}
}

// TestStackCSV: the frames are a cell in the folded format.
func TestStackCSV(t *testing.T) {
	hostile := &fault.Stack{Frames: []fault.Frame{{Func: "_do;it"}, {Func: "=1+\"2\",\n\x1b[m", File: "a.c", Line: 3}}}
	for _, c := range []struct {
		stack *fault.Stack
		want  string
	}{
		{nil, ""},
		{&fault.Stack{End: fault.StackNone}, ""},
		{deep(2), "(incomplete);f1;f0"},
		{hostile, `\x3d1+\"2\",\n\x1b[m:3;_do\x3bit`},
	} {
		e := NewEncoder(&fault.Session{}, Options{Format: CSV, Stacks: true, Mappers: true})
		b := e.AppendFault(e.AppendHeader(nil), &fault.Fault{Stack: c.stack, Mapper: deep(1)})
		rows, err := csv.NewReader(strings.NewReader(string(b))).ReadAll()
		if err != nil || len(rows) != 2 {
			t.Fatalf("%v: %q", err, b)
		}
		n := len(rows[0])
		if rows[0][n-2] != "stack" || rows[0][n-1] != "mapper" || rows[1][n-2] != c.want || rows[1][n-1] != "(incomplete);f0" {
			t.Errorf("%q\n%q, want %q", rows[0][n-2:], rows[1][n-2:], c.want)
		}
	}
	e := NewEncoder(&fault.Session{}, Options{Format: CSV})
	if b := string(e.AppendHeader(nil)); strings.Contains(b, "stack") {
		t.Errorf("a column of stacks that are not taken: %s", b)
	}
}

// TestFrameName: as much is told of a frame as is known.
func TestFrameName(t *testing.T) {
	for _, c := range []struct {
		frame fault.Frame
		want  string
	}{
		{fault.Frame{Func: "f", Module: "/srv/a", Offset: 7}, "f"},
		{fault.Frame{Module: "/srv/a", Offset: 7}, "a+0x7"},
		{fault.Frame{Module: "[anon]", Offset: 7, Addr: 0x1007}, "[anon]+0x7"},
		{fault.Frame{Module: "[anon]", Addr: 0x1000}, "[anon]+0x0"},
		{fault.Frame{Module: "[anon]", Lang: fault.LangNative}, "[anon]"},
		{fault.Frame{Addr: 0x1007}, "0x1007"},
		{fault.Frame{Lang: fault.LangNode}, "[node]"},
		{fault.Frame{}, "[unknown]"},
	} {
		if got := string(appendFrameName(nil, &c.frame)); got != c.want {
			t.Errorf("%+v: %s, want %s", c.frame, got, c.want)
		}
	}
}
