package aggregate

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

// resolved is what most faults know.
const resolved = fault.HasResult | fault.HasMajor | fault.HasLatency | fault.HasKind | fault.HasAfter | fault.HasAccess | fault.HasMode

// sum adds up a table.
func sum(t *fault.Table) fault.Cost {
	total := t.Other
	for _, c := range t.Rows {
		total.Add(&c)
	}
	return total
}

// all adds up the kinds.
func all(r *fault.Rows) fault.Cost {
	var total fault.Cost
	for i := range r.Kinds {
		total.Add(&r.Kinds[i].Cost)
	}
	return total
}

func TestCost(t *testing.T) {
	for name, test := range map[string]struct {
		f    fault.Fault
		want fault.Cost
	}{
		"minor": {
			fault.Fault{Known: resolved, Latency: 5, Pages: 2},
			fault.Cost{Minor: 1, Time: 5, Max: 5, Bytes: 8192},
		},
		"major": {
			fault.Fault{Known: resolved, Major: true, Latency: 7, OffCPU: 6, Level: 1, Pages: 1},
			fault.Cost{Major: 1, Time: 7, Max: 7, OffCPU: 6, Bytes: 2 << 20},
		},
		"failed": { // maps nothing, whatever stood in the table
			fault.Fault{Known: resolved, Result: fault.SIGBUS, Latency: 9, Pages: 1},
			fault.Cost{Failed: 1, Time: 9, Max: 9},
		},
		"failed, major": {
			fault.Fault{Known: resolved, Result: fault.OOM, Major: true, Latency: 9},
			fault.Cost{Failed: 1, Time: 9, Max: 9},
		},
		"unknown":         {fault.Fault{Latency: 3}, fault.Cost{Unknown: 1, Untimed: 1}},
		"no time":         {fault.Fault{Known: resolved &^ fault.HasLatency, Latency: 3, Pages: 1}, fault.Cost{Minor: 1, Untimed: 1, Bytes: 4096}},
		"no time at all":  {fault.Fault{Known: resolved}, fault.Cost{Minor: 1}},
		"no page table":   {fault.Fault{Known: resolved &^ fault.HasAfter, Pages: 1}, fault.Cost{Minor: 1}},
		"result not told": {fault.Fault{Known: resolved &^ fault.HasResult, Latency: 2}, fault.Cost{Unknown: 1, Time: 2, Max: 2}},
	} {
		c := NewCounter([]fault.By{fault.ByCPU}, 1)
		c.Add(&test.f)
		if got := all(c.Rows()); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
		if got := c.Rows().Tables[0].Rows[fault.Key{}]; got != test.want {
			t.Errorf("%s in a table: %+v, want %+v", name, got, test.want)
		}
		if test.want.Faults() != 1 {
			t.Errorf("%s: counted as %d faults", name, test.want.Faults())
		}
	}
}

func TestKeyOf(t *testing.T) {
	f := fault.Fault{
		PID: 11, TID: 12, CPU: 3, Process: fault.MakeComm("proc"), Comm: fault.MakeComm("thread"), Address: 0x7f1234567abc,
		Known: resolved | fault.HasVMA | fault.HasLabel, Kind: fault.Cow, Access: fault.Write, Mode: fault.Remote, Result: fault.OOM,
		VMA: fault.VMA{Start: 0x7f1234500000, Dev: 8, Inode: 99, Label: "libc.so.6"},
	}
	var none fault.Fault
	for by, want := range map[fault.By][2]fault.Key{
		fault.ByProcess: {{ID: 11, Name: fault.MakeComm("proc")}, {}},
		fault.ByThread:  {{ID: 12, Value: 11, Name: fault.MakeComm("thread")}, {}},
		fault.ByKind:    {{ID: uint32(fault.Cow)}, {ID: uint32(fault.KindUnknown)}},
		fault.ByFile:    {{Label: "libc.so.6", File: fault.FileKey{Dev: 8, Inode: 99}}, {}},
		fault.ByMapping: {{ID: 11, Value: 0x7f1234500000, Label: "libc.so.6", File: fault.FileKey{Dev: 8, Inode: 99}}, {}},
		fault.ByPage:    {{ID: 11, Value: 0x7f1234567000}, {}},
		fault.ByCgroup:  {{}, {}},
		fault.ByUID:     {{ID: fault.NoUID}, {ID: fault.NoUID}},
		fault.ByCPU:     {{ID: 3}, {}},
		fault.ByAccess:  {{ID: uint32(fault.Write)}, {ID: fault.Unset}},
		fault.ByMode:    {{ID: uint32(fault.Remote)}, {ID: fault.Unset}},
		fault.ByResult:  {{ID: uint32(fault.OOM)}, {ID: fault.Unset}},
	} {
		if got := KeyOf(&f, by); got != want[0] {
			t.Errorf("by %v: %+v, want %+v", by, got, want[0])
		}
		if got := KeyOf(&none, by); got != want[1] {
			t.Errorf("by %v, nothing known: %+v, want %+v", by, got, want[1])
		}
	}
}

