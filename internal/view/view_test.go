package view

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

var session = fault.Session{
	Hook: "fentry", Reason: "the best", Kernel: "6.18.0", Host: "a\"host", CPUs: 2,
	Command: []string{"sh", "-c", "exit \xff"}, Covers: []string{"user", "kernel", "failed"},
	Started: time.Date(2026, 11, 30, 3, 2, 1, 5, time.UTC), MonoStarted: 1_000_000_000,
	FlagNames: []fault.BitName{{Bit: 1, Name: "WRITE"}, {Bit: 4, Name: "ALLOW_RETRY"}, {Bit: 0x40, Name: "USER"}, {Bit: 0x1000, Name: "VMA_LOCK"}},
	PageSize:  4096,
}

const all = fault.HasLatency | fault.HasMode | fault.HasAccess | fault.HasMajor | fault.HasFlags | fault.HasAttempts |
	fault.HasResult | fault.HasIP | fault.HasVMA | fault.HasPgOff | fault.HasLabel | fault.HasIDs | fault.HasInnerIDs |
	fault.HasKind | fault.HasBefore | fault.HasAfter | fault.HasOffCPU | fault.HasReclaim |
	fault.HasAgain | fault.HasPFN

// full is a record with every fact known and every number as long as it gets.
func full() fault.Fault {
	return fault.Fault{
		End: 4_000_001_234, Latency: 12_345, PID: 4194303, TID: 4194304, HostPID: 4194303, HostTID: 4194304,
		InnerPID: 4194303, InnerTID: 4194304, CPU: 127, Comm: fault.MakeComm("systemd-journald"), Process: fault.MakeComm("systemd"),
		Known: all, Mode: fault.Kernel, Access: fault.Write, Major: true, Attempts: 2, Flags: 0x80001045,
		Address: 0x7ffff7ff1234, IP: 0xffffffff81234567, PgOff: 0x7ffff7ff1,
		VMA: fault.VMA{Start: 0x7ffff7ff0000, End: 0x7ffff7ff8000, PgOff: 0x7ffff7ff0, Flags: 0x73, Label: "libpython3.11.so.1.0"},

		Kind: fault.CowFile, KindExact: true, EntryBefore: 0x8000000000000025, EntryAfter: 0x8000000000000867, Pages: 16,

		OffCPU: 9_876, Wait: fault.IO, Reclaim: 4_321, Compaction: 321, Again: true, PFN: 0x123456, Node: 1,

		Section: ".data", Symbol: "table", SymbolOffset: 0x1234,
	}
}

func encode(o Options, f fault.Fault) string {
	if o.Location == nil {
		o.Location = time.UTC
	}
	return string(NewEncoder(&session, o).AppendFault(nil, &f))
}

