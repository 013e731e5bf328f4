package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

const (
	// pollInterval bounds how long a record waits for the reader. It trades the
	// promptness of a quiet trace against wakeups.
	pollInterval = 50 * time.Millisecond
	// upkeepInterval is how often losses and the CPUs online are looked at.
	upkeepInterval = 200 * time.Millisecond
	// maxBatch bounds the memory of a batch; records beyond it stay in the ring.
	maxBatch = 2048
)

// Live is a running trace, for use by one goroutine but for Counters.
type Live struct {
	plan    Plan
	session fault.Session
	coll    *ebpf.Collection
	// attached must stay referenced: the garbage collector closes a link that is not.
	attached attachments
	reader   *ringbuf.Reader
	counts   *ebpf.Memory // a faultCounters for each CPU
	kinds    *ebpf.Memory // a faultKindRow for each kind, on each CPU
	others   *ebpf.Memory // a faultCost for each table, on each CPU
	record   ringbuf.Record
	decoder  decoder
	batch    fault.Batch
	early    []fault.Fault     // those of the next batch that have been read
	lost     map[string]uint64 // as last reported
	tables   []fault.By
	compared string // see fault.Session
	stacks   stackRoom
	recordFilter,
	stopped,
	drained bool
	nextUpkeep time.Time
}

// Open loads and attaches what plan says, proves that it works by a fault of its
// own, and starts counting. The caller closes the Live.
func Open(plan Plan, opt Options) (*Live, error) {
	spec, err := loadFault()
	if err != nil {
		return nil, fmt.Errorf("reading the BPF object: %w", err)
	}
	if err := plan.apply(spec); err != nil {
		return nil, err
	}
	if err := identifyTool(spec); err != nil {
		return nil, err
	}
	sys := ReadSystem()
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: opt.Unwinder})
	if err != nil {
		s := sys.refusal("loading the BPF programs", err)
		return nil, &UnsupportedError{plan.Hook, s}
	}
	l := &Live{plan: plan, coll: coll, lost: map[string]uint64{}, tables: opt.Tables}
	if err := l.start(opt, &sys); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

func (l *Live) start(opt Options, sys *System) error {
	flt := &opt.Filter
	// Accounting for faults that no record exists of cannot ask for their address.
	l.recordFilter = flt.AddrEnd != 0 || flt.Mode != nil || flt.Access != nil || flt.Major != nil || len(flt.Kinds) > 0 || flt.MinLatency != 0
	l.decoder = newDecoder(uint64(os.Getpagesize()))
	if opt.PFN {
		nodes, err := process.NodeRanges()
		if err != nil {
			return err
		}
		l.decoder.frames, l.decoder.nodes = true, nodes
	}
	l.decoder.reclaim = slices.Contains(l.plan.Programs, faultProgBeginReclaim)
	var err error
	if l.reader, err = ringbuf.NewReader(l.coll.Maps[faultMapRecords]); err != nil {
		return fmt.Errorf("opening the ring buffer: %w", err)
	}
	for name, m := range map[string]**ebpf.Memory{faultMapCounts: &l.counts, faultMapKindRows: &l.kinds, faultMapOtherRows: &l.others} {
		if *m, err = l.coll.Maps[name].Memory(); err != nil {
			return fmt.Errorf("mapping %s: %w", name, err)
		}
	}
	if err := l.makeRoom(); err != nil {
		return err
	}
	if err := l.setTargets(opt); err != nil {
		return err
	}
	if err := l.attached.attach(&l.plan, l.coll); err != nil {
		return &UnsupportedError{l.plan.Hook, sys.refusal("attaching", err)}
	}
	if err := l.selfTest(); err != nil {
		return fmt.Errorf("testing hook %s with a fault of the tool's own: %w", l.plan.Hook, err)
	}
	if err := l.arm(); err != nil {
		return err
	}
	return l.describe(sys, opt.Command)
}

// arm lets the programs count, and notes what every thread has been counted so far.
func (l *Live) arm() error {
	if err := l.coll.Variables[faultVarArmed].Set(true); err != nil {
		return fmt.Errorf("arming the filters: %w", err)
	}
	if err := l.coll.Variables[faultVarWatchingSinceNs].Set(process.Now()); err != nil {
		return fmt.Errorf("arming the filters: %w", err)
	}
	return walkTasks(l.coll.Programs[faultProgTakeBaseline])
}

