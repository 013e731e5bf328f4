package workload

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// thp is the first write to memory with transparent huge pages.
type thp struct{ pageCount }

func thpFlags(fs *pflag.FlagSet) program {
	t := &thp{}
	fs.IntVar(&t.pages, "pages", 8, "number of huge pages")
	return t
}

// thpFolder is described in Documentation/admin-guide/mm/transhuge.rst.
const thpFolder = "/sys/kernel/mm/transparent_hugepage/"

func (t *thp) lay(p *plan) error {
	huge, err := thpSize()
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
		ranges:  []Range{wholeRange(b, fault.Write, fault.THP, huge)},
		memory:  [][]byte{b},
		toucher: p.writer(), // each small page: only the first of a huge one faults
	})
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
	return p.addJob(&job{
		ranges:  []Range{wholeRange(b, fault.Write, fault.HugeTLB, pool.pageSize)},
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
