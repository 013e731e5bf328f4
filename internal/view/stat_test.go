package view

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

var update = flag.Bool("update", false, "write the golden files anew")

// latencies makes a histogram and what a kind must say beside it.
func latencies(minor, major uint64, bytes uint64, of ...time.Duration) fault.KindCost {
	k := fault.KindCost{Cost: fault.Cost{Minor: minor, Major: major, Bytes: bytes}, Buckets: make([]uint64, aggregate.Buckets)}
	for _, d := range of {
		k.Buckets[aggregate.Bucket(d)]++
		k.Time += d
		k.Max = max(k.Max, d)
	}
	k.Untimed = k.Faults() - uint64(len(of))
	return k
}

// counted is a run in which names are as bad and numbers as long as they get.
func counted() *Stat {
	rows := &fault.Rows{}
	rows.Kinds[fault.Anon] = latencies(7, 0, 7*4096, 700, 800, 900, 1000, 1100, 1200, 50_000)
	rows.Kinds[fault.File] = latencies(1, 3, 4*65536, 300, 2_000_000, 3_000_000, 4_000_000)
	rows.Kinds[fault.File].OffCPU = 8_500_000
	rows.Kinds[fault.THP] = latencies(1_234_567, 0, 1_234_567<<21)
	rows.Kinds[fault.KindUnknown] = fault.KindCost{Cost: fault.Cost{Failed: 1, Unknown: 2, Untimed: 3}, Buckets: make([]uint64, aggregate.Buckets)}

	process := map[fault.Key]fault.Cost{}
	for i, name := range []string{"\x1b[2J\x1b[31m", "a\"b\\c\n\xff", "\u202eevil", "=cmd|' /C", "漢字漢字"} {
		key := fault.Key{ID: uint32(4711 + i), Name: fault.MakeComm(name)}
		process[key] = fault.Cost{Minor: uint64(i + 1), Time: time.Duration(5-i) * time.Millisecond, Max: time.Millisecond, Bytes: uint64(i+1) * 4096}
	}
	mapping := map[fault.Key]fault.Cost{
		{ID: 4194303, Value: 0x7f1234500000, File: fault.FileKey{Dev: 8, Inode: 5}, Label: "/" + strings.Repeat("long name/", 12) + "libpython3.11.so.1.0"}: {Major: 4_000_000_000, Time: 9 * time.Hour, Max: time.Minute, Bytes: 1 << 45},
		{ID: 4711, Value: 0x6e0000000000, Label: "[anon]"}: {Minor: 7, Untimed: 7},
		{ID: 4711}: {Failed: 3, Untimed: 3},
		{ID: 4711, End: 0x7ffe12340000, Label: "[stack]"}: {Minor: 5, Time: time.Second, Max: time.Millisecond, Bytes: 5 * 4096},
	}
	rows.Tables = []fault.Table{
		{By: fault.ByProcess, Rows: process, Other: fault.Cost{Minor: 12, Time: 12345, Max: 2345, Bytes: 12 * 4096}},
		{By: fault.ByMapping, Rows: mapping},
		{By: fault.ByCgroup, Rows: map[fault.Key]fault.Cost{{}: {Minor: 1, Untimed: 1}, {Value: 1}: {Minor: 2, Untimed: 2}, {Value: 99}: {Minor: 3, Untimed: 3}}},
		{By: fault.ByUID, Rows: map[fault.Key]fault.Cost{{ID: fault.NoUID}: {Minor: 1, Untimed: 1}, {ID: 0}: {Minor: 2, Untimed: 2}, {ID: 255}: {Minor: 3, Untimed: 3}}},
		{By: fault.ByAccess, Rows: map[fault.Key]fault.Cost{{ID: fault.Unset}: {Minor: 1, Untimed: 1}, {ID: uint32(fault.Exec)}: {Minor: 2, Untimed: 2}}},
		{By: fault.ByPage, Rows: map[fault.Key]fault.Cost{}},
	}
	return &Stat{
		Session: &session, Rows: rows, Duration: 2500 * time.Millisecond, End: time.Date(2026, 11, 30, 3, 2, 4, 0, time.UTC), Top: 3, Hist: true,
		Counters: fault.Counters{Filtered: 17, Lost: []fault.Loss{{Where: "ring buffer full", Count: 1500}, {Where: "exit", Count: 2}}},
		User: func(uid uint32) string {
			return map[uint32]string{0: "root\x1b"}[uid]
		},
		Cgroup: func(id uint64) string {
			return map[uint64]string{1: "/user.slice/\xffname"}[id]
		},
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	name = "testdata/" + name + ".golden"
	if *update {
		if err := os.WriteFile(name, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func appended(t *testing.T, appendTo func([]byte) ([]byte, error)) []byte {
	t.Helper()
	b, err := appendTo(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestStatGolden(t *testing.T) {
	s := counted()
	golden(t, "stat.text", s.AppendText(nil, 100))
	golden(t, "stat.json", appended(t, s.AppendJSON))
	golden(t, "stat.csv", appended(t, func(b []byte) ([]byte, error) { return s.AppendCSV(AppendCSVHeader(b)) }))

	// A source that knows neither times nor what was mapped, as hook perf can be.
	blind := &Stat{
		Session: &fault.Session{Hook: "perf"}, Duration: time.Second, End: s.End, Hist: true, Part: Interval, Rows: &fault.Rows{
			Tables: []fault.Table{{By: fault.ByCPU, Rows: map[fault.Key]fault.Cost{{ID: 127}: {Minor: 9, Untimed: 9}}}},
		},
	}
	blind.Rows.Kinds[fault.KindUnknown].Cost = fault.Cost{Minor: 9, Untimed: 9}
	golden(t, "blind.text", blind.AppendText(nil, 100))
	golden(t, "blind.json", appended(t, blind.AppendJSON))
	golden(t, "blind.csv", appended(t, blind.AppendCSV))

	none := &Stat{Session: &session, Rows: &fault.Rows{Tables: []fault.Table{{By: fault.ByFile}}}, End: s.End}
	golden(t, "none.text", none.AppendText(nil, 100))
	golden(t, "none.json", appended(t, none.AppendJSON))
	golden(t, "none.csv", appended(t, none.AppendCSV))
}

// No name steers a terminal or a spreadsheet, or breaks a line.
func TestStatHostileNames(t *testing.T) {
	s := counted()
	s.Top = 0
	for form, b := range map[string][]byte{
		"text": s.AppendText(nil, 100), "csv": appended(t, s.AppendCSV), "json": appended(t, s.AppendJSON),
	} {
		for line := range strings.Lines(string(b)) {
			checkPrintable(t, strings.TrimSuffix(line, "\n"))
		}
		if !utf8.Valid(b) {
			t.Errorf("%s is not UTF-8", form)
		}
	}
	var got struct {
		Tables []struct {
			By   string
			Rows []map[string]any
		}
	}
	line := appended(t, s.AppendJSON)
	if bytes.Count(line, []byte("\n")) != 1 {
		t.Errorf("not one line: %q", line)
	}
	if err := json.Unmarshal(line, &got); err != nil {
		t.Fatal(err)
	}
	row := got.Tables[0].Rows[1]
	if row["process"] != "a\"b\\c\n\ufffd" || row["process_hex"] != fmt.Sprintf("%x", "a\"b\\c\n\xff") {
		t.Errorf("bytes are not recoverable from %v", row)
	}
	rows, err := csv.NewReader(bytes.NewReader(appended(t, func(b []byte) ([]byte, error) { return s.AppendCSV(AppendCSVHeader(b)) }))).ReadAll()
	if err != nil {
		t.Fatal(err) // among others for a line of another length than the header
	}
	for _, r := range rows {
		if strings.ContainsAny(r[4][:1], "=+-@") {
			t.Errorf("a spreadsheet runs %q", r[4])
		}
	}
}

// Lines fit the width; the numbers that tell rows apart are never cut off.
func TestStatWidth(t *testing.T) {
	// But for the first line, and numbers that no machine counts.
	for _, width := range []int{100, 120, 300} {
		s := counted()
		s.Top = 0
		text := string(s.AppendText(nil, width))
		for line := range strings.Lines(text) {
			if n := columnsOf([]byte(strings.TrimSuffix(line, "\n"))); n > width && !strings.Contains(line, "4,000,000,000") && !strings.Contains(line, " faults in ") {
				t.Errorf("%d of %d columns: %s", n, width, line)
			}
		}
		for _, numbers := range []string{" (4711)", " (4713)", " (4194303 7f1234500000)", " (4711 -7ffe12340000)", "cgroup 99", " (0)\n"} {
			if !strings.Contains(text, numbers) {
				t.Errorf("%q was cut off at width %d:\n%s", numbers, width, text)
			}
		}
	}
}

// What is not shown is in the sum of the rest.
func TestStatTop(t *testing.T) {
	rows := map[fault.Key]fault.Cost{}
	for i := range 10 {
		rows[fault.Key{ID: uint32(i)}] = fault.Cost{Minor: 1, Time: time.Duration(i), Max: time.Duration(i)}
	}
	s := Stat{Session: &session, Rows: &fault.Rows{}}
	for _, test := range []struct{ top, shown, hidden, first int }{{0, 10, 0, 9}, {3, 3, 7, 9}, {10, 10, 0, 9}, {11, 10, 0, 9}} {
		s.Top = test.top
		shown, rest, hidden := s.top(&fault.Table{By: fault.ByCPU, Rows: rows})
		for i := range shown {
			rest.Add(&shown[i].cost)
			if want := test.first - i; int(shown[i].key.ID) != want {
				t.Errorf("top %d: row %d is that of CPU %d, want %d", test.top, i, shown[i].key.ID, want)
			}
		}
		if len(shown) != test.shown || hidden != test.hidden || rest.Faults() != 10 || rest.Time != 45 {
			t.Errorf("top %d: %d rows and %d more, in all %+v", test.top, len(shown), hidden, rest)
		}
	}
}

// Naming a cgroup or a user may cost much: only rows that are shown are named.
func TestStatNamesShown(t *testing.T) {
	rows := map[fault.Key]fault.Cost{}
	for i := range 100 {
		rows[fault.Key{ID: uint32(i), Value: uint64(i + 1)}] = fault.Cost{Minor: 1, Untimed: 1}
	}
	asked := 0
	s := Stat{
		Session: &session, Top: 3,
		Rows:   &fault.Rows{Tables: []fault.Table{{By: fault.ByCgroup, Rows: rows}, {By: fault.ByUID, Rows: rows}}},
		User:   func(uint32) string { asked++; return "user" },
		Cgroup: func(uint64) string { asked++; return "/cgroup" },
	}
	for form, show := range map[string]func(){
		"text": func() { s.AppendText(nil, 100) }, "json": func() { appended(t, s.AppendJSON) }, "csv": func() { appended(t, s.AppendCSV) },
	} {
		asked = 0
		if show(); asked == 0 || asked > 6 {
			t.Errorf("%s: asked for %d names, 6 are shown", form, asked)
		}
	}
}

// The order is by time, and where that is not known by number, then by name.
func TestStatOrder(t *testing.T) {
	s := Stat{Session: &session, Rows: &fault.Rows{}}
	key := func(name string, pid uint32) fault.Key { return fault.Key{ID: pid, Name: fault.MakeComm(name)} }
	rows, _, _ := s.top(&fault.Table{By: fault.ByProcess, Rows: map[fault.Key]fault.Cost{
		key("b", 3): {Minor: 5, Untimed: 5}, key("a", 9): {Minor: 5, Untimed: 5}, key("a", 10): {Minor: 5, Untimed: 5},
		key("z", 1): {Minor: 1, Time: 1}, key("y", 2): {Minor: 6, Untimed: 6},
	}})
	var got []uint32
	for i := range rows {
		got = append(got, rows[i].key.ID)
	}
	if fmt.Sprint(got) != "[1 2 9 10 3]" {
		t.Errorf("order of processes %v", got)
	}
}

// Percentiles come from bounds of buckets, but never exceed what was seen.
func TestStatQuantile(t *testing.T) {
	k := latencies(3, 0, 0, 1_000_000, 1_000_000, 1_000_001)
	for _, q := range quantiles {
		if got := quantile(&k, q.share); got != 1_000_001 {
			t.Errorf("%s is %d of three of 1 ms", q.name, got)
		}
	}
}

func TestHistogram(t *testing.T) {
	k := latencies(6, 0, 0, 100, 100, 100, 100, 100, 400)
	s := Stat{Session: &session, Rows: &fault.Rows{}}
	s.Rows.Kinds[fault.Cow] = k
	text := string(s.appendHistograms(nil))
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if lines[0] != "cow, latency" {
		t.Errorf("title %q", lines[0])
	}
	first, last := lines[1], lines[len(lines)-1]
	if !strings.HasPrefix(first, "  <= 111ns ") || strings.Count(first, "█") != histWidth || !strings.HasPrefix(last, "  <= 400ns ") || strings.Count(last, "█") != histWidth/5 {
		t.Errorf("first and last of\n%s", text)
	}
	// Four steps for a power of two: from 96 ns to 415 ns there are 9 of them.
	if len(lines) != 10 {
		t.Errorf("%d lines:\n%s", len(lines), text)
	}
	for _, test := range []struct {
		n, most uint64
		want    string
	}{
		{0, 8, ""},
		{8, 8, strings.Repeat("█", 50)},
		{1, 1000, "▏"},
		{1, 1 << 50, "▏"},
		{4, 8, strings.Repeat("█", 25)},
		{1, 8, strings.Repeat("█", 6) + "▎"},
		{7, 400, "▉"},
		{0, 0, ""},
	} {
		if got := bar(test.n, test.most); got != test.want {
			t.Errorf("%d of %d: %q, want %q", test.n, test.most, got, test.want)
		}
	}
}

func TestGroup(t *testing.T) {
	for n, want := range map[uint64]string{0: "0", 999: "999", 1000: "1,000", 123456: "123,456", 1<<64 - 1: "18,446,744,073,709,551,615"} {
		if got := group(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}
