package main

import (
	"errors"
	"io"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

// TestBacklog: what is read waits in its order, as much as there is room for, and a reader that
// nobody takes anything from is not held for ever.
func TestBacklog(t *testing.T) {
	b := newBacklog()
	source := fault.Batch{Faults: make([]fault.Fault, 1)} // as a source uses it again
	put := make(chan int)
	go func() {
		defer close(put)
		for i := range 1 << 20 {
			source.Faults[0].Address = uint64(i)
			b.put(&delivery{batch: &source})
			b.put(&delivery{batch: &fault.Batch{}}) // nothing, so it is not kept
			put <- i
		}
	}()
	full := 0
	for waiting := true; waiting; {
		select {
		case full = <-put:
		case <-time.After(500 * time.Millisecond):
			waiting = false
		}
	}
	// The last one that has come in has not been told of.
	if size := (full + 2) * (&delivery{batch: &source}).size(); size < maxBacklog || size > maxBacklog+4096 {
		t.Errorf("%d bytes waited before the reader did, want %d", size, maxBacklog)
	}
	for i := range 100 {
		if d := b.take(); d.batch.Faults[0].Address != uint64(i) {
			t.Fatalf("delivery %d is %+v", i, d.batch.Faults)
		}
	}
	if next := <-put; next != full+1 {
		t.Errorf("%d came when there was room, want %d", next, full+1)
	}
	b.abandon()
	for range put { //nolint:revive // until the reader is through
	}

	b = newBacklog()
	b.put(&delivery{batch: &fault.Batch{}})
	b.put(&delivery{err: io.EOF})
	if d := b.take(); d.batch == nil || d.err != nil {
		t.Errorf("%+v", d)
	}
	if d := b.take(); !errors.Is(d.err, io.EOF) {
		t.Errorf("%+v", d)
	}
}

// TestStackCounts: equal samples are one, and what finds no room is counted.
func TestStackCounts(t *testing.T) {
	c := newStackCounts()
	one := fault.RawSample{PID: 1, TID: 2, Comm: fault.MakeComm("t"), Kind: fault.Anon, Faults: 2, Time: 3, Bytes: 4}
	other := one
	other.Major = true
	for range 2 {
		for _, s := range []*fault.RawSample{&one, &other} {
			if !c.add(s, 7, fault.MakeComm("p")) {
				t.Fatal("no room")
			}
		}
	}
	c.samples = c.samples[:2:2]
	full := make([]fault.StackSample, maxSamples-2)
	c.samples = append(c.samples, full...)
	if c.add(&one, 8, fault.Comm{}) || !c.add(&one, 7, fault.MakeComm("p")) {
		t.Error("room for one that is new, or none for one that is there")
	}
	p := c.profile()
	if first, last := p.Samples[0], p.Samples[len(p.Samples)-1]; first.Faults != 6 || first.Time != 9 || first.Bytes != 12 || first.Stack != 7 ||
		first.Process != fault.MakeComm("p") || last.Stack != 0 || last.Faults != 2 || p.Faults != 12 {
		t.Errorf("%+v and %+v, %d in all", first, last, p.Faults)
	}
}
