package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

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
	for stopped := false; ; {
		if p.out.probe(); !stopped && (ctx.Err() != nil || p.done()) {
			stopped = true
			end()
			if err := p.src.Stop(); err != nil {
				return fmt.Errorf("stopping: %w", err)
			}
			ctx = context.WithoutCancel(ctx)
		}
		batch, err := p.src.Next(ctx)
		if p.stacks != nil {
			ended := errors.Is(err, io.EOF)
			if ended && batch == nil {
				batch = &fault.Batch{} // those that have waited for their stacks
			}
			if batch != nil {
				if err := p.stacks.name(batch, ended); err != nil {
					return err
				}
			}
		}
		if batch != nil {
			if err := p.take(batch); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			p.out.flush()
			return nil
		case err != nil && ctx.Err() != nil: // woken up by the end, which comes next
		case err != nil:
			return fmt.Errorf("reading faults: %w", err)
		}
	}
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
