package fault

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// enumerators are the names of an enum in bpf/fault.h that count up from 0, without
// their prefix and in the notation of the words here.
func enumerators(t *testing.T, enum, prefix string) []string {
	t.Helper()
	header, err := os.ReadFile("../../bpf/fault.h")
	if err != nil {
		t.Fatal(err)
	}
	body := regexp.MustCompile(`(?s)\nenum ` + enum + ` \{(.*?)\n\};`).FindSubmatch(header)
	if body == nil {
		t.Fatalf("no enum %s in bpf/fault.h", enum)
	}
	text := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAllString(string(body[1]), "")
	var names []string
	for word := range strings.SplitSeq(text, ",") {
		name, ok := strings.CutPrefix(strings.TrimSpace(word), prefix)
		if !ok || strings.Contains(name, "=") { // the number of them, or one apart
			continue
		}
		names = append(names, strings.ReplaceAll(strings.ToLower(name), "_", "-"))
	}
	return names
}

// The BPF side writes the numbers that are read as these words.
func TestOrderIsThatOfBPF(t *testing.T) {
	for _, test := range []struct {
		enum, prefix string
		words        []string
	}{
		{"kind", "KIND_", kindNames[:]},
		{"by", "BY_", byNames[:]},
		{"result", "RESULT_", resultNames[:]},
		{"mode", "MODE_", modeNames[:]},
		{"access", "ACCESS_", accessNames[:]},
		{"wait", "WAIT_", waitNames[:]},
	} {
		if got := enumerators(t, test.enum, test.prefix); !slices.Equal(got, test.words) {
			t.Errorf("enum %s is %q, the words are %q", test.enum, got, test.words)
		}
	}
	if len(kindNames) != len(Rows{}.Kinds) {
		t.Errorf("%d kinds have words, %d rows", len(kindNames), len(Rows{}.Kinds))
	}
}

func TestParseKind(t *testing.T) {
	for k := Anon; k <= Spurious; k++ {
		if got, ok := ParseKind(k.String()); got != k || !ok {
			t.Errorf("%v: parsed as %v, %v", k, got, ok)
		}
	}
	for _, s := range []string{"", "unknown", "Anon", "cowfile", "cow-file ", "none"} {
		if k, ok := ParseKind(s); ok {
			t.Errorf("%q is parsed as %v", s, k)
		}
	}
	if got := (Spurious + 1).String(); got != "unknown" {
		t.Errorf("a kind without a word is %q", got)
	}
	if names := Names[Kind](); len(names) != int(Spurious) || slices.Contains(names, "unknown") {
		t.Errorf("a filter accepts %q", names)
	}
}

func TestParseBy(t *testing.T) {
	for b := ByProcess; b <= BySample; b++ {
		if got, ok := ParseBy(b.String()); got != b || !ok {
			t.Errorf("%v: parsed as %v, %v", b, got, ok)
		}
	}
	for _, s := range []string{"", "pid", "unknown", "Page"} {
		if b, ok := ParseBy(s); ok {
			t.Errorf("%q is parsed as %v", s, b)
		}
	}
	if names := Names[By](); len(names) != int(BySample)+1 {
		t.Errorf("--by accepts %q", names)
	}
}

// What a fault has mapped, from the entry it left.
func TestMapped(t *testing.T) {
	for _, test := range []struct {
		f          Fault
		size, want uint64
	}{
		{Fault{}, 0, 0},
		{Fault{Level: 1, Pages: 3}, 0, 0},
		{Fault{Known: HasAfter, Pages: 1}, 4096, 4096},
		{Fault{Known: HasAfter, Pages: 16}, 4096, 64 << 10},
		{Fault{Known: HasAfter, Level: 1, Pages: 1}, 2 << 20, 2 << 20},
		{Fault{Known: HasAfter, Level: 2, Pages: 1}, 1 << 30, 1 << 30},
		{Fault{Known: HasAfter, Level: 1}, 2 << 20, 0},
		{Fault{Known: HasAfter}, 4096, 0},
	} {
		if size, got := test.f.PageSize(), test.f.Mapped(); size != test.size || got != test.want {
			t.Errorf("%+v: page of %d bytes and %d mapped, want %d and %d", test.f, size, got, test.size, test.want)
		}
	}
}

// A filter on kinds takes only what is known to be of one of them.
func TestMatchKind(t *testing.T) {
	cow := Filter{Kinds: []Kind{THP, Cow}}
	for _, test := range []struct {
		f    Fault
		want bool
	}{
		{Fault{Known: HasKind, Kind: Cow}, true},
		{Fault{Known: HasKind, Kind: THP}, true},
		{Fault{Known: HasKind, Kind: CowFile}, false},
		{Fault{Kind: Cow}, false},
	} {
		if got := cow.MatchRecord(&test.f); got != test.want {
			t.Errorf("kind %v, known %v: %v", test.f.Kind, test.f.Is(HasKind), got)
		}
	}
	if !new(Filter).MatchRecord(&Fault{}) {
		t.Error("no filter leaves a record out")
	}
}
