package workload

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// touchPages writes to the first byte of every stride bytes of b. It is a function
// of its own so that it can be found in stacks.
//
//go:noinline
//go:norace
//go:nosplit
func touchPages(b []byte, stride int) {
	for i := 0; i < len(b); i += stride {
		b[i] = 1
	}
}

// readPages reads the first byte of every stride bytes of b and returns their sum.
//
//go:noinline
//go:norace
//go:nosplit
func readPages(b []byte, stride int) byte {
	var sum byte
	for i := 0; i < len(b); i += stride {
		sum += b[i]
	}
	return sum
}

// writeEach writes to each stride bytes, readEach reads there.
type (
	writeEach struct{ stride int }
	readEach  struct{ stride int }
)

//go:norace
//go:nosplit
func (w writeEach) touch(memory [][]byte) {
	for _, b := range memory {
		touchPages(b, w.stride)
	}
}

//go:norace
//go:nosplit
func (r readEach) touch(memory [][]byte) {
	for _, b := range memory {
		readPages(b, r.stride)
	}
}

// dropPages unmaps the pages of b by MADV_DONTNEED. Unlike [unix.Madvise] it does
// not tell the Go scheduler, which could otherwise run code of its own, and take
// faults, on the way back.
//
//go:norace
//go:nosplit
func dropPages(b []byte) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_MADVISE, uintptr(unsafe.Pointer(unsafe.SliceData(b))),
		uintptr(len(b)), unix.MADV_DONTNEED)
	return errno
}

// asError is nil for 0.
func asError(errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

//go:nosplit
func addressOf(b []byte) Address {
	return Address(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

// The bits of /proc/PID/pagemap that are visible without privilege
// (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagemapExclusive = 1 << 56 // a normal page, mapped once; the shared zero page is not normal
	pagemapPresent   = 1 << 63
)

// pagemap returns the entries of the pages of b in /proc/self/pagemap.
func pagemap(b []byte, pageSize int) ([]uint64, error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, fmt.Errorf("opening the page map: %w", err)
	}
	defer f.Close()
	const entry = 8
	raw := make([]byte, len(b)/pageSize*entry)
	if _, err := f.ReadAt(raw, int64(addressOf(b))/int64(pageSize)*entry); err != nil {
		return nil, fmt.Errorf("reading the page map: %w", err)
	}
	entries := make([]uint64, len(raw)/entry)
	for i := range entries {
		entries[i] = binary.NativeEndian.Uint64(raw[i*entry:])
	}
	return entries, nil
}

// cached returns how many of the file pages mapped at b are in the page cache.
func cached(b []byte, pageSize int) (int, error) {
	vec := make([]byte, len(b)/pageSize)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(b))),
		uintptr(len(b)), uintptr(unsafe.Pointer(unsafe.SliceData(vec))))
	if errno != 0 {
		return 0, fmt.Errorf("asking for resident pages: %w", errno)
	}
	n := 0
	for _, v := range vec {
		n += int(v & 1) // the other bits are reserved
	}
	return n, nil
}
