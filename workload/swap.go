package workload

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// swap is the reading of pages that were written out.
type swap struct{ pageCount }

func swapFlags(fs *pflag.FlagSet) program {
	s := &swap{}
	s.declare(fs, 256)
	return s
}

func (s *swap) lay(p *plan) error {
	text, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return fmt.Errorf("asking for swap space: %w", err)
	}
	areas := swapAreas(string(text))
	if len(areas) == 0 {
		return errors.New("no swap is on: as root, for example, modprobe zram; " +
			"echo 512M > /sys/block/zram0/disksize; mkswap /dev/zram0; swapon /dev/zram0")
	}
	b, err := p.mapTouched(s.pages*p.pageSize, func(b []byte) {
		for i := range b { // a page of one value repeated needs no place on the device
			b[i] = byte(i/p.pageSize + i)
		}
	})
	if err != nil {
		return err
	}
	if err := pageOut(b, p.pageSize); err != nil {
		return err
	}
	r := wholeRange(b, fault.Read, fault.Swap, p.pageSize)
	r.Minor = 0
	if synchronous(areas) {
		r.Major = r.Pages
	} else {
		r.Either = r.Pages
	}
	return p.addJob(&job{
		ranges:  []Range{r},
		memory:  [][]byte{b},
		toucher: readEach{p.pageSize},
	})
}

// pageOut has the kernel write all of b to swap.
func pageOut(b []byte, pageSize int) error {
	const attempts, pause = 100, 20 * time.Millisecond // a page under writeback stays for a moment
	present := 0
	for range attempts {
		if err := unix.Madvise(b, unix.MADV_PAGEOUT); err != nil {
			return fmt.Errorf("paging out %d bytes: %w", len(b), err)
		}
		entries, err := pagemap(b, pageSize)
		if err != nil {
			return err
		}
		present = 0
		for _, e := range entries {
			if e&pagemapPresent != 0 {
				present++
			}
		}
		if present == 0 {
			return nil
		}
		time.Sleep(pause)
	}
	return fmt.Errorf("paging out: %d of %d pages stay in memory; is the swap space full?", present, len(b)/pageSize)
}

// swapAreas returns the names in /proc/swaps.
func swapAreas(text string) []string {
	var names []string
	for i, line := range strings.Split(text, "\n") {
		if fields := strings.Fields(line); i > 0 && len(fields) > 0 {
			names = append(names, fields[0])
		}
	}
	return names
}

// synchronous reports whether every read of a page from the areas is a major fault.
// That is so for zram, which do_swap_page in mm/memory.c reads without swap cache and
// read-ahead (SWP_SYNCHRONOUS_IO); elsewhere read-ahead makes the neighbours' faults
// minor.
func synchronous(areas []string) bool {
	for _, name := range areas {
		if !strings.HasPrefix(name, "/dev/zram") {
			return false
		}
	}
	return true
}
