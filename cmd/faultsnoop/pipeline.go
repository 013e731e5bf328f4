package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
	"faultsnoop/internal/symbol"
	"faultsnoop/internal/view"
)

// source is where faults come from: a BPF hook or perf events.
type source interface {
	Session() *fault.Session
	// Next waits for about 100 ms at most; a batch may be empty. After Stop it
	// returns io.EOF when everything has been delivered.
	Next(ctx context.Context) (*fault.Batch, error)
	Stop() error
	Counters() (fault.Counters, error)
	Close() error
}

// opener opens the source that sourceOptions describe.
type opener func(sourceOptions, *slog.Logger) (source, error)

// pipeline moves batches from a source to whoever takes them.
type pipeline struct {
	src source
	out *output
	// stacks is nil if none are taken.
	stacks *stackNamer
	// take is called for each batch; done reports that nothing more is wanted.
	take func(*fault.Batch) error
	done func() bool
	// due reads what was counted when it is time to show it, else it returns nil; show shows it.
	// Both are nil if nothing is shown before the end. due is called where the source is read.
	due  func() (*reading, error)
	show func(*reading) error

	// ended is when the end came, before the source was stopped: that takes its time.
	ended time.Time
}

// run goes on until ctx is done, nothing more is wanted or the output is gone.
// Then it stops the source and takes what is left in it.
func (p *pipeline) run(ctx context.Context) error {
	var once sync.Once
	end := func() { once.Do(func() { p.ended = time.Now() }) }
	// At the latest when an error is returned; a batch may be taken while ctx is cancelled.
	defer end()
	defer context.AfterFunc(ctx, end)()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	next := p.reader(ctx)
	if p.stacks.runsAhead() {
		ahead := newBacklog()
		var reading sync.WaitGroup
		read := next
		reading.Go(func() {
			for last := false; !last; {
				d := read()
				last = d.err != nil
				ahead.put(&d)
			}
		})
		defer reading.Wait()
		defer ahead.abandon()
		defer stop()
		next = ahead.take
	}
	for {
		if p.out.probe(); p.done() {
			end()
			stop()
		}
		d := next()
		if err := p.pass(&d); err != nil {
			return err
		}
		if errors.Is(d.err, io.EOF) {
			p.out.flush()
			return nil
		}
		if d.err != nil {
			return d.err
		}
	}
}

// pass hands on what has come.
func (p *pipeline) pass(d *delivery) error {
	if p.stacks != nil {
		ended := errors.Is(d.err, io.EOF)
		if ended && d.batch == nil {
			d.batch = &fault.Batch{} // those that have waited for their stacks
		}
		if d.batch != nil {
			p.stacks.name(d.batch, d.stacks, ended)
		}
	}
	if d.batch != nil {
		if err := p.take(d.batch); err != nil {
			return err
		}
	}
	if d.counts != nil {
		return p.show(d.counts)
	}
	return nil
}

// delivery is a batch on its way.
type delivery struct {
	batch  *fault.Batch // nil if there is none
	stacks []rawStack   // its new stacks
	counts *reading     // nil if they are not due
	err    error        // io.EOF after the last one
}

// reader returns what reads the source, and stops it when ctx is done.
func (p *pipeline) reader(ctx context.Context) (next func() delivery) {
	stopped := false
	return func() (d delivery) {
		if !stopped && ctx.Err() != nil {
			stopped = true
			if err := p.src.Stop(); err != nil {
				return delivery{err: fmt.Errorf("stopping: %w", err)}
			}
			ctx = context.WithoutCancel(ctx)
		}
		d.batch, d.err = p.src.Next(ctx)
		switch {
		case d.err == nil || errors.Is(d.err, io.EOF):
		case ctx.Err() != nil: // woken up by the end, which comes next
			d.err = nil
		default:
			d.err = fmt.Errorf("reading faults: %w", d.err)
		}
		var err error
		if p.stacks != nil {
			if err = p.stacks.advance(); err == nil && d.batch != nil {
				d.stacks = p.stacks.prepare(d.batch.Stacks)
			}
		}
		if err == nil && p.due != nil {
			if d.counts, err = p.due(); d.counts != nil && p.stacks != nil && d.counts.rows != nil {
				d.counts.stacks = p.stacks.prepare(d.counts.rows.Stacks)
			}
		}
		if err != nil {
			d.err = err
		}
		return d
	}
}

// maxBacklog is how much may wait to be named, in about bytes: more than a ring holds.
const maxBacklog = 8 << 20

// backlog is what has been read and waits for its names. The reader of a source goes on for as
// long as there is room, so that a name that takes its time loses no record.
type backlog struct {
	mu        sync.Mutex
	changed   *sync.Cond
	waiting   []*delivery
	size      int
	abandoned bool
}

