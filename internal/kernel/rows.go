package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

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
	return out, l.readTables(out)
}

func (l *Live) readKinds(out *fault.Rows) error {
	var perCPU []faultKindRow
	for kind := range out.Kinds {
		if err := l.coll.Maps[faultMapKindRows].Lookup(uint32(kind), &perCPU); err != nil {
			return fmt.Errorf("reading the counts of kind %v: %w", fault.Kind(kind), err)
		}
		row := &out.Kinds[kind]
		row.Buckets = make([]uint64, len(perCPU[0].Buckets))
		for i := range perCPU {
			cost := costOf(&perCPU[i].Cost)
			row.Add(&cost)
			for b, n := range perCPU[i].Buckets {
				row.Buckets[b] += n
			}
		}
	}
	return nil
}

func (l *Live) readOther(out *fault.Rows) error {
	var perCPU []faultCost
	for i := range out.Tables {
		if err := l.coll.Maps[faultMapOtherRows].Lookup(uint32(i), &perCPU); err != nil {
			return fmt.Errorf("reading the counts without a row: %w", err)
		}
		for j := range perCPU {
			cost := costOf(&perCPU[j])
			out.Tables[i].Other.Add(&cost)
		}
	}
	return nil
}

func (l *Live) readTables(out *fault.Rows) error {
	type row struct {
		key  faultStatKey
		cost fault.Cost
	}
	var found []row
	var key faultStatKey
	var value faultCost
	rows := l.coll.Maps[faultMapStatRows].Iterate()
	for rows.Next(&key, &value) {
		if int(key.Table) < len(out.Tables) {
			found = append(found, row{key, costOf(&value)})
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("reading the tables: %w", err)
	}
	// A file's name is sent before it is counted: now those of all rows have arrived.
	if err := l.readNames(); err != nil {
		return err
	}
	out.Names = map[fault.FileKey]string{}
	for i := range found {
		k := l.decoder.key(&found[i].key)
		out.Tables[found[i].key.Table].Rows[k] = found[i].cost
		if name := l.decoder.rowName(&found[i].key); name != "" {
			out.Names[k.File] = name
		}
	}
	return nil
}

// readNames reads what is in the ring buffer: file names, since faults are counted.
func (l *Live) readNames() error {
	if l.drained {
		return nil
	}
	l.reader.SetDeadline(time.Now())
	for {
		err := l.reader.ReadInto(&l.record)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case errors.Is(err, ringbuf.ErrFlushed):
			l.drained = true
			return nil
		case err != nil:
			return fmt.Errorf("reading the ring buffer: %w", err)
		}
		l.decoder.decode(l.record.RawSample)
	}
}

func costOf(c *faultCost) fault.Cost {
	return fault.Cost{
		Minor: c.Minor, Major: c.Major, Failed: c.Failed, Unknown: c.Unknown, Untimed: c.Untimed,
		Time: time.Duration(c.Ns), Max: time.Duration(c.MaxNs), OffCPU: time.Duration(c.OffcpuNs), Bytes: c.Bytes,
	}
}

// key is the row's for good. What it is named by is not part of it if that may change.
func (d *decoder) key(k *faultStatKey) fault.Key {
	key := fault.Key{ID: k.Id, Value: k.Value, Name: *(*fault.Comm)(unsafe.Pointer(&k.Name))}
	switch k.Label {
	case labelFile, labelAnonName:
		key.File = fault.FileKey{Dev: k.File.Dev, Inode: k.File.Ino, Mount: k.File.Mount, Hash: k.File.Hash, Anon: k.Label == labelAnonName}
	default:
		name, _ := d.nameOf(k.Label, uint32(k.File.Ino), &k.File)
		key.Label = name.label
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
