package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
)

// statLine is a line of stat --json. Pointers are nil for null.
type statLine struct {
	Type       string
	Hook       string
	DurationNS int64 `json:"duration_ns"`

	Seen, Lost, Filtered uint64

	Total  statCost
	Kinds  []statRow
	Tables []statTable
}

type statCost struct {
	Faults, Minor, Major, Failed, Unknown, Untimed uint64

	TimeNS *int64 `json:"time_ns"`
	MaxNS  *int64 `json:"max_ns"`
	P50NS  *int64 `json:"p50_ns"`
	P99NS  *int64 `json:"p99_ns"`
	Bytes  *uint64
}

func (c *statCost) add(o *statCost) {
	c.Faults += o.Faults
	c.Minor += o.Minor
	c.Major += o.Major
	c.Failed += o.Failed
	c.Unknown += o.Unknown
	c.Untimed += o.Untimed
	time := c.time() + o.time()
	c.TimeNS = &time
	bytes := c.bytes() + o.bytes()
	c.Bytes = &bytes
}

// bytes are those that are known.
func (c *statCost) bytes() uint64 {
	if c.Bytes == nil {
		return 0
	}
	return *c.Bytes
}

func (c *statCost) time() int64 {
	if c.TimeNS == nil {
		return 0
	}
	return *c.TimeNS
}

// sums is what adds up over rows and intervals.
type sums struct {
	minor, major, failed, unknown, untimed, bytes uint64

	time int64
}

func (c *statCost) sums() sums {
	return sums{c.Minor, c.Major, c.Failed, c.Unknown, c.Untimed, c.bytes(), c.time()}
}

type statRow struct {
	statCost
	Kind      *string
	Histogram [][2]uint64

	PID, TID      int
	Address       *hexNumber
	Start, End    *hexNumber
	Mode, Access  *string
	Result        *string
	Process, Comm *string
	Label, Cgroup *string
	CPU, UID      *uint32
	CgroupID      *uint64 `json:"cgroup_id"`
}

type statTable struct {
	By          string
	Rows        []statRow
	Other, More *statCost
}

// sum is that of all rows, shown or not.
func (t *statTable) sum() statCost {
	total := *t.Other
	if t.More != nil {
		total.add(t.More)
	}
	for i := range t.Rows {
		total.add(&t.Rows[i].statCost)
	}
	return total
}

// statRun is what one run of stat --json printed.
type statRun struct {
	header    liveHeader
	intervals []statLine
	whole     statLine
	stderr    string
}

func parseStat(t *testing.T, stdout, stderr string) *statRun {
	t.Helper()
	c := &statRun{stderr: stderr}
	for line := range strings.Lines(stdout) {
		var s statLine
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatalf("%v in %s\nstderr: %s", err, line, stderr)
		}
		switch s.Type {
		case "header":
			if err := json.Unmarshal([]byte(line), &c.header); err != nil {
				t.Fatal(err)
			}
		case "interval":
			c.intervals = append(c.intervals, s)
		case "stat":
			if c.whole.Type != "" {
				t.Errorf("the whole run twice")
			}
			c.whole = s
		default:
			t.Errorf("unknown line type %q", s.Type)
		}
	}
	if c.header.Hook == "" || c.whole.Type == "" || !strings.HasPrefix(stdout, `{"type":"header"`) {
		t.Fatalf("no header or no counts in %s\nstderr: %s", stdout, stderr)
	}
	c.check(t)
	return c
}

// check checks what holds for all counts: each table divides all faults, and the
// intervals are the whole.
func (c *statRun) check(t *testing.T) {
	t.Helper()
	var total statCost
	for i := range c.whole.Kinds {
		k := &c.whole.Kinds[i]
		total.add(&k.statCost)
		var timed, bound, below uint64
		for _, bucket := range k.Histogram {
			timed += bucket[1]
			bound, below = bucket[0], bound
		}
		if longest := k.MaxNS; longest != nil && (uint64(*longest) > bound || uint64(*longest) <= below) {
			t.Errorf("kind %s: the longest is %d ns, not in the highest bucket, up to %d ns", words(k.Kind), *longest, bound)
		}
		if timed != k.Faults-k.Untimed {
			t.Errorf("kind %s: %d latencies in the histogram, %d faults, %d without time", words(k.Kind), timed, k.Faults, k.Untimed)
		}
	}
	want := c.whole.Total.sums()
	if c.whole.Seen != want.minor+want.major+want.failed+want.unknown {
		t.Errorf("seen %d, total %+v", c.whole.Seen, want)
	}
	if got := total.sums(); got != want || c.whole.Seen != c.whole.Total.Faults {
		t.Errorf("kinds %+v, total %+v, seen %d", got, want, c.whole.Seen)
	}
	for i := range c.whole.Tables {
		table := &c.whole.Tables[i]
		cost := table.sum()
		if got := cost.sums(); got != want || cost.Faults != c.whole.Seen {
			t.Errorf("table by %s: %+v, total %+v", table.By, got, want)
		}
	}
	if len(c.intervals) == 0 {
		return
	}
	var all statCost
	var lost, filtered uint64
	tables := make([]statCost, len(c.whole.Tables))
	for i := range c.intervals {
		s := &c.intervals[i]
		all.add(&s.Total)
		lost += s.Lost
		filtered += s.Filtered
		for j := range s.Tables {
			cost := s.Tables[j].sum()
			tables[j].add(&cost)
		}
	}
	if got := all.sums(); got != want || lost != c.whole.Lost || filtered != c.whole.Filtered {
		t.Errorf("intervals %+v, %d lost, %d filtered; the whole %+v, %d and %d", got, lost, filtered, want, c.whole.Lost, c.whole.Filtered)
	}
	for i := range tables {
		if got := tables[i].sums(); got != want {
			t.Errorf("table by %s: intervals %+v, the whole %+v", c.whole.Tables[i].By, got, want)
		}
	}
}

