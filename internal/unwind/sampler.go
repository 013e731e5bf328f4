package unwind

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"go.opentelemetry.io/ebpf-profiler/metrics"
	"go.opentelemetry.io/ebpf-profiler/reporter/samples"
	"go.opentelemetry.io/ebpf-profiler/support"
	"go.opentelemetry.io/ebpf-profiler/tracer"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/process"
)

// samplesPerSecond makes the library's ring buffer ringBytes large: it multiplies by
// the number of CPUs and the size of the largest stack, and rounds up to a power of two.
func samplesPerSecond() int {
	return max(1, ringBytes/support.Sizeof_Trace/runtime.NumCPU())
}

// sampler is the library's tracer.Probe: page-fault events whose program ends in the
// library's, or does nothing.
type sampler struct {
	options Options
	cpus    []int

	objects sampleObjects
	entry   *ebpf.Program
	// metrics are the library's own counters, and pythons where it keeps what it
	// knows of a Python process.
	metrics, pythons *ebpf.Map

	mu       sync.Mutex
	events   map[int][]int // descriptors of events, by CPU
	detached bool
}

// The library's names.
const (
	entryProgram  = "native_tracer_entry"
	entryOrigin   = "origin_id_sampling"
	metricsMap    = "metrics"
	reportedPIDs  = "reported_pids"
	pythonProgram = "perf_unwind_python"
	pythonMap     = "py_procs"
	pageFaultType = "page faults"
)

// Load implements tracer.Probe.
func (s *sampler) Load(_ context.Context, reg tracer.ProbeRegistrar, pc *tracer.ProbeContext) (link.Link, error) {
	origin, err := reg.Register(&samples.TypeMetadata{SampleType: pageFaultType, SampleUnit: "count"})
	if err != nil {
		return nil, err
	}
	spec, err := pc.CollectionSpecWith(nil, []string{entryProgram, pythonProgram}, []string{entryOrigin})
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[entryOrigin].Set(origin); err != nil {
		return nil, fmt.Errorf("setting %s: %w", entryOrigin, err)
	}
	// RewriteMaps forgets the names, but not the places.
	type place struct {
		program     string
		instruction int
	}
	loads := map[string]place{}
	for name, program := range spec.Programs {
		for i, ins := range program.Instructions {
			loads[ins.Reference()] = place{name, i}
		}
	}
	if err := pc.RewriteMaps(spec, nil); err != nil {
		return nil, err
	}
	mapOf := func(name string) *ebpf.Map {
		at, ok := loads[name]
		if !ok {
			return nil
		}
		m, _ := spec.Programs[at.program].Instructions[at.instruction].Map().(*ebpf.Map)
		return m
	}
	reported := mapOf(reportedPIDs)
	s.metrics, s.pythons = mapOf(metricsMap), mapOf(pythonMap)
	if s.metrics == nil || reported == nil || s.pythons == nil {
		return nil, errors.New("the library uses other maps than expected")
	}
	delete(spec.Programs, pythonProgram)
	library, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, fmt.Errorf("loading %s: %w", entryProgram, err)
	}
	s.entry = library.DetachProgram(entryProgram)
	library.Close()

	if err := s.loadOwn(reported); err != nil {
		return nil, err
	}
	s.events = map[int][]int{}
	return nil, s.attach(s.cpus)
}

func (s *sampler) loadOwn(reported *ebpf.Map) error {
	spec, err := loadSample()
	if err != nil {
		return err
	}
	if err := spec.Variables[sampleVarUnwinding].Set(uint8(s.options.When) + 1); err != nil {
		return fmt.Errorf("setting %s: %w", sampleVarUnwinding, err)
	}
	// The library chooses how many it keeps.
	spec.Maps[sampleMapReportedPids].MaxEntries = reported.MaxEntries()
	spec.Maps[sampleMapReportedPids].Flags = reported.Flags()
	err = spec.LoadAndAssign(&s.objects, &ebpf.CollectionOptions{
		MapReplacements: map[string]*ebpf.Map{sampleMapReportedPids: reported},
	})
	if err != nil {
		return fmt.Errorf("loading the sampler: %w", err)
	}
	if err := s.objects.Entry.Update(uint32(0), s.entry, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("connecting the sampler: %w", err)
	}
	budget := max(2, uint64(s.options.PerSecond)*uint64(window.Milliseconds())/1000)
	pace := samplePace{Every: uint64(s.options.Every), Window: uint64(window.Nanoseconds()), Budget: budget, Limit: budget, Rate: 1}
	if err := s.objects.Pacing.Update(uint32(0), pace, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("setting the rate of stacks: %w", err)
	}
	return nil
}

