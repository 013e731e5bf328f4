package kernel

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unsafe"

	"faultsnoop/internal/fault"
)

// raw is a record as the ring buffer holds it; it aliases r.
func raw[T any](r *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(r)), unsafe.Sizeof(*r))
}

func nameRecord(key faultNameKey, name string) *faultNameRecord {
	r := &faultNameRecord{Type: recordName, Len: uint32(len(name)), Key: key}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&r.Name[0])), len(r.Name)), name)
	return r
}

func TestDecode(t *testing.T) {
	key := faultNameKey{Ino: 5, Hash: 6, Dev: 7}
	r := faultFaultRecord{
		Type: recordFault, Cpu: 3, StartNs: 1000, EndNs: 3500, Address: 0x7000_2345, Ip: 0x400000,
		VmaStart: 0x7000_0000, VmaEnd: 0x7000_8000, VmaPgoff: 16, VmaFlags: 0x75, File: key,
		HostPid: 11, HostTid: 12, Pid: 1, Tid: 2, Flags: 0x55, Attempts: 2, Known: 0xfff,
		Mode: 1, Access: 2, Result: 2, Major: 1, Label: labelFile,
		Kind: uint8(fault.Swap), EntryBefore: frameBits | 0x40, EntryAfter: 0x1234_5000 | 0x27, Pages: 3, Folio: 2,
		OffcpuNs: 700, Wait: uint8(fault.IO), ReclaimNs: 500, CompactionNs: 100, Cause: uint8(fault.AccErr), Again: 1,
	}
	copy(raw(&r.Comm), "worker")
	copy(raw(&r.Process), "server")
	d := newDecoder(4096)
	d.reclaim = true

	if f, ok := d.decode(raw(&r)); !ok || f.Is(fault.HasLabel) {
		t.Errorf("label %q of a name that has not come", f.VMA.Label)
	}
	name := nameRecord(key, "lib.so\x00usr\x00")
	name.Flags = namePath | nameDeleted
	if _, ok := d.decode(raw(name)); ok {
		t.Error("a name became a fault")
	}
	f, ok := d.decode(raw(&r))
	if !ok {
		t.Fatal("no fault")
	}
	const most = fault.HasLatency | fault.HasMode | fault.HasAccess | fault.HasMajor | fault.HasFlags | fault.HasSomeFlag |
		fault.HasAttempts | fault.HasResult | fault.HasIP | fault.HasVMA | fault.HasPgOff | fault.HasLabel | fault.HasIDs |
		fault.HasKind | fault.HasBefore | fault.HasAfter | fault.HasAgain | fault.HasOffCPU | fault.HasReclaim
	want := fault.Fault{
		End: 3500, Latency: 2500 * time.Nanosecond, PID: 1, TID: 2, HostPID: 11, HostTID: 12, CPU: 3,
		Comm: fault.MakeComm("worker"), Process: fault.MakeComm("server"), Known: most,
		Mode: fault.Kernel, Access: fault.Exec, Result: fault.SIGSEGV, Major: true, Attempts: 2, Flags: 0x55,
		Address: 0x7000_2345, IP: 0x400000, PgOff: 18,
		VMA:  fault.VMA{Start: 0x7000_0000, End: 0x7000_8000, PgOff: 16, Flags: 0x75, Inode: 5, Dev: 7, Label: "lib.so", Path: "/usr/lib.so", Deleted: true},
		Kind: fault.Swap, KindExact: true, EntryBefore: 0x40, EntryAfter: 0x27, Pages: 3, Folio: 2,
		OffCPU: 700, Wait: fault.IO, Reclaim: 500, Compaction: 100, Cause: fault.AccErr, Again: true,
	}
	if f != want {
		t.Errorf("got  %+v\nwant %+v", f, want)
	}
	if f.VMA.Perm() != "r-xp" {
		t.Errorf("permissions %q", f.VMA.Perm())
	}
}

