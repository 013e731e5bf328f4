package aggregate

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"time"

	"faultsnoop/internal/fault"
)

// Counter counts records as the BPF programs count faults.
type Counter struct {
	rows  fault.Rows
	limit int
}

// NewCounter returns a counter with a table for each of by, of at most limit rows in all.
func NewCounter(by []fault.By, limit int) *Counter {
	c := &Counter{limit: limit}
	for _, b := range by {
		c.rows.Tables = append(c.rows.Tables, fault.Table{By: b, Rows: map[fault.Key]fault.Cost{}})
	}
	return c
}

// Add counts a fault.
func (c *Counter) Add(f *fault.Fault) {
	cost := costOf(f)
	kind := &c.rows.Kinds[kindOf(f)]
	kind.Add(&cost)
	if f.Is(fault.HasLatency) {
		if kind.Buckets == nil {
			kind.Buckets = make([]uint64, Buckets)
		}
		kind.Buckets[Bucket(f.Latency)]++
	}
	for i := range c.rows.Tables {
		c.addTo(&c.rows.Tables[i], KeyOf(f, c.rows.Tables[i].By), &cost)
	}
}

func (c *Counter) addTo(t *fault.Table, key fault.Key, cost *fault.Cost) {
	row, ok := t.Rows[key]
	if !ok {
		if c.limit <= 0 {
			t.Other.Add(cost)
			return
		}
		c.limit--
	}
	row.Add(cost)
	t.Rows[key] = row
}

// Forget counts the rows that forgotten selects as what found no room.
func (c *Counter) Forget(forgotten func(*fault.Key) bool) {
	for i := range c.rows.Tables {
		t := &c.rows.Tables[i]
		for key, cost := range t.Rows {
			if forgotten(&key) {
				delete(t.Rows, key)
				t.Other.Add(&cost)
				c.limit++
			}
		}
	}
}

// Rows returns what was counted; it is the counter's and valid until the next Add.
func (c *Counter) Rows() *fault.Rows { return &c.rows }

func kindOf(f *fault.Fault) fault.Kind {
	if !f.Is(fault.HasKind) {
		return fault.KindUnknown
	}
	return f.Kind
}

func costOf(f *fault.Fault) fault.Cost {
	var c fault.Cost
	switch {
	case !f.Is(fault.HasResult):
		c.Unknown = 1
	case f.Result != fault.OK:
		c.Failed = 1
	case f.Major:
		c.Major = 1
	default:
		c.Minor = 1
	}
	if f.OK() {
		c.Bytes = f.Mapped()
	}
	if f.Is(fault.HasLatency) {
		c.Time, c.Max, c.OffCPU = f.Latency, f.Latency, f.OffCPU
	} else {
		c.Untimed = 1
	}
	if f.Stands > 1 {
		others := f.Stands - 1
		c.Others = fault.Estimate{Faults: others, Time: time.Duration(others) * c.Time, Bytes: others * c.Bytes}
	}
	return c
}

// KeyOf is the row that counts a fault in a table. Records know nothing of the user and
// the cgroup.
func KeyOf(f *fault.Fault, by fault.By) fault.Key {
	switch by {
	case fault.ByProcess:
		return fault.Key{ID: f.PID, Name: f.Process}
	case fault.ByThread:
		return fault.Key{ID: f.TID, Value: uint64(f.PID), Name: f.Comm}
	case fault.ByKind:
		return fault.Key{ID: uint32(kindOf(f))}
	case fault.ByFile, fault.ByMapping:
		k := fault.Key{Label: f.VMA.Name(), File: fault.FileKey{Dev: f.VMA.Dev, Inode: f.VMA.Inode}}
		if by == fault.ByMapping {
			k.ID, k.Value = f.PID, f.VMA.Start
			if k.Label == "[stack]" {
				k.Value, k.End = 0, f.VMA.End
			}
		}
		return k
	case fault.ByPage:
		const pageMask = 0xfff
		return fault.Key{ID: f.PID, Value: f.Address &^ pageMask}
	case fault.ByUID:
		return fault.Key{ID: fault.NoUID}
	case fault.ByCPU:
		return fault.Key{ID: f.CPU}
	case fault.ByAccess:
		return known(f, fault.HasAccess, uint32(f.Access))
	case fault.ByMode:
		return known(f, fault.HasMode, uint32(f.Mode))
	case fault.ByStack:
		return fault.Key{Value: stackOf(f)}
	case fault.BySample:
		return fault.Key{ID: f.TID, Value: stackOf(f), Name: f.Comm, Process: f.PID, Kind: kindOf(f), Major: f.Is(fault.HasMajor) && f.Major}
	case fault.ByResult:
		return known(f, fault.HasResult, uint32(f.Result))
	}
	return fault.Key{} // ByCgroup: no cgroup has the id 0
}