// table finds the table by something.
func (s *statLine) table(t *testing.T, by string) *statTable {
	t.Helper()
	for i := range s.Tables {
		if s.Tables[i].By == by {
			return &s.Tables[i]
		}
	}
	t.Fatalf("no table by %s", by)
	return nil
}

// kind finds the row of a kind; "null" is that of faults whose kind is not known.
func (s *statLine) kind(name string) *statRow {
	for i := range s.Kinds {
		if words(s.Kinds[i].Kind) == name {
			return &s.Kinds[i]
		}
	}
	return &statRow{}
}

// Records of a source that has no counts are counted here.
func TestStatCountsRecords(t *testing.T) {
	batches := []fault.Batch{{Faults: sampleFaults()}, {}, {Faults: manyFaults(700)}, {Lost: []fault.Loss{{Where: "ring buffer full", Count: 7}}}}
	for _, interval := range [][]string{nil, {"-i", "60ms"}} {
		args := append([]string{"stat", "--json", "-d", "400ms", "--by", "kind,process,uid,page"}, interval...)
		code, stdout, stderr := runWith(script(fakeSource{batches: batches}), args...)
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		c := parseStat(t, stdout, stderr)
		if (len(c.intervals) > 1) != (interval != nil) {
			t.Errorf("%d intervals with %q", len(c.intervals), interval)
		}
		if c.whole.Seen != 705 || c.whole.Lost != 7 || c.whole.Total.Major != 1 || c.whole.Total.Failed != 1 {
			t.Errorf("%+v", c.whole)
		}
		if k := c.whole.kind("anon"); k.Minor != 701 || k.bytes() != 701*4096 {
			t.Errorf("anon: %+v", k)
		}
		if by := c.whole.table(t, "uid"); len(by.Rows) != 1 || by.Rows[0].UID != nil {
			t.Errorf("a user that is not known: %+v", by.Rows)
		}
	}
}

// The header of CSV is there once, however many intervals follow.
func TestStatCSV(t *testing.T) {
	batches := []fault.Batch{{Faults: sampleFaults()}, {}, {Faults: sampleFaults()}}
	code, stdout, stderr := runWith(script(fakeSource{batches: batches}), "stat", "--csv", "-d", "300ms", "-i", "50ms", "--by", "process")
	if code != 0 || !strings.HasPrefix(stdout, "type,time,duration_ns,by,") || strings.Count(stdout, "duration_ns") != 1 {
		t.Errorf("exit code %d: %s\n%s", code, stdout, stderr)
	}
}

// Whatever is asked for, and however often, the lines of one table add up to all faults.
func TestStatCSVSums(t *testing.T) {
	code, stdout, stderr := runWith(script(fakeSource{batches: []fault.Batch{{Faults: sampleFaults()}}}), "stat", "--csv", "-d", "100ms", "--by", "kind,process,process", "--by", "kind,cpu", "--top", "1")
	rows, err := csv.NewReader(strings.NewReader(stdout)).ReadAll()
	if code != 0 || err != nil {
		t.Fatalf("exit code %d, %v: %s", code, err, stderr)
	}
	number := func(row []string, column string) (n int) {
		_, err := fmt.Sscan(row[slices.Index(rows[0], column)], &n)
		if err != nil {
			t.Fatalf("%s of %v: %v", column, row, err)
		}
		return n
	}
	got := map[string]int{}
	for _, row := range rows[1:] {
		n := number(row, "faults")
		got[row[slices.Index(rows[0], "by")]] += n
		if parts := number(row, "minor") + number(row, "major") + number(row, "failed") + number(row, "unknown"); parts != n {
			t.Errorf("%d of %d faults in %v", parts, n, row)
		}
	}
	want := len(sampleFaults())
	if !maps.Equal(got, map[string]int{"kind": want, "process": want, "cpu": want}) {
		t.Errorf("%v, want %d in each", got, want)
	}
}

// What was counted before a failure is shown.
func TestStatFailure(t *testing.T) {
	code, stdout, stderr := runWith(script(fakeSource{batches: []fault.Batch{{Faults: sampleFaults()}}, err: errors.New("ring gone")}), "stat", "--json")
	if code != exitFailure || !strings.Contains(stderr, "faultsnoop: reading faults: ring gone\n") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	if c := parseStat(t, stdout, stderr); c.whole.Seen != 5 {
		t.Errorf("%d faults", c.whole.Seen)
	}
}

func TestStatUsage(t *testing.T) {
	for args, want := range map[string]string{
		"stat --by pid":                           "--by",
		"stat --by kind,page,cpu,uid,access":      "5 tables, at most 4",
		"stat --json --csv":                       "contradict",
		"stat --kind unknown":                     "--kind",
		"stat --hook perf --kind cow":             "--hook perf cannot tell any of these kinds",
		"stat --columns pid":                      "unknown flag",
		"stat -i 0s":                              "-i",
		"trace --hook perf --kind anon,cow":       "--hook perf cannot tell any of these kinds",
		"trace --kind anon,cowfile":               "cowfile",
		"stat --by process,process -d 10ms extra": "unexpected argument",
	} {
		code, _, stderr := runWith(fakes["quiet"], strings.Fields(args)...)
		if code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d: %s", args, code, stderr)
		}
	}
}
