package perfevent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// Session hears of faults until it is stopped. Next, Stop and Close are for one
// goroutine; Counters may be called from another one meanwhile.
type Session struct {
	opt  Options
	info fault.Session

	// scope, userOnly, inherit and order are how events are opened.
	scope    scope
	userOnly bool // faults taken in kernel mode are not reported
	inherit  bool
	order    int // log2 of a ring's pages
	cgroupFD int
	sets     uint32

	events  []event
	retired [2]uint64 // minor and major, of events that have been closed

	rings   []*ring
	decoder decoder
	merge   merge
	pairing pairing
	tasks   *tasks

	self     uint32 // our own process
	onlyTIDs map[uint32]bool
	kinds    []fault.Kind // only these are wanted, of a fault that matches else
	cgroup   string       // path as in /proc/PID/cgroup
	readProc bool         // /proc shows our pids
	hostIDs  bool         // our pids are those of the whole machine

	stopped bool
	started bool // the command's exec was seen
	done    bool
	// behind: some ring was not read to its end.
	behind   bool
	now      uint64 // when the rings were read last
	nextLook uint64 // when /proc/PID/maps may be read again
	nextCPUs uint64 // when to look for CPUs that came or went
	backings *backings
	uffd     bool         // the kernel may have userfaultfd
	numa     cached[bool] // NUMA balancing may be on
	audit    audit

	// stacks are the ids of those that have been handed on in this generation.
	stacks     map[stackKey]uint64
	generation uint64

	batch fault.Batch
	tally fault.Counters // since the batch began; added to counted at its end
	polls []unix.PollFd

	// mu guards counted, which Next alone changes and Counters reads.
	mu      sync.Mutex
	counted fault.Counters
}

const (
	// maxWait is the longest that Next waits for records.
	maxWait = 100 * time.Millisecond
	// mergeWait is how soon records that wait for those of other CPUs are looked at again.
	mergeWait = 10 * time.Millisecond
	// settle is how old records are when they are merged. The kernel takes a record's
	// time first and publishes it afterwards.
	settle = uint64(time.Millisecond)
	// maxDelay is the longest that may take: a virtual CPU can lose its real one in
	// between, by which 12 ms were seen.
	maxDelay = 100 * settle
	// maxRecords bounds what one call of Next reads, in all rings.
	maxRecords = 32 << 10
)

// Session returns the facts that stay the same.
func (s *Session) Session() *fault.Session { return &s.info }

// Next waits for records and returns the faults that they tell of, after 100 ms an
// empty batch. The batch is valid until the next call. After Stop it returns what is
// left and then io.EOF.
func (s *Session) Next(ctx context.Context) (*fault.Batch, error) {
	if s.done {
		return nil, io.EOF
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !s.stopped {
		if err := s.wait(); err != nil {
			return nil, err
		}
		if err := s.followCPUs(); err != nil {
			return nil, err
		}
	}
	s.batch.Faults, s.batch.Lost, s.batch.Stacks = s.batch.Faults[:0], s.batch.Lost[:0], nil
	clear(s.tasks.ended)
	s.forgetStacks()
	if err := s.audit.before(s); err != nil {
		return nil, err
	}
	if err := s.readRings(); err != nil {
		return nil, err
	}
	s.backings.refresh()
	s.done = s.stopped && !s.behind
	bound := readThrough(s.rings) - settle
	if s.done {
		bound = math.MaxUint64
	}
	s.consume(bound)
	s.audit.after(s)
	s.publish()
	return &s.batch, nil
}

// wait sleeps until a ring has enough to read or it is time to look anyway.
func (s *Session) wait() error {
	timeout := maxWait
	for _, r := range s.rings {
		if r.next < len(r.queue) {
			timeout = mergeWait
		}
	}
	if s.behind {
		timeout = 0
	}
	s.polls = s.polls[:0]
	for _, r := range s.rings {
		s.polls = append(s.polls, unix.PollFd{Fd: int32(r.fd), Events: unix.POLLIN})
	}
	_, err := unix.Poll(s.polls, int(timeout/time.Millisecond))
	if err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("waiting for perf records: %w", os.NewSyscallError("poll", err))
	}
	return nil
}

func (s *Session) readRings() error {
	s.now = process.Now()
	s.behind = false
	if len(s.rings) == 0 {
		return nil
	}
	limit := max(maxRecords/len(s.rings), 256)
	for _, r := range s.rings {
		if err := r.read(&s.decoder, limit, s.now); err != nil {
			return err
		}
		s.behind = s.behind || r.through < s.now
		if s.opt.Filter.UID != nil {
			s.learnUsers(r)
		}
	}
	return nil
}

// consume handles all records up to a time.
func (s *Session) consume(bound uint64) {
	for {
		rec := s.merge.next(s.rings, bound)
		if rec == nil {
			return
		}
		switch rec.kind {
		case minor, major, entry:
			s.sample(rec)
		case forked:
			s.learnUser(rec)
			s.tasks.fork(rec)
		case renamed:
			s.tasks.rename(rec, s.pairing.losses)
			s.started = s.started || rec.side.exec && int(rec.pid) == s.opt.CommandPID
		case mapped:
			s.tasks.mapped(rec)
		case exited:
			if t := s.tasks.threads[rec.tid]; t != nil {
				s.fail(t, s.pairing.end(t))
				s.tasks.end(rec.tid)
			}
		case loss:
			s.pairing.lost(rec.side.until)
			s.audit.wanted, s.audit.full = true, true
		}
	}
}