// shared are the maps of bpf/rendezvous.h, by name.
func (s *sampler) shared() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		sampleMapRendezvous: s.objects.Rendezvous, sampleMapPacing: s.objects.Pacing, sampleMapProcesses: s.objects.Processes,
	}
}

// attach opens the events of cpus.
func (s *sampler) attach(cpus []int) error {
	configs := []uint64{unix.PERF_COUNT_SW_PAGE_FAULTS_MIN, unix.PERF_COUNT_SW_PAGE_FAULTS_MAJ}
	if s.options.When == AtBegin {
		configs = []uint64{unix.PERF_COUNT_SW_PAGE_FAULTS}
	}
	for _, cpu := range cpus {
		var fds []int
		for _, config := range configs {
			fd, err := s.open(config, cpu)
			if err != nil {
				closeAll(fds)
				if errors.Is(err, unix.ENODEV) {
					fds = nil
					break // it went offline again
				}
				return fmt.Errorf("page-fault event on cpu %d: %w", cpu, err)
			}
			fds = append(fds, fd)
		}
		if fds != nil {
			s.events[cpu] = fds
		}
	}
	return nil
}

// open is pinned since the kernel adds pinned events to a CPU's list first, and runs
// those that it added last first (perf_swevent_add in kernel/events/core.c): so the stack is taken after other programs
// on the same event have noted the time.
func (s *sampler) open(config uint64, cpu int) (int, error) {
	fd, err := unix.PerfEventOpen(&unix.PerfEventAttr{
		Type: unix.PERF_TYPE_SOFTWARE, Config: config, Sample: 1,
		Size: unix.PERF_ATTR_SIZE_VER1, Bits: unix.PerfBitPinned,
	}, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, s.objects.TakeStack.FD()); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// update follows CPUs that come and go. An event does not survive its CPU's being
// offline. What fails is tried again the next time.
func (s *sampler) update() {
	cpus, err := process.OnlineCPUs()
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.detached {
		return
	}
	online := make(map[int]bool, len(cpus))
	var fresh []int
	for _, cpu := range cpus {
		online[cpu] = true
		if _, ok := s.events[cpu]; !ok {
			fresh = append(fresh, cpu)
		}
	}
	for cpu, fds := range s.events {
		if !online[cpu] {
			closeAll(fds)
			delete(s.events, cpu)
		}
	}
	_ = s.attach(fresh)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func (s *sampler) detach() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.detached = true
	for _, fds := range s.events {
		closeAll(fds)
	}
	clear(s.events)
}

func (s *sampler) close() {
	s.objects.Close()
	if s.entry != nil {
		s.entry.Close()
	}
}

func (s *sampler) counts() (Counts, error) {
	var perCPU []sampleCounts
	if err := s.objects.Tally.Lookup(uint32(0), &perCPU); err != nil {
		return Counts{}, fmt.Errorf("counting stacks: %w", err)
	}
	c := Counts{Every: uint64(s.options.Every)}
	for _, n := range perCPU {
		c.Taken += n.Taken
	}
	if c.Every == 0 {
		var pace samplePace
		if err := s.objects.Pacing.Lookup(uint32(0), &pace); err != nil {
			return Counts{}, fmt.Errorf("reading the rate of stacks: %w", err)
		}
		c.Every = pace.Rate
	}
	var dropped []uint64
	id := uint32(slices.Index(support.MetricsTranslation, metrics.IDBPFRingbufOutputErr))
	if err := s.metrics.Lookup(id, &dropped); err != nil {
		return Counts{}, fmt.Errorf("counting dropped stacks: %w", err)
	}
	for _, n := range dropped {
		c.Dropped += n
	}
	return c, nil
}
