package workload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// file is the reading of a mapped file.
type file struct {
	pageCount
	cold, warm, around bool
	dir                string
}

func fileFlags(fs *pflag.FlagSet) program {
	f := &file{}
	f.declare(fs, 256)
	fs.BoolVar(&f.cold, "cold", false, "drop the pages from the page cache first: major faults")
	fs.BoolVar(&f.warm, "warm", false, "have the pages in the page cache: minor faults (the default)")
	fs.BoolVar(&f.around, "around", false, "let the kernel map warm neighbours, as it does for ordinary programs")
	fs.StringVar(&f.dir, "dir", "/var/tmp", "folder of the file, on a disk if it is to be cold")
	return f
}

func (f *file) validate() error {
	switch {
	case f.cold && f.warm:
		return errors.New("--cold and --warm: choose one")
	case f.cold && f.around:
		return errors.New("--around: needs warm pages, leave --cold out")
	}
	return f.pageCount.validate()
}

func (f *file) lay(p *plan) error {
	if f.cold {
		if err := onDisk(f.dir); err != nil {
			return err
		}
	}
	// As many pages again before and behind.
	fd, err := f.create(p, 3*f.pages*p.pageSize)
	if err != nil {
		return err
	}
	if !f.cold {
		if err := f.keepCached(p, fd); err != nil {
			return err
		}
	}
	pgoff := int64(f.pages)
	b, err := f.mapMiddle(p, fd, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	r := wholeRange(b, fault.Read, fault.File, p.pageSize)
	r.PgOff = &pgoff
	j := &job{memory: [][]byte{b}, toucher: readEach{p.pageSize}}
	switch {
	case f.cold:
		if err := makeCold(fd, b, p.pageSize); err != nil {
			return err
		}
		r.Minor, r.Major = 0, r.Pages
	case f.around:
		r.Faults = windows(r, p.pageSize)
		r.Minor = r.Faults
	default:
		j.toucher = readAlone{p.pageSize}
	}
	j.ranges = []Range{r}
	return p.addJob(j)
}

// create makes the file, whose pages are all written to the disk.
func (f *file) create(p *plan, size int) (fd int, err error) {
	tmp, err := os.CreateTemp(f.dir, "faultsnoop-file-*")
	if err != nil {
		return -1, fmt.Errorf("creating a file: %w", err)
	}
	p.onClose(func() error { return errors.Join(tmp.Close(), os.Remove(tmp.Name())) })
	if p.file, err = filepath.Abs(tmp.Name()); err != nil {
		return -1, fmt.Errorf("naming the file: %w", err)
	}
	chunk := make([]byte, p.pageSize)
	for i := range chunk {
		chunk[i] = 'x'
	}
	for n := 0; n < size; n += len(chunk) {
		if _, err := tmp.Write(chunk); err != nil {
			return -1, fmt.Errorf("filling the file: %w", err)
		}
	}
	if err := tmp.Sync(); err != nil {
		return -1, fmt.Errorf("syncing the file: %w", err)
	}
	return int(tmp.Fd()), nil
}

// keepCached keeps the file's pages in the page cache by locking them in a mapping
// elsewhere: a machine may reclaim pages that are young and have no mapping even while
// memory is free (mm/damon/paddr.c). Where the limit for locked memory is too low, a page
// that is reclaimed makes a major fault, which is counted.
func (f *file) keepCached(p *plan, fd int) error {
	b, err := p.mapAt(nil, 3*f.pages*p.pageSize, unix.PROT_READ, unix.MAP_SHARED, fd, 0)
	if err != nil {
		return err
	}
	err = unix.Mlock(b)
	if limits := []error{unix.EPERM, unix.ENOMEM, unix.EAGAIN}; err != nil && !slices.Contains(limits, err) {
		return fmt.Errorf("locking %d bytes of the file: %w", len(b), err)
	}
	return nil
}

// mapMiddle maps the middle third of the file. Its start is aligned so that
// fault-around windows do not cross it.
func (f *file) mapMiddle(p *plan, fd, prot, flags int) ([]byte, error) {
	size := f.pages * p.pageSize
	hole, err := p.mapMemory(size+aroundBytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
	if err != nil {
		return nil, err
	}
	skip := int(-addressOf(hole) & (aroundBytes - 1))
	b := hole[skip : skip+size]
	// It replaces a part of the hole and goes with it.
	if _, err := unix.MmapPtr(fd, int64(size), unsafe.Pointer(unsafe.SliceData(b)), uintptr(size),
		prot, flags|unix.MAP_FIXED); err != nil {
		return nil, fmt.Errorf("mapping %d bytes of the file: %w", size, err)
	}
	// No read-ahead: only the page that faulted is read from the disk.
	if err := unix.Madvise(b, unix.MADV_RANDOM); err != nil {
		return nil, fmt.Errorf("advising random access: %w", err)
	}
	return b, nil
}

// written is the writing to the pages of a mapped file, private or shared.
type written struct {
	file
	kind   fault.Kind
	flags  int  // of mmap
	mapped bool // read them before
}

func cowFileFlags(fs *pflag.FlagSet) program {
	w := &written{kind: fault.CowFile, flags: unix.MAP_PRIVATE}
	w.declareFile(fs)
	fs.BoolVar(&w.mapped, "mapped", false, "read the pages before: they are mapped already, for reading")
	return w
}

func mkwriteFlags(fs *pflag.FlagSet) program {
	w := &written{kind: fault.MkWrite, flags: unix.MAP_SHARED, mapped: true}
	w.declareFile(fs)
	return w
}

func (w *written) declareFile(fs *pflag.FlagSet) {
	w.declare(fs, 256)
	fs.StringVar(&w.dir, "dir", "/var/tmp", "folder of the file, on a disk")
}

func (w *written) lay(p *plan) error {
	if err := onDisk(w.dir); err != nil {
		return err
	}
	fd, err := w.create(p, 3*w.pages*p.pageSize)
	if err != nil {
		return err
	}
	if err := w.keepCached(p, fd); err != nil {
		return err
	}
	b, err := w.mapMiddle(p, fd, unix.PROT_READ|unix.PROT_WRITE, w.flags)
	if err != nil {
		return err
	}
	if w.mapped {
		if b, err = w.mapRead(p, fd, b); err != nil {
			return err
		}
	}
	pgoff := int64(w.pages)
	r := wholeRange(b, fault.Write, w.kind, p.pageSize)
	r.PgOff = &pgoff
	if w.kind == fault.MkWrite {
		// Old kernels try it again after the file system has been asked, which makes it major.
		r.Minor, r.Either = 0, r.Faults
	}
	return p.addJob(&job{ranges: []Range{r}, memory: [][]byte{b}, toucher: p.writer()})
}

// mapRead replaces the mapping at b by one whose pages were read. They were read
// elsewhere and moved, so that no other faults are taken at these addresses.
func (w *written) mapRead(p *plan, fd int, b []byte) ([]byte, error) {
	from, err := unix.MmapPtr(fd, int64(len(b)), nil, uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, w.flags)
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes of the file: %w", len(b), err)
	}
	readPages(unsafe.Slice((*byte)(from), len(b)), p.pageSize)
	if _, err := unix.MremapPtr(from, uintptr(len(b)), unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)),
		unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED); err != nil {
		return nil, errors.Join(fmt.Errorf("moving %d bytes: %w", len(b), err), unix.MunmapPtr(from, uintptr(len(b))))
	}
	return b, nil
}

