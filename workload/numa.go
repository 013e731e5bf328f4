package workload

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// numa is the reading of memory from which NUMA balancing takes the permissions.
type numa struct {
	pageCount
	patience time.Duration
}

func numaFlags(fs *pflag.FlagSet) program {
	n := &numa{}
	n.declare(fs, 256)
	fs.DurationVar(&n.patience, "patience", 30*time.Second, "how long to wait for the kernel to scan the memory")
	return n
}

func (n *numa) validate() error {
	if n.patience <= 0 {
		return fmt.Errorf("--patience %v: must be positive", n.patience)
	}
	return n.pageCount.validate()
}

func (n *numa) lay(p *plan) error {
	const knob = "/proc/sys/kernel/numa_balancing"
	on, err := os.ReadFile(knob)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return errors.New("the kernel has no NUMA balancing (CONFIG_NUMA_BALANCING)")
	case err != nil:
		return fmt.Errorf("asking for NUMA balancing: %w", err)
	case strings.TrimSpace(string(on)) == "0":
		return fmt.Errorf("NUMA balancing is off: on a machine of several nodes, as root, echo 1 > %s", knob)
	}
	b, err := p.mapTouched(n.pages*p.pageSize, func(b []byte) { touchPages(b, p.pageSize) })
	if err != nil {
		return err
	}
	r := &hintReader{stride: p.pageSize, want: int64(n.pages), patience: n.patience.Nanoseconds()}
	j := &job{ranges: []Range{wholeRange(b, fault.Read, fault.NUMA, p.pageSize)}, memory: [][]byte{b}, toucher: r}
	j.check = func() error {
		if r.taken < r.want {
			return fmt.Errorf("%d of %d pages faulted in %v: is there more than one node?", r.taken, r.want, n.patience)
		}
		return nil
	}
	return p.addJob(j)
}

// hintReader reads memory until the kernel has counted as many faults as it has pages.
type hintReader struct {
	stride         int
	want, patience int64
	taken          int64
	before, after  unix.Rusage
	rehearsed      bool
}

//go:norace
//go:nosplit
func (r *hintReader) touch(memory [][]byte) {
	want, deadline := r.want, monotonic()+r.patience
	if !r.rehearsed {
		r.rehearsed, want = true, 0
	}
	readUsage(&r.before)
	for {
		readPages(memory[0], r.stride)
		readUsage(&r.after)
		r.taken = r.after.Minflt - r.before.Minflt
		if r.taken >= want || monotonic() > deadline {
			return
		}
	}
}

// monotonic is CLOCK_MONOTONIC in nanoseconds, by a system call: the clock of the vdso
// could fault.
//
//go:norace
//go:nosplit
func monotonic() int64 {
	var ts unix.Timespec
	unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Sec*1e9 + ts.Nsec
}
