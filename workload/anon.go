package workload

import (
	"cmp"
	"fmt"
	"os"
	"unsafe"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// alloc is the allocation of a given size in blocks.
type alloc struct{ size, block byteSize }

func allocFlags(fs *pflag.FlagSet) program {
	a := &alloc{size: units.GiB, block: 10 * units.MiB}
	fs.Var(&a.size, "size", "bytes to allocate in all (1GB is 2^30 bytes)")
	fs.Var(&a.block, "block", "bytes to allocate at a time; the last block takes what is left")
	return a
}

func (a *alloc) validate() error {
	pageSize := os.Getpagesize()
	for _, f := range []struct {
		name string
		size byteSize
	}{{"size", a.size}, {"block", a.block}} {
		if f.size <= 0 || f.size%byteSize(pageSize) != 0 {
			return fmt.Errorf("--%s %d: must be a positive multiple of the page size, %d bytes", f.name, f.size, pageSize)
		}
		if err := checkCount(f.name, int(f.size), maxPages*pageSize); err != nil {
			return err
		}
	}
	if blocks := int(a.size / a.block); blocks > maxMappings {
		return fmt.Errorf("--block %s: makes %d blocks of --size %s, more than %d", &a.block, blocks, &a.size, maxMappings)
	}
	return nil
}

// maxMappings is below the kernel's default limit of mappings, vm.max_map_count
// (DEFAULT_MAX_MAP_COUNT is 65530).
const maxMappings = 60000

func (a *alloc) lay(p *plan) error {
	j := &job{toucher: p.writer()}
	for left := a.size; left > 0; left -= a.block {
		b, err := p.mapAnon(int(min(left, a.block)))
		if err != nil {
			return err
		}
		j.memory = append(j.memory, b)
		j.ranges = append(j.ranges, wholeRange(b, fault.Write, fault.Anon, p.pageSize))
	}
	j.ranges = joinAdjacent(j.ranges)
	return p.addJob(j)
}

// touch is the plain first write, by several threads.
type touch struct {
	pages, threads, stride int
	vmaName                string
}

func touchFlags(fs *pflag.FlagSet) program {
	t := &touch{}
	fs.IntVar(&t.pages, "pages", 1024, "pages that each thread touches")
	fs.IntVar(&t.threads, "threads", 1, "number of threads")
	fs.IntVar(&t.stride, "stride", 1, "distance of touched pages, in pages")
	fs.StringVar(&t.vmaName, "vma-name", "", "name of the mapping (PR_SET_VMA_ANON_NAME, since Linux 5.17)")
	return t
}

// maxThreads keeps well below the runtime's own limit of 10000 threads.
const maxThreads = 4096

func (t *touch) validate() error {
	return cmp.Or( // the first error
		checkCount("pages", t.pages, maxPages),
		checkCount("threads", t.threads, maxThreads),
		checkCount("stride", t.stride, maxPages/max(1, min(t.pages, maxPages))),
	)
}

func (t *touch) lay(p *plan) error {
	for range t.threads {
		b, err := p.mapAnon(t.pages * t.stride * p.pageSize)
		if err != nil {
			return err
		}
		if t.vmaName != "" {
			if err := nameMapping(b, t.vmaName); err != nil {
				return err
			}
		}
		r := wholeRange(b, fault.Write, fault.Anon, p.pageSize)
		n := int64(t.pages)
		r.Expectation = Expectation{Pages: n, Faults: n, Minor: n}
		j := &job{ranges: []Range{r}, memory: [][]byte{b}, toucher: writeEach{t.stride * p.pageSize}}
		if err := p.addJob(j); err != nil {
			return err
		}
	}
	return nil
}

// nameMapping gives anonymous memory a name that /proc/PID/maps shows.
func nameMapping(b []byte, name string) error {
	text, err := unix.BytePtrFromString(name)
	if err != nil {
		return fmt.Errorf("naming the mapping %q: %w", name, err)
	}
	err = unix.Prctl(unix.PR_SET_VMA, unix.PR_SET_VMA_ANON_NAME, uintptr(addressOf(b)), uintptr(len(b)),
		uintptr(unsafe.Pointer(text)))
	if err != nil {
		return fmt.Errorf("naming the mapping %q: %w: the kernel was built without CONFIG_ANON_VMA_NAME, or the name has letters that it forbids", name, err)
	}
	return nil
}

// zero is the first read of fresh memory.
type zero struct{ pageCount }

func zeroFlags(fs *pflag.FlagSet) program {
	z := &zero{}
	z.declare(fs, 256)
	return z
}

func (z *zero) lay(p *plan) error {
	kind := fault.Anon
	switch zeroPage, err := mapsZeroPage(p); {
	case err != nil:
		return err
	case zeroPage:
		kind = fault.Zero
	}
	b, err := p.mapAnon(z.pages * p.pageSize)
	if err != nil {
		return err
	}
	return p.addJob(&job{
		ranges:  []Range{wholeRange(b, fault.Read, kind, p.pageSize)},
		memory:  [][]byte{b},
		toucher: readEach{p.pageSize},
	})
}

// pageCount is the only flag of several kinds.
type pageCount struct{ pages int }

func (c *pageCount) declare(fs *pflag.FlagSet, pages int) {
	fs.IntVar(&c.pages, "pages", pages, "number of pages")
}

func (c *pageCount) validate() error { return checkCount("pages", c.pages, maxPages) }
