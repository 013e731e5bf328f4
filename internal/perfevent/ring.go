package perfevent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	perf "github.com/elastic/go-perf"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/process"
)

var pageSize = uint64(os.Getpagesize())

// fullMargin is how much room a ring needs at least to be counted as not full. More
// than any sample together with the record of an earlier loss.
const fullMargin = 256

// ring is the buffer of one CPU. It is mapped and read here and not by go-perf, which
// copies every record, moves the tail once for each, has a goroutine and a descriptor
// per ring, and does not tell how full it is.
type ring struct {
	cpu int
	// offline: the CPU was, when looked last.
	offline bool
	owner   *perf.Event
	fd      int
	mem     []byte
	meta    *unix.PerfEventMmapPage
	data    []byte
	wrap    []byte // a record that goes round the end, made contiguous

	// queue[next:] are the records read and not yet merged.
	queue []record
	next  int
	// last is the time of the newest record read.
	last uint64
	// through is the time up to which everything that was written has been read.
	through uint64
}

// mapRing maps the ring of an event with 1 << order pages of data.
func mapRing(owner *perf.Event, cpu, order int) (*ring, error) {
	fd, err := owner.FD()
	if err != nil {
		return nil, err
	}
	mem, err := unix.Mmap(fd, 0, int(pageSize)*(1+1<<order), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return &ring{
		cpu: cpu, owner: owner, fd: fd, mem: mem,
		meta: (*unix.PerfEventMmapPage)(unsafe.Pointer(&mem[0])),
		data: mem[pageSize:],
	}, nil
}

func (r *ring) close() error {
	return errors.Join(os.NewSyscallError("munmap", unix.Munmap(r.mem)), r.owner.Close())
}

// read decodes at most limit records into the queue. now is a time before the call.
func (r *ring) read(d *decoder, limit int, now uint64) error {
	r.compact()
	head := atomic.LoadUint64(&r.meta.Data_head)
	tail := atomic.LoadUint64(&r.meta.Data_tail)
	size := uint64(len(r.data))
	full := head-tail+fullMargin > size
	// No record can be from outside this time, nor from long before the one that stands
	// before it, since no interrupt takes faults; the clock may step back by nanoseconds
	// (ktime_get_mono_fast_ns). One that claims to be has got its time from another
	// clock, see decode.go.
	earliest, latest := r.through-min(r.through, maxDelay), process.Now()
	for ; tail < head && limit > 0; limit-- {
		b, typ, misc, err := r.record(tail, head)
		if err != nil {
			atomic.StoreUint64(&r.meta.Data_tail, head)
			return err
		}
		tail += uint64(headerSize + len(b))
		r.queue = append(r.queue, record{})
		rec := &r.queue[len(r.queue)-1]
		ok, err := d.decode(typ, misc, b, rec)
		if !ok || err != nil {
			r.queue = r.queue[:len(r.queue)-1]
			if err != nil {
				atomic.StoreUint64(&r.meta.Data_tail, tail)
				return err
			}
			continue
		}
		rec.cpu = uint32(r.cpu)
		switch {
		case rec.kind == loss:
			// What is missing was dropped after the record before this one.
			rec.time = r.last
		case rec.time < earliest || rec.time+settle < r.last || rec.time > latest:
			rec.time, rec.askew = max(earliest, r.last), true
		default:
			r.last = max(r.last, rec.time)
		}
	}
	atomic.StoreUint64(&r.meta.Data_tail, tail)
	switch {
	case full:
		r.suspect()
		r.through = r.last
	case tail < head:
		r.through = r.last
	default:
		r.through = now
	}
	return nil
}

// suspect notes that the ring was full: records may be missing from the newest one
// to now, though the kernel only says so when it writes the next.
func (r *ring) suspect() {
	r.queue = append(r.queue, record{
		time: r.last, cpu: uint32(r.cpu), kind: loss, side: &side{until: process.Now()},
	})
}

// record returns the bytes behind the header at an offset; they are valid until the
// tail is moved.
func (r *ring) record(tail, head uint64) (b []byte, typ uint32, misc uint16, err error) {
	size := uint64(len(r.data))
	at := tail & (size - 1)
	// Records are aligned to 8 bytes, so a header never goes round the end.
	header := r.data[at : at+headerSize]
	typ = u32(header, 0)
	misc = binary.NativeEndian.Uint16(header[4:])
	length := uint64(binary.NativeEndian.Uint16(header[6:]))
	if length < headerSize || length > head-tail {
		return nil, 0, 0, fmt.Errorf("reading the perf ring of CPU %d: a record of %d bytes where %d are", r.cpu, length, head-tail)
	}
	if at+length <= size {
		return r.data[at+headerSize : at+length], typ, misc, nil
	}
	r.wrap = append(r.wrap[:0], r.data[at+headerSize:]...)
	r.wrap = append(r.wrap, r.data[:at+length-size]...)
	return r.wrap, typ, misc, nil
}

// compact moves what is left of the queue to its beginning.
func (r *ring) compact() {
	if r.next == 0 {
		return
	}
	n := copy(r.queue, r.queue[r.next:])
	clear(r.queue[n:]) // release what side points to
	r.queue = r.queue[:n]
	r.next = 0
}