func TestFileName(t *testing.T) {
	for _, tt := range []struct {
		text  string
		flags uint32
		want  fileName
	}{
		{"memfd:x", 0, fileName{label: "memfd:x"}},
		{"dev/zero", 0, fileName{label: "[shmem]"}},
		{"anon_hugepage", 0, fileName{label: "[hugetlb]"}},
		{"SYSV0000002a", 0, fileName{label: "[sysv:0x0000002a:7]"}},
		{"SYSV0000002a\x00", namePath | nameDeleted, fileName{label: "SYSV0000002a", path: "/SYSV0000002a", deleted: true}},
		{"c\x00b\x00a\x00", namePath, fileName{label: "c", path: "/a/b/c"}},
		{"c\x00", namePath | nameDeleted, fileName{label: "c", path: "/c", deleted: true}},
		{"c\x00b\x00", namePath | nameCut, fileName{label: "c", path: ".../b/c"}},
		{"", namePath, fileName{path: "/"}},
	} {
		if got := makeFileName(tt.text, tt.flags, 7); got != tt.want {
			t.Errorf("%q, flags %d: %+v, want %+v", tt.text, tt.flags, got, tt.want)
		}
	}
}

func TestDecodeThreadStack(t *testing.T) {
	d := newDecoder(4096)
	r := faultFaultRecord{
		Type: recordFault, Known: 1 << 6, HostTid: 1012, Tid: 12, VmaStart: 0x7000_0000, VmaEnd: 0x7000_8000, Label: labelThreadStack,
	}
	if f, _ := d.decode(raw(&r)); !f.Is(fault.HasLabel) || f.VMA.Label != "[stack:12]" || f.VMA.Inode != 0 {
		t.Errorf("%+v", f.VMA)
	}
	for _, test := range []struct {
		by   fault.By
		row  faultStatKey
		want fault.Key
	}{
		{
			fault.ByMapping,
			faultStatKey{Id: 11, Value: 0x7000_8000, Label: labelThreadStack, File: faultNameKey{Ino: 12}},
			fault.Key{ID: 11, End: 0x7000_8000, Label: "[stack:12]"},
		},
		{fault.ByMapping, faultStatKey{Id: 11, Value: 0x7000_8000, Label: labelStack}, fault.Key{ID: 11, End: 0x7000_8000, Label: "[stack]"}},
		{fault.ByMapping, faultStatKey{Id: 11, Value: 0x7000_0000, Label: labelAnon}, fault.Key{ID: 11, Value: 0x7000_0000, Label: "[anon]"}},
		{fault.ByFile, faultStatKey{Label: labelThreadStack}, fault.Key{Label: "[thread stacks]"}},
		{fault.ByFile, faultStatKey{Label: labelStack}, fault.Key{Label: "[stack]"}},
	} {
		if got := d.key(test.by, &test.row); got != test.want {
			t.Errorf("by %v: row %+v, want %+v", test.by, got, test.want)
		}
	}
}

// A row is the same before and after its name has come, and is named by the latest.
func TestRowNames(t *testing.T) {
	d := newDecoder(4096)
	file := faultStatKey{Id: 11, Label: labelFile, File: faultNameKey{Ino: 5, Hash: 6, Dev: 7, Mount: 8}}
	anon := faultStatKey{Id: 11, Label: labelAnonName, File: faultNameKey{Hash: 6}}
	before := [2]fault.Key{d.key(fault.ByFile, &file), d.key(fault.ByFile, &anon)}
	if a, b := d.rowName(&file), d.rowName(&anon); a != "" || b != "" {
		t.Errorf("names %q and %q that have not come", a, b)
	}
	for _, path := range []string{"/usr/lib.so", "/moved/lib.so"} {
		name := nameRecord(file.File, "lib.so\x00"+path[1:strings.LastIndexByte(path, '/')]+"\x00")
		name.Flags = namePath
		d.decode(raw(name))
		d.decode(raw(nameRecord(anon.File, "cache")))
		if got := d.rowName(&file); got != path {
			t.Errorf("name %q, want %q", got, path)
		}
		if got := d.rowName(&anon); got != "[anon:cache]" {
			t.Errorf("name %q", got)
		}
		if after := [2]fault.Key{d.key(fault.ByFile, &file), d.key(fault.ByFile, &anon)}; after != before || after[0] == after[1] {
			t.Errorf("rows %+v, before %+v", after, before)
		}
	}
	for label, want := range map[uint8]string{labelAnon: "[anon]", labelHeap: "[heap]", labelStack: "[stack]", 0: ""} {
		if got := d.key(fault.ByFile, &faultStatKey{Label: label}); got != (fault.Key{Label: want}) {
			t.Errorf("label %d: %+v", label, got)
		}
	}
}

