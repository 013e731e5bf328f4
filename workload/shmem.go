package workload

import (
	"fmt"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// shmem is the first write to shared memory.
type shmem struct {
	pageCount
	memfd bool
}

func shmemFlags(fs *pflag.FlagSet) program {
	s := &shmem{}
	s.declare(fs, 1024)
	fs.BoolVar(&s.memfd, "memfd", false, "map a memfd instead of shared anonymous memory")
	return s
}

func (s *shmem) lay(p *plan) error {
	n, fd, flags := s.pages*p.pageSize, -1, unix.MAP_SHARED|unix.MAP_ANONYMOUS
	if s.memfd {
		var err error
		if fd, err = p.memfd("faultsnoop-shmem", int64(n)); err != nil {
			return err
		}
		flags = unix.MAP_SHARED
	}
	b, err := p.mapMemory(n, unix.PROT_READ|unix.PROT_WRITE, flags, fd, 0)
	if err != nil {
		return err
	}
	if err := noHugePages(b); err != nil {
		return err
	}
	r := wholeRange(b, fault.Write, fault.Shmem, p.pageSize)
	// Before Linux 6.0 (commit d92725256b4f) a first write to shared memory is tried
	// twice, which makes it major.
	r.Minor, r.Either = 0, r.Faults
	return p.addJob(&job{
		ranges:  []Range{r},
		memory:  [][]byte{b},
		toucher: p.writer(),
	})
}

// memfd returns a memory file of size bytes that is closed with the plan.
func (p *plan) memfd(name string, size int64) (int, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("creating a memfd: %w", err)
	}
	p.onClose(func() error { return unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		return -1, fmt.Errorf("sizing a memfd to %d bytes: %w", size, err)
	}
	return fd, nil
}