func columns(t *testing.T, list string) []Column {
	t.Helper()
	c, err := ParseColumns(list)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDefaultTextFits(t *testing.T) {
	widest := full()
	for _, change := range []func(*fault.Fault){
		func(*fault.Fault) {},
		func(f *fault.Fault) { f.Address = 0xffffffffff600400 },
		func(f *fault.Fault) { f.Comm = fault.MakeComm("\x1b\x1b\x1b\x1b\x1b\x1b\x1b\x1b") },
		func(f *fault.Fault) { f.VMA.Label = strings.Repeat("長", 80) },
		func(f *fault.Fault) { f.CPU = 8191; f.Latency = 999 * time.Microsecond },
		func(f *fault.Fault) { f.TID = f.PID; f.Known = 0 },
	} {
		f := widest
		change(&f)
		e := NewEncoder(&session, Options{Width: 100, Location: time.UTC})
		header, line := e.AppendHeader(nil), e.AppendFault(nil, &f)
		for _, l := range [][]byte{header, line} {
			if n := columnsOf(bytes.TrimSuffix(l, []byte("\n"))); n > 100 {
				t.Errorf("%d columns: %s", n, l)
			}
		}
		if bytes.Contains(header, []byte("  \n")) || bytes.Contains(line, []byte(" \n")) {
			t.Errorf("line ends in blanks:\n%q\n%q", header, line)
		}
	}
}

func TestTextAligns(t *testing.T) {
	short := fault.Fault{End: 1_000_000_000, PID: 7, TID: 7, Comm: fault.MakeComm("a"), Known: all, Address: 0x1000}
	wide := short
	wide.Comm = fault.MakeComm("漢字")
	long := short
	long.Address = 0xffffffffff600400 // four more than the column has
	e := NewEncoder(&session, Options{Columns: columns(t, "pid,comm,address,pgoff,latency"), Location: time.UTC})
	var at []int
	for _, f := range []fault.Fault{short, wide, long} {
		f.PgOff, f.Latency = 1, 5
		line := e.AppendFault(nil, &f)
		at = append(at, columnsOf(line[:bytes.LastIndexByte(line, ' ')]))
	}
	if at[0] != at[1] || at[0] != at[2] {
		t.Errorf("last column begins at %v, want the same everywhere", at)
	}
}

func TestTextUnknown(t *testing.T) {
	got := encode(Options{}, fault.Fault{End: 1_000_000_000, Comm: fault.MakeComm("x"), Address: 0x10})
	want := []string{"03:02:01.000000", "-", "-", "0", "x", "-", "-", "10", "-", "-", "-"}
	if fields := strings.Fields(got); !slices.Equal(fields, want) {
		t.Errorf("got %q, want %q", fields, want)
	}
}

func TestTextFailed(t *testing.T) {
	f := full()
	f.Known &^= fault.HasMajor
	for result, want := range map[fault.Result]string{
		fault.SIGBUS: "bus", fault.SIGSEGV: "seg", fault.OOM: "oom", fault.HWPoison: "hwp", fault.Interrupted: "int", fault.EFAULT: "efa", fault.OK: "-",
	} {
		f.Result = result
		if got := strings.TrimSpace(encode(Options{Columns: columns(t, "major")}, f)); got != want {
			t.Errorf("%v: %q, want %q", result, got, want)
		}
	}
}

func TestColumnsOnce(t *testing.T) {
	if got := encode(Options{Columns: columns(t, "pid,cpu,pid,pte")}, full()); len(strings.Fields(got)) != 5 {
		t.Errorf("pid, cpu, comm, address and pgoff once: %q", got)
	}
}

func TestTextThread(t *testing.T) {
	f := full()
	if got := strings.Fields(encode(Options{}, f))[2]; got != "4194304" {
		t.Errorf("tid %q where it differs", got)
	}
	f.TID = f.PID
	if got := strings.Fields(encode(Options{}, f))[2]; got != "." {
		t.Errorf("tid %q where it is the pid", got)
	}
}

func TestColorOnlyWhenAsked(t *testing.T) {
	if got := encode(Options{}, full()); strings.Contains(got, "\x1b") {
		t.Errorf("escape sequence without colour: %q", got)
	}
	colored := encode(Options{Color: true}, full())
	if !strings.Contains(colored, red+"maj"+reset) {
		t.Errorf("major fault not marked: %q", colored)
	}
	if plain := strings.NewReplacer(red, "", reset, "").Replace(colored); plain != encode(Options{}, full()) {
		t.Errorf("colour changes the layout: %q", plain)
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0ns", 850: "850ns", 999: "999ns", 1000: "1.00us", 9_999: "9.99us", 12_345: "12.3us", 99_999: "99.9us",
		999_999: "999us", 1_050_000: "1.05ms", time.Second: "1.00s", 61 * time.Second: "61.0s", time.Hour: "3600s",
	} {
		if got := string(appendDuration(nil, d)); got != want {
			t.Errorf("%d ns: %s, want %s", d, got, want)
		}
	}
}

// decoded is the record of issue 2 as a program would read it.
type decoded struct {
	Type     string          `json:"type"`
	Time     time.Time       `json:"time"`
	Mono     uint64          `json:"mono_ns"`
	PID      *uint32         `json:"pid"`
	TID      *uint32         `json:"tid"`
	NSPID    *uint32         `json:"nspid"`
	HostPID  *uint32         `json:"host_pid"`
	CPU      uint32          `json:"cpu"`
	Comm     string          `json:"comm"`
	CommHex  string          `json:"comm_hex"`
	Process  string          `json:"process"`
	Mode     *string         `json:"mode"`
	Access   *string         `json:"access"`
	Major    *bool           `json:"major"`
	Address  string          `json:"address"`
	IP       *string         `json:"ip"`
	Flags    []string        `json:"flags"`
	FlagsRaw *string         `json:"flags_raw"`
	Attempts *int            `json:"attempts"`
	Result   *string         `json:"result"`
	Kind     *string         `json:"kind"`
	KindBy   *string         `json:"kind_by"`
	PageSize *uint64         `json:"page_size"`
	Before   *string         `json:"pte_before"`
	After    *string         `json:"pte_after"`
	Latency  *int64          `json:"latency_ns"`
	OffCPU   *int64          `json:"offcpu_ns"`
	Wait     *string         `json:"wait"`
	Reclaim  *int64          `json:"reclaim_ns"`
	Compact  *int64          `json:"compaction_ns"`
	Cause    *string         `json:"cause"`
	PFN      *string         `json:"pfn"`
	Node     *int            `json:"node"`
	Again    *bool           `json:"again"`
	Offset   *uint64         `json:"file_offset"`
	Section  *string         `json:"section"`
	Symbol   *string         `json:"symbol"`
	VMALock  *bool           `json:"vma_lock"`
	VMA      json.RawMessage `json:"vma"`
	PgOff    *uint64         `json:"pgoff"`
	Hook     string          `json:"hook"`
}

func decode(t *testing.T, line string) decoded {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(line))
	d.DisallowUnknownFields()
	var got decoded
	if err := d.Decode(&got); err != nil {
		t.Fatalf("%v in %s", err, line)
	}
	return got
}

