package perfevent

import (
	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// task is a thread as far as it is known.
type task struct {
	comm     fault.Comm
	proc     *proc
	innerTID uint32
	flight   flight
	// from is, for each kind of sample, where the last one came from.
	from [sampleKinds]origin
}

// origin is the event of a sample, and when.
type origin struct {
	cpu, set uint32
	time     uint64
}

// duplicate reports whether another event has delivered the same sample: where threads
// are started while a process is being attached to, one can have two sets of events.
// One set delivers all samples of a thread for as long as it stays on a CPU; where
// ids are not reliable (see decode.go) the samples have the very same time instead.
func (t *task) duplicate(rec *record) bool {
	o := &t.from[rec.kind]
	if rec.time == o.time && !rec.askew {
		return true
	}
	if rec.set != 0 && rec.set != o.set && rec.cpu == o.cpu && o.set != 0 {
		return true
	}
	*o = origin{rec.cpu, rec.set, rec.time}
	return false
}

// proc is a process.
type proc struct {
	pid     uint32
	threads int
	comm    fault.Comm // of the leader

	// listed: its id is one of those asked for, or its parent's was and children are wanted.
	listed bool
	// kin: it or an ancestor of it matched by name, and children are wanted.
	kin bool

	image  uint32 // fault.Fault.Image
	status cached[process.Status]
	exe    cached[string]
	cgroup cached[bool]

	space process.Space
	// looked is when /proc/PID/maps was read last, and losses how many losses space
	// has lived through.
	looked uint64
	losses uint64
	execed bool // and has not mapped its program yet
	// searched is when its descriptors were looked through for a userfaultfd, and
	// userfault whether it may have one.
	searched  uint64
	userfault bool
}

// cached is a fact read from /proc.
type cached[T any] struct {
	value T
	read  uint64 // when, in nanoseconds of CLOCK_MONOTONIC
	tried bool
	known bool
}

// refreshAfter is how long a fact about a process that can change without notice (its
// user, its cgroup) is believed.
const refreshAfter = 1e9

// get returns the fact, asking read when it is not known or too old. A process that
// has gone keeps what was known of it.
func (c *cached[T]) get(now, maxAge uint64, read func() (T, error)) (T, bool) {
	if !c.tried || now > c.read && now-c.read > maxAge {
		c.tried, c.read = true, now
		if v, err := read(); err == nil {
			c.value, c.known = v, true
		}
	}
	return c.value, c.known
}

// tasks knows the threads and processes that have been heard of and not yet ended.
type tasks struct {
	threads map[uint32]*task
	procs   map[uint32]*proc
	// nobody stands for all threads without an id in our pid namespace.
	nobody task
	// readProc says that /proc shows our pids.
	readProc bool
	// list holds the ids of processes that were asked for.
	list map[uint32]bool
	// children: forks of a listed or kindred process are so too.
	children bool
	// chosen: the kernel reports those that were asked for and their descendants only.
	// Then a process whose fork was not heard of, because its record was lost, is one
	// of them too.
	chosen bool
	// sweepAt is the number of processes at which to look for those whose end was missed.
	sweepAt int
	images  uint32
	// ended are the processes that have ended since it was emptied, if it is kept.
	ended map[uint32]*proc
}

func (t *tasks) newImage() uint32 {
	t.images++
	return t.images
}

func newTasks(readProc bool, list map[uint32]bool, children bool) *tasks {
	t := &tasks{
		threads:  map[uint32]*task{},
		procs:    map[uint32]*proc{},
		nobody:   task{proc: &proc{}},
		readProc: readProc,
		list:     list,
		children: children,
		sweepAt:  minSweep,
	}
	return t
}

// get returns the thread of a record. One not heard of before was there before the
// events were; what can be known of it is in /proc.
func (t *tasks) get(pid, tid uint32) *task {
	if tid == 0 {
		t.nobody = task{proc: t.nobody.proc}
		return &t.nobody
	}
	if th := t.threads[tid]; th != nil && th.proc.pid == pid {
		return th
	}
	return t.add(pid, tid)
}

// add makes a thread, and its process if need be, from /proc.
func (t *tasks) add(pid, tid uint32) *task {
	t.end(tid)
	p := t.procs[pid]
	if p == nil {
		p = &proc{pid: pid, image: t.newImage(), listed: t.list[pid] || t.chosen}
		p.comm = t.readComm(pid, pid)
		t.procs[pid] = p
		t.sweep()
	}
	p.threads++
	th := &task{proc: p}
	if tid == pid {
		th.comm = p.comm
	} else {
		th.comm = t.readComm(pid, tid)
	}
	t.threads[tid] = th
	return th
}

func (t *tasks) readComm(pid, tid uint32) fault.Comm {
	if !t.readProc {
		return fault.Comm{}
	}
	// A thread that has ended has no name any more; it stays empty.
	name, _ := process.Comm(int(pid), int(tid))
	return fault.MakeComm(name)
}

// fork adds the thread that a record of a fork announces.
func (t *tasks) fork(rec *record) {
	if rec.tid == 0 || rec.side.parentTID == 0 {
		return
	}
	parent := t.get(rec.side.parentPID, rec.side.parentTID)
	t.end(rec.tid)
	th := &task{comm: parent.comm, proc: parent.proc}
	if rec.pid != rec.side.parentPID {
		if old := t.procs[rec.pid]; old != nil {
			t.drop(old)
		}
		th.proc = t.child(parent, rec.pid)
		t.procs[rec.pid] = th.proc
		t.sweep()
	}
	th.proc.threads++
	t.threads[rec.tid] = th
}

// child is a new process, like its parent in all that fork copies.
func (t *tasks) child(parent *task, pid uint32) *proc {
	from := parent.proc
	p := &proc{
		pid: pid, image: t.newImage(), comm: parent.comm,
		listed: from.listed && t.children || t.list[pid],
		kin:    from.kin && t.children,
		exe:    from.exe,
		space:  from.space.Fork(),
		losses: from.losses,
	}
	// The child's own ids must be read; its user is taken from the parent should it end
	// before that.
	p.status = cached[process.Status]{value: from.status.value, known: from.status.known}
	p.status.value.InnerTGID, p.status.value.InnerTID, p.status.value.Nested = 0, 0, false
	p.cgroup = cached[bool]{value: from.cgroup.value, known: from.cgroup.known}
	return p
}

// rename applies a new thread name, and an exec if it came from one.
func (t *tasks) rename(rec *record, losses uint64) {
	if rec.tid == 0 {
		return
	}
	th := t.get(rec.pid, rec.tid)
	th.comm = rec.side.comm
	p := th.proc
	if rec.tid == rec.pid {
		p.comm = rec.side.comm
	}
	if rec.side.exec {
		p.space.Reset()
		p.looked, p.losses, p.execed = 0, losses, true
		p.image = t.newImage()
		p.exe, p.status.tried = cached[string]{}, false
		if rec.side.status.known {
			p.status = rec.side.status
		}
	}
}

// mapped adds a mapping. The first file that is mapped after an exec is the program
// (load_elf_binary in fs/binfmt_elf.c).
func (t *tasks) mapped(rec *record) {
	if rec.tid == 0 {
		return
	}
	p := t.get(rec.pid, rec.tid).proc
	m := rec.side.mapping
	p.space.Insert(m)
	if p.execed && m.Inode != 0 {
		p.exe = cached[string]{value: m.Label, read: rec.time, tried: true, known: true}
		p.execed = false
	}
}

// end forgets a thread, and its process with the last one.
func (t *tasks) end(tid uint32) {
	th := t.threads[tid]
	if th == nil {
		return
	}
	delete(t.threads, tid)
	if th.proc.threads--; th.proc.threads <= 0 && t.procs[th.proc.pid] == th.proc {
		delete(t.procs, th.proc.pid)
		if t.ended != nil {
			t.ended[th.proc.pid] = th.proc
		}
	}
}

// drop forgets a process of which the end was missed.
func (t *tasks) drop(p *proc) {
	for tid, th := range t.threads {
		if th.proc == p {
			delete(t.threads, tid)
		}
	}
	delete(t.procs, p.pid)
}

// minSweep is a number of processes that may be remembered unchecked.
const minSweep = 4096

// sweep bounds the memory: records of an end can be lost, and are not delivered for a
// process whose events the kernel took away because it gained privileges by exec.
func (t *tasks) sweep() {
	if len(t.procs) < t.sweepAt {
		return
	}
	for tid, th := range t.threads {
		if !process.Alive(int(th.proc.pid)) {
			delete(t.threads, tid)
			delete(t.procs, th.proc.pid)
		}
	}
	for pid := range t.procs {
		if !process.Alive(int(pid)) {
			delete(t.procs, pid)
		}
	}
	t.sweepAt = max(minSweep, 2*len(t.procs))
}
