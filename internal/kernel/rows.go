package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"faultsnoop/internal/fault"
)

// Rows reads what was counted, with a table for each of [Options.Tables]. Faults that
// are counted meanwhile may be in some rows and not in others.
func (l *Live) Rows() (*fault.Rows, error) {
	out := &fault.Rows{}
	if err := l.readKinds(out); err != nil {
		return nil, err
	}
	for _, by := range l.tables {
		out.Tables = append(out.Tables, fault.Table{By: by, Rows: map[fault.Key]fault.Cost{}})
	}
	if err := l.readOther(out); err != nil {
		return nil, err
	}
	if err := l.takeSamples(); err != nil {
		return nil, err
	}
	found, err := l.readRows()
	if err != nil {
		return nil, err
	}
	// A file's name and a row's longest latency are sent before they are counted: now those
	// of all rows have arrived.
	if err := l.readSent(); err != nil {
		return nil, err
	}
	for kind := range out.Kinds {
		l.decoder.raiseMax(&out.Kinds[kind].Cost, &faultStatKey{Table: tableKinds, Id: uint32(kind)})
	}
	for i := range out.Tables {
		l.decoder.raiseMax(&out.Tables[i].Other, &faultStatKey{Table: tableOthers, Id: uint32(i)})
	}
	l.fillTables(out, found)
	out.Stacks = l.decoder.takeStacks()
	l.stacks.add(out.Stacks)
	out.Samples, l.stacks.reaped = l.stacks.reaped, nil
	return out, nil
}

// takeSamples takes all that was counted by stack so far out of the kernel. What these stacks are
// is in the ring then.
func (l *Live) takeSamples() error {
	if _, ok := l.byStack(); ok && !l.stopped {
		return l.beginGeneration()
	}
	return l.harvest()
}

func (l *Live) readKinds(out *fault.Rows) error {
	perCPU, err := readMapped[faultKindRow](l.kinds)
	if err != nil {
		return fmt.Errorf("reading the counts of kinds: %w", err)
	}
	for i := range perCPU {
		row := &out.Kinds[i%len(out.Kinds)]
		if row.Buckets == nil {
			row.Buckets = make([]uint64, len(perCPU[i].Buckets))
		}
		cost := costOf(&perCPU[i].Cost)
		row.Add(&cost)
		for b, n := range perCPU[i].Buckets {
			row.Buckets[b] += n
		}
	}
	return nil
}

func (l *Live) readOther(out *fault.Rows) error {
	perCPU, err := readMapped[faultCost](l.others)
	if err != nil {
		return fmt.Errorf("reading the counts without a row: %w", err)
	}
	for i := range perCPU {
		if table := i % fault.MaxTables; table < len(out.Tables) {
			cost := costOf(&perCPU[i])
			out.Tables[table].Other.Add(&cost)
		}
	}
	return nil
}

// readMapped copies a map that is mapped, of values without padding.
func readMapped[T any](m *ebpf.Memory) ([]T, error) {
	var one T
	values := make([]T, uintptr(m.Size())/unsafe.Sizeof(one))
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(values))), uintptr(len(values))*unsafe.Sizeof(one))
	_, err := m.ReadAt(b, 0)
	return values, err
}

// statRow is a row of a table as the kernel has it.
type statRow struct {
	key  faultStatKey
	cost fault.Cost
}

// rowsAtATime is how many rows one system call reads: some 100 us of work.
const rowsAtATime = 2048

// eachBatch reads a hash map with one of its batch operations, as many elements at a time as
// keys and values have room for, and calls use with their number. An element that is changed
// meanwhile may come twice.
func eachBatch(
	batch func(*ebpf.MapBatchCursor, any, any, *ebpf.BatchOptions) (int, error), keys, values any, use func(n int),
) error {
	var cursor ebpf.MapBatchCursor
	for {
		var n int
		err := unpreempted(func() (err error) {
			n, err = batch(&cursor, keys, values, nil)
			return err
		})
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return err
		}
		if use(n); last {
			return nil
		}
	}
}

