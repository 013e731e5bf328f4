package workload

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// thp is the first write to memory with transparent huge pages.
type thp struct {
	pageCount
	folio byteSize
}

func thpFlags(fs *pflag.FlagSet) program {
	t := &thp{}
	fs.IntVar(&t.pages, "pages", 8, "number of huge pages")
	fs.Var(&t.folio, "folio", "use large folios of 16k, 32k or 64k instead (multi-size THP, since Linux 6.8); as root, they are enabled while it runs")
	return t
}

func (t *thp) validate() error {
	switch t.folio {
	case 0, 16 << 10, 32 << 10, 64 << 10:
		return t.pageCount.validate()
	}
	return fmt.Errorf("--folio %v: must be 16k, 32k or 64k", &t.folio)
}

// size of what one fault maps, and its kind.
func (t *thp) size(p *plan) (int, fault.Kind, error) {
	if t.folio == 0 {
		size, err := thpSize()
		return size, fault.THP, err
	}
	return int(t.folio), fault.Anon, p.enableFolios(int(t.folio))
}

// enableFolios has MADV_HUGEPAGE give folios of size bytes until the plan is closed.
func (p *plan) enableFolios(size int) error {
	name := fmt.Sprintf("%shugepages-%dkB/enabled", thpFolder, size>>10)
	text, err := os.ReadFile(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("this kernel has no folios of %d KiB for anonymous memory (multi-size THP, Linux 6.8)", size>>10)
	case err != nil:
		return fmt.Errorf("reading the mode of large folios: %w", err)
	}
	old := "never"
	for _, word := range strings.Fields(string(text)) {
		if chosen, ok := strings.CutPrefix(word, "["); ok {
			old = strings.TrimSuffix(chosen, "]")
		}
	}
	if old != "never" && old != "inherit" {
		return nil
	}
	if err := os.WriteFile(name, []byte("madvise"), 0o644); err != nil {
		return fmt.Errorf("enabling folios of %d KiB: %w: as root, echo madvise > %s", size>>10, err, name)
	}
	p.onClose(func() error { return os.WriteFile(name, []byte(old), 0o644) })
	return nil
}

// thpFolder is described in Documentation/admin-guide/mm/transhuge.rst.
const thpFolder = "/sys/kernel/mm/transparent_hugepage/"

