package perfevent

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// Options say what to hear of and how.
type Options struct {
	Filter fault.Filter
	// Sample keeps every Nth matching record; 0 and 1 keep all. Counters stay exact.
	Sample uint64
	// CommandPID is a child of the caller that has not called exec yet. It counts as
	// one of Filter.PIDs from its exec on.
	CommandPID int
	// Command is what CommandPID will run, for [fault.Session].
	Command []string
	// BufferPages is the size of each CPU's ring in pages, a power of two. 0 chooses
	// the largest that is allowed and useful.
	BufferPages int
	// NoEntries leaves out the events at the beginning of faults. It halves the
	// traffic; latencies and faults that failed are unknown then.
	NoEntries bool
	// Stacks takes the stack of each completed fault.
	Stacks bool
	// KeepStacks keeps the ids of stacks for good: once there is no room for more, faults
	// have none.
	KeepStacks bool

	// noFaults leaves out all of them: only processes and their mappings are followed.
	noFaults bool
}

// validate refuses what this hook can never answer.
func (o *Options) validate() error {
	const remedy = "use a BPF hook, as root"
	flt := &o.Filter
	switch {
	case flt.Access != nil:
		return errors.New("filtering by access: perf events do not tell read, write and exec apart; " + remedy)
	case len(flt.Kinds) > 0 && !slices.ContainsFunc(flt.Kinds, Tells):
		return errors.New("filtering by kind: none of these can be told from perf events; " + remedy)
	case flt.Mode != nil && *flt.Mode == fault.Remote:
		return errors.New("filtering by mode: perf events do not fire for remote faults; " + remedy)
	case flt.MinLatency > 0 && o.NoEntries:
		return errors.New("filtering by latency: it is not measured without the events at the beginning of faults")
	case o.BufferPages < 0 || bits.OnesCount(uint(o.BufferPages)) > 1:
		return fmt.Errorf("choosing a ring of %d pages: not a power of two", o.BufferPages)
	}
	return nil
}

// Open starts to hear of the faults that the options choose. The caller must call
// [Session.Close].
func Open(opt Options) (_ *Session, err error) {
	if err := opt.validate(); err != nil {
		return nil, err
	}
	cpus, err := process.OnlineCPUs()
	if err != nil {
		return nil, err
	}
	s := newSession(opt)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	s.backings, s.uffd = newBackings(), hasUserfaultfd()
	if err := s.resolve(); err != nil {
		return nil, err
	}
	if s.order = bits.Len(uint(opt.BufferPages)) - 1; opt.BufferPages == 0 {
		s.order = chooseOrder(len(cpus))
	}
	for _, cpu := range cpus {
		if _, err := s.addCPU(cpu); err != nil {
			return nil, err
		}
	}
	if err := s.attach(); err != nil {
		return nil, err
	}
	if err := s.describe(len(cpus)); err != nil {
		return nil, err
	}
	return s, nil
}

func newSession(opt Options) *Session {
	flt := &opt.Filter
	list := map[uint32]bool{}
	for _, pid := range flt.PIDs {
		list[pid] = true
	}
	if opt.CommandPID != 0 {
		list[uint32(opt.CommandPID)] = true
	}
	s := &Session{
		opt:      opt,
		self:     uint32(os.Getpid()),
		readProc: process.ProcIsOurs(),
		hostIDs:  process.InInitialNamespace(),
		onlyTIDs: map[uint32]bool{},
		kinds:    opt.Filter.Kinds,
		cgroupFD: -1,
	}
	// A kind is known when the mapping has been looked up, which only what matches else
	// is worth.
	s.opt.Filter.Kinds = nil
	if opt.Stacks {
		s.decoder.takeChains(maxChains)
		s.stacks = map[stackKey]uint64{}
	}
	s.tasks = newTasks(s.readProc, list, flt.Children)
	if opt.Stacks {
		s.tasks.ended = map[uint32]*proc{}
	}
	for _, tid := range flt.TIDs {
		s.onlyTIDs[tid] = true
	}
	if len(flt.PIDs) > 0 {
		s.decoder.sets = map[uint64]uint32{}
	}
	// Threads that are asked for by their own id do not stand for those they start.
	s.inherit = len(flt.TIDs) == 0
	s.tasks.chosen = len(list) > 0 && s.inherit && flt.Children
	s.tasks.nobody.proc.listed = s.tasks.chosen
	return s
}

