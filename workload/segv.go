package workload

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// segv is the access that kills.
type segv struct {
	pageCount
	how string
}

// The values of --how, named after the si_code of the signal; sigbus is BUS_ADRERR.
const (
	howMapErr = "maperr"
	howAccErr = "accerr"
	howSIGBUS = "sigbus"
)

func segvFlags(fs *pflag.FlagSet) program {
	s := &segv{}
	s.declare(fs, 16)
	fs.StringVar(&s.how, "how", howMapErr, "kind of bad address: "+strings.Join(hows(), ", "))
	return s
}

func hows() []string { return []string{howMapErr, howAccErr, howSIGBUS} }

func (s *segv) validate() error {
	if !slices.Contains(hows(), s.how) {
		return fmt.Errorf("--how %q: must be one of %s", s.how, strings.Join(hows(), ", "))
	}
	return s.pageCount.validate()
}

func (s *segv) lay(p *plan) error {
	good, err := p.mapAnon(s.pages * p.pageSize)
	if err != nil {
		return err
	}
	bad, err := s.badAddress(p)
	if err != nil {
		return err
	}
	page := Address(uintptr(bad)) &^ Address(p.pageSize-1)
	// Without a core dump, whether to a file or to a program: a limit of one byte is
	// too small for the first, and stops the second (do_coredump in fs/coredump.c).
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("limiting the core dump: %w", err)
	}
	return p.addJob(&job{
		ranges: []Range{
			wholeRange(good, fault.Write, fault.Anon, p.pageSize),
			{
				Start: page, End: page + Address(p.pageSize),
				Expectation: Expectation{Pages: 1, Failed: 1},
				Access:      fault.Read.String(),
				Touches:     []Touch{{Address(uintptr(bad)), fault.Read.String()}},
			},
		},
		memory:  [][]byte{good},
		toucher: p.writer(),
		last:    func() { peek(bad) },
	})
}

// badAddress returns an address that cannot be read.
func (s *segv) badAddress(p *plan) (unsafe.Pointer, error) {
	const offset = 0x10
	var b []byte
	var err error
	switch s.how {
	case howAccErr:
		b, err = p.mapMemory(p.pageSize, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
	case howSIGBUS:
		fd, ferr := p.memfd("faultsnoop-empty", 0)
		if ferr != nil {
			return nil, ferr
		}
		b, err = p.mapMemory(p.pageSize, unix.PROT_READ, unix.MAP_SHARED, fd, 0)
	default:
		return lowAddress(offset), nil
	}
	if err != nil {
		return nil, err
	}
	return unsafe.Pointer(&b[offset]), nil
}

// lowAddress returns addr, which is below vm.mmap_min_addr, where there never is a
// mapping. The checks of a race build are told not to find that suspicious.
//
//go:nocheckptr
func lowAddress(addr int) unsafe.Pointer { return unsafe.Add(nil, addr) }

// peek reads one byte.
//
//go:noinline
//go:norace
func peek(p unsafe.Pointer) byte { return *(*byte)(p) }