// sample handles the beginning or the completion of a fault.
func (s *Session) sample(rec *record) {
	t := s.tasks.get(rec.pid, rec.tid)
	if t.duplicate(rec) {
		return
	}
	if rec.kind == entry {
		s.fail(t, s.pairing.begin(t, rec))
		return
	}
	latency, timed, failed := s.pairing.complete(t, rec)
	s.fail(t, failed)
	f := s.record(t, rec)
	f.Known |= fault.HasMajor | fault.HasResult
	f.Major = rec.kind == major
	f.Result = fault.OK
	if timed {
		f.Known |= fault.HasLatency
		f.Latency = latency
	}
	if s.deliver(t, f, rec) && !timed && !s.opt.NoEntries {
		s.tally.Untimed++
	}
}

// fail delivers a fault that began and did not complete. Whether a signal ended it,
// and which, is not known.
func (s *Session) fail(t *task, fl flight) {
	if fl.up {
		s.deliver(t, s.record(t, &fl.record), &fl.record)
	}
}

// record adds a fault to the batch.
func (s *Session) record(t *task, rec *record) *fault.Fault {
	s.batch.Faults = append(s.batch.Faults, fault.Fault{
		End: rec.time,
		PID: rec.pid, TID: rec.tid, CPU: rec.cpu,
		Comm: t.comm, Process: t.proc.comm, Image: t.proc.image,
		Known:   fault.HasMode | fault.HasIP,
		Address: rec.addr, IP: rec.ip,
	})
	f := &s.batch.Faults[len(s.batch.Faults)-1]
	if rec.kernel {
		f.Mode = fault.Kernel
	}
	return f
}

// deliver counts the last fault of the batch if it matches, and takes it out again if
// it does not or is left out by sampling.
func (s *Session) deliver(t *task, f *fault.Fault, rec *record) (matches bool) {
	last := len(s.batch.Faults) - 1
	matches = s.matches(t, f)
	if matches && len(s.kinds) > 0 {
		s.locate(t.proc, f)
		matches = f.Is(fault.HasKind) && slices.Contains(s.kinds, f.Kind)
	}
	if !matches {
		s.tally.Filtered++
		s.batch.Faults = s.batch.Faults[:last]
		return false
	}
	seen := s.counted.Seen + s.tally.Seen
	s.tally.Seen++
	if f.Is(fault.HasMajor) {
		if f.Major {
			s.tally.Major++
		} else {
			s.tally.Minor++
		}
	}
	if s.opt.Sample > 1 && seen%s.opt.Sample != 0 {
		s.batch.Faults = s.batch.Faults[:last]
		return true
	}
	s.identify(t, f)
	s.stack(t, f, rec)
	if len(s.kinds) == 0 {
		s.locate(t.proc, f)
	}
	return true
}

// publish makes the counts of the batch visible to Counters.
func (s *Session) publish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counted.Seen += s.tally.Seen
	s.counted.Filtered += s.tally.Filtered
	s.counted.Untimed += s.tally.Untimed
	s.counted.Stackless += s.tally.Stackless
	s.counted.Minor += s.tally.Minor
	s.counted.Major += s.tally.Major
	s.tally = fault.Counters{}
	for _, l := range s.batch.Lost {
		s.counted.Lost = addLoss(s.counted.Lost, l)
	}
}

func addLoss(to []fault.Loss, l fault.Loss) []fault.Loss {
	for i := range to {
		if to[i].Where == l.Where {
			to[i].Count += l.Count
			return to
		}
	}
	return append(to, l)
}

// Stop ends the counting. Faults that have happened stay in the rings for Next.
func (s *Session) Stop() error {
	if s.stopped {
		return nil
	}
	s.stopped = true
	return s.disable()
}

// Counters returns the totals of all batches so far; after the last one they are
// final.
func (s *Session) Counters() (fault.Counters, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.counted
	c.Lost = append([]fault.Loss(nil), c.Lost...)
	return c, nil
}

// Close gives back all descriptors and memory. What was not read is lost.
func (s *Session) Close() error {
	s.stopped, s.done = true, true
	var errs []error
	for _, ev := range s.events {
		errs = append(errs, ev.Close())
	}
	for _, r := range s.rings {
		errs = append(errs, r.close())
	}
	if s.backings != nil {
		errs = append(errs, s.backings.close())
	}
	s.events, s.rings, s.backings = nil, nil, nil
	if s.cgroupFD >= 0 {
		errs = append(errs, unix.Close(s.cgroupFD))
		s.cgroupFD = -1
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("closing page-fault events: %w", err)
	}
	return nil
}

// startTimes reads the monotonic and the wall clock at one moment.
func startTimes() (uint64, time.Time) { return process.Now(), time.Now() }