func TestFileID(t *testing.T) {
	f := full()
	f.VMA.Dev, f.VMA.Inode = 0xfe<<20|1, 1<<40
	if line := encode(Options{Format: JSON}, f); !strings.Contains(line, `,"dev":"fe:01","inode":1099511627776}`) {
		t.Error(line)
	}
}

func TestJSONFull(t *testing.T) {
	f := full()
	f.HostPID, f.InnerPID = 99, 3
	line := encode(Options{Format: JSON}, f)
	const want = `{"type":"fault","time":"2026-11-30T03:02:04.000001239Z","mono_ns":4000001234,"pid":4194303,"tid":4194304,` +
		`"nspid":3,"host_pid":99,"cpu":127,"comm":"systemd-journal","process":"systemd","mode":"kernel","access":"write","major":true,` +
		`"address":"0x7ffff7ff1234","ip":"0xffffffff81234567","flags":["WRITE","ALLOW_RETRY","USER","VMA_LOCK","0x80000000"],` +
		`"flags_raw":"0x80001045","attempts":2,"result":"ok","cause":null,` +
		`"kind":"cow-file","kind_by":"exact","pfn":"0x123456","node":1,"again":true,"page_size":4096,"pte_before":"0x8000000000000025","pte_after":"0x8000000000000867","latency_ns":12345,"offcpu_ns":9876,"wait":"io","reclaim_ns":4321,"compaction_ns":321,` +
		`"vma":{"start":"0x7ffff7ff0000","end":"0x7ffff7ff8000","perm":"rw-p","flags":"rd wr mr mw me","pgoff":34359705584,"label":"libpython3.11.so.1.0","path":null,"deleted":false,"dev":null,"inode":null},` +
		`"pgoff":34359705585,"file_offset":null,"section":".data","symbol":"table+0x1234","vma_lock":true,"hook":"fentry"}` + "\n"
	if line != want {
		t.Errorf("got  %swant %s", line, want)
	}
	got := decode(t, line)
	if !got.Time.Equal(session.Wall(f.End)) {
		t.Errorf("time %v, want %v", got.Time, session.Wall(f.End))
	}
}

func TestJSONUnknownIsNull(t *testing.T) {
	got := decode(t, encode(Options{Format: JSON}, fault.Fault{Flags: 1, Latency: 5, Attempts: 1}))
	if got.PID != nil || got.TID != nil || got.Mode != nil || got.Access != nil || got.Major != nil || got.IP != nil || got.Flags != nil ||
		got.FlagsRaw != nil || got.Attempts != nil || got.Result != nil || got.Latency != nil || got.PgOff != nil || string(got.VMA) != "null" {
		t.Errorf("a fact that is not known is not null: %+v", got)
	}
	if got.Kind != nil || got.KindBy != nil || got.PageSize != nil || got.Before != nil || got.After != nil ||
		got.OffCPU != nil || got.Wait != nil || got.Reclaim != nil || got.Compact != nil || got.Cause != nil || got.PFN != nil ||
		got.Node != nil || got.Again != nil || got.Offset != nil || got.VMALock != nil ||
		got.Section != nil || got.Symbol != nil {
		t.Errorf("what the kernel did is not known and not null: %+v", got)
	}
	if got.NSPID != nil || got.HostPID != nil {
		t.Errorf("namespace ids without need: %+v", got)
	}
}

