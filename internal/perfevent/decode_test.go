package perfevent

import (
	"encoding/binary"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// raw builds the bytes of records.
type raw []byte

func (b raw) u64(vs ...uint64) raw {
	for _, v := range vs {
		b = binary.NativeEndian.AppendUint64(b, v)
	}
	return b
}

func (b raw) u32(vs ...uint32) raw {
	for _, v := range vs {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

// text is padded to 8 bytes, with at least one NUL.
func (b raw) text(s string) raw {
	b = append(b, s...)
	for range 8 - len(s)%8 {
		b = append(b, 0)
	}
	return b
}

func (b raw) trailer(time uint64) raw { return b.u32(7, 7).u64(time).u32(3, 0) }

func sampleBytes(k kind, pid, tid uint32, time, addr uint64) raw {
	b := raw{}.u64(0x400000).u32(pid, tid).u64(time, addr)
	if k != minor {
		b = b.u32(3, 0)
	}
	if k == major {
		b = b.u64(1)
	}
	return b
}

// framed puts a header in front.
func framed(typ uint32, misc uint16, body raw) raw {
	b := raw{}.u32(typ)
	b = binary.NativeEndian.AppendUint16(b, misc)
	b = binary.NativeEndian.AppendUint16(b, uint16(headerSize+len(body)))
	return append(b, body...)
}

func TestDecode(t *testing.T) {
	mmap := func(path string, flags uint32) raw {
		return raw{}.u32(40, 41).u64(0x7000, 0x3000, 0x2000).u32(8, 1).u64(1234, 5).
			u32(unix.PROT_READ|unix.PROT_EXEC, flags).text(path).trailer(50)
	}
	library := process.Mapping{
		Start: 0x7000, End: 0xa000, PgOff: 0x2000 / pageSize, HasPgOff: true,
		Flags: 0x5, Dev: 8<<20 | 1, Inode: 1234,
		Path: "/usr/lib/libc.so.6", Label: "libc.so.6", ExactSince: process.Never, Since: 50,
	}
	shared := library // VM_READ, VM_EXEC and VM_MAYSHARE
	shared.Flags |= 0x80
	shared.Path, shared.Label = "/memfd:x (deleted)", "memfd:x"
	gone := library
	gone.Path, gone.Label, gone.Deleted = "/usr/lib/old.so (deleted)", "old.so", true

	for _, test := range []struct {
		name string
		typ  uint32
		misc uint16
		body raw
		want *record // nil: nothing of interest
		side *side
	}{
		{
			"minor", unix.PERF_RECORD_SAMPLE, 2, sampleBytes(minor, 40, 41, 50, 0x7123),
			&record{kind: minor, ip: 0x400000, pid: 40, tid: 41, time: 50, addr: 0x7123}, nil,
		},
		{
			"major in kernel mode", unix.PERF_RECORD_SAMPLE, 1, sampleBytes(major, 40, 41, 50, 0x7123),
			&record{kind: major, ip: 0x400000, pid: 40, tid: 41, time: 50, addr: 0x7123, kernel: true}, nil,
		},
		{
			"vsyscall", unix.PERF_RECORD_SAMPLE, 2, sampleBytes(entry, 40, 41, 50, 0xffffffffff600400),
			&record{kind: entry, ip: 0x400000, pid: 40, tid: 41, time: 50, addr: 0xffffffffff600400}, nil,
		},
		{
			"thread that is gone", unix.PERF_RECORD_SAMPLE, 2, sampleBytes(minor, 0xffffffff, 0xffffffff, 50, 1),
			&record{kind: minor, ip: 0x400000, time: 50, addr: 1}, nil,
		},
		{
			"mmap2", unix.PERF_RECORD_MMAP2, 2, mmap("/usr/lib/libc.so.6", unix.MAP_PRIVATE),
			&record{kind: mapped, pid: 40, tid: 41, time: 50}, &side{mapping: library},
		},
		{
			"mmap2 shared", unix.PERF_RECORD_MMAP2, 2, mmap("/memfd:x (deleted)", unix.MAP_SHARED),
			&record{kind: mapped, pid: 40, tid: 41, time: 50}, &side{mapping: shared},
		},
		{
			"mmap2 of a deleted file", unix.PERF_RECORD_MMAP2, 2, mmap("/usr/lib/old.so (deleted)", unix.MAP_PRIVATE),
			&record{kind: mapped, pid: 40, tid: 41, time: 50}, &side{mapping: gone},
		},
		{
			"comm", unix.PERF_RECORD_COMM, 0, raw{}.u32(40, 41).text("worker").trailer(50),
			&record{kind: renamed, pid: 40, tid: 41, time: 50}, &side{comm: fault.MakeComm("worker")},
		},
		{
			"exec", unix.PERF_RECORD_COMM, miscCommExec, raw{}.u32(40, 40).text("sh").trailer(50),
			&record{kind: renamed, pid: 40, tid: 40, time: 50}, &side{comm: fault.MakeComm("sh"), exec: true},
		},
		{
			"fork", unix.PERF_RECORD_FORK, 0, raw{}.u32(50, 40, 51, 41).u64(49).trailer(50),
			&record{kind: forked, pid: 50, tid: 51, time: 50}, &side{parentPID: 40, parentTID: 41},
		},
		{
			"exit", unix.PERF_RECORD_EXIT, 0, raw{}.u32(50, 40, 51, 41).u64(49).trailer(50),
			&record{kind: exited, pid: 50, tid: 51, time: 50}, nil,
		},
		{
			"lost", unix.PERF_RECORD_LOST, 0, raw{}.u64(3, 1000).trailer(50),
			&record{kind: loss, time: 50}, &side{until: 50},
		},
		{
			"lost, written by the event of minor faults", unix.PERF_RECORD_LOST, 0,
			raw{}.u64(3, 1000).u32(7, 7).u64(50),
			&record{kind: loss, time: 50}, &side{until: 50},
		},
		{"throttle", unix.PERF_RECORD_THROTTLE, 0, raw{}.u64(1, 2, 3).trailer(50), nil, nil},
	} {
		d := decoder{}
		var got record
		ok, err := d.decode(test.typ, test.misc, test.body, &got)
		if err != nil || ok != (test.want != nil) {
			t.Errorf("%s: %v, %v", test.name, ok, err)
			continue
		}
		if !ok {
			continue
		}
		if !reflect.DeepEqual(got.side, test.side) {
			t.Errorf("%s:\n got %+v\nwant %+v", test.name, got.side, test.side)
		}
		got.side = nil
		if got != *test.want {
			t.Errorf("%s:\n got %+v\nwant %+v", test.name, got, *test.want)
		}
		for n := range test.body {
			// A short record is an error, never a panic or a shorter name taken for the whole.
			d.decode(test.typ, test.misc, test.body[:n], &got)
		}
	}
}

// TestDecodeIDs decodes the layout that tells sets of events apart.
func TestDecodeIDs(t *testing.T) {
	d := decoder{sets: map[uint64]uint32{9: 4}}
	for id, set := range map[uint64]uint32{9: 4, 10: 0} {
		var got record
		body := append(raw{}.u64(id), sampleBytes(entry, 40, 41, 50, 0x7123)...)
		ok, err := d.decode(unix.PERF_RECORD_SAMPLE, 2, body, &got)
		want := record{kind: entry, ip: 0x400000, pid: 40, tid: 41, time: 50, addr: 0x7123, set: set}
		if !ok || err != nil || got != want {
			t.Errorf("id %d: got %+v, %v, %v, want %+v", id, got, ok, err, want)
		}
	}
	var got record
	ok, err := d.decode(unix.PERF_RECORD_COMM, 0, raw{}.u32(40, 41).text("x").trailer(50).u64(9), &got)
	if !ok || err != nil || got.time != 50 || got.side.comm != fault.MakeComm("x") {
		t.Errorf("got %+v, %v, %v", got, ok, err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(uint32(unix.PERF_RECORD_SAMPLE), uint16(2), []byte(sampleBytes(minor, 2, 3, 4, 5)))
	f.Add(uint32(unix.PERF_RECORD_COMM), uint16(2), []byte(raw{}.u32(1, 2).text("x").trailer(3)))
	f.Add(uint32(unix.PERF_RECORD_MMAP2), uint16(2), make([]byte, 120))
	f.Fuzz(func(t *testing.T, typ uint32, misc uint16, b []byte) {
		d := decoder{}
		var rec record
		d.decode(typ, misc, b, &rec)
	})
}

// fakeRing is a ring of one page that the test writes as the kernel does.
func fakeRing(cpu int) *ring {
	return &ring{cpu: cpu, meta: &unix.PerfEventMmapPage{}, data: make([]byte, pageSize)}
}

// write adds a record if there is room for it.
func (r *ring) write(b raw) bool {
	size := uint64(len(r.data))
	if r.meta.Data_head-r.meta.Data_tail+uint64(len(b)) > size {
		return false
	}
	for _, c := range b {
		r.data[r.meta.Data_head%size] = c
		r.meta.Data_head++
	}
	return true
}

func TestRingWraps(t *testing.T) {
	r, d := fakeRing(3), decoder{}
	var want uint64
	for round := range 50 {
		for i := range 20 { // 20 names of 72 bytes do not divide a page
			r.write(framed(unix.PERF_RECORD_COMM, 0, raw{}.u32(1, 2).text("name of a thread").trailer(uint64(round*100+i))))
		}
		if err := r.read(&d, 1000, uint64(round*100+50)); err != nil {
			t.Fatal(err)
		}
		for r.has(^uint64(0)) {
			rec := r.queue[r.next]
			r.next++
			if rec.cpu != 3 || rec.side == nil || rec.side.comm != fault.MakeComm("name of a thread") || rec.time != want/20*100+want%20 {
				t.Fatalf("record %d: %+v", want, rec)
			}
			want++
		}
		if r.through != uint64(round*100+50) {
			t.Fatalf("read through %d", r.through)
		}
	}
	if want != 1000 {
		t.Errorf("%d records read", want)
	}
}

func TestRingLimitAndFull(t *testing.T) {
	r, d := fakeRing(0), decoder{}
	var written int
	for r.write(framed(unix.PERF_RECORD_SAMPLE, 2, sampleBytes(minor, 1, 1, uint64(written+1), 0))) {
		written++
	}
	if err := r.read(&d, 10, 5000); err != nil {
		t.Fatal(err)
	}
	// Ten samples and the suspicion that more than the ring holds has happened.
	if n := len(r.queue); n != 11 || r.queue[10].kind != loss || r.queue[10].time != 10 || r.through != 10 {
		t.Fatalf("%d records, last %+v, through %d", n, r.queue[n-1], r.through)
	}
	if err := r.read(&d, 1000, 5000); err != nil {
		t.Fatal(err)
	}
	if d.got[minor] != uint64(written) || r.through != 5000 {
		t.Errorf("read %d of %d, through %d", d.got[minor], written, r.through)
	}
}

// TestRingForeignClock reads samples whose times are from another clock.
func TestRingForeignClock(t *testing.T) {
	r, d := fakeRing(0), decoder{}
	// What lies behind the present is foreign, so the times start from it.
	base := process.Now() - 1e9
	r.through, r.last = base, base
	write := func(time uint64) {
		r.write(framed(unix.PERF_RECORD_SAMPLE, 2, sampleBytes(minor, 1, 1, time, 0)))
	}
	write(base + 5)
	write(7)                 // long ago
	write(base + 4 - settle) // before the one before
	write(1 << 62)           // in the future
	write(base + 6)
	if err := r.read(&d, 10, base+10); err != nil {
		t.Fatal(err)
	}
	for i, want := range []record{{time: base + 5}, {time: base + 5, askew: true}, {time: base + 5, askew: true}, {time: base + 5, askew: true}, {time: base + 6}} {
		if got := r.queue[i]; got.time != want.time || got.askew != want.askew {
			t.Errorf("record %d: time %d, askew %v, want %+v", i, got.time, got.askew, want)
		}
	}
}

// TestRingLatePublication reads a sample that was not there yet when all before a later
// time had been read.
func TestRingLatePublication(t *testing.T) {
	r, d := fakeRing(0), decoder{}
	now := process.Now()
	r.through, r.last = now-1e6, now-1e9
	for _, test := range []struct {
		time  uint64
		askew bool
	}{
		{r.through - maxDelay - 1, true},
		{r.through - maxDelay, false},
		{r.through - 1, false},
	} {
		r.write(framed(unix.PERF_RECORD_SAMPLE, 2, sampleBytes(minor, 1, 1, test.time, 0)))
		if err := r.read(&d, 10, now-1e6); err != nil {
			t.Fatal(err)
		}
		rec := r.queue[len(r.queue)-1]
		if rec.askew != test.askew || !test.askew && rec.time != test.time {
			t.Errorf("time %d, askew %v, want %+v", rec.time, rec.askew, test)
		}
	}
}

func TestRingCorrupt(t *testing.T) {
	for _, length := range []uint16{0, 4, 4000} {
		r, d := fakeRing(0), decoder{}
		b := framed(unix.PERF_RECORD_SAMPLE, 2, sampleBytes(minor, 1, 1, 1, 0))
		binary.NativeEndian.PutUint16(b[6:], length)
		r.write(b)
		if err := r.read(&d, 10, 1); err == nil {
			t.Errorf("a record of %d bytes was read", length)
		}
		if err := r.read(&d, 10, 2); err != nil {
			t.Errorf("the ring stays unusable: %v", err)
		}
	}
}
