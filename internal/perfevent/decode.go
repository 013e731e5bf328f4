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
	set      uint32 // which call of openSet the event is from, 0 if not known
	kind     kind
	kernel   bool   // the CPU was in kernel mode
	askew    bool   // time is not when it happened
	chain    uint32 // one of decoder.chains, 0 for none
	side     *side
}

// side is what the rarer records add.
type side struct {
	parentPID, parentTID uint32 // forked
	comm                 fault.Comm
	exec                 bool                   // renamed: by exec
	status               cached[process.Status] // renamed by exec: who the process was soon after, if asked for
	mapping              process.Mapping
	until                uint64 // loss: when it was over; record.time is when it began at the earliest
}

// The layout of samples (perf_output_sample in kernel/events/core.c):
//
//	[u64 id;] u64 ip; u32 pid, tid; u64 time; u64 addr; [u32 cpu, res; [u64 period;]]
//
// A minor fault has none of the optional parts at the end, the beginning of one has
// the CPU and a major one both, so that its size says what a sample is. The id would
// not: since Linux 6.2 all software events that one fault fires share one struct
// perf_sample_data, and perf_prepare_sample does not fill in again what an event before
// has filled in, be it another program's. Then the id is that event's, and the time
// is read from that event's clock.
//
// With stacks the two completions are longer, and still told by their sizes:
//
//	... u64 addr; [u64 stream;] u32 cpu, res; u64 period; u64 n; u64 ips[n];
//
// where a major fault has the stream. The first of ips is a mark of its context, a number
// that no n is.
//
// Behind every other record sample_id_all puts
//
//	u32 pid, tid; u64 time; [u32 cpu, res;] [u64 id;]
//
// (__perf_event__output_id_sample), with the CPU but for a record of a loss that
// happens to be written by the event of minor faults.
const (
	headerSize  = 8
	minorSize   = 32
	entrySize   = minorSize + 8
	majorSize   = entrySize + 8
	chainsAt    = majorSize // of a minor fault with a stack; 8 more of a major one
	trailerSize = 24
	idSize      = 8

	miscCPUModeMask = 7       // PERF_RECORD_MISC_CPUMODE_MASK
	miscKernel      = 1       // PERF_RECORD_MISC_KERNEL
	miscCommExec    = 1 << 13 // PERF_RECORD_MISC_COMM_EXEC
)

// decoder turns the bytes of a ring into records. It is ours and not go-perf's since
// that one allocates every record and its name, and copies it out of the ring first,
// which is too slow for a storm of faults.
type decoder struct {
	// sets says which call of openSet an id comes from. If it is nil samples have no id.
	sets map[uint64]uint32
	got  [2]uint64 // samples of minor and of major so far
	// chains are the stacks of samples, by numbers, and chainOf these numbers by the bytes of a
	// sample; nil if samples have none. The last number is numbered; 0 stands for none.
	chains   map[uint32][]uint64
	chainOf  map[string]uint32
	numbered uint32
	// older are those from before the last forgetting. frames are how many the others have.
	older  map[uint32][]uint64
	frames int
	// room is how many are kept at most.
	room int
}

// maxChains and maxFrames bound the memory for stacks and for their names.
const (
	maxChains = 1 << 15
	maxFrames = 1 << 18
)

// takeChains has samples decoded that have stacks.
func (d *decoder) takeChains(room int) {
	d.chains, d.chainOf, d.room = map[uint32][]uint64{}, map[string]uint32{}, room
}

// forgetChains forgets those that no record since the last time has had.
func (d *decoder) forgetChains() {
	d.older, d.frames = d.chains, 0
	d.takeChains(d.room)
}

// chainAt is a chain by its number.
func (d *decoder) chainAt(number uint32) []uint64 {
	if c, ok := d.chains[number]; ok {
		return c
	}
	return d.older[number]
}

// chain keeps the stack of a sample, whose bytes b are. 0 says that there is no room.
func (d *decoder) chain(b []byte) uint32 {
	if c, ok := d.chainOf[string(b)]; ok {
		return c
	}
	if len(d.chains) >= d.room {
		return 0
	}
	if d.numbered++; d.numbered == 0 {
		d.numbered++
	}
	c := d.numbered
	ips := make([]uint64, len(b)/8)
	for i := range ips {
		ips[i] = u64(b, 8*i)
	}
	d.chains[c] = ips
	d.frames += len(ips)
	d.chainOf[string(b)] = c
	return c
}