// The memory for names is bounded, but for those of rows, however often others come; what a
// fault in flight relies on stays for a while.
func TestForgetNames(t *testing.T) {
	d := newDecoder(4096)
	row := faultNameKey{Hash: 1 << 40}
	d.decode(raw(nameRecord(row, "kept")))
	n := uint64(0)
	for range 3 {
		for !d.crowded() {
			n++
			d.names[faultNameKey{Hash: n}] = fileName{label: "x"}
		}
		d.forgetNames([]faultNameKey{row, {Hash: 1 << 41}})
		if name, ok := d.sentName(row); !ok || name.label != "kept" {
			t.Errorf("the name of a row is %q", name.label)
		}
		if _, ok := d.sentName(faultNameKey{Hash: n}); !ok {
			t.Error("a name that has just come is forgotten")
		}
		if len(d.names) != 1 || len(d.older) > maxNames+1 {
			t.Errorf("%d and %d names", len(d.names), len(d.older))
		}
	}
	if _, ok := d.sentName(faultNameKey{Hash: 1}); ok {
		t.Error("an old name is not forgotten")
	}
	f := faultFaultRecord{Type: recordFault, Known: 1 << 6, Label: labelAnonName, File: faultNameKey{Hash: 1}}
	if got, _ := d.decode(raw(&f)); got.Is(fault.HasLabel) || got.VMA.Label != "" {
		t.Errorf("label %q of a name that is not known", got.VMA.Label)
	}
}

func TestDecodeUnknown(t *testing.T) {
	d := newDecoder(4096)
	r := faultFaultRecord{Type: recordFault, StartNs: 9, EndNs: 9, Result: resultUnknown, VmaStart: 1, Label: labelHeap}
	f, ok := d.decode(raw(&r))
	if !ok || f.Known != fault.HasMode|fault.HasIDs || f.VMA != (fault.VMA{}) || f.PgOff != 0 {
		t.Errorf("%+v", f)
	}
	r.Known, r.EndNs = 1, 8
	if f, _ := d.decode(raw(&r)); f.Is(fault.HasLatency) || f.Latency != 0 {
		t.Errorf("latency %v of a fault that ends before it begins", f.Latency)
	}
}

func FuzzDecode(f *testing.F) {
	r := faultFaultRecord{Type: recordFault, Known: 0xff, Label: labelFile}
	f.Add(bytes.Clone(raw(&r)))
	f.Add(bytes.Clone(raw(nameRecord(faultNameKey{}, "x"))))
	f.Add([]byte{1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		d := newDecoder(4096)
		// The ring buffer's records are aligned.
		aligned := make([]uint64, len(b)/8+1)
		p := unsafe.Slice((*byte)(unsafe.Pointer(&aligned[0])), len(b))
		copy(p, b)
		d.decode(p)
	})
}

// The Go constants must be those of bpf/fault.h, whose enums bpf2go does not export.
func TestWords(t *testing.T) {
	if fault.EFAULT != 6 || fault.Interrupted != 5 || fault.HWPoison != 4 || fault.OOM != 3 || fault.SIGSEGV != 2 {
		t.Error("fault.Result is not in the order of enum result")
	}
	if fault.Remote != 2 || fault.Exec != 2 {
		t.Error("fault.Mode or fault.Access is not in the order of the C enums")
	}
}

func BenchmarkDecode(b *testing.B) {
	d := newDecoder(4096)
	r := faultFaultRecord{Type: recordFault, Known: 0xff, Label: labelAnon, VmaEnd: 1 << 40}
	p := raw(&r)
	b.ReportAllocs()
	for b.Loop() {
		d.decode(p)
	}
}