// describe fills the session.
func (l *Live) describe(sys *System, command []string) error {
	host, _ := os.Hostname() // a nameless host is no reason to fail
	cpus, err := process.OnlineCPUs()
	if err != nil {
		return err
	}
	l.session = fault.Session{
		Hook: string(l.plan.Hook), Covers: l.plan.Covers, Blind: l.plan.Blind, Unseen: l.plan.Unseen, Compared: l.compared,
		Kernel: sys.Release, Host: host, CPUs: len(cpus), Command: command,
		FlagNames: l.plan.FlagNames, PageSize: l.decoder.pageSize,
	}
	l.session.Started, l.session.MonoStarted = time.Now(), process.Now()
	return nil
}

// setTargets fills the maps that say which processes are wanted.
func (l *Live) setTargets(opt Options) error {
	put := func(name string, id uint32, value uint8) error {
		if err := l.coll.Maps[name].Put(id, value); err != nil {
			return fmt.Errorf("setting the filter on %d in %s: %w", id, name, err)
		}
		return nil
	}
	const tracked, preExec = 1, 2 // enum tracked in bpf/fault.h
	for _, pid := range opt.Filter.PIDs {
		if err := put(faultMapTracked, pid, tracked); err != nil {
			return err
		}
	}
	if opt.CommandPID != 0 {
		if err := put(faultMapTracked, opt.CommandPID, preExec); err != nil {
			return err
		}
	}
	for _, tid := range opt.Filter.TIDs {
		if err := put(faultMapTids, tid, 1); err != nil {
			return err
		}
	}
	if opt.Filter.Cgroup == "" {
		return nil
	}
	dir, err := os.Open(opt.Filter.Cgroup)
	if err != nil {
		return fmt.Errorf("opening the cgroup: %w", err)
	}
	defer dir.Close()
	if err := l.coll.Maps[faultMapCgroup].Put(uint32(0), uint32(dir.Fd())); err != nil {
		return fmt.Errorf("setting the filter on cgroup %q: %w; it must be a cgroup v2 folder", opt.Filter.Cgroup, err)
	}
	return nil
}

// Session returns the constant facts of the trace.
func (l *Live) Session() *fault.Session { return &l.session }

// Next returns the records that have arrived, waiting up to 50 ms for one. The
// batch may be empty and is valid until the next call. After Stop it returns what
// is left and then io.EOF.
func (l *Live) Next(ctx context.Context) (*fault.Batch, error) {
	l.batch.Faults = l.batch.Faults[:0]
	l.batch.Lost = l.batch.Lost[:0]
	l.batch.Samples = nil
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l.batch.Faults = append(l.batch.Faults, l.early...)
	l.early = l.early[:0]
	if l.drained && len(l.batch.Faults) == 0 {
		return nil, io.EOF
	}
	l.batch.Until = process.Now()
	l.reader.SetDeadline(time.Now().Add(pollInterval))
	for {
		if n, m := len(l.batch.Faults), len(l.decoder.stacks); n+m >= maxBatch || l.drained {
			l.batch.Until = 0
			if n > 0 {
				l.batch.Until = l.batch.Faults[n-1].End
			}
			if m > 0 {
				l.batch.Until = max(l.batch.Until, l.decoder.stacks[m-1].Time)
			}
			break
		}
		err := l.reader.ReadInto(&l.record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		} else if errors.Is(err, ringbuf.ErrFlushed) {
			l.drained = true
			break
		} else if err != nil {
			return nil, fmt.Errorf("reading the ring buffer: %w", err)
		}
		l.stacks.read(len(l.record.RawSample))
		if f, ok := l.decoder.decode(l.record.RawSample); ok {
			l.batch.Faults = append(l.batch.Faults, f)
		}
	}
	l.batch.Stacks = l.decoder.takeStacks()
	if err := l.renewRoom(); err != nil {
		return nil, err
	}
	l.batch.Mappings, l.decoder.mappings = l.decoder.mappings, nil
	return &l.batch, l.upkeep()
}