func stackOf(f *fault.Fault) uint64 {
	if f.StackID == 0 && f.Sampled != 0 {
		return fault.Stackless
	}
	return f.StackID
}

func known(f *fault.Fault, field fault.Field, value uint32) fault.Key {
	if !f.Is(field) {
		value = fault.Unset
	}
	return fault.Key{ID: value}
}

// WithStacks divides a table of all faults, by stack or by sample, that knows no stacks: stacked
// is one of those whose stack was asked for. What stacked has no row for stays with those of
// which it was not, so that the sum is that of all.
func WithStacks(all, stacked *fault.Table) fault.Table {
	t := fault.Table{By: all.By, Rows: maps.Clone(all.Rows), Other: all.Other}
	for key, cost := range stacked.Rows {
		if key.Value == 0 {
			continue
		}
		t.Rows[key] = cost
		key.Value = 0
		none, ok := t.Rows[key]
		if !ok {
			subtract(&t.Other, &cost)
		} else if subtract(&none, &cost); none.Faults() > 0 {
			t.Rows[key] = none
		} else {
			delete(t.Rows, key)
		}
	}
	return t
}

// subtract takes from a cost, which keeps its longest latency, a part of it.
func subtract(c, part *fault.Cost) {
	c.Minor -= min(c.Minor, part.Minor)
	c.Major -= min(c.Major, part.Major)
	c.Failed -= min(c.Failed, part.Failed)
	c.Unknown -= min(c.Unknown, part.Unknown)
	c.Untimed -= min(c.Untimed, part.Untimed)
	c.Time -= min(c.Time, part.Time)
	c.OffCPU -= min(c.OffCPU, part.OffCPU)
	c.Bytes -= min(c.Bytes, part.Bytes)
}

// Estimated divides the faults whose stack was not asked for among those of the same thread,
// kind and so on that stand for them. The sum remains what it is. Where none stands for them
// they stay what they are. OffCPU and Untimed are not divided.
func Estimated(t *fault.Table) fault.Table {
	out := fault.Table{By: t.By, Rows: maps.Clone(t.Rows), Other: t.Other}
	standing := map[fault.Key][]fault.Key{}
	for key, cost := range t.Rows {
		if key.Value != 0 && cost.Others.Faults > 0 {
			alike := key
			alike.Value = 0
			standing[alike] = append(standing[alike], key)
		}
	}
	for alike, keys := range standing {
		rest, ok := t.Rows[alike]
		if !ok {
			continue
		}
		slices.SortFunc(keys, func(a, b fault.Key) int { return cmp.Compare(a.Value, b.Value) })
		divide(&out, alike, rest, keys)
	}
	return out
}

// divide divides rest, which is the row of alike, among rows by what these stand for.
func divide(t *fault.Table, alike fault.Key, rest fault.Cost, rows []fault.Key) {
	var all, upTo fault.Cost
	for _, key := range rows {
		cost := t.Rows[key]
		all.Add(&cost)
	}
	// What none of them has had is not theirs: hooks do not ask for stacks of all that fails.
	of := func(n, seen uint64) uint64 {
		if seen == 0 {
			return 0
		}
		return n
	}
	given := fault.Cost{
		Minor: of(rest.Minor, all.Minor), Major: of(rest.Major, all.Major), Failed: of(rest.Failed, all.Failed), Unknown: of(rest.Unknown, all.Unknown),
		Time: time.Duration(of(uint64(rest.Time), uint64(all.Others.Time))), Bytes: of(rest.Bytes, all.Others.Bytes),
	}
	for _, key := range rows {
		row := t.Rows[key]
		from := upTo.Others
		upTo.Add(&row)
		faults := func(whole uint64) uint64 {
			return portion(whole, upTo.Others.Faults, all.Others.Faults) - portion(whole, from.Faults, all.Others.Faults)
		}
		row.Minor += faults(given.Minor)
		row.Major += faults(given.Major)
		row.Failed += faults(given.Failed)
		row.Unknown += faults(given.Unknown)
		row.Time += time.Duration(portion(uint64(given.Time), uint64(upTo.Others.Time), uint64(all.Others.Time)) -
			portion(uint64(given.Time), uint64(from.Time), uint64(all.Others.Time)))
		row.Bytes += portion(given.Bytes, upTo.Others.Bytes, all.Others.Bytes) - portion(given.Bytes, from.Bytes, all.Others.Bytes)
		t.Rows[key] = row
	}
	if subtract(&rest, &given); rest.Faults() > 0 || rest.Time > 0 || rest.Bytes > 0 {
		t.Rows[alike] = rest
	} else {
		delete(t.Rows, alike)
	}
}

// portion is whole*part/of, 0 of nothing.
func portion(whole, part, of uint64) uint64 {
	if of == 0 {
		return 0
	}
	hi, lo := bits.Mul64(whole, part)
	q, _ := bits.Div64(hi, lo, of)
	return q
}