func TestJSONSomeFlags(t *testing.T) {
	got := decode(t, encode(Options{Format: JSON}, fault.Fault{Known: fault.HasSomeFlag, Flags: 0x41}))
	if !slices.Equal(got.Flags, []string{"WRITE", "USER"}) || got.FlagsRaw != nil {
		t.Errorf("flags %q raw %v", got.Flags, got.FlagsRaw)
	}
	none := encode(Options{Format: JSON}, fault.Fault{Known: fault.HasFlags})
	if !strings.Contains(none, `"flags":[],"flags_raw":"0x0"`) {
		t.Errorf("no flags: %s", none)
	}
}

func TestJSONLabelAlone(t *testing.T) {
	line := encode(Options{Format: JSON}, fault.Fault{Known: fault.HasLabel, VMA: fault.VMA{Label: "a\xffb"}})
	const want = `"vma":{"start":null,"end":null,"perm":null,"flags":null,"pgoff":null,"label":"a` + "\ufffd" + `b","label_hex":"61ff62"`
	if !strings.Contains(line, want) {
		t.Errorf("%s lacks %s", line, want)
	}
}

func TestJSONColumns(t *testing.T) {
	for list, want := range map[string]string{
		"mm":              `{"type":"fault","pid":4194303,"cpu":127,"comm":"systemd-journal","address":"0x7ffff7ff1234","flags":["WRITE","ALLOW_RETRY","USER","VMA_LOCK","0x80000000"]}`,
		"mapping,pid,how": `{"type":"fault","pid":4194303,"mode":"kernel","access":"write","vma":{"label":"libpython3.11.so.1.0"}}`,
		"thread,tid":      `{"type":"fault","tid":4194304}`,
		"latency_ns":      `{"type":"fault","latency_ns":12345}`,
		"kind,page_size":  `{"type":"fault","kind":"cow-file","page_size":4096}`,
	} {
		if got := encode(Options{Format: JSON, Columns: columns(t, list)}, full()); got != want+"\n" {
			t.Errorf("%s: got %swant %s", list, got, want)
		}
	}
}

func TestJSONOtherLines(t *testing.T) {
	e := NewEncoder(&session, Options{Format: JSON})
	s := Summary{
		Counters: fault.Counters{Seen: 7, Minor: 4, Major: 2, Failed: 1, Filtered: 3, Lost: []fault.Loss{{Where: "a", Count: 5}, {Where: "b", Count: 6}}},
		Duration: 1500, Session: &fault.Session{Hook: "perf", Covers: []string{"failed"}},
	}
	for got, want := range map[string]string{
		string(e.AppendHeader(nil)): `{"type":"header","hook":"fentry","reason":"the best","kernel":"6.18.0","host":"a\"host","cpus":2,` +
			`"started":"2026-11-30T03:02:01.000000005Z","command":["sh","-c","exit ` + "\ufffd" + `"],"covers":["user","kernel","failed"],"blind":[],"unseen":[]}`,
		string(e.AppendLost(nil, fault.Loss{Where: "ring buffer full", Count: 9})): `{"type":"lost","count":9,"where":"ring buffer full"}`,
		string(e.AppendSummary(nil, &s)):                                           `{"type":"summary","seen":7,"lost":11,"filtered":3,"minor":4,"major":2,"failed":1,"untimed":0,"unremembered":0,"duration_ns":1500,"hook":"perf"}`,
	} {
		if got != want+"\n" {
			t.Errorf("got  %swant %s", got, want)
		}
		if !json.Valid([]byte(got)) {
			t.Errorf("not JSON: %s", got)
		}
	}
}

