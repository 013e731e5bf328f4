package workload

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// storm is the touching and dropping of memory on many CPUs.
type storm struct {
	cpus     string
	duration time.Duration
	pages    int
}

const (
	allCPUs       = "all"
	stormDuration = time.Second // if nothing else ends it
	stormPages    = 512         // touched before they are dropped: 2 MiB fit the caches
)

func stormFlags(fs *pflag.FlagSet) program {
	s := &storm{}
	fs.StringVar(&s.cpus, "cpus", allCPUs, "on how many CPUs, a number or all")
	fs.DurationVar(&s.duration, "duration", 0, fmt.Sprintf("how long (default %v, or until --pages are touched)", stormDuration))
	fs.IntVar(&s.pages, "pages", 0, "end each thread after this many touches")
	return s
}

func (s *storm) validate() error {
	switch {
	case s.duration < 0:
		return fmt.Errorf("--duration %v: must not be negative", s.duration)
	case s.pages < 0:
		return fmt.Errorf("--pages %d: must not be negative", s.pages)
	case s.cpus == allCPUs:
		return nil
	}
	if n, err := strconv.Atoi(s.cpus); err != nil || n < 1 {
		return fmt.Errorf("--cpus %q: must be %s or a number from 1", s.cpus, allCPUs)
	}
	return nil
}

func (s *storm) lay(p *plan) error {
	cpus, err := s.chooseCPUs()
	if err != nil {
		return err
	}
	duration := s.duration
	if duration == 0 && s.pages == 0 {
		duration = stormDuration
	}
	var stop atomic.Bool
	stop.Store(true) // one round each in the rehearsal
	p.start = func(ctx context.Context) {
		stop.Store(false)
		context.AfterFunc(ctx, func() { stop.Store(true) })
		if duration > 0 {
			time.AfterFunc(duration, func() { stop.Store(true) })
		}
	}
	for _, cpu := range cpus {
		b, err := p.mapAnon(stormPages * p.pageSize)
		if err != nil {
			return err
		}
		r := &rounds{stop: &stop, most: int64(s.pages), pageSize: p.pageSize}
		j := &job{
			ranges:  []Range{wholeRange(b, fault.Write, fault.Anon, p.pageSize)},
			memory:  [][]byte{b},
			toucher: r,
			pinned:  true,
			cpu:     cpu,
		}
		j.ranges[0].Faults, j.ranges[0].Minor = int64(s.pages), int64(s.pages)
		j.check = func() error {
			j.ranges[0].Faults, j.ranges[0].Minor = r.touched, r.touched
			return asError(r.failed)
		}
		if err := p.addJob(j); err != nil {
			return err
		}
	}
	return nil
}

// rounds is one thread's part of a storm.
type rounds struct {
	stop     *atomic.Bool
	most     int64 // touches, 0 without a limit
	pageSize int
	touched  int64
	failed   unix.Errno
}

// touch makes round after round until it is told to stop.
//
//go:norace
//go:nosplit
func (r *rounds) touch(memory [][]byte) {
	r.touched = 0
	for {
		b := memory[0]
		if left := r.most - r.touched; r.most > 0 && left < int64(len(b)/r.pageSize) {
			b = b[:left*int64(r.pageSize)]
		}
		touchPages(b, r.pageSize)
		r.touched += int64(len(b) / r.pageSize)
		r.failed = dropPages(b)
		if r.failed != 0 || r.stop.Load() || r.touched == r.most {
			return
		}
	}
}

// chooseCPUs returns the CPUs this process may use, or the first of them.
func (s *storm) chooseCPUs() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("asking for usable CPUs: %w", err)
	}
	wanted := set.Count()
	if s.cpus != allCPUs {
		n, err := strconv.Atoi(s.cpus)
		if err != nil {
			return nil, fmt.Errorf("reading --cpus: %w", err)
		}
		if n > wanted {
			return nil, fmt.Errorf("--cpus %d: this process may use %d", n, wanted)
		}
		wanted = n
	}
	var cpus []int
	for cpu := 0; len(cpus) < wanted; cpu++ {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}
