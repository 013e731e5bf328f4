package view

import (
	"bytes"
	"strings"
	"testing"

	"faultsnoop/internal/aggregate"
)

// What was written comes back: the same functions and lines cost the same.
func TestReadPprof(t *testing.T) {
	p := plainProfile()
	b, err := AppendPprof(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadPprof(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if got.Faults != p.Faults || !got.Begin.Equal(p.Begin) || got.Duration != p.Duration || aggregate.Stacked(got) != aggregate.Stacked(p) {
		t.Errorf("%d faults, %d with a stack, at %v in %v; want %d, %d, %v, %v",
			got.Faults, aggregate.Stacked(got), got.Begin, got.Duration, p.Faults, aggregate.Stacked(p), p.Begin, p.Duration)
	}
	lines := func(b []byte) int { return bytes.Count(b, []byte("\n")) }
	for v := Faults; v <= Bytes; v++ {
		if sumOf(got, v) != sumOf(p, v) || lines(AppendFolded(nil, got, v)) != lines(AppendFolded(nil, p, v)) {
			t.Errorf("%s: %d in\n%s\nwant %d in\n%s", v, sumOf(got, v), AppendFolded(nil, got, v), sumOf(p, v), AppendFolded(nil, p, v))
		}
	}
	for _, bad := range []string{"", "x", "\x1f\x8b"} {
		if _, err := ReadPprof(strings.NewReader(bad)); err == nil || !strings.HasPrefix(err.Error(), "reading a profile: ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