// aroundBytes is the kernel's default for how much it maps around a fault
// (fault_around_bytes in mm/memory.c; a debugfs file can change it).
const aroundBytes = 64 << 10

// windows is the number of fault-around windows of r, which starts at one.
func windows(r Range, pageSize int) int64 {
	perWindow := int64(max(1, aroundBytes/pageSize))
	return (r.Pages + perWindow - 1) / perWindow
}

// readAlone reads from each page of a file mapping and has every page fault by
// itself: fault-around maps neighbours, but never beyond the page table of the page
// that faulted (do_fault_around in mm/memory.c), and a huge mapping is not larger
// than one. So the rest of the table is unmapped before its next page.
type readAlone struct{ pageSize int }

//go:norace
//go:nosplit
func (r readAlone) touch(memory [][]byte) {
	const entry = 8 // bytes of a page-table entry
	span := r.pageSize / entry * r.pageSize
	b := memory[0]
	for i := 0; i < len(b); i += r.pageSize {
		readPages(b[i:i+1], r.pageSize)
		if rest := b[i+r.pageSize : min(i+span, len(b))]; len(rest) > 0 {
			// It can only fail for a bad range. Then fewer faults are counted than expected.
			_ = dropPages(rest)
		}
	}
}

// makeCold drops the pages that b maps from the page cache.
func makeCold(fd int, b []byte, pageSize int) error {
	const attempts, pause = 50, 10 * time.Millisecond // writeback may hold pages for a moment
	for range attempts {
		if err := unix.Fsync(fd); err != nil {
			return fmt.Errorf("syncing the file: %w", err)
		}
		if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
			return fmt.Errorf("dropping the file from the page cache: %w", err)
		}
		n, err := cached(b, pageSize)
		if n == 0 || err != nil {
			return err
		}
		time.Sleep(pause)
	}
	return errors.New("dropping the file from the page cache: pages stay in it; choose a --dir on another file system")
}

// onDisk returns an error if files in dir have no other place than the page cache.
func onDisk(dir string) error {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return fmt.Errorf("asking for the file system of %q: %w", dir, err)
	}
	names := map[int64]string{
		unix.TMPFS_MAGIC: "tmpfs", unix.RAMFS_MAGIC: "ramfs", unix.HUGETLBFS_MAGIC: "hugetlbfs",
	}
	if name, ok := names[int64(s.Type)]; ok {
		return fmt.Errorf("making a cold file in %q: it is on %s, which lives in memory; choose a --dir on a disk", dir, name)
	}
	return nil
}