// upkeep does what is due from time to time: new CPUs, file names, losses.
func (l *Live) upkeep() error {
	now := time.Now()
	if now.Before(l.nextUpkeep) && !l.drained {
		return nil
	}
	l.nextUpkeep = now.Add(upkeepInterval)
	if !l.stopped {
		if err := l.attached.pages.update(); err != nil {
			return err
		}
	}
	if l.decoder.crowded() {
		if err := l.forgetNames(); err != nil {
			return err
		}
	}
	c, err := l.Counters()
	if err != nil {
		return err
	}
	for _, loss := range c.Lost {
		if n := loss.Count - l.lost[loss.Where]; n > 0 {
			l.lost[loss.Where] = loss.Count
			l.batch.Lost = append(l.batch.Lost, fault.Loss{Where: loss.Where, Count: n})
		}
	}
	return nil
}

// forgetNames starts over with names but for those of rows: first here, then in the
// kernel, which then sends each name again.
func (l *Live) forgetNames() error {
	rows, err := l.readRows()
	if err != nil {
		return err
	}
	var files []faultNameKey
	for i := range rows {
		if file := rows[i].key.File; file != (faultNameKey{}) {
			files = append(files, file)
		}
	}
	l.decoder.forgetNames(files)
	keys, values := make([]faultNameKey, rowsAtATime), make([]uint8, rowsAtATime)
	if err := eachBatch(l.coll.Maps[faultMapNames].BatchLookupAndDelete, keys, values, func(int) {}); err != nil {
		return fmt.Errorf("forgetting file names: %w", err)
	}
	return nil
}

// Stop ends the counting and detaches all programs; Next then returns the rest.
func (l *Live) Stop() error {
	if l.stopped {
		return nil
	}
	l.stopped = true
	var err error
	if serr := l.coll.Variables[faultVarArmed].Set(false); serr != nil {
		err = fmt.Errorf("disarming the filters: %w", serr)
	}
	err = errors.Join(err, walkTasks(l.coll.Programs[faultProgSettleAll]), l.attached.Close())
	if ferr := l.reader.Flush(); ferr != nil {
		err = errors.Join(err, fmt.Errorf("flushing the ring buffer: %w", ferr))
	}
	return err
}

// Counters reads the totals, which the kernel keeps per CPU. It may be called while
// another goroutine is in Next.
func (l *Live) Counters() (fault.Counters, error) {
	perCPU, err := readMapped[faultCounters](l.counts)
	if err != nil {
		return fault.Counters{}, fmt.Errorf("reading the counters: %w", err)
	}
	var out fault.Counters
	var seen [outcomes]uint64
	var ring, unseen, children uint64
	for i := range perCPU {
		c := &perCPU[i]
		for o := range seen {
			seen[o] += c.Matched.Faults[o] - c.LostRing.Faults[o]
			ring += c.LostRing.Faults[o]
			unseen += c.Unseen.Faults[o]
		}
		out.Filtered += c.Filtered
		out.Untimed += c.Untimed
		out.Unremembered += c.Unremembered
		out.Stackless += c.Stackless
		out.StacksLost += c.StacksUnsent
		out.Asked += c.Asked
		out.MappingsLost += c.MappingsLost
		children += c.LostChildren
	}
	out.Minor, out.Major, out.Failed = seen[outcomeMinor], seen[outcomeMajor], seen[outcomeFailed]
	out.Seen = out.Minor + out.Major + out.Failed + seen[outcomeUnknown]
	for _, loss := range []fault.Loss{
		{Where: "ring buffer full", Count: ring},
		{Where: l.unseenWhere(), Count: unseen},
		{Where: "whole processes, too many to follow", Count: children},
	} {
		if loss.Count > 0 {
			out.Lost = append(out.Lost, loss)
		}
	}
	if by, ok := l.byStack(); ok {
		rows := fault.Rows{Tables: make([]fault.Table, len(l.tables))}
		if err := l.readOther(&rows); err != nil {
			return fault.Counters{}, err
		}
		out.Stackless += rows.Tables[by].Other.Faults()
	}
	return out, nil
}

// unseenWhere names the faults that the kernel has counted for a traced thread
// and no program heard of.
func (l *Live) unseenWhere() string {
	where := "missed by hook " + string(l.plan.Hook)
	if l.plan.Hook == Tracepoint {
		where = "by get_user_pages, which hook tracepoint cannot see"
	}
	if l.recordFilter {
		where += fault.Unfiltered
	}
	return where
}

// Close detaches and frees everything.
func (l *Live) Close() error {
	err := l.attached.Close()
	if l.reader != nil {
		err = errors.Join(err, l.reader.Close())
	}
	l.coll.Close()
	return err
}