// chainFrom is where the stack of a sample begins, behind its length, and whose it is.
func chainFrom(b []byte) (at int, k kind, ok bool) {
	const longer = chainsAt + 8
	if len(b) >= longer+8 && u64(b, longer) == uint64(len(b)-longer-8)/8 {
		return longer + 8, major, true
	}
	if len(b) >= chainsAt+8 && u64(b, chainsAt) == uint64(len(b)-chainsAt-8)/8 {
		return chainsAt + 8, minor, true
	}
	return 0, 0, false
}

func (d *decoder) idSize() int {
	if d.sets == nil {
		return 0
	}
	return idSize
}

// decode reads one record without its header. It is false for a record that tells
// nothing of interest.
func (d *decoder) decode(typ uint32, misc uint16, b []byte, rec *record) (bool, error) {
	if typ == unix.PERF_RECORD_SAMPLE {
		return d.sample(misc, b, rec)
	}
	var want int
	switch typ {
	case unix.PERF_RECORD_LOST:
		return d.lost(b, rec)
	case unix.PERF_RECORD_MMAP2:
		want = mmap2Size
	case unix.PERF_RECORD_COMM:
		want = 8
	case unix.PERF_RECORD_FORK, unix.PERF_RECORD_EXIT:
		want = 24
	default:
		return false, nil
	}
	end := len(b) - trailerSize - d.idSize()
	if end < want {
		return false, fmt.Errorf("decoding a record of type %d: %d bytes", typ, len(b))
	}
	body := b[:end]
	*rec = record{time: u64(b, end+8)}
	rec.pid, rec.tid = u32(body, 0), u32(body, 4)
	switch typ {
	case unix.PERF_RECORD_MMAP2:
		rec.kind = mapped
		rec.side = &side{mapping: mapping(body, rec.time)}
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

// lost reads u64 id, lost; and the trailer of whichever event wrote it.
func (d *decoder) lost(b []byte, rec *record) (bool, error) {
	if len(b) < 32 {
		return false, fmt.Errorf("decoding the record of a loss: %d bytes", len(b))
	}
	*rec = record{kind: loss, time: u64(b, 24)}
	rec.side = &side{until: rec.time}
	return true, nil
}

func (d *decoder) sample(misc uint16, b []byte, rec *record) (bool, error) {
	*rec = record{kernel: misc&miscCPUModeMask == miscKernel}
	if d.sets != nil && len(b) >= idSize {
		rec.set = d.sets[u64(b, 0)]
		b = b[idSize:]
	}
	at, chained := 0, kind(0)
	if d.chains != nil && len(b) != entrySize {
		var ok bool
		if at, chained, ok = chainFrom(b); !ok {
			return false, fmt.Errorf("decoding a sample with a stack: %d bytes", len(b))
		}
	}
	switch {
	case at != 0:
		rec.kind = chained
		d.got[chained]++
		rec.chain = d.chain(b[at:])
	case len(b) == minorSize:
		rec.kind = minor
		d.got[minor]++
	case len(b) == majorSize:
		rec.kind = major
		d.got[major]++
	case len(b) == entrySize:
		rec.kind = entry
	default:
		return false, fmt.Errorf("decoding a sample: %d bytes", len(b))
	}
	rec.ip, rec.pid, rec.tid = u64(b, 0), u32(b, 8), u32(b, 12)
	rec.time, rec.addr = u64(b, 16), u64(b, 24)
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

func mapping(b []byte, time uint64) process.Mapping {
	start := u64(b, 8)
	path := text(b[mmap2Size:])
	m := process.Mapping{
		Start: start, End: start + u64(b, 16),
		PgOff: u64(b, 24) / pageSize, HasPgOff: true,
		// PROT_READ, _WRITE and _EXEC have the values of the VM_* bits.
		Flags: uint64(u32(b, 56)) & fault.PermFlags("rwx"),
		Dev:   process.Dev(u32(b, 32), u32(b, 36)),
		Inode: u64(b, 40),
		Path:  path, ExactSince: process.Never, Since: time,
	}
	m.Label, m.Deleted = process.Label(path, m.Inode)
	if u32(b, 60)&unix.MAP_SHARED != 0 {
		m.Flags |= fault.PermFlags("---s")
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