// resolve decides whose events are opened.
func (s *Session) resolve() error {
	flt := &s.opt.Filter
	if flt.Cgroup != "" {
		path, err := process.CgroupOf(flt.Cgroup)
		if err != nil {
			return err
		}
		s.cgroup = path
	}
	switch {
	case len(s.tasks.list) > 0 || len(flt.TIDs) > 0:
		s.scope = taskScope
	case s.cgroup != "":
		s.scope = cgroupScope
		fd, err := unix.Open(flt.Cgroup, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("opening cgroup %q: %w", flt.Cgroup, err)
		}
		s.cgroupFD = fd
	default:
		s.scope = systemScope
	}
	if s.scope != taskScope {
		s.inherit = false
	}
	return nil
}

// addCPU makes the ring of a CPU, or none if the CPU went offline since it was listed
// (ENODEV).
func (s *Session) addCPU(cpu int) (*ring, error) {
	owner, err := s.openOwner(cpu)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, s.explain(err, os.Getpid())
	}
	r, err := s.mapLargest(owner, cpu)
	if err != nil {
		return nil, errors.Join(err, owner.Close())
	}
	s.rings = append(s.rings, r)
	return r, nil
}

func (s *Session) explain(err error, tid int) error {
	paranoid, perr := readInt(paranoidFile)
	if perr != nil {
		paranoid = -1
	}
	return explainOpen(err, s.scope, tid, paranoid)
}

// attach opens the events of all tasks and starts them.
func (s *Session) attach() error {
	switch s.scope {
	case cgroupScope:
		err := s.openAll(s.cgroupFD, false)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EBADF) {
			// The perf_event controller is not on the v2 hierarchy, or not built in: hear of
			// all tasks and look up the cgroup of each.
			s.scope = systemScope
			err = s.openAll(-1, false)
		}
		if err != nil {
			return s.explain(err, 0)
		}
	case systemScope:
		if err := s.openAll(-1, false); err != nil {
			return s.explain(err, 0)
		}
	case taskScope:
		return s.attachTasks()
	}
	if err := s.enable(0); err != nil {
		return err
	}
	return s.seedAll()
}

// attachTasks opens the events of the chosen threads. Those of a process are listed
// again until no new one appears: a thread that was started meanwhile by one that had
// no events yet has none either. One that has inherited them gets a second set, which
// task.duplicate tells.
func (s *Session) attachTasks() error {
	opened := map[int]bool{}
	if pid := s.opt.CommandPID; pid != 0 {
		if err := s.openTask(pid, true); err != nil {
			return err
		}
		opened[pid] = true
		// It may end before the first record is read; exec does not change its user.
		s.status(s.tasks.get(uint32(pid), uint32(pid)).proc, refreshAfter)
	}
	for _, tid := range s.opt.Filter.TIDs {
		if opened[int(tid)] {
			continue
		}
		opened[int(tid)] = true
		if err := s.attachTask(int(tid)); err != nil {
			return err
		}
	}
	if len(s.opt.Filter.TIDs) > 0 {
		return nil
	}
	for _, pid := range s.opt.Filter.PIDs {
		if int(pid) == s.opt.CommandPID {
			continue
		}
		if err := s.attachProcess(int(pid), opened); err != nil {
			return err
		}
	}
	return nil
}

