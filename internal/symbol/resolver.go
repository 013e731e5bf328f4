// Package symbol tells what a linker has put where a fault was: the section of an ELF
// file, and the object or function; and of the code that was running, the functions and
// source lines.
//
// Everything is read from files that the traced processes have mapped, by whoever may
// write them. So a file is what the kernel said that was mapped or it is not read, what
// is read of it is bounded, and the names in it are bytes for a view to escape.
package symbol

import (
	"maps"
	"slices"
	"strings"
	"time"
	"unsafe"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

const (
	// maxOpen is how many files are open at a time, and maxFailed how many others are
	// remembered.
	maxOpen   = 128
	maxFailed = 4096
	// maxKept bounds what is kept of all files, in bytes.
	maxKept = 128 << 20
	// maxProcesses, maxTails, of each, and maxTailBytes, of all, bound what is known of
	// mappings.
	maxProcesses = 4096
	maxTails     = 1024
	maxTailBytes = 16 << 20

	// retryAfter is how long a failure is believed, and closeAfter how long a file stays
	// open that nobody asks for: nobody could unmount its file system.
	retryAfter = 1e9
	closeAfter = 10e9
	// partAfter is how long a process is known that nobody asks for.
	partAfter = 60e9
	// readShare is the share of time that goes into reading files and mappings at most,
	// 1/readShare, since no records are taken meanwhile; maxSaved is what may be made up for
	// at once, in nanoseconds. lookEvery is how often the mappings of one process are read at
	// most.
	readShare = 20
	maxSaved  = 1e9
	lookEvery = 1e9
)

// Options choose what a [Resolver] tells.
type Options struct {
	PageSize uint64
	// Symbols: not only sections.
	Symbols bool
	// Timeline: the source knows all mappings, and tells what a fault's continues.
	Timeline bool
	// Proc: /proc shows the processes that ids of faults belong to.
	Proc bool
	// Patient: nobody waits, reading may take the time that it takes.
	Patient bool
	// Fetch is how long a debug file is waited for that a server has. One that comes
	// later is used from then on.
	Fetch time.Duration
}

// Resolver fills Section, Symbol and SymbolOffset of faults, and tells the functions of
// stacks. It is not safe for concurrent use.
type Resolver struct {
	opt       Options
	files     map[fileID]*file
	failed    int
	kept      int // bytes of all images and code
	processes map[uint32]*tailed
	tailBytes int // bytes of all tails

	now   uint64 // of the batch
	swept uint64
	saved int64 // nanoseconds that may go into reading, by readShare
	// unread stands for files that cannot be afforded now.
	unread file
	// last is the file asked for last.
	last   *file
	lastID fileID

	codes    map[string]*code // by build-id, those that may be shared
	maps     map[uint32]*compiled
	mapBytes int
	// mapVersions is the last one that was given.
	mapVersions uint64
	vdso        *Code // nil if there is none
	vdsoRead    bool
	debuginfod  *debuginfod // nil if it was not asked for
}

// file is a file that was looked at.
type file struct {
	*opened        // nil if it could not be opened
	image   *image // nil if it is no ELF file that can be read
	kept    int    // its size, as far as it is in [Resolver.kept]
	used    uint64 // when it was asked for last
	checked uint64 // and when whether it has changed
	stale   bool   // it has, and was not read again yet
	code    *code  // nil if it was not asked for, or cannot be read
	noCode  bool   // it cannot be read
	retry   uint64 // when to look at it again, if image is nil
}

// tailed is a process with mappings that continue files.
type tailed struct {
	image  uint32 // fault.Fault.Image
	tails  []tail
	bytes  int    // of tails
	looked bool   // at all of its mappings
	lookAt uint64 // not before
	used   uint64 // when it was asked for last
}

// tail is anonymous memory that begins right behind a mapping of a file.
type tail struct {
	of fault.VMA
	// end is where the memory ends, as far as is known: what follows [of.End, end) has
	// parts with different flags.
	end uint64
}

// size is how many bytes are kept of a tail, about.
func (t *tail) size() int {
	return int(unsafe.Sizeof(*t)) + len(t.of.Path) + len(t.of.Label)
}

// NewResolver returns a resolver that has nothing open yet.
func NewResolver(o Options) *Resolver {
	return &Resolver{
		opt: o, files: map[fileID]*file{}, processes: map[uint32]*tailed{},
		codes: map[string]*code{}, maps: map[uint32]*compiled{}, debuginfod: newDebuginfod(o.Fetch),
	}
}

// Close closes all files.
func (r *Resolver) Close() {
	for id := range r.files {
		r.forget(id)
	}
	for pid := range r.maps {
		r.forgetMap(pid)
	}
	r.debuginfod.close()
}

// Resolve names the places of faults, in the order in which they were complete. It is
// to be called for empty batches too, now and then: files that are not used any more are
// closed.
func (r *Resolver) Resolve(faults []fault.Fault) {
	r.Begin()
	for i := range faults {
		f := &faults[i]
		switch {
		case !f.Is(fault.HasLabel):
		case f.VMA.Inode != 0:
			r.resolveFile(f)
		case continues(f.VMA.Label):
			r.resolveTail(f)
		}
	}
}

// Begin begins a batch: files may have changed since the last one, and those that are not used
// any more are closed. Before the first batch nothing is known.
func (r *Resolver) Begin() {
	now := process.Now()
	r.saved = min(r.saved+int64((now-r.now)/readShare), maxSaved)
	r.now = now
	r.sweep()
}

// continues reports whether memory with a label may be what a file's segment has beyond
// the file. That of a static program and the heap may be one mapping.
func continues(label string) bool {
	return label == "[anon]" || label == "[heap]" || strings.HasPrefix(label, "[anon:")
}

// affords reports whether something may be read. What cannot be is unknown for now.
func (r *Resolver) affords() bool { return r.opt.Patient || r.saved > 0 }

// spend takes note of what was read since a moment.
func (r *Resolver) spend(since uint64) { r.saved -= int64(process.Now() - since) }

func (r *Resolver) resolveFile(f *fault.Fault) {
	if !f.Is(fault.HasPgOff) {
		return
	}
	bounds := f.Is(fault.HasVMA)
	fl := r.open(&f.VMA, bounds, f.PID)
	if fl.image == nil {
		return
	}
	if bounds && !r.opt.Timeline && f.Mode != fault.Remote && fl.image.hasTail(&f.VMA) {
		r.addTails(r.process(f), tail{of: f.VMA, end: f.VMA.End + 1})
	}
	if f.End >= fl.since {
		r.show(f, fl, fl.image.placeOfOffset(f.FileOffset(r.opt.PageSize), &f.VMA, bounds))
	}
}

func (r *Resolver) resolveTail(f *fault.Fault) {
	of := f.Continues
	if of == nil {
		if of = r.continued(f); of == nil {
			return
		}
	}
	fl := r.open(of, true, f.PID)
	if fl.image == nil || f.End < fl.since {
		return
	}
	if addr, ok := fl.image.beyond(of, f.Address-of.End); ok {
		r.show(f, fl, fl.image.placeOfAddr(addr))
	}
}

func (r *Resolver) show(f *fault.Fault, fl *file, p place) {
	f.Section = p.section
	if !r.opt.Symbols || !p.hasAddr {
		return
	}
	symbols := &fl.image.symbols
	f.Symbol, f.SymbolOffset = symbols.at(p.addr, r.affords())
	r.saved -= int64(symbols.took)
	symbols.took = 0
	r.account(fl)
}

// account takes note of what is kept of a file, and forgets others if that is too much.
func (r *Resolver) account(fl *file) {
	size := fl.image.size()
	r.kept += size - fl.kept
	fl.kept = size
	for r.kept > maxKept && r.forgetOldest(fl) {
	}
}

// continued is the mapping of a file that a fault's anonymous one begins behind. In mode
// remote it is a mapping of another process, nobody says which.
func (r *Resolver) continued(f *fault.Fault) *fault.VMA {
	if r.opt.Timeline || !f.Is(fault.HasVMA) || f.Mode == fault.Remote {
		return nil
	}
	p := r.process(f)
	of := p.find(&f.VMA)
	if of == nil && !p.looked && r.now >= p.lookAt && r.affords() && r.opt.Proc && f.PID != 0 {
		r.lookAround(p, f.PID)
		of = p.find(&f.VMA)
	}
	return of
}

// lookAround reads the mappings of a process, once: those of one that began before
// the tracing may have taken all their faults by then.
func (r *Resolver) lookAround(p *tailed, pid uint32) {
	defer r.spend(process.Now())
	mappings, _ := process.ReadMaps(int(pid)) // one that has ended has none
	r.addTails(p, tails(mappings)...)
	p.looked, p.lookAt = true, r.now+lookEvery
}

// tails finds anonymous memory that follows files.
func tails(mappings []process.Mapping) []tail {
	var found []tail
	var open *tail // ends where the next mapping may begin
	for i := range mappings {
		m := &mappings[i]
		switch {
		case m.Inode != 0 && m.HasPgOff:
			path, _ := process.FilePath(m.Path)
			found = append(found, tail{
				of:  fault.VMA{Start: m.Start, End: m.End, PgOff: m.PgOff, Flags: m.Flags, Inode: m.Inode, Dev: m.Dev, Label: m.Label, Path: path},
				end: m.End,
			})
			open = &found[len(found)-1]
		case open != nil && open.end == m.Start && continues(m.Label):
			open.end = m.End
		default:
			open = nil
		}
	}
	return slices.DeleteFunc(found, func(t tail) bool { return t.end == t.of.End })
}

// process is what is known of the process of a fault since its last exec.
func (r *Resolver) process(f *fault.Fault) *tailed {
	id := f.HostPID
	if id == 0 {
		id = f.PID
	}
	p := r.processes[id]
	if p == nil {
		if len(r.processes) >= maxProcesses {
			r.partAll()
		}
		p = &tailed{image: f.Image}
		r.processes[id] = p
	}
	if p.image != f.Image {
		r.tailBytes -= p.bytes
		*p = tailed{image: f.Image, lookAt: p.lookAt}
	}
	p.used = r.now
	return p
}

// partAll forgets all processes.
func (r *Resolver) partAll() {
	clear(r.processes)
	r.tailBytes = 0
}

// addTails adds to what is known of a process, and forgets all others if that is too much.
func (r *Resolver) addTails(p *tailed, tails ...tail) {
	before := p.bytes
	for _, t := range tails {
		p.add(t)
	}
	if r.tailBytes += p.bytes - before; r.tailBytes > maxTailBytes {
		maps.DeleteFunc(r.processes, func(_ uint32, other *tailed) bool { return other != p })
		r.tailBytes = p.bytes
	}
}

func (p *tailed) add(t tail) {
	for i := range p.tails {
		if old := &p.tails[i]; old.of.End == t.of.End && old.of.Inode == t.of.Inode && old.of.Dev == t.of.Dev {
			p.bytes -= old.size()
			old.of, old.end = t.of, max(old.end, t.end)
			p.bytes += old.size()
			return
		}
	}
	// What was mapped there before is gone.
	p.tails = slices.DeleteFunc(p.tails, func(old tail) bool {
		gone := old.of.Start < t.of.End && t.of.Start < old.of.End
		if gone {
			p.bytes -= old.size()
		}
		return gone
	})
	if len(p.tails) >= maxTails {
		p.tails, p.bytes = nil, 0
	}
	p.tails = append(p.tails, t)
	p.bytes += t.size()
}

func (p *tailed) find(v *fault.VMA) *fault.VMA {
	for i := range p.tails {
		if t := &p.tails[i]; v.Start >= t.of.End && v.Start < t.end {
			return &t.of
		}
	}
	return nil
}

// open returns what is known of the file of a mapping, and looks at it if need be.
func (r *Resolver) open(v *fault.VMA, bounds bool, pid uint32) *file {
	id := fileID{v.Dev, v.Inode}
	fl := r.last
	if fl == nil || r.lastID != id {
		fl = r.files[id]
	}
	if fl == nil || fl.image == nil && r.now >= fl.retry {
		if !r.affords() {
			return &r.unread
		}
		r.forget(id)
		fl = r.look(id, v, bounds, pid)
	}
	fl.used = r.now
	r.last, r.lastID = fl, id
	if fl.image != nil && fl.checked != r.now {
		fl.checked = r.now
		fl.stale = !fl.current() || fl.stale
	}
	if fl.stale {
		if !r.affords() {
			return &r.unread
		}
		r.reload(fl)
	}
	return fl
}

// look opens a file that is not known yet.
func (r *Resolver) look(id fileID, v *fault.VMA, bounds bool, pid uint32) *file {
	defer r.spend(process.Now())
	r.makeRoom()
	fl := &file{checked: r.now}
	r.files[id] = fl
	if !r.opt.Proc {
		pid = 0
	}
	// Why not is told by nobody: what cannot be opened has no names.
	fl.opened, _ = open(v, bounds, pid)
	r.load(fl)
	return fl
}

// reload reads a file that has changed.
func (r *Resolver) reload(fl *file) {
	defer r.spend(process.Now())
	r.drop(fl)
	r.load(fl)
}

// load reads the headers; a file that is of no use is closed.
func (r *Resolver) load(fl *file) {
	if fl.opened != nil {
		var err error
		if fl.image, err = readImage(fl.File, r.opt.PageSize); err == nil {
			r.account(fl)
			return
		}
		fl.Close()
		fl.opened = nil
	}
	r.failed++
	fl.retry = r.now + retryAfter
}

// makeRoom forgets files when there are too many.
func (r *Resolver) makeRoom() {
	if r.failed >= maxFailed {
		for id, fl := range r.files {
			if fl.image == nil {
				r.forget(id)
			}
		}
	}
	if len(r.files)-r.failed < maxOpen {
		return
	}
	r.forgetOldest(nil)
}

// forgetOldest closes the file that was not asked for for the longest time, but not one
// that is in use, and reports whether there was one.
func (r *Resolver) forgetOldest(inUse *file) bool {
	var oldest fileID
	found := false
	least := ^uint64(0)
	for id, fl := range r.files {
		if fl.image != nil && fl != inUse && fl.used < least {
			oldest, least, found = id, fl.used, true
		}
	}
	if found {
		r.forget(oldest)
	}
	return found
}

// sweep closes files and forgets processes that were not asked for for a while.
func (r *Resolver) sweep() {
	if r.now-r.swept < retryAfter {
		return
	}
	r.swept = r.now
	for id, fl := range r.files {
		if r.now-fl.used > closeAfter {
			r.forget(id)
		}
	}
	for id, p := range r.processes {
		if r.now-p.used > partAfter {
			r.tailBytes -= p.bytes
			delete(r.processes, id)
		}
	}
	for pid, m := range r.maps {
		if r.now-m.used > partAfter {
			r.forgetMap(pid)
		}
	}
}

func (r *Resolver) forget(id fileID) {
	fl := r.files[id]
	if fl == nil {
		return
	}
	delete(r.files, id)
	if r.last == fl {
		r.last = nil
	}
	if fl.image == nil {
		r.failed--
		return
	}
	r.drop(fl)
	fl.Close()
}

// drop forgets what was read of a file.
func (r *Resolver) drop(fl *file) {
	r.leave(fl)
	fl.noCode = false
	if fl.image != nil {
		r.kept -= fl.kept
		fl.image, fl.kept, fl.stale = nil, 0, false
	}
}
