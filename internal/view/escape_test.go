package view

import (
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestEscape(t *testing.T) {
	for in, want := range map[string]string{
		"python3": "python3", "Web Content": "Web Content", `a"b\c`: `a\"b\\c`, "\x1b[31m": `\x1b[31m`, "a\nb\tc\rd": `a\nb\tc\rd`,
		"\xff\xfe": `\xff\xfe`, "caf\u00e9": "caf\u00e9", "漢字": "漢字", "a\u202eb": `a\u202eb`, "\u2066x": `\u2066x`, "a\u200db": `a\u200db`,
		"\x7f": `\x7f`, "\u009b31m": `\u009b31m`, "e\u0301": "e\u0301", "\u0301e": `\u0301e`, "e\u0301\u0301\u0301": "e\u0301\u0301" + `\u0301`,
		"\U000e0001": `\U000e0001`, "\ufeff": `\ufeff`, "\u00a0": `\u00a0`, "\xe6\xbc": `\xe6\xbc`, "\n\u0301": `\n\u0301`,
	} {
		if got := string(appendEscaped(nil, in, 0)); got != want {
			t.Errorf("%q: got %s, want %s", in, got, want)
		}
		if got := string(appendEscaped(nil, []byte(in), 0)); got != want {
			t.Errorf("%q as bytes: got %s, want %s", in, got, want)
		}
	}
}

func TestEscapeCut(t *testing.T) {
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{"abcdef", 6, "abcdef"},
		{"abcdefg", 6, "abcde+"},
		{"abc\x1b", 6, "abc+"},
		{"abc\x1b", 7, `abc\x1b`},
		{"漢字漢", 5, "漢字+"},
		{"漢字漢", 4, "漢+"},
		{"漢字", 4, "漢字"},
		{"\x1b", 3, "+"},
		{"\x1b\x1b", 4, "+"},
		{"ab\\", 3, "ab+"},
		{"ae\u0301b", 2, "a+"},
	} {
		if got := string(appendEscaped(nil, c.in, c.limit)); got != c.want {
			t.Errorf("%q in %d columns: got %q, want %q", c.in, c.limit, got, c.want)
		}
	}
}

func FuzzEscape(f *testing.F) {
	for _, s := range []string{"", "a", "\x1b[2J", "\xff", `"\`, "漢\u0301", "\u202e", "a\x00b", "\U0001f600"} {
		f.Add(s, 7)
	}
	f.Fuzz(func(t *testing.T, s string, limit int) {
		got := string(appendEscaped(nil, s, 0))
		if back, err := strconv.Unquote(`"` + got + `"`); err != nil || back != s {
			t.Errorf("%q becomes %q and then %q, %v", s, got, back, err)
		}
		checkPrintable(t, got)
		if limit > 0 {
			cut := appendEscaped(nil, s, limit)
			if n := columnsOf(cut); n > limit {
				t.Errorf("%q takes %d of %d columns", cut, n, limit)
			}
			if whole := strings.TrimSuffix(string(cut), "+"); !strings.HasPrefix(got, whole) {
				t.Errorf("%q is no beginning of %q", whole, got)
			} else if _, err := strconv.Unquote(`"` + whole + `"`); err != nil {
				t.Errorf("an escape was cut: %q", cut)
			}
		}
	})
}

func FuzzJSONString(f *testing.F) {
	for _, s := range []string{"", "a", "\x1b[2J", "\xff", `"\/`, "\u2028", "\U0001f600", "\U000e0001", "\xed\xa0\x80", "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, valid := appendJSONString(nil, s)
		if valid != utf8.ValidString(s) {
			t.Errorf("%q: valid %v", s, valid)
		}
		checkPrintable(t, string(got))
		std, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var ours, theirs string
		if err := json.Unmarshal(got, &ours); err != nil {
			t.Fatalf("%q: %v", got, err)
		}
		if err := json.Unmarshal(std, &theirs); err != nil {
			t.Fatal(err)
		}
		if ours != theirs {
			t.Errorf("%q reads as %q, encoding/json as %q", s, ours, theirs)
		}
		named := `{"comm":` + string(appendJSONName(nil, "comm", s)) + `}`
		var object map[string]string
		if err := json.Unmarshal([]byte(named), &object); err != nil {
			t.Fatalf("%s: %v", named, err)
		}
		raw, err := hex.DecodeString(object["comm_hex"])
		if err != nil || (!valid && string(raw) != s) || (valid && object["comm"] != s) {
			t.Errorf("bytes of %q are not recoverable from %s", s, named)
		}
	})
}

func checkPrintable(t *testing.T, s string) {
	t.Helper()
	if !utf8.ValidString(s) {
		t.Errorf("not UTF-8: %q", s)
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			t.Errorf("%q holds %U", s, r)
		}
	}
}
