package symbol

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

const (
	// maxCompared is the size of files that are compared to find out whether they are one.
	maxCompared = 64 << 20
	// maxMaps is how many maps of compiled code are known at a time, and maxMapsKept how many
	// bytes of all.
	maxMaps = 64
	// lateAfter is how soon somebody who is patient looks again whether there is a map.
	lateAfter   = 200e6
	maxMapsKept = 96 << 20
)

// Instruction is where a frame of a stack was.
type Instruction struct {
	Addr uint64
	// Caller: Addr is what will be returned to, behind the call. The call is asked for.
	Caller bool
	// VMA is the mapping that holds Addr, with its bounds and its PgOff.
	VMA *fault.VMA
	// PID is the process as we see it, 0 if it cannot be asked for anything. Image as in
	// [fault.Fault].
	PID, Image uint32
	// Time is when the stack was taken, in nanoseconds of CLOCK_MONOTONIC.
	Time uint64
}

// Frames are the functions at an instruction, the innermost first: those that were inlined,
// and the one that they are in. There is always one; it has Addr, Module and Offset, which
// is an offset in the file where that cannot be read, or is another by now.
//
// It is not done if something must be read first and that would take too much time now (see
// [Options]): the caller may ask again later. Whether a file has changed is asked once
// between two calls of [Resolver.Begin].
func (r *Resolver) Frames(in *Instruction) (frames []fault.Frame, done bool) {
	v := in.VMA
	unknown := fault.Frame{Addr: in.Addr, Module: v.Name(), Offset: in.Addr - v.Start}
	if v.Inode != 0 {
		unknown.Offset += v.PgOff * r.opt.PageSize
	}
	none := []fault.Frame{unknown}
	at := in.Addr
	if in.Caller {
		at--
	}
	if at < v.Start || at >= v.End {
		return none, true
	}
	if v.Label == "[vdso]" {
		c := r.readVDSO(v)
		if c == nil {
			return none, true
		}
		return r.answer(c, in, at, at-v.Start, none), true
	}
	if v.Inode != 0 {
		fl := r.open(v, true, in.PID)
		switch {
		case fl == &r.unread:
			return none, false
		case fl.image == nil || in.Time < fl.since:
		default:
			c, done := r.codeOf(fl, v, in.PID)
			if !done {
				return none, false
			}
			if c == nil {
				break
			}
			if !r.opt.Patient {
				defer r.spend(process.Now())
			}
			frames := r.answer(c.Code, in, at, at-v.Start+v.PgOff*r.opt.PageSize, none)
			r.accountCode(c, fl)
			return frames, true
		}
	}
	m, done := r.mapOf(in.PID, in.Image)
	if m == nil {
		return none, done
	}
	if f := m.At(at); f.Func != "" {
		f.Addr, f.Module, f.Offset = unknown.Addr, unknown.Module, unknown.Offset
		return []fault.Frame{f}, true
	}
	return none, true
}

// answer asks code for what is at an offset of its file.
func (r *Resolver) answer(c *Code, in *Instruction, at, off uint64, none []fault.Frame) []fault.Frame {
	addr, ok := c.AddrOf(off)
	if !ok {
		none[0].BuildID = c.BuildID
		return none
	}
	known := c.At(addr)
	frames := make([]fault.Frame, len(known))
	for i, f := range known {
		f.Addr, f.Module, f.Offset = in.Addr, none[0].Module, addr+(in.Addr-at)
		frames[i] = f
	}
	return frames
}

// readVDSO is the code of the vdso. That of processes of 32 bits is another one, which is
// not known.
func (r *Resolver) readVDSO(v *fault.VMA) *Code {
	if v.Start < 1<<32 {
		return nil
	}
	if !r.vdsoRead {
		r.vdsoRead = true
		r.vdso, _ = readVDSO() // without it there are no names
	}
	return r.vdso
}

// code is the code of files that are equal.
type code struct {
	*Code
	file  *debugFile // that of the first of them, open for us alone
	debug *debugFile // what was split off, nil if there is nothing
	later *fetch     // what is being fetched of that, nil if nothing is
	users int
	kept  int // its size, as far as it is in [Resolver.kept]
	// gone: its file has changed.
	gone    bool
	checked uint64
}

