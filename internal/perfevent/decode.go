package perfevent

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// kind says what a record tells.
type kind uint8

const (
	minor   kind = iota // a minor fault is complete
	major               // a major fault is complete
	entry               // the handling of a fault begins
	tracker             // the event that carries the side records; has no samples
	forked
	exited
	renamed
	mapped
	loss
	eventKinds  = int(tracker) + 1
	sampleKinds = int(entry) + 1
)

// record is one decoded record of a ring.
type record struct {
	time     uint64 // CLOCK_MONOTONIC, nanoseconds
	addr, ip uint64
	pid, tid uint32
	cpu      uint32
	set      uint32 // which call of openSet the event is from
	kind     kind
	kernel   bool // the CPU was in kernel mode
	side     *side
}

// side is what the rarer records add.
type side struct {
	parentPID, parentTID uint32 // forked
	comm                 fault.Comm
	exec                 bool // renamed: by exec
	mapping              process.Mapping
	until                uint64 // loss: when it was over; record.time is when it began at the earliest
	count                uint64 // loss: records of any kind
}

// sampleFormat is the layout of samples, the same for all events so that one ring
// can hold the records of many:
//
//	u64 id; u64 ip; u32 pid, tid; u64 time; u64 addr
//
// and of the trailer that sample_id_all puts behind every other record:
//
//	u32 pid, tid; u64 time; u64 id
//
// (perf_output_sample and __perf_event__output_id_sample in kernel/events/core.c).
const (
	headerSize  = 8
	sampleSize  = 40
	trailerSize = 24

	miscCPUModeMask = 7       // PERF_RECORD_MISC_CPUMODE_MASK
	miscKernel      = 1       // PERF_RECORD_MISC_KERNEL
	miscCommExec    = 1 << 13 // PERF_RECORD_MISC_COMM_EXEC
)

// source says which event an id belongs to.
type source struct {
	kind kind
	set  uint32
}

// decoder turns the bytes of a ring into records. It is ours and not go-perf's since
// that one allocates every record and its name, and copies it out of the ring first,
// which is too slow for a storm of faults.
type decoder struct {
	sources map[uint64]source
	got     [2]uint64 // samples of minor and of major so far
}

// decode reads one record without its header. It is false for a record that tells
// nothing of interest.
func (d *decoder) decode(typ uint32, misc uint16, b []byte, rec *record) (bool, error) {
	if typ == unix.PERF_RECORD_SAMPLE {
		return d.sample(misc, b, rec)
	}
	if len(b) < trailerSize {
		return false, fmt.Errorf("decoding a record of type %d: %d bytes", typ, len(b))
	}
	body, trailer := b[:len(b)-trailerSize], b[len(b)-trailerSize:]
	*rec = record{time: u64(trailer, 8)}
	var want int
	switch typ {
	case unix.PERF_RECORD_MMAP2:
		want = mmap2Size
	case unix.PERF_RECORD_COMM:
		want = 8
	case unix.PERF_RECORD_FORK, unix.PERF_RECORD_EXIT:
		want = 24
	case unix.PERF_RECORD_LOST:
		want = 16
	case unix.PERF_RECORD_LOST_SAMPLES:
		want = 8
	default:
		return false, nil
	}
	if len(body) < want {
		return false, fmt.Errorf("decoding a record of type %d: %d bytes", typ, len(b))
	}
	if typ == unix.PERF_RECORD_LOST || typ == unix.PERF_RECORD_LOST_SAMPLES {
		rec.kind = loss
		rec.side = &side{until: rec.time, count: u64(body, want-8)}
		return true, nil
	}
	rec.pid, rec.tid = u32(body, 0), u32(body, 4)
	switch typ {
	case unix.PERF_RECORD_MMAP2:
		rec.kind = mapped
		rec.side = &side{mapping: mapping(body)}
	case unix.PERF_RECORD_COMM:
		rec.kind = renamed
		rec.side = &side{comm: fault.MakeComm(text(body[8:])), exec: misc&miscCommExec != 0}
	case unix.PERF_RECORD_FORK:
		rec.kind = forked
		rec.side = &side{parentPID: u32(body, 4), parentTID: u32(body, 12)}
		rec.tid = u32(body, 8)
	case unix.PERF_RECORD_EXIT:
		rec.kind = exited
		rec.tid = u32(body, 8)
	}
	return true, nil
}

func (d *decoder) sample(misc uint16, b []byte, rec *record) (bool, error) {
	if len(b) < sampleSize {
		return false, fmt.Errorf("decoding a sample: %d bytes", len(b))
	}
	src, ok := d.sources[u64(b, 0)]
	if !ok {
		return false, nil
	}
	if src.kind <= major {
		d.got[src.kind]++
	}
	*rec = record{
		ip:     u64(b, 8),
		pid:    u32(b, 16),
		tid:    u32(b, 20),
		time:   u64(b, 24),
		addr:   u64(b, 32),
		kind:   src.kind,
		set:    src.set,
		kernel: misc&miscCPUModeMask == miscKernel,
	}
	// A thread that is gone or lives outside our pid namespace has the id 0 or -1
	// (perf_event_pid_type); both mean that it has none here.
	if int32(rec.tid) < 0 || int32(rec.pid) < 0 {
		rec.pid, rec.tid = 0, 0
	}
	return true, nil
}

// mmap2Size is the size of the fixed part of PERF_RECORD_MMAP2:
//
//	u32 pid, tid; u64 addr, len, pgoff; u32 maj, min; u64 ino, ino_generation; u32 prot, flags; char filename[]
const mmap2Size = 64

func mapping(b []byte) process.Mapping {
	start := u64(b, 8)
	path := text(b[mmap2Size:])
	m := process.Mapping{
		Start: start, End: start + u64(b, 16),
		PgOff: u64(b, 24) / pageSize, HasPgOff: true,
		// PROT_READ, _WRITE and _EXEC have the values of the VM_* bits.
		Flags: uint64(u32(b, 56)) & (process.VMRead | process.VMWrite | process.VMExec),
		Dev:   process.Dev(u32(b, 32), u32(b, 36)),
		Inode: u64(b, 40),
		Path:  path, Label: process.Label(path),
		ExactSince: process.Never,
	}
	if u32(b, 60)&unix.MAP_SHARED != 0 {
		m.Flags |= process.VMMayShare
	}
	return m
}

func u64(b []byte, at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }

func u32(b []byte, at int) uint32 { return binary.NativeEndian.Uint32(b[at:]) }

// text is a NUL-terminated string; the kernel pads it with more.
func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
