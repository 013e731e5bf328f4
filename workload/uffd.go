package workload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// uffd is the touching of pages that a userfaultfd server provides.
type uffd struct {
	pageCount
	delay time.Duration
}

func uffdFlags(fs *pflag.FlagSet) program {
	u := &uffd{}
	u.declare(fs, 64)
	fs.DurationVar(&u.delay, "delay", 2*time.Millisecond, "how long the server waits before it provides a page")
	return u
}

func (u *uffd) validate() error {
	if u.delay < 0 {
		return fmt.Errorf("--delay %v: must not be negative", u.delay)
	}
	return u.pageCount.validate()
}

func (u *uffd) lay(p *plan) error {
	size := u.pages * p.pageSize
	b, err := p.mapAnon(size + p.pageSize)
	if err != nil {
		return err
	}
	// The page behind gives the mapping its anon_vma. Without, the first fault would
	// be tried once more for that reason (vmf_anon_prepare in mm/memory.c).
	touchPages(b[size:], p.pageSize)
	b = b[:size]
	s, err := newUffdServer(b, p.pageSize, u.delay)
	if err != nil {
		return err
	}
	p.onClose(s.close)
	s.start(u.pages)

	r := wholeRange(b, fault.Write, fault.Uffd, p.pageSize)
	// Minor or major: a fault that comes back with FAULT_FLAG_TRIED counts as major
	// (mm_account_fault). Under a per-VMA lock, since Linux 6.7, it comes back without.
	r.Minor, r.Either = 0, r.Faults
	return p.addJob(&job{ranges: []Range{r}, memory: [][]byte{b}, toucher: p.writer(), check: s.wait})
}

// uffdServer provides pages of one region.
type uffdServer struct {
	fd    int
	page  []byte
	delay time.Duration
	done  chan error
	close func() error
}

// The ioctls of include/uapi/linux/userfaultfd.h, whose numbers hold for x86 and arm64.
const (
	uffdAPI            = 0xaa
	uffdioAPI          = 3<<30 | 24<<16 | uffdAPI<<8 | 0x3f
	uffdioRegister     = 3<<30 | 32<<16 | uffdAPI<<8 // number 0
	uffdioCopy         = 3<<30 | 40<<16 | uffdAPI<<8 | 0x03
	uffdModeMissing    = 1
	uffdEventPagefault = 0x12
	uffdUserModeOnly   = 1
)

type (
	uffdioAPIArg      struct{ api, features, ioctls uint64 }
	uffdioRegisterArg struct{ start, length, mode, ioctls uint64 }
	uffdioCopyArg     struct{ dst, src, length, mode, copied uint64 }
)

func newUffdServer(region []byte, pageSize int, delay time.Duration) (_ *uffdServer, err error) {
	fd, err := openUffd()
	if err != nil {
		return nil, err
	}
	s := &uffdServer{fd: fd, page: make([]byte, pageSize), delay: delay, done: make(chan error, 1)}
	s.close = sync.OnceValue(func() error { return unix.Close(fd) })
	api := uffdioAPIArg{api: uffdAPI}
	if err := s.ioctl(uffdioAPI, unsafe.Pointer(&api)); err != nil {
		return nil, errors.Join(fmt.Errorf("agreeing on the userfaultfd protocol: %w", err), s.close())
	}
	reg := uffdioRegisterArg{start: uint64(addressOf(region)), length: uint64(len(region)), mode: uffdModeMissing}
	if err := s.ioctl(uffdioRegister, unsafe.Pointer(&reg)); err != nil {
		return nil, errors.Join(fmt.Errorf("registering memory with userfaultfd: %w", err), s.close())
	}
	return s, nil
}

// openUffd opens a userfaultfd. Without privilege it can only serve faults from
// user mode, which the kernel wants to be told (since Linux 5.11).
func openUffd() (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if errno == unix.EPERM {
		fd, _, errno = unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|uffdUserModeOnly, 0, 0)
	}
	switch errno {
	case 0:
		return int(fd), nil
	case unix.ENOSYS:
		return -1, errors.New("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")
	case unix.EPERM, unix.EINVAL:
		return -1, fmt.Errorf("opening a userfaultfd: %w (as root, or with vm.unprivileged_userfaultfd=1)", errno)
	}
	return -1, fmt.Errorf("opening a userfaultfd: %w", errno)
}

func (s *uffdServer) ioctl(request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s.fd), request, uintptr(arg))
	return asError(errno)
}

// start serves n faults in a goroutine.
func (s *uffdServer) start(n int) {
	go func() {
		var err error
		for served := 0; served < n && err == nil; served++ {
			err = s.serve()
		}
		if err != nil {
			// Closing wakes those who wait for a page; they get an ordinary one.
			err = errors.Join(err, s.close())
		}
		s.done <- err
	}()
}

// wait returns when all faults are served.
func (s *uffdServer) wait() error { return <-s.done }

// serve provides the page of the next fault.
func (s *uffdServer) serve() error {
	var msg [32]byte // struct uffd_msg
	n, err := unix.Read(s.fd, msg[:])
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(s.fd, msg[:])
	}
	if err != nil {
		return fmt.Errorf("reading from userfaultfd: %w", err)
	}
	if n != len(msg) || msg[0] != uffdEventPagefault {
		return fmt.Errorf("reading from userfaultfd: %d bytes of event %#x", n, msg[0])
	}
	time.Sleep(s.delay)
	c := uffdioCopyArg{
		dst:    binary.NativeEndian.Uint64(msg[16:]) &^ uint64(len(s.page)-1),
		src:    uint64(addressOf(s.page)),
		length: uint64(len(s.page)),
	}
	if err := s.ioctl(uffdioCopy, unsafe.Pointer(&c)); err != nil {
		return fmt.Errorf("providing the page at %#x: %w", c.dst, err)
	}
	return nil
}