func newBacklog() *backlog {
	b := &backlog{}
	b.changed = sync.NewCond(&b.mu)
	return b
}

// put adds a copy of a delivery, when there is room.
func (b *backlog) put(d *delivery) {
	d.own()
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.size > maxBacklog && !b.abandoned {
		b.changed.Wait()
	}
	if b.abandoned || len(b.waiting) > 0 && d.empty() {
		return
	}
	b.size += d.size()
	b.waiting = append(b.waiting, d)
	b.changed.Broadcast()
}

// take waits for the next one.
func (b *backlog) take() delivery {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.waiting) == 0 {
		b.changed.Wait()
	}
	d := b.waiting[0]
	b.waiting[0] = nil
	b.waiting = b.waiting[1:]
	b.size -= d.size()
	b.changed.Broadcast()
	return *d
}

// abandon says that nobody takes any more.
func (b *backlog) abandon() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.abandoned = true
	b.changed.Broadcast()
}

// own copies what belongs to the source.
func (d *delivery) own() {
	if d.batch == nil {
		return
	}
	d.batch = &fault.Batch{
		Faults: slices.Clone(d.batch.Faults), Until: d.batch.Until, Samples: d.batch.Samples, Mappings: slices.Clone(d.batch.Mappings), Lost: slices.Clone(d.batch.Lost),
	}
}

// empty reports whether a delivery only says that the source is alive.
func (d *delivery) empty() bool { return d.err == nil && d.counts == nil && d.size() == 0 }

// size is how many bytes are kept, about.
func (d *delivery) size() int {
	n := 0
	if d.batch != nil {
		n += len(d.batch.Faults)*int(unsafe.Sizeof(fault.Fault{})) + len(d.batch.Samples)*int(unsafe.Sizeof(fault.RawSample{})) +
			len(d.batch.Mappings)*int(unsafe.Sizeof(fault.MappingCall{})) + len(d.batch.Lost)*int(unsafe.Sizeof(fault.Loss{}))
	}
	const word = 8
	for i := range d.stacks {
		s := &d.stacks[i]
		n += int(unsafe.Sizeof(*s)) + word*(len(s.Kernel)+cap(s.User)+cap(s.mapped))
	}
	return n
}

// printer writes records.
type printer struct {
	enc   *view.Encoder
	out   *output
	limit uint64           // of records, 0 for none
	names *symbol.Resolver // nil if no section or symbol is shown

	printed, stacked uint64 // records, and those with a stack
}

// done reports that nothing more can be shown.
func (p *printer) done() bool {
	return p.out.err != nil || (p.limit > 0 && p.printed >= p.limit)
}

func (p *printer) take(batch *fault.Batch) error {
	if p.names != nil {
		p.names.Resolve(batch.Faults)
	}
	for i := range batch.Faults {
		if p.done() {
			break
		}
		p.out.buf = p.enc.AppendFault(p.out.buf, &batch.Faults[i])
		p.printed++
		if aggregate.HasStack(batch.Faults[i].Stack) {
			p.stacked++
		}
		if len(p.out.buf) >= outputSize {
			p.out.flush()
		}
	}
	for _, l := range batch.Lost {
		if l.Count > 0 {
			p.out.buf = p.enc.AppendLost(p.out.buf, l)
		}
	}
	p.out.settle(len(batch.Faults) == 0)
	return nil
}

const (
	// lossTick is how often losses are looked for, so that the first is told at once.
	lossTick = 100 * time.Millisecond
	// lossPause is the shortest time between two reports of them.
	lossPause = time.Second
)

// reportLosses tells about losses while they happen, until ctx is done. It asks the
// source itself, since the pipeline may stand still for the very reason that makes
// records get lost: nobody reads its output.
func reportLosses(ctx context.Context, src source, log *slog.Logger) {
	told := map[string]uint64{}
	var last time.Time
	tick := time.NewTicker(lossTick)
	defer tick.Stop()
	for done := false; !done; {
		select {
		case <-ctx.Done():
			done = true
		case now := <-tick.C:
			if now.Sub(last) < lossPause {
				continue
			}
		}
		c, err := src.Counters()
		if err != nil {
			return // the pipeline meets the same error and reports it
		}
		var lately []string
		for _, l := range c.Lost {
			if l.Count > told[l.Where] {
				told[l.Where] = l.Count
				lately = append(lately, l.Where)
			}
		}
		if len(lately) > 0 {
			last = time.Now()
			n, noun := c.LostTotal(), "faults"
			if n == 1 {
				noun = "fault"
			}
			log.Warn(fmt.Sprintf("%d %s lost so far, lately: %s", n, noun, strings.Join(lately, "; ")))
		}
	}
}