func TestSummaryLine(t *testing.T) {
	s := Summary{Counters: fault.Counters{Seen: 1234, Minor: 1200, Major: 34, Filtered: 56}, Printed: 1234, Duration: 2100 * time.Millisecond, Session: &fault.Session{Hook: "tracepoint", Covers: []string{"failed"}}}
	if got, want := s.Line(), "1234 faults: 1200 minor, 34 major, 0 failed; 0 lost; 56 filtered out; 2.1 s by tracepoint"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	s.Stacks, s.Stacked = true, 617
	if got := s.Line(); !strings.Contains(got, "; 617 (50.0%) of those shown with a stack; 0 lost") {
		t.Errorf("with stacks it is %q", got)
	}
	if got := string(s.appendJSON(nil)); !strings.Contains(got, `,"printed":1234,"stacked":617,`) {
		t.Errorf("with stacks it is %s", got)
	}
	s = Summary{Counters: fault.Counters{Seen: 1, Lost: []fault.Loss{{Where: "ring buffer full", Count: 2}, {Where: "unused"}}}, Session: &fault.Session{Hook: "perf"}}
	if got, want := s.Line(), "1 fault: 0 minor, 0 major, failed ones not seen, 1 of unknown result; 0 shown; 2 lost (ring buffer full: 2); 0 filtered out; 0.0 s by perf"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestCSV(t *testing.T) {
	f := full()
	f.Comm = fault.MakeComm(`=cmd|"/c,`)
	f.Known &^= fault.HasLatency
	f.VMA.Label = "\x1b[31m"
	e := NewEncoder(&session, Options{Format: CSV})
	out := e.AppendFault(e.AppendHeader(nil), &f)
	rows, err := csv.NewReader(bytes.NewReader(out)).ReadAll()
	if err != nil || len(rows) != 2 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	got := map[string]string{}
	for i, name := range rows[0] {
		got[name] = rows[1][i]
	}
	for name, want := range map[string]string{
		"comm": `\x3dcmd|\"/c,`, "latency_ns": "", "vma_label": `\x1b[31m`, "address": "0x7ffff7ff1234", "major": "true",
		"time": "2026-11-30T03:02:04.000001239Z", "flags": "WRITE|ALLOW_RETRY|USER|VMA_LOCK|0x80000000", "pgoff": "34359705585", "nspid": "",
		"kind": "cow-file", "kind_by": "exact", "page_size": "4096", "pte_before": "0x8000000000000025", "pte_after": "0x8000000000000867",
		"offcpu_ns": "9876", "wait": "io", "cause": "", "vma_flags": "rd wr mr mw me", "file_offset": "", "vma_lock": "true",
		"section": ".data", "symbol": "table+0x1234",
	} {
		if got[name] != want {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
	if name, err := strconv.Unquote(`"` + got["comm"] + `"`); err != nil || name != f.Comm.String() {
		t.Errorf("comm comes back as %q, %v", name, err)
	}
}

// TestKindText: what is known of the kind decides what is shown of it.
func TestKindText(t *testing.T) {
	const list = "kind,kind_by,page_size,pte_before,pte_after"
	for _, test := range []struct {
		change func(*fault.Fault)
		want   string
	}{
		{func(*fault.Fault) {}, "cow-file exact 4K 8000000000000025 8000000000000867"},
		{func(f *fault.Fault) { f.Level = 1 }, "cow-file exact 2M 8000000000000025 8000000000000867"},
		{func(f *fault.Fault) { f.Level = 2 }, "cow-file exact 1G 8000000000000025 8000000000000867"},
		{func(f *fault.Fault) { f.EntryBefore = 0 }, "cow-file exact 4K 0 8000000000000867"},
		{func(f *fault.Fault) { f.Known &^= fault.HasAfter }, "cow-file exact - 8000000000000025 -"},
		{func(f *fault.Fault) { f.Known &^= fault.HasBefore | fault.HasAfter; f.KindExact = false }, "cow-file inferred - - -"},
		{func(f *fault.Fault) { f.Known &^= fault.HasKind }, "- - 4K 8000000000000025 8000000000000867"},
	} {
		f := full()
		test.change(&f)
		if got := strings.Join(strings.Fields(encode(Options{Columns: columns(t, list)}, f)), " "); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
}

// TestSymbol: its bytes are a file's, and it may begin where the address is.
func TestSymbol(t *testing.T) {
	for _, test := range []struct {
		symbol     string
		offset     uint64
		text, json string
	}{
		{"table", 0, "table", `"symbol":"table"`},
		{"table", 0x10, "table+0x10", `"symbol":"table+0x10"`},
		{"", 0x10, "-", `"symbol":null`},
		{"\x1b[2J\xff", 1, `\x1b[2J\xff+0x1`, `"symbol":"\u001b[2J` + "\ufffd" + `+0x1","symbol_hex":"1b5b324aff2b307831"`},
		{strings.Repeat("n", 300), 1, strings.Repeat("n", 300) + "+0x1", `"symbol":"` + strings.Repeat("n", 300) + `+0x1"`},
	} {
		f := fault.Fault{Symbol: test.symbol, SymbolOffset: test.offset}
		if got := strings.TrimSpace(encode(Options{Columns: columns(t, "symbol")}, f)); got != test.text {
			t.Errorf("text %q, want %q", got, test.text)
		}
		if got := encode(Options{Format: JSON, Columns: columns(t, "symbol")}, f); got != `{"type":"fault",`+test.json+"}\n" {
			t.Errorf("JSON %s, want %s", got, test.json)
		}
	}
}

func TestShows(t *testing.T) {
	for _, test := range []struct {
		o    Options
		want bool
	}{
		{Options{}, false},
		{Options{Format: JSON}, true},
		{Options{Format: CSV}, true},
		{Options{Format: JSON, Columns: columns(t, "pid,how")}, false},
		{Options{Columns: columns(t, "symbol")}, true},
	} {
		if got := NewEncoder(&session, test.o).Shows("symbol"); got != test.want {
			t.Errorf("%+v shows symbols: %v", test.o, got)
		}
	}
}

func TestParseColumns(t *testing.T) {
	if _, err := ParseColumns("pid,adress"); err == nil || err.Error() != `unknown column "adress"` {
		t.Errorf("got %v", err)
	}
	if _, err := ParseColumns(""); err == nil {
		t.Error("an empty list is accepted")
	}
	seen := map[string]bool{}
	for _, name := range Names() {
		if seen[name] {
			t.Errorf("%q is there twice", name)
		}
		seen[name] = true
		if _, err := ParseColumns(name); err != nil {
			t.Error(err)
		}
	}
	for _, p := range Presets {
		if len(pick(p.columns)) != len(p.columns) {
			t.Errorf("preset %s names a column that does not exist", p.Name)
		}
	}
	for i := range Columns {
		c := &Columns[i]
		if c.Help == "" || c.Title == "" || c.Width < len(c.Title) {
			t.Errorf("column %s: title %q, width %d, help %q", c.Name, c.Title, c.Width, c.Help)
		}
		if c.key == "" && len(pick(c.short)) == 0 {
			t.Errorf("column %s stands for nothing", c.Name)
		}
	}
}

func TestPermNames(t *testing.T) {
	for _, perm := range []string{"----"[:3] + "p", "rw-p", "r-xp", "rwxs", "---s"} {
		f := fault.Fault{VMA: fault.VMA{Flags: fault.PermFlags(perm) | 0x70}}
		if got := string(appendPerm(nil, &f)); got != perm {
			t.Errorf("%s becomes %s", perm, got)
		}
	}
}

func BenchmarkJSON(b *testing.B) {
	f := full()
	e := NewEncoder(&session, Options{Format: JSON})
	buf := e.AppendFault(nil, &f)
	b.ReportAllocs()
	for b.Loop() {
		f.End += 1000
		buf = e.AppendFault(buf[:0], &f)
	}
}

func BenchmarkText(b *testing.B) {
	f := full()
	e := NewEncoder(&session, Options{Width: 100})
	buf := e.AppendFault(nil, &f)
	b.ReportAllocs()
	for b.Loop() {
		f.End += 1000
		buf = e.AppendFault(buf[:0], &f)
	}
}

func TestHotPathAllocatesNothing(t *testing.T) {
	f := full()
	for name, o := range map[string]Options{"json": {Format: JSON}, "text": {Width: 100}} {
		e := NewEncoder(&session, o)
		buf := e.AppendFault(nil, &f)
		if n := testing.AllocsPerRun(100, func() { buf = e.AppendFault(buf[:0], &f) }); n != 0 {
			t.Errorf("%s: %v allocations a record", name, n)
		}
	}
}
