package kernel

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/process"
)

// pageEvent is a software page-fault event of one CPU with a program on it. The
// descriptor is a plain number: nothing but Close ends it.
type pageEvent int

// attachPageFaults runs p at every event of the kind (PERF_COUNT_SW_PAGE_FAULTS_MIN
// or _MAJ) on cpu, for all processes.
func attachPageFaults(kind uint64, cpu int, p *ebpf.Program) (pageEvent, error) {
	attr := unix.PerfEventAttr{
		Type: unix.PERF_TYPE_SOFTWARE, Config: kind, Sample: 1,
		Size: unix.PERF_ATTR_SIZE_VER1, Sample_type: unix.PERF_SAMPLE_ADDR,
	}
	fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("opening a page-fault event on cpu %d: %w", cpu, err)
	}
	if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_SET_BPF, p.FD()); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("attaching to a page-fault event on cpu %d: %w", cpu, err)
	}
	if err := unix.IoctlSetInt(fd, unix.PERF_EVENT_IOC_ENABLE, 0); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("enabling a page-fault event on cpu %d: %w", cpu, err)
	}
	return pageEvent(fd), nil
}

// Close ends the event.
func (e pageEvent) Close() error { return unix.Close(int(e)) }

// pageEvents keeps the events of all online CPUs open and follows hot-plug.
type pageEvents struct {
	minor, major *ebpf.Program
	open         map[int][2]pageEvent
}

// update opens events on CPUs that have come online and closes those of CPUs that
// have gone: an event does not survive its CPU's being offline. It does nothing
// for a hook that needs no such events.
func (p *pageEvents) update() error {
	if p.open == nil {
		return nil
	}
	cpus, err := process.OnlineCPUs()
	if err != nil {
		return err
	}
	online := make(map[int]bool, len(cpus))
	for _, cpu := range cpus {
		online[cpu] = true
		if _, ok := p.open[cpu]; ok {
			continue
		}
		minor, err := attachPageFaults(unix.PERF_COUNT_SW_PAGE_FAULTS_MIN, cpu, p.minor)
		if errors.Is(err, unix.ENODEV) {
			continue // it went offline again
		} else if err != nil {
			return err
		}
		major, err := attachPageFaults(unix.PERF_COUNT_SW_PAGE_FAULTS_MAJ, cpu, p.major)
		if err != nil {
			minor.Close()
			if errors.Is(err, unix.ENODEV) {
				continue
			}
			return err
		}
		p.open[cpu] = [2]pageEvent{minor, major}
	}
	for cpu, events := range p.open {
		if !online[cpu] {
			events[0].Close()
			events[1].Close()
			delete(p.open, cpu)
		}
	}
	return nil
}

// Close ends all events.
func (p *pageEvents) Close() error {
	for cpu, events := range p.open {
		events[0].Close()
		events[1].Close()
		delete(p.open, cpu)
	}
	return nil
}
