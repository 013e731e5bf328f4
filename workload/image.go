package workload

import (
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// imageBytes have a whole fault-around window, wherever they begin.
const imageBytes = 2 * aroundBytes

// What the linker puts into .noptrdata, .noptrbss and .rodata.
var (
	imageData = [imageBytes]byte{imageBytes - 1: 1}
	imageBSS  [imageBytes]byte
	imageText = text128k
)

const (
	text16   = "read-only bytes\n"
	text128  = text16 + text16 + text16 + text16 + text16 + text16 + text16 + text16
	text1k   = text128 + text128 + text128 + text128 + text128 + text128 + text128 + text128
	text16k  = text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k + text1k
	text128k = text16k + text16k + text16k + text16k + text16k + text16k + text16k + text16k
)

// image is the program's own memory, as its linker has laid it out.
type image struct{}

func imageFlags(*pflag.FlagSet) program { return image{} }

func (image) validate() error { return nil }

func (image) lay(p *plan) error {
	// By the process, not by madvise: that would divide the mapping.
	if err := unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("doing without huge pages: %w", err)
	}
	p.onClose(func() error {
		if err := unix.Prctl(unix.PR_SET_THP_DISABLE, 0, 0, 0, 0); err != nil {
			return fmt.Errorf("allowing huge pages again: %w", err)
		}
		return nil
	})
	if err := warmUp("/proc/self/exe"); err != nil {
		return err
	}
	text := unsafe.Slice(unsafe.StringData(imageText), len(imageText))
	return errors.Join(
		p.addImage(imageData[:], ".noptrdata", "imageData", fault.Write, p.writer()),
		p.addImage(imageBSS[:], ".noptrbss", "imageBSS", fault.Write, p.writer()),
		p.addImage(text, ".rodata", "", fault.Read, readAlone{p.pageSize}),
	)
}

// addImage adds a job on those pages of b that are mapped by no fault beside them.
func (p *plan) addImage(b []byte, section, symbol string, access fault.Access, how toucher) error {
	skip := int(-addressOf(b) & (aroundBytes - 1))
	inner := b[skip : skip+(len(b)-skip)&^(aroundBytes-1)]
	if err := asError(dropPages(inner)); err != nil {
		return fmt.Errorf("dropping pages of %s: %w", section, err)
	}
	r := wholeRange(inner, access, fault.Anon, p.pageSize)
	r.Section = section
	if symbol != "" {
		r.Symbol, r.SymbolOffset = "faultsnoop/workload."+symbol, int64(skip)
	}
	switch section {
	case ".noptrdata":
		r.FaultKind = fault.CowFile.String()
	case ".rodata":
		r.FaultKind = "" // file, or shmem where the program is on tmpfs
	}
	return p.addJob(&job{ranges: []Range{r}, memory: [][]byte{inner}, toucher: how})
}

// warmUp has a file in memory.
func warmUp(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("reading the program: %w", err)
	}
	defer f.Close()
	if _, err := io.Copy(io.Discard, f); err != nil {
		return fmt.Errorf("reading the program: %w", err)
	}
	return nil
}