// codeOf is the code of a file, nil if it cannot be read.
func (r *Resolver) codeOf(fl *file, v *fault.VMA, pid uint32) (c *code, done bool) {
	if c := fl.code; c != nil {
		if r.current(c) {
			return c, true
		}
		r.leave(fl)
	}
	if fl.noCode {
		return nil, true
	}
	if !r.affords() {
		return nil, false
	}
	defer r.spend(process.Now())
	if !r.opt.Proc {
		pid = 0
	}
	c, err := r.newCode(fl, v, pid)
	if err != nil {
		fl.noCode = true
		return nil, true
	}
	fl.code = c
	c.users++
	return c, true
}

// current reports whether what code is read from is still what it was.
func (r *Resolver) current(c *code) bool {
	if c.checked != r.now && !c.gone {
		c.checked = r.now
		c.gone = !c.file.current() || c.debug != nil && !c.debug.current()
		if c.later != nil {
			ended, found := c.later.over()
			if c.gone = c.gone || found; ended {
				c.later = nil
			}
		}
	}
	return !c.gone
}

func (r *Resolver) newCode(fl *file, v *fault.VMA, pid uint32) (*code, error) {
	o, err := readObject(fl.File)
	if err != nil {
		return nil, err
	}
	if c := r.codes[o.buildID]; o.buildID != "" && c != nil && r.current(c) &&
		c.file.size == fl.size && equal(c.file, fl.File, fl.size) {
		return c, nil
	}
	fd, err := unix.FcntlInt(fl.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	c := &code{file: &debugFile{File: os.NewFile(uintptr(fd), fl.Name()), version: fl.version}, checked: r.now}
	c.Code, err = newCode(c.file, func(buildID, link string, crc uint32, hasLink bool) *object {
		var found *object
		c.debug, found = findDebugFile(pid, v.Path, buildID, link, crc, hasLink)
		if found == nil && r.debuginfod != nil {
			c.debug, found, c.later = r.debuginfod.find(buildID)
		}
		return found
	})
	if err != nil {
		c.close()
		return nil, fmt.Errorf("reading %s: %w", fl.Name(), err)
	}
	// What only one process sees is not told of others.
	if c.BuildID != "" && (c.debug == nil || c.debug.own) && r.codes[c.BuildID] == nil {
		r.codes[c.BuildID] = c
	}
	return c, nil
}

func (c *code) close() {
	c.file.Close()
	if c.debug != nil {
		c.debug.Close()
	}
}

// leave ends the use of code by a file.
func (r *Resolver) leave(fl *file) {
	c := fl.code
	if c == nil {
		return
	}
	fl.code = nil
	if c.gone && r.codes[c.BuildID] == c {
		delete(r.codes, c.BuildID)
	}
	if c.users--; c.users > 0 {
		return
	}
	if r.codes[c.BuildID] == c {
		delete(r.codes, c.BuildID)
	}
	r.kept -= c.kept
	c.close()
}

// accountCode takes note of what is kept of code, and forgets files if that is too much.
func (r *Resolver) accountCode(c *code, fl *file) {
	size := c.Size()
	r.kept += size - c.kept
	c.kept = size
	for r.kept > maxKept && r.forgetOldest(fl) {
	}
}

// equal reports whether two files have the same bytes. A build-id is what whoever made a
// file says.
func equal(a, b io.ReaderAt, size int64) bool {
	if size > maxCompared {
		return false
	}
	const step = 256 << 10
	x, y := make([]byte, step), make([]byte, step)
	for off := int64(0); off < size; off += step {
		n := min(step, size-off)
		if _, err := a.ReadAt(x[:n], off); err != nil && !errors.Is(err, io.EOF) {
			return false
		}
		if _, err := b.ReadAt(y[:n], off); err != nil && !errors.Is(err, io.EOF) {
			return false
		}
		if !bytes.Equal(x[:n], y[:n]) {
			return false
		}
	}
	return true
}

// compiled is what is known of the map of compiled code of a process.
type compiled struct {
	*PerfMap        // nil if it has none
	image    uint32 // fault.Fault.Image
	used     uint64
	checked  uint64 // whether it has grown
	looked   uint64 // at what is at its path
	more     bool   // of it was not read yet
	kept     int
	// version is another number after each change of the map, as far as changes is.
	version, changes uint64
	// before is the map of the program that the process was before, nil if it had none.
	before *PerfMap
}

// mapOf is the map of compiled code of a process, as it is now; nil if there is none.
func (r *Resolver) mapOf(pid, image uint32) (m *PerfMap, done bool) {
	if pid == 0 || !r.opt.Proc {
		return nil, true
	}
	c := r.maps[pid]
	var before *PerfMap
	if c != nil && c.image != image {
		if before = c.before; c.PerfMap != nil {
			before = &PerfMap{id: c.id, written: c.written}
		}
		r.forgetMap(pid)
		c = nil
	}
	if c == nil {
		if len(r.maps) >= maxMaps {
			r.forgetOldestMap(nil)
		}
		c = &compiled{image: image, before: before}
		r.maps[pid] = c
	}
	c.used = r.now
	wait := uint64(retryAfter)
	if c.PerfMap == nil && r.opt.Patient {
		wait = lateAfter
	}
	if r.now-c.looked >= wait {
		if !r.affords() {
			return c.PerfMap, false
		}
		begin := process.Now()
		c.looked = r.now
		if c.PerfMap == nil {
			c.PerfMap, _ = OpenPerfMap(pid) // most processes have none
			if c.PerfMap != nil && c.before != nil && c.sameAs(c.before) {
				c.PerfMap.Close()
				c.PerfMap = nil
			}
		} else {
			_ = c.Replace(pid) // one that has ended cannot have a new one
		}
		r.spend(begin)
	}
	if c.PerfMap == nil {
		return nil, true
	}
	if c.checked != r.now || c.more {
		c.checked = r.now
		for {
			if !r.affords() {
				return c.PerfMap, false
			}
			begin := process.Now()
			c.more, _ = c.Refresh() // what was read stays
			r.spend(begin)
			if !c.more {
				break
			}
		}
		if c.changes != c.PerfMap.changes {
			c.changes = c.PerfMap.changes
			r.mapVersions++
			c.version = r.mapVersions
		}
		size := c.Size()
		r.mapBytes += size - c.kept
		c.kept = size
		for r.mapBytes > maxMapsKept && r.forgetOldestMap(c) {
		}
	}
	return c.PerfMap, true
}

// Compiled reports whether a mapping may hold code that its process has made, whose names
// change with time.
func Compiled(v *fault.VMA) bool {
	return v.Inode == 0 && v.Label != "[vdso]" || strings.HasPrefix(v.Path, "/memfd:")
}

// MapVersion is another number whenever what a process lists of its compiled code has
// changed, so that names of addresses in it may have; 0 if it lists nothing or if names of
// another program in the process were asked for since.
func (r *Resolver) MapVersion(pid, image uint32) uint64 {
	if c := r.maps[pid]; c != nil && c.image != image {
		return 0
	}
	if m, _ := r.mapOf(pid, image); m == nil {
		return 0
	}
	return r.maps[pid].version
}

func (r *Resolver) forgetOldestMap(inUse *compiled) bool {
	var oldest uint32
	least := ^uint64(0)
	for pid, c := range r.maps {
		if c != inUse && c.used < least {
			oldest, least = pid, c.used
		}
	}
	if least == ^uint64(0) {
		return false
	}
	r.forgetMap(oldest)
	return true
}

func (r *Resolver) forgetMap(pid uint32) {
	c := r.maps[pid]
	delete(r.maps, pid)
	r.mapBytes -= c.kept
	if c.PerfMap != nil {
		c.Close()
	}
}

// FramesIn are the functions at an address of an ELF file, as Frames tells them: for who knows
// the address there and not that in the process. in.VMA is any mapping of the file, and
// in.Addr is not used; buildID is that which the file must have, empty if nobody knows.
func (r *Resolver) FramesIn(in *Instruction, addr uint64, buildID string) []fault.Frame {
	at := addr
	if in.Caller {
		at--
	}
	var c *Code
	if in.VMA.Label == "[vdso]" {
		c = r.readVDSO(in.VMA)
	} else if fl := r.open(in.VMA, true, in.PID); fl.image != nil && in.Time >= fl.since {
		if kept, _ := r.codeOf(fl, in.VMA, in.PID); kept != nil {
			c = kept.Code
			defer r.accountCode(kept, fl)
		}
	}
	if c == nil || buildID != "" && c.BuildID != "" && c.BuildID != buildID {
		return nil
	}
	frames := slices.Clone(c.At(at))
	for i := range frames {
		frames[i].Module, frames[i].Offset = in.VMA.Name(), addr
	}
	return frames
}