// A stack that grows is one mapping.
func TestKeyOfStack(t *testing.T) {
	for _, start := range []uint64{0x7ffe12300000, 0x7ffe12200000} {
		f := fault.Fault{PID: 11, VMA: fault.VMA{Start: start, End: 0x7ffe12340000, Label: "[stack]"}}
		if got, want := KeyOf(&f, fault.ByMapping), (fault.Key{ID: 11, End: 0x7ffe12340000, Label: "[stack]"}); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}

// Whatever finds no row is in the row of all others: no fault is lost.
func TestCounterOverflow(t *testing.T) {
	const pages, names, limit = 150_000, 12_000, 1000
	tables := []fault.By{fault.ByPage, fault.ByProcess, fault.ByThread, fault.ByKind}
	c := NewCounter(tables, limit)
	var want fault.Cost
	var buckets uint64
	for i := range pages {
		name := i % names
		f := fault.Fault{
			PID: uint32(name + 1), TID: uint32(i + 1), Address: 0x6e0000000000 + uint64(i)*4096 + uint64(i%4096),
			Process: fault.MakeComm(fmt.Sprintf("worker-%d", name)), Known: resolved, Pages: 1,
			Kind: fault.Kind(i % int(fault.Spurious+1)), Major: i%10 == 0, Latency: time.Duration(i) * time.Microsecond,
		}
		switch i % 7 {
		case 1:
			f.Result = fault.SIGBUS
		case 2:
			f.Known &^= fault.HasLatency
		case 3:
			f.Known &^= fault.HasResult
		}
		if f.Is(fault.HasLatency) {
			buckets++
		}
		cost := costOf(&f)
		want.Add(&cost)
		c.Add(&f)
	}
	if want.Faults() != pages {
		t.Fatalf("%d faults, want %d", want.Faults(), pages)
	}
	if got := all(c.Rows()); got != want {
		t.Errorf("kinds: %+v, want %+v", got, want)
	}
	rows := 0
	for i := range c.Rows().Tables {
		table := &c.Rows().Tables[i]
		rows += len(table.Rows)
		if got := sum(table); got != want || table.By != tables[i] {
			t.Errorf("table by %v: %+v, want %+v", table.By, got, want)
		}
		if table.By != fault.ByKind && table.Other.Faults() == 0 {
			t.Errorf("table by %v: %d rows and nothing without one", table.By, len(table.Rows))
		}
	}
	if rows != limit {
		t.Errorf("%d rows, want %d", rows, limit)
	}
	var counted uint64
	for i := range c.Rows().Kinds {
		for _, n := range c.Rows().Kinds[i].Buckets {
			counted += n
		}
	}
	if counted != buckets {
		t.Errorf("%d latencies in the histograms, want %d", counted, buckets)
	}
}

// With room for all rows there are no others.
func TestCounterRoom(t *testing.T) {
	const pages = 150_000
	c := NewCounter([]fault.By{fault.ByPage, fault.ByKind}, pages+1)
	for i := range pages {
		c.Add(&fault.Fault{PID: 1, Address: uint64(i) << 12, Known: resolved, Kind: fault.Anon, Pages: 1})
	}
	byPage, byKind := &c.Rows().Tables[0], &c.Rows().Tables[1]
	if len(byPage.Rows) != pages || byPage.Other != (fault.Cost{}) || byKind.Other != (fault.Cost{}) {
		t.Errorf("%d rows by page, others %+v and %+v", len(byPage.Rows), byPage.Other, byKind.Other)
	}
	want := fault.Cost{Minor: pages, Bytes: pages * 4096}
	if got := byKind.Rows[fault.Key{ID: uint32(fault.Anon)}]; got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// Counting in two parts and adding them up is counting at once: what Live does with
// the parts of CPUs.
func TestCostsAdd(t *testing.T) {
	var faults []fault.Fault
	for i := range 100 {
		faults = append(faults, fault.Fault{CPU: uint32(i % 3), Known: resolved, Latency: time.Duration(i * i), Pages: uint16(i % 16)})
	}
	count := func(faults []fault.Fault) map[fault.Key]fault.Cost {
		c := NewCounter([]fault.By{fault.ByCPU}, 10)
		for i := range faults {
			c.Add(&faults[i])
		}
		return c.Rows().Tables[0].Rows
	}
	merged := count(faults[:37])
	for key, cost := range count(faults[37:]) {
		row := merged[key]
		row.Add(&cost)
		merged[key] = row
	}
	if want := count(faults); !maps.Equal(merged, want) {
		t.Errorf("%+v, want %+v", merged, want)
	}
}

// snapshotOf copies a counter, as is done at the end of an interval.
func snapshotOf(c *Counter, counters fault.Counters) Snapshot {
	s := Snapshot{Rows: c.Rows(), Counters: counters}
	return s.Copy()
}

// Intervals add up to the whole, whatever is counted in which.
func TestSinceAddsUp(t *testing.T) {
	c := NewCounter([]fault.By{fault.ByPage, fault.ByAccess}, 40)
	var before Snapshot
	var kinds [fault.Spurious + 1]fault.Cost
	buckets := make([]uint64, Buckets)
	tables := make([]fault.Cost, 2)
	var counters, seen fault.Counters
	n := 0
	for _, faults := range []int{0, 10, 1, 0, 90, 7} {
		for range faults {
			n++
			f := fault.Fault{
				PID: 1, Address: uint64(n%60) << 12, Known: resolved, Kind: fault.Kind(n % 3), Access: fault.Access(n % 2),
				Latency: time.Duration(n*7919%1000) * time.Microsecond, Pages: 1,
			}
			if n%5 == 0 {
				f.Known &^= fault.HasLatency
			}
			c.Add(&f)
		}
		counters.Seen += uint64(faults)
		counters.Filtered += 3
		counters.Lost = []fault.Loss{{Where: "ring buffer full", Count: uint64(n)}}
		now := snapshotOf(c, counters)
		diff := now.Since(&before)
		for i := range diff.Rows.Kinds {
			kinds[i].Add(&diff.Rows.Kinds[i].Cost)
			for b, count := range diff.Rows.Kinds[i].Buckets {
				buckets[b] += count
			}
		}
		for i := range diff.Rows.Tables {
			cost := sum(&diff.Rows.Tables[i])
			tables[i].Add(&cost)
			if cost.Faults() != uint64(faults) {
				t.Errorf("table %d of an interval: %d faults, want %d", i, cost.Faults(), faults)
			}
			for key, row := range diff.Rows.Tables[i].Rows {
				if row.Faults() == 0 {
					t.Errorf("table %d of an interval: row %+v without faults", i, key)
				}
			}
		}
		seen.Seen += diff.Counters.Seen
		seen.Filtered += diff.Counters.Filtered
		seen.Lost = append(seen.Lost, diff.Counters.Lost...)
		before = now
	}
	whole := c.Rows()
	for i := range kinds {
		want := whole.Kinds[i].Cost
		if kinds[i] != want {
			t.Errorf("kind %v: intervals %+v, whole %+v", fault.Kind(i), kinds[i], want)
		}
		for b, count := range whole.Kinds[i].Buckets {
			buckets[b] -= count
		}
	}
	if slices.ContainsFunc(buckets, func(n uint64) bool { return n != 0 }) {
		t.Error("the histograms of the intervals are not that of the whole")
	}
	for i := range tables {
		if got, want := tables[i].Faults(), sum(&whole.Tables[i]); got != want.Faults() || got != uint64(n) {
			t.Errorf("table %d: intervals %d faults, whole %d of %d", i, got, want.Faults(), n)
		}
	}
	if seen.Seen != counters.Seen || seen.Filtered != counters.Filtered || seen.LostTotal() != counters.LostTotal() {
		t.Errorf("intervals %+v, whole %+v", seen, counters)
	}
}

// The longest latency of an interval is known exactly only if it is the longest so far.
func TestSinceMax(t *testing.T) {
	c := NewCounter([]fault.By{fault.ByCPU}, 9)
	add := func(latencies ...time.Duration) Snapshot {
		for _, d := range latencies {
			c.Add(&fault.Fault{Known: resolved, Kind: fault.Swap, Latency: d})
		}
		return snapshotOf(c, fault.Counters{})
	}
	first := add(5000, 100)
	for _, test := range []struct {
		latencies []time.Duration
		kind, row time.Duration
	}{
		{[]time.Duration{900}, Bound(Bucket(900)), 0},
		{[]time.Duration{10, 7000}, 7000, 7000},
		{nil, 0, 0},
		{[]time.Duration{6990}, 7000, 0}, // of the same bucket as the longest
	} {
		now := add(test.latencies...)
		diff := now.Since(&first)
		if got := diff.Rows.Kinds[fault.Swap].Max; got != test.kind {
			t.Errorf("%v: longest of the kind %d, want %d", test.latencies, got, test.kind)
		}
		if got := diff.Rows.Tables[0].Rows[fault.Key{}].Max; got != test.row {
			t.Errorf("%v: longest of the row %d, want %d", test.latencies, got, test.row)
		}
		first = now
	}
}

// A row whose name comes, goes or changes is the same row: its interval has only what is
// new. Rows of one name are shown as one.
func TestSinceNames(t *testing.T) {
	first, again := fault.FileKey{Dev: 8, Inode: 5, Mount: 1, Hash: 7}, fault.FileKey{Dev: 8, Inode: 5, Mount: 2, Hash: 7}
	nameless := fault.FileKey{Hash: 7, Anon: true}
	snapshot := func(n uint64, names map[fault.FileKey]string) Snapshot {
		rows := map[fault.Key]fault.Cost{
			{File: first}: {Minor: 100 + n}, {File: again}: {Minor: 200 + n}, {File: nameless}: {Minor: 300 + n}, {Label: "[heap]"}: {Minor: 400 + n},
		}
		return Snapshot{Rows: &fault.Rows{Tables: []fault.Table{{By: fault.ByFile, Rows: rows}}, Names: names}}
	}
	both := map[fault.FileKey]string{first: "/a", again: "/a"}
	for _, test := range []struct {
		before, now map[fault.FileKey]string
		want        map[fault.Key]fault.Cost
	}{
		{nil, both, map[fault.Key]fault.Cost{
			{Label: "/a", File: fault.FileKey{Dev: 8, Inode: 5}}: {Minor: 4}, {}: {Minor: 2}, {Label: "[heap]"}: {Minor: 2},
		}},
		{both, nil, map[fault.Key]fault.Cost{
			{File: fault.FileKey{Dev: 8, Inode: 5}}: {Minor: 4}, {}: {Minor: 2}, {Label: "[heap]"}: {Minor: 2},
		}},
		{both, map[fault.FileKey]string{first: "/a", again: "/b", nameless: "[anon:x]"}, map[fault.Key]fault.Cost{
			{Label: "/a", File: fault.FileKey{Dev: 8, Inode: 5}}: {Minor: 2}, {Label: "/b", File: fault.FileKey{Dev: 8, Inode: 5}}: {Minor: 2},
			{Label: "[anon:x]"}: {Minor: 2}, {Label: "[heap]"}: {Minor: 2},
		}},
	} {
		before, now := snapshot(0, test.before), snapshot(2, test.now)
		diff := now.Since(&before)
		if got := Named(diff.Rows).Tables[0].Rows; !maps.Equal(got, test.want) {
			t.Errorf("names %v, then %v: %+v, want %+v", test.before, test.now, got, test.want)
		}
	}
}

// A copy stays what it was.
func TestCopy(t *testing.T) {
	c := NewCounter([]fault.By{fault.ByCPU}, 9)
	f := fault.Fault{Known: resolved, Latency: 5, Kind: fault.Anon}
	c.Add(&f)
	live := Snapshot{Rows: c.Rows(), Counters: fault.Counters{Lost: []fault.Loss{{Where: "a", Count: 1}}}}
	kept := live.Copy()
	c.Add(&f)
	live.Counters.Lost[0].Count = 9
	kind := &kept.Rows.Kinds[fault.Anon]
	if kind.Minor != 1 || kind.Buckets[5] != 1 || kept.Rows.Tables[0].Rows[fault.Key{}].Minor != 1 || kept.Counters.LostTotal() != 1 {
		t.Errorf("the copy has become %+v", kept)
	}
}

func TestWithStacks(t *testing.T) {
	key := func(tid uint32, stack uint64) fault.Key { return fault.Key{ID: tid, Value: stack} }
	cost := func(n uint64) fault.Cost {
		return fault.Cost{Minor: n, Time: time.Duration(n), OffCPU: time.Duration(n), Bytes: n, Max: 9}
	}
	all := fault.Table{By: fault.BySample, Other: cost(7), Rows: map[fault.Key]fault.Cost{key(1, 0): cost(100), key(2, 0): cost(20), key(3, 0): cost(5)}}
	stacked := fault.Table{By: fault.BySample, Other: cost(50), Rows: map[fault.Key]fault.Cost{
		key(1, 11): cost(30), key(1, 12): cost(10), key(2, 11): cost(20), key(4, 13): cost(3), key(3, 0): cost(2),
	}}
	got := WithStacks(&all, &stacked)
	want := map[fault.Key]fault.Cost{
		key(1, 0): cost(60), key(1, 11): cost(30), key(1, 12): cost(10), // what is left has no stack
		key(2, 11): cost(20), // nothing is
		key(3, 0):  cost(5),  // all is
		key(4, 13): cost(3),  // it had no room for a row
	}
	if !maps.Equal(got.Rows, want) || got.Other != cost(4) {
		t.Errorf("rows are %v and %v, want %v and %v", got.Rows, got.Other, want, cost(4))
	}
	var before, after uint64
	for _, c := range all.Rows {
		before += c.Faults()
	}
	for _, c := range got.Rows {
		after += c.Faults()
	}
	if before+all.Other.Faults() != after+got.Other.Faults() {
		t.Errorf("%d faults became %d", before+all.Other.Faults(), after+got.Other.Faults())
	}
}

// Of faults whose stack was not asked for each stands with those that stand for it, and nothing
// is lost or made.
func TestEstimated(t *testing.T) {
	key := func(tid uint32, stack uint64) fault.Key { return fault.Key{ID: tid, Value: stack} }
	cost := func(n, stands uint64) fault.Cost {
		c := fault.Cost{Minor: n, Time: time.Duration(10 * n), Bytes: 4096 * n}
		if stands > 1 {
			c.Others = fault.Estimate{Faults: n * (stands - 1), Time: c.Time * time.Duration(stands-1), Bytes: c.Bytes * (stands - 1)}
		}
		return c
	}
	same := func(a, b fault.Cost) bool {
		return a.Minor == b.Minor && a.Failed == b.Failed && a.Time == b.Time && a.Bytes == b.Bytes
	}
	in := fault.Table{By: fault.BySample, Other: cost(7, 1), Rows: map[fault.Key]fault.Cost{
		// At first all stacks were taken, then one of ten: 30, 10 and 20 stand for 90 and 180.
		key(1, 0): cost(300, 1), key(1, 11): cost(30, 1), key(1, 12): cost(10, 10), key(1, 13): cost(20, 10),
		key(2, 0): cost(5, 1), key(2, 11): cost(20, 1), // all were asked for: these are lost
		key(3, 0): cost(9, 1),                                    // none was
		key(5, 0): {Minor: 8, Failed: 3}, key(5, 11): cost(2, 5), // of no failed one
		// A stack was asked for and did not come.
		key(4, 0): cost(90, 1), key(4, 11): cost(5, 10), key(4, fault.Stackless): cost(5, 10),
	}}
	got := Estimated(&in)
	want := map[fault.Key]fault.Cost{
		key(1, 11): cost(30, 1), key(1, 12): cost(110, 1), key(1, 13): cost(220, 1),
		key(2, 0): cost(5, 1), key(2, 11): cost(20, 1), key(3, 0): cost(9, 1),
		key(4, 11): cost(50, 1), key(4, fault.Stackless): cost(50, 1),
		key(5, 0): {Failed: 3}, key(5, 11): {Minor: 10, Time: 20, Bytes: 8192},
	}
	if !maps.EqualFunc(got.Rows, want, same) || got.Other != in.Other {
		t.Errorf("rows are %v and %v, want %v and %v", got.Rows, got.Other, want, in.Other)
	}

	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		in := fault.Table{Rows: map[fault.Key]fault.Cost{}}
		for range r.IntN(50) {
			n := r.Uint64N(1 << 40)
			c := fault.Cost{Minor: n, Major: n / 3, Failed: n / 7, Unknown: n / 11, Time: time.Duration(n), Bytes: n}
			if stack := r.Uint64N(10); stack > 0 {
				c.Others = fault.Estimate{Faults: r.Uint64N(1 << 50), Time: time.Duration(r.Int64N(1 << 50)), Bytes: r.Uint64N(1 << 50)}
				in.Rows[key(r.Uint32N(3), stack)] = c
			} else {
				in.Rows[key(r.Uint32N(3), 0)] = c
			}
		}
		sum := func(t *fault.Table) (sum fault.Cost) {
			for _, c := range t.Rows {
				sum.Add(&c)
			}
			sum.Others, sum.Max = fault.Estimate{}, 0
			return sum
		}
		out := Estimated(&in)
		if before, after := sum(&in), sum(&out); before != after {
			t.Fatalf("%+v became %+v", before, after)
		}
		for key, c := range in.Rows {
			if now := out.Rows[key]; key.Value != 0 && (now.Faults() < c.Faults() || now.Time < c.Time || now.Bytes < c.Bytes) {
				t.Fatalf("%v: %+v became less, %+v", key, c, now)
			}
		}
	}
}

func TestForget(t *testing.T) {
	c := NewCounter([]fault.By{fault.ByStack}, 2)
	add := func(stack uint64) { c.Add(&fault.Fault{StackID: stack}) }
	for _, stack := range []uint64{1, 1, 2, 3} {
		add(stack)
	}
	c.Forget(func(k *fault.Key) bool { return k.Value == 1 })
	add(4) // there is room again
	table := &c.Rows().Tables[0]
	ids := slices.Sorted(func(yield func(uint64) bool) {
		for k := range table.Rows {
			if !yield(k.Value) {
				return
			}
		}
	})
	if !slices.Equal(ids, []uint64{2, 4}) || table.Other.Faults() != 3 {
		t.Errorf("rows of stacks %v and %d other faults, want 2, 4 and 3", ids, table.Other.Faults())
	}
}

// A stack that comes after its fault was shown as one without makes no row smaller than nothing.
func TestKeepStackless(t *testing.T) {
	snapshot := func(none, stacked uint64) Snapshot {
		return Snapshot{Rows: &fault.Rows{Tables: []fault.Table{{By: fault.ByStack, Rows: map[fault.Key]fault.Cost{
			{}: {Minor: none}, {Value: 1}: {Minor: stacked},
		}}}}}
	}
	before := snapshot(50, 50)
	now := snapshot(20, 80) // nothing new
	whole := now
	now.KeepStackless(&before)
	diff := now.Since(&before)
	if rows := diff.Rows.Tables[0].Rows; len(rows) != 1 || rows[fault.Key{Value: 1}].Minor != 30 {
		t.Errorf("rows are %v, want 30 with a stack", rows)
	}
	if rows := whole.Rows.Tables[0].Rows; rows[fault.Key{}].Minor != 20 {
		t.Errorf("rows of another snapshot have become %v", rows)
	}
	first := snapshot(1, 2)
	first.KeepStackless(&Snapshot{})
	if rows := first.Rows.Tables[0].Rows; rows[fault.Key{}].Minor != 1 {
		t.Errorf("rows are %v", rows)
	}
}