// readRows reads the rows of all tables. One that is counted meanwhile may come twice.
func (l *Live) readRows() ([]statRow, error) {
	var found []statRow
	keys, values := make([]faultStatKey, rowsAtATime), make([]faultCost, rowsAtATime)
	err := eachBatch(l.coll.Maps[faultMapStatRows].BatchLookup, keys, values, func(n int) {
		for i := range keys[:n] {
			found = append(found, statRow{keys[i], costOf(&values[i])})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("reading the tables: %w", err)
	}
	return found, nil
}

func (l *Live) fillTables(out *fault.Rows, found []statRow) {
	out.Names = map[fault.FileKey]string{}
	for i := range found {
		key, cost := &found[i].key, &found[i].cost
		if by, ok := l.byStack(); ok && int(key.Table) == by {
			continue // harvest has them
		}
		l.decoder.raiseMax(cost, key)
		t := &out.Tables[key.Table]
		k := l.decoder.key(t.By, key)
		t.Rows[k] = *cost
		if name := l.decoder.rowName(key); name != "" {
			out.Names[k.File] = name
		}
	}
}

// raiseMax makes the longest latency of a row that which was sent, if it is longer: of two
// CPUs at once the one that stores the row's last may have the shorter one.
func (d *decoder) raiseMax(c *fault.Cost, key *faultStatKey) {
	c.Max = max(c.Max, time.Duration(d.longest[*key]))
}

// readSent reads what is in the ring buffer. Faults, of which those are sent whose stack another
// library takes, are for the next batch.
func (l *Live) readSent() error {
	if l.drained {
		return nil
	}
	l.reader.SetDeadline(time.Now())
	for {
		err := l.reader.ReadInto(&l.record)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			l.stacks.before = 0
			return nil
		case errors.Is(err, ringbuf.ErrFlushed):
			l.drained = true
			return nil
		case err != nil:
			return fmt.Errorf("reading the ring buffer: %w", err)
		}
		l.stacks.read(len(l.record.RawSample))
		if f, ok := l.decoder.decode(l.record.RawSample); ok {
			l.early = append(l.early, f)
		}
	}
}

func costOf(c *faultCost) fault.Cost {
	n := &c.Tally.Faults
	return fault.Cost{
		Minor: n[outcomeMinor], Major: n[outcomeMajor], Failed: n[outcomeFailed], Unknown: n[outcomeUnknown], Untimed: c.Untimed,
		Time: time.Duration(c.Ns), Max: time.Duration(c.MaxNs), OffCPU: time.Duration(c.OffcpuNs), Bytes: c.Bytes,
	}
}

// key is the row's for good. What it is named by is not part of it if that may change.
func (d *decoder) key(by fault.By, k *faultStatKey) fault.Key {
	key := fault.Key{ID: k.Id, Value: k.Value, Name: *(*fault.Comm)(unsafe.Pointer(&k.Name))}
	switch k.Label {
	case labelFile, labelAnonName:
		key.File = fault.FileKey{Dev: k.File.Dev, Inode: k.File.Ino, Mount: k.File.Mount, Hash: k.File.Hash, Anon: k.Label == labelAnonName}
	default:
		name, _ := d.nameOf(k.Label, uint32(k.File.Ino), &k.File)
		key.Label = name.label
	}
	switch by {
	case fault.BySample:
		key.Label = ""
		key.Process, key.Kind, key.Major = uint32(k.File.Ino), fault.Kind(k.File.Dev), k.File.Mount != 0
	case fault.ByFile:
		if k.Label == labelThreadStack {
			key.Label = "[thread stacks]"
		}
	case fault.ByMapping:
		if k.Label == labelStack || k.Label == labelThreadStack {
			key.Value, key.End = 0, k.Value
		}
	}
	return key
}

// rowName is what a row by file or mapping is called now, empty if nobody knows.
func (d *decoder) rowName(k *faultStatKey) string {
	if k.Label != labelFile && k.Label != labelAnonName {
		return ""
	}
	name, _ := d.nameOf(k.Label, 0, &k.File)
	return cmp.Or(name.path, name.label)
}