func (t *thp) lay(p *plan) error {
	huge, kind, err := t.size(p)
	if err != nil {
		return err
	}
	p.faultSize = huge
	size := t.pages * huge
	hole, err := p.mapMemory(size+huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
	if err != nil {
		return err
	}
	skip := int(-addressOf(hole) & Address(huge-1))
	b := hole[skip : skip+size]
	if err := unix.Madvise(b, unix.MADV_HUGEPAGE); err != nil {
		return fmt.Errorf("advising huge pages: %w", err)
	}
	return p.addJob(&job{
		ranges:  []Range{wholeRange(b, fault.Write, kind, huge)},
		memory:  [][]byte{b},
		toucher: p.writer(), // each small page: only the first of a huge one faults
	})
}

// mapTouchedHuge is [plan.mapTouched] with huge pages of size bytes. They stay whole when
// they are moved between places that are aligned alike.
func (p *plan) mapTouchedHuge(huge int) func(int, func([]byte)) ([]byte, error) {
	return func(n int, fill func([]byte)) ([]byte, error) {
		hole, err := p.mapMemory(n+huge, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
		if err != nil {
			return nil, err
		}
		// It goes with the hole.
		to := hole[-addressOf(hole)&Address(huge-1):][:n]
		whole, err := unix.MmapPtr(-1, 0, nil, uintptr(n+huge), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return nil, fmt.Errorf("mapping %d bytes: %w", n+huge, err)
		}
		skip := int(-uintptr(whole) & uintptr(huge-1))
		from := unsafe.Add(whole, skip)
		b := unsafe.Slice((*byte)(from), n)
		if err := unix.Madvise(b, unix.MADV_HUGEPAGE); err != nil {
			return nil, errors.Join(fmt.Errorf("advising huge pages: %w", err), unix.MunmapPtr(whole, uintptr(n+huge)))
		}
		fill(b)
		if _, err := unix.MremapPtr(from, uintptr(n), unsafe.Pointer(unsafe.SliceData(to)), uintptr(n),
			unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED); err != nil {
			return nil, errors.Join(fmt.Errorf("moving %d bytes: %w", n, err), unix.MunmapPtr(whole, uintptr(n+huge)))
		}
		// Others may have come between already, so each end goes by itself.
		var front error
		if skip > 0 {
			front = unix.MunmapPtr(whole, uintptr(skip))
		}
		if err := errors.Join(front, unix.MunmapPtr(unsafe.Add(from, n), uintptr(huge-skip))); err != nil {
			return nil, fmt.Errorf("unmapping what was left: %w", err)
		}
		return to, nil
	}
}

// thpSize returns the size of a transparent huge page in bytes, or an error if
// MADV_HUGEPAGE has no effect.
func thpSize() (int, error) {
	size, err := readInt(thpFolder + "hpage_pmd_size")
	if errors.Is(err, fs.ErrNotExist) {
		return 0, errors.New("this kernel has no transparent huge pages (CONFIG_TRANSPARENT_HUGEPAGE)")
	}
	if err != nil {
		return 0, err
	}
	files := []string{
		// Since Linux 6.8 each size has a switch, which by default inherits the general one.
		fmt.Sprintf("%shugepages-%dkB/enabled", thpFolder, size>>10),
		thpFolder + "enabled",
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		switch {
		case errors.Is(err, fs.ErrNotExist), err == nil && bytes.Contains(text, []byte("[inherit]")):
			continue
		case err != nil:
			return 0, fmt.Errorf("reading the mode of huge pages: %w", err)
		case bytes.Contains(text, []byte("[never]")):
			return 0, fmt.Errorf("transparent huge pages are off: as root, echo madvise > %s", name)
		}
		break
	}
	return size, nil
}

// hugetlb is the first write to pages of the pool.
type hugetlb struct{ pageCount }

func hugetlbFlags(fs *pflag.FlagSet) program {
	h := &hugetlb{}
	fs.IntVar(&h.pages, "pages", 8, "number of huge pages, of the system's default size")
	return h
}

// poolFile is the number of pages in the pool of the default size
// (Documentation/admin-guide/mm/hugetlbpage.rst).
const poolFile = "/proc/sys/vm/nr_hugepages"

func (h *hugetlb) lay(p *plan) error {
	pool, err := readPool()
	if err != nil {
		return err
	}
	if pool.free < h.pages {
		if err := pool.grow(p, h.pages); err != nil {
			return err
		}
	}
	p.faultSize = pool.pageSize
	b, err := p.mapMemory(h.pages*pool.pageSize, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB, -1, 0)
	if err != nil {
		return fmt.Errorf("%w (are other huge pages reserved?)", err)
	}
	r := wholeRange(b, fault.Write, fault.HugeTLB, pool.pageSize)
	r.Label = "[hugetlb]"
	return p.addJob(&job{
		ranges:  []Range{r},
		memory:  [][]byte{b},
		toucher: p.writer(),
	})
}

// pool is the state of the huge pages of the default size.
type pool struct {
	pageSize  int // bytes
	free      int // pages that are neither used nor reserved
	available int // bytes of memory that may become pages
}

func readPool() (pool, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return pool{}, fmt.Errorf("asking for huge pages: %w", err)
	}
	values := map[string]int{}
	for line := range strings.Lines(string(text)) {
		key, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		if values[key], err = strconv.Atoi(fields[0]); err != nil {
			return pool{}, fmt.Errorf("reading %s of /proc/meminfo: %w", key, err)
		}
	}
	if values["Hugepagesize"] == 0 {
		return pool{}, errors.New("this kernel has no pool of huge pages (CONFIG_HUGETLBFS)")
	}
	return pool{
		pageSize:  values["Hugepagesize"] << 10,
		free:      values["HugePages_Free"] - values["HugePages_Rsvd"],
		available: values["MemAvailable"] << 10,
	}, nil
}

// grow makes wanted pages of the pool free until the plan is closed.
func (l *pool) grow(p *plan, wanted int) error {
	missing := wanted - l.free
	// The kernel would take all it can get, and leave nothing to the others.
	if missing > l.available/2/l.pageSize {
		return fmt.Errorf("enlarging the pool of huge pages by %d: that is more than half of the available memory", missing)
	}
	old, err := readInt(poolFile)
	if err != nil {
		return err
	}
	set := func(n int) error { return os.WriteFile(poolFile, strconv.AppendInt(nil, int64(n), 10), 0) }
	if err := set(old + missing); err != nil {
		return fmt.Errorf("enlarging the pool of huge pages by %d: %w (have root set vm.nr_hugepages to %d)", missing, err, old+missing)
	}
	p.onClose(func() error {
		if err := set(old); err != nil {
			return fmt.Errorf("restoring the pool of huge pages to %d: %w", old, err)
		}
		return nil
	})
	// It adds what it finds, without an error.
	grown, err := readPool()
	if err == nil && grown.free < wanted {
		err = fmt.Errorf("enlarging the pool of huge pages: %d of %d are free, memory is too fragmented", grown.free, wanted)
	}
	return err
}

func readInt(name string) (int, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, err // names operation and file
	}
	n, err := strconv.Atoi(string(bytes.TrimSpace(text)))
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", name, err)
	}
	return n, nil
}
