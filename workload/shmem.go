package workload

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// shmem is the first write to shared memory.
type shmem struct {
	pageCount
	memfd, sysv bool
}

func shmemFlags(fs *pflag.FlagSet) program {
	s := &shmem{}
	s.declare(fs, 1024)
	fs.BoolVar(&s.memfd, "memfd", false, "map a memfd instead of shared anonymous memory")
	fs.BoolVar(&s.sysv, "sysv", false, "attach a System V segment instead of shared anonymous memory")
	return s
}

func (s *shmem) validate() error {
	if s.memfd && s.sysv {
		return errors.New("--memfd and --sysv: choose one")
	}
	return s.pageCount.validate()
}

// memory maps n bytes and tells what their mapping is called.
func (s *shmem) memory(p *plan, n int) (b []byte, label string, err error) {
	const access = unix.PROT_READ | unix.PROT_WRITE
	switch {
	case s.sysv:
		return p.attach(n)
	case s.memfd:
		const name = "faultsnoop-shmem"
		fd, err := p.memfd(name, int64(n))
		if err != nil {
			return nil, "", err
		}
		b, err = p.mapMemory(n, access, unix.MAP_SHARED, fd, 0)
		return b, "memfd:" + name, err
	}
	b, err = p.mapMemory(n, access, unix.MAP_SHARED|unix.MAP_ANONYMOUS, -1, 0)
	return b, "[shmem]", err
}

func (s *shmem) lay(p *plan) error {
	b, label, err := s.memory(p, s.pages*p.pageSize)
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
	r.Label = label
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

// attach attaches n bytes of a new System V segment behind the last mapping, until the
// plan is closed. The segment itself goes with its last user, even one that is killed.
func (p *plan) attach(n int) (b []byte, label string, err error) {
	const create = unix.IPC_CREAT | unix.IPC_EXCL | 0o600
	key := os.Getpid() | sysvKeys
	id, err := unix.SysvShmGet(key, n, create)
	for errors.Is(err, unix.EEXIST) {
		key++
		id, err = unix.SysvShmGet(key, n, create)
	}
	if err != nil {
		return nil, "", fmt.Errorf("making a System V segment of %d bytes: %w", n, err)
	}
	b, err = unix.SysvShmAttach(id, OwnArea+uintptr(p.mapped), 0)
	_, gone := unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	if err := errors.Join(err, gone); err != nil {
		return nil, "", fmt.Errorf("attaching System V segment %d: %w", id, err)
	}
	p.mapped += n
	p.onClose(func() error {
		if err := unix.SysvShmDetach(b); err != nil {
			return fmt.Errorf("detaching System V segment %d: %w", id, err)
		}
		return nil
	})
	return b, fmt.Sprintf("[sysv:0x%08x:%d]", key, id), nil
}

// sysvKeys is where keys are tried from, by process.
const sysvKeys = 0x66000000
