package aggregate

import (
	"maps"
	"slices"

	"faultsnoop/internal/fault"
)

// Snapshot is all that was counted up to a moment.
type Snapshot struct {
	Rows     *fault.Rows
	Counters fault.Counters
}

// Copy returns a snapshot that does not change when more is counted.
func (s *Snapshot) Copy() Snapshot {
	c := Snapshot{Rows: &fault.Rows{Kinds: s.Rows.Kinds}, Counters: s.Counters}
	for i := range c.Rows.Kinds {
		c.Rows.Kinds[i].Buckets = slices.Clone(s.Rows.Kinds[i].Buckets)
	}
	for _, t := range s.Rows.Tables {
		t.Rows = maps.Clone(t.Rows)
		c.Rows.Tables = append(c.Rows.Tables, t)
	}
	c.Counters.Lost = slices.Clone(s.Counters.Lost)
	return c
}

// Since is what was counted after an earlier snapshot of the same source. The longest
// latency of a kind is that of its histogram then; that of a row is only known, and
// else 0, if it was longer than all before.
func (s *Snapshot) Since(earlier *Snapshot) Snapshot {
	if earlier.Rows == nil {
		return *s
	}
	d := Snapshot{Rows: &fault.Rows{Names: s.Rows.Names}, Counters: countersSince(&s.Counters, &earlier.Counters)}
	for i := range s.Rows.Kinds {
		d.Rows.Kinds[i] = kindSince(&s.Rows.Kinds[i], &earlier.Rows.Kinds[i])
	}
	for i := range s.Rows.Tables {
		d.Rows.Tables = append(d.Rows.Tables, tableSince(&s.Rows.Tables[i], &earlier.Rows.Tables[i]))
	}
	return d
}

// KeepStackless raises the rows of faults without a stack to those of an earlier snapshot: a
// stack comes later than its fault, which until then is one without. Other snapshots that
// share the rows are not changed.
func (s *Snapshot) KeepStackless(earlier *Snapshot) {
	if earlier.Rows == nil {
		return
	}
	rows := *s.Rows
	rows.Tables = slices.Clone(rows.Tables)
	s.Rows = &rows
	for i := range s.Rows.Tables {
		t := &s.Rows.Tables[i]
		if t.By != fault.ByStack && t.By != fault.BySample {
			continue
		}
		t.Rows = maps.Clone(t.Rows)
		for key, before := range earlier.Rows.Tables[i].Rows {
			if key.Value == 0 {
				now := t.Rows[key]
				t.Rows[key] = atLeast(&now, &before)
			}
		}
	}
}

func atLeast(c, least *fault.Cost) fault.Cost {
	return fault.Cost{
		Minor: max(c.Minor, least.Minor), Major: max(c.Major, least.Major), Failed: max(c.Failed, least.Failed),
		Unknown: max(c.Unknown, least.Unknown), Untimed: max(c.Untimed, least.Untimed),
		Time: max(c.Time, least.Time), Max: max(c.Max, least.Max), OffCPU: max(c.OffCPU, least.OffCPU), Bytes: max(c.Bytes, least.Bytes),
	}
}

// Named returns rows as they are shown, with the names of their files. Rows that these do
// not tell apart are one: a file by two mounts that have the same path.
func Named(r *fault.Rows) *fault.Rows {
	named := &fault.Rows{Kinds: r.Kinds}
	for _, t := range r.Tables {
		rows := make(map[fault.Key]fault.Cost, len(t.Rows))
		for key, cost := range t.Rows {
			if key.Label == "" {
				key.Label = r.Names[key.File]
			}
			key.File = fault.FileKey{Dev: key.File.Dev, Inode: key.File.Inode}
			sum := rows[key]
			sum.Add(&cost)
			rows[key] = sum
		}
		t.Rows = rows
		named.Tables = append(named.Tables, t)
	}
	return named
}

func kindSince(now, before *fault.KindCost) fault.KindCost {
	d := fault.KindCost{Cost: costSince(&now.Cost, &before.Cost), Buckets: slices.Clone(now.Buckets)}
	highest := -1
	for i := range d.Buckets {
		if i < len(before.Buckets) {
			d.Buckets[i] -= before.Buckets[i]
		}
		if d.Buckets[i] > 0 {
			highest = i
		}
	}
	if d.Max == 0 && highest >= 0 {
		d.Max = min(Bound(highest), now.Max)
	}
	return d
}

func tableSince(now, before *fault.Table) fault.Table {
	d := fault.Table{By: now.By, Rows: map[fault.Key]fault.Cost{}, Other: costSince(&now.Other, &before.Other)}
	for key, cost := range now.Rows {
		old := before.Rows[key]
		if diff := costSince(&cost, &old); diff.Faults() > 0 {
			d.Rows[key] = diff
		}
	}
	return d
}

func costSince(now, before *fault.Cost) fault.Cost {
	d := fault.Cost{
		Minor: now.Minor - before.Minor, Major: now.Major - before.Major, Failed: now.Failed - before.Failed,
		Unknown: now.Unknown - before.Unknown, Untimed: now.Untimed - before.Untimed,
		Time: now.Time - before.Time, Bytes: now.Bytes - before.Bytes, OffCPU: now.OffCPU - before.OffCPU,
		Others: fault.Estimate{
			Faults: now.Others.Faults - before.Others.Faults, Time: now.Others.Time - before.Others.Time,
			Bytes: now.Others.Bytes - before.Others.Bytes,
		},
	}
	if now.Max > before.Max {
		d.Max = now.Max
	}
	return d
}

func countersSince(now, before *fault.Counters) fault.Counters {
	d := fault.Counters{
		Seen: now.Seen - before.Seen, Filtered: now.Filtered - before.Filtered, Untimed: now.Untimed - before.Untimed,
		Minor: now.Minor - before.Minor, Major: now.Major - before.Major, Failed: now.Failed - before.Failed,
		Unremembered: now.Unremembered - before.Unremembered,
	}
	for _, l := range now.Lost {
		for _, old := range before.Lost {
			if old.Where == l.Where {
				l.Count -= old.Count
			}
		}
		if l.Count > 0 {
			d.Lost = append(d.Lost, l)
		}
	}
	return d
}