// attachProcess opens the events of all threads of a process.
func (s *Session) attachProcess(pid int, opened map[int]bool) error {
	if !s.readProc {
		return fmt.Errorf("listing the threads of process %d: /proc shows another pid namespace: mount it anew (unshare --mount-proc)", pid)
	}
	for fresh := true; fresh; {
		fresh = false
		tids, err := process.Threads(pid)
		if err != nil {
			return fmt.Errorf("opening a page-fault event: no process %d: %w: check the id", pid, err)
		}
		for _, tid := range tids {
			if opened[tid] {
				continue
			}
			opened[tid], fresh = true, true
			err := s.attachTask(tid)
			// A thread may end at any time; the process has others.
			if errors.Is(err, unix.ESRCH) && tid != pid {
				continue
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// attachTask opens and starts the events of one thread and learns its names.
func (s *Session) attachTask(tid int) error {
	first := len(s.events)
	if err := s.openTask(tid, false); err != nil {
		return err
	}
	if err := s.enable(first); err != nil {
		return err
	}
	if !s.readProc {
		return nil
	}
	st, err := process.ReadStatus(tid)
	if err != nil {
		return nil // it has ended, which its exit record says too
	}
	th := s.tasks.get(st.TGID, uint32(tid))
	if st.Nested {
		th.innerTID = st.InnerTID
	}
	if p := th.proc; p.looked == 0 {
		s.look(p)
		s.status(p, refreshAfter)
	}
	return nil
}

// openTask opens the events of one thread on all CPUs. Without the privilege to watch
// the kernel it leaves out faults that the kernel takes on the thread's behalf.
func (s *Session) openTask(tid int, onExec bool) error {
	err := s.openAll(tid, onExec)
	if errors.Is(err, unix.EACCES) && !s.userOnly && len(s.events) == 0 {
		s.userOnly = true
		err = s.openAll(tid, onExec)
	}
	if err != nil {
		return s.explain(err, tid)
	}
	return nil
}

func (s *Session) openAll(id int, onExec bool) error {
	for _, r := range s.rings {
		err := s.openSet(r, id, onExec)
		if errors.Is(err, unix.ENODEV) {
			r.offline = true // gone since the CPUs were listed
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// seedAll learns the names of all threads that exist. Those that start or rename
// themselves from now on are reported.
func (s *Session) seedAll() error {
	if !s.readProc {
		return nil
	}
	pids, err := process.All()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		tids, err := process.Threads(pid)
		if err != nil {
			continue // it has ended
		}
		for _, tid := range tids {
			th := s.tasks.get(uint32(pid), uint32(tid))
			if tid == pid && s.opt.Filter.UID != nil {
				s.status(th.proc, refreshAfter)
			}
		}
	}
	return nil
}

// describe fills the constant facts of the session.
func (s *Session) describe(cpus int) error {
	if s.userOnly && s.opt.Filter.Mode != nil && *s.opt.Filter.Mode == fault.Kernel {
		return errors.New("filtering by mode: faults in kernel mode are not reported at perf_event_paranoid 2 and above: " +
			"run as root or set kernel.perf_event_paranoid=1")
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return fmt.Errorf("reading the kernel's version: %w", err)
	}
	info := &s.info
	*info = fault.Session{
		Hook:     "perf",
		Covers:   []string{fault.User.String()},
		Kernel:   unix.ByteSliceToString(uts.Release[:]),
		Host:     unix.ByteSliceToString(uts.Nodename[:]),
		CPUs:     cpus,
		Command:  slices.Clone(s.opt.Command),
		PageSize: pageSize,
	}
	info.MonoStarted, info.Started = startTimes()
	if s.userOnly {
		info.Unseen = append(info.Unseen,
			"faults that the kernel takes on a process's memory: need root or perf_event_paranoid 1")
	} else {
		info.Covers = append(info.Covers, fault.Kernel.String())
	}
	if s.scope == taskScope {
		// begin_new_exec in fs/exec.c takes their events away, whoever has opened them.
		info.Unseen = append(info.Unseen, "programs that gain privileges or may not be read, from their start on")
	}
	info.Unseen = append(info.Unseen, "remote faults (get_user_pages)")
	unknown := "why a fault failed"
	if s.opt.NoEntries {
		info.Unseen = append(info.Unseen, "faults that fail")
		unknown = "latency"
	} else {
		info.Covers = append(info.Covers, "failed")
	}
	info.Blind = append(slices.Clone(info.Unseen), unknown, "read, write or exec",
		"kinds of faults in writable and in anonymous memory", "fault flags", "attempts")
	if s.opt.Filter.UID != nil {
		info.Blind = append(info.Blind, "the user of a process that ends within milliseconds: its parent's is taken")
	}
	if !s.readProc {
		info.Blind = append(info.Blind, "kinds", "names and mappings from before the start: /proc shows another pid namespace")
	}
	return nil
}
