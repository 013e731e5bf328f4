package workload

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// cow is the write to memory shared with a forked child.
type cow struct {
	pageCount
	huge bool
}

func cowFlags(fs *pflag.FlagSet) program {
	c := &cow{}
	c.declare(fs, 1024)
	fs.BoolVar(&c.huge, "huge", false, "share that many huge pages, and write to one page in each: it is copied, and the huge page split")
	return c
}

func (c *cow) lay(p *plan) error {
	stride, mapShared := p.pageSize, p.mapTouched
	if c.huge {
		var err error
		if stride, err = thpSize(); err != nil {
			return err
		}
		mapShared = p.mapTouchedHuge(stride)
	}
	b, err := mapShared(c.pages*stride, func(b []byte) { touchPages(b, p.pageSize) })
	if err != nil {
		return err
	}
	r := wholeRange(b, fault.Write, fault.Cow, stride)
	j := &job{ranges: []Range{r}, memory: [][]byte{b}, toucher: writeEach{stride}}
	if err := p.addJob(j); err != nil {
		return err
	}
	// Last, because it makes all of this process's memory copy on write. The
	// rehearsal then copies what the counting itself writes to.
	_, err = p.forkIdle()
	return err
}

// reuse is the write to memory that was shared with a forked child.
type reuse struct{ pageCount }

func reuseFlags(fs *pflag.FlagSet) program {
	r := &reuse{}
	r.declare(fs, 256)
	return r
}

func (r *reuse) lay(p *plan) error {
	cpu, err := anyCPU()
	if err != nil {
		return err
	}
	var b []byte
	// A page is copied, not reused, while a CPU other than the one that takes the fault
	// still has it in its list of pages to be put on the LRU (wp_can_reuse_anon_folio).
	if err := onCPU(cpu, func() (err error) {
		b, err = p.mapTouched(r.pages*p.pageSize, func(b []byte) { touchPages(b, p.pageSize) })
		return err
	}); err != nil {
		return err
	}
	if err := p.addJob(&job{
		ranges:  []Range{wholeRange(b, fault.Write, fault.Reuse, p.pageSize)},
		memory:  [][]byte{b},
		toucher: p.writer(),
		pinned:  true, cpu: cpu,
	}); err != nil {
		return err
	}
	_, release, err := forkIdle()
	return errors.Join(err, release())
}

// kernel is the system call that writes to fresh memory.
type kernel struct{ pageCount }

func kernelFlags(fs *pflag.FlagSet) program {
	k := &kernel{}
	k.declare(fs, 1024)
	return k
}

func (k *kernel) lay(p *plan) error {
	p.mode = fault.Kernel
	b, err := p.mapAnon(k.pages * p.pageSize)
	if err != nil {
		return err
	}
	fd, err := unix.Open("/dev/zero", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening /dev/zero: %w", err)
	}
	p.onClose(func() error { return unix.Close(fd) })
	z := &zeroReader{fd: fd}
	return p.addJob(&job{
		ranges:  []Range{wholeRange(b, fault.Write, fault.Anon, p.pageSize)},
		memory:  [][]byte{b},
		toucher: z,
		check: func() error {
			if z.failed != 0 {
				return fmt.Errorf("reading /dev/zero: %w", z.failed)
			}
			return nil
		},
	})
}

// zeroReader has read(2) fill memory from fd.
type zeroReader struct {
	fd     int
	failed unix.Errno
}

//go:norace
//go:nosplit
func (z *zeroReader) touch(memory [][]byte) {
	for b := memory[0]; len(b) > 0 && z.failed == 0; {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(z.fd),
			uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		if z.failed = errno; errno == 0 {
			b = b[n:]
		}
	}
}

// remote is the write to another process's fresh memory.
type remote struct{ pageCount }

func remoteFlags(fs *pflag.FlagSet) program {
	r := &remote{}
	r.declare(fs, 1024)
	return r
}

func (r *remote) lay(p *plan) error {
	p.mode = fault.Remote
	size := r.pages * p.pageSize
	b, err := p.mapAnon(size) // never touched here: the child has it at the same address
	if err != nil {
		return err
	}
	// One page of data for each system call, so that large counts need little memory.
	data, err := p.mapAnon(p.pageSize)
	if err != nil {
		return err
	}
	touchPages(data, p.pageSize)
	w := &remoteWriter{data: data}
	j := &job{ranges: []Range{wholeRange(b, fault.Write, fault.Anon, p.pageSize)}, memory: [][]byte{b}, toucher: w, check: w.check}
	if err := p.addJob(j); err != nil {
		return err
	}
	w.pid, err = p.forkIdle()
	p.target = w.pid
	return err
}

type remoteWriter struct {
	pid           int
	data          []byte // one page
	local, remote unix.RemoteIovec
	failed        unix.Errno
	short         bool
}

// touch fills the child's memory at the addresses of memory, page by page, by raw
// system calls for the reason given at dropPages.
//
//go:norace
//go:nosplit
func (w *remoteWriter) touch(memory [][]byte) {
	n := len(w.data)
	w.local = unix.RemoteIovec{Base: uintptr(addressOf(w.data)), Len: n}
	start := uintptr(addressOf(memory[0]))
	for at := 0; at < len(memory[0]); at += n {
		w.remote = unix.RemoteIovec{Base: start + uintptr(at), Len: n}
		written, _, errno := unix.RawSyscall6(unix.SYS_PROCESS_VM_WRITEV, uintptr(w.pid),
			uintptr(unsafe.Pointer(&w.local)), 1, uintptr(unsafe.Pointer(&w.remote)), 1, 0)
		if errno != 0 || int(written) != n {
			w.failed, w.short = errno, errno == 0
			return
		}
	}
}

func (w *remoteWriter) check() error {
	switch {
	case w.failed == unix.EPERM:
		return fmt.Errorf("writing to the memory of child %d: %w (kernel.yama.ptrace_scope above 1 needs CAP_SYS_PTRACE)", w.pid, w.failed)
	case w.failed != 0:
		return fmt.Errorf("writing to the memory of child %d: %w", w.pid, w.failed)
	case w.short:
		return fmt.Errorf("writing to the memory of child %d: less than a page was written", w.pid)
	}
	return nil
}
