package process

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// Mapping is one mapping of an address space.
type Mapping struct {
	Start, End uint64 // [Start, End), bytes
	// PgOff is the offset of Start in its file, in pages, and for anonymous memory
	// the number that the kernel keeps in its place. It is known if HasPgOff.
	PgOff    uint64
	HasPgOff bool
	Flags    uint64 // VM_* bits, only those of [fault.PermFlags]
	Inode    uint64
	Dev      uint32 // kernel dev_t: major << 20 | minor
	// Path is what the kernel prints for the mapping; empty for anonymous memory.
	// Its bytes may be hostile.
	Path string
	// Label is the last element of Path, or a name in brackets. Deleted says that the
	// file it is of has lost its name.
	Label   string
	Deleted bool
	// ExactSince is when the bounds and flags became certain, in nanoseconds of
	// CLOCK_MONOTONIC: 0 if they always were, [Never] if they are not.
	ExactSince uint64
	// Since is the earliest time for which it is known that this object was mapped here
	// with these rights, whatever the bounds were.
	Since uint64
	// Written: it was writable before, or may have been. What was written to a private
	// mapping is no page of the file any more.
	Written bool
	listed  uint64 // when Confirm saw it last
	cut     bool   // what another mapping left of a larger one
}

// VMA is what a fault on the mapping says of it.
func (m *Mapping) VMA() *fault.VMA {
	path, gone := FilePath(m.Path)
	return &fault.VMA{
		Start: m.Start, End: m.End, PgOff: m.PgOff, Flags: m.Flags,
		Inode: m.Inode, Dev: m.Dev, Label: m.Label, Path: path, Deleted: gone,
	}
}

// Never is an ExactSince that no time reaches.
const Never = ^uint64(0)

const deleted = " (deleted)"

// Label names a mapping by the path that the kernel prints for it in
// /proc/PID/maps or in a perf MMAP2 record (perf_event_mmap_event in
// kernel/events/core.c, where anonymous memory is "//anon"), and by its inode. gone
// says that the file is in its folder no more.
func Label(path string, inode uint64) (label string, gone bool) {
	switch {
	case path == "", path == "//anon":
		return "[anon]", false
	case path[0] == '[':
		return path, false
	}
	path, gone = strings.CutSuffix(path, deleted)
	// What never was in a folder is printed as if it had been in the first one
	// (simple_dname in fs/d_path.c).
	if name := strings.TrimPrefix(path, "/"); gone {
		if label := InternalFile(name, inode); label != "" {
			return label, false
		}
		if strings.HasPrefix(name, "memfd:") {
			return name, false
		}
	}
	return filepath.Base(path), gone
}

// InternalFile is what to call a file that the kernel has made for memory for which no
// process opened a file, by the name and inode that it has then (mm/shmem.c, mm/mmap.c,
// ipc/shm.c). It is empty for other files.
func InternalFile(name string, inode uint64) string {
	switch name {
	case "dev/zero":
		return "[shmem]"
	case "anon_hugepage":
		return "[hugetlb]"
	}
	// The inode's number is the id of the segment (newseg).
	key, ok := strings.CutPrefix(name, "SYSV")
	if _, err := strconv.ParseUint(key, 16, 32); !ok || err != nil || len(key) != 8 {
		return ""
	}
	return fmt.Sprintf("[sysv:0x%s:%d]", key, inode)
}

// FilePath is the path of a mapped file by what the kernel prints for the mapping, and
// whether it had lost it by then; "" for memory that never had one.
func FilePath(path string) (file string, gone bool) {
	if path == "" || path[0] != '/' || strings.HasPrefix(path, "//") {
		return "", false
	}
	file, gone = strings.CutSuffix(path, deleted)
	// Files of the kernel's own (memfd_create in mm/memfd.c, newseg in ipc/shm.c,
	// shmem_zero_setup in mm/shmem.c, hugetlb_file_setup in fs/hugetlbfs/inode.c) look like
	// ones that were in the root folder.
	if gone && (file == "/dev/zero" || strings.LastIndexByte(file, '/') == 0) {
		return "", false
	}
	return file, gone
}

// Dev packs a device number as the kernel does.
func Dev(major, minor uint32) uint32 { return major<<20 | minor }

// same reports whether two mappings show the same object with the same rights.
func (m *Mapping) same(o *Mapping) bool {
	return m.Flags == o.Flags && m.Inode == o.Inode && m.Dev == o.Dev && m.Label == o.Label
}

// written reports whether m has or had the right to write to the file of another one.
func (m *Mapping) written(o *Mapping) bool {
	return m.Inode == o.Inode && m.Dev == o.Dev && (m.Flags&vmWrite != 0 || m.Written)
}

// include/linux/mm.h
const (
	vmWrite = 0x2
	vmExec  = 0x4
)

// pgOffAt is the page offset of an address in the mapping.
func (m *Mapping) pgOffAt(addr uint64) uint64 {
	return m.PgOff + (addr-m.Start)/pageSize
}

// PgOffAt is the page offset of an address in the mapping as linear_page_index
// computes it (include/linux/pagemap.h). It is false if not known.
func (m *Mapping) PgOffAt(addr uint64) (uint64, bool) {
	return m.pgOffAt(addr), m.HasPgOff
}

var pageSize = uint64(os.Getpagesize())

// Now reads CLOCK_MONOTONIC in nanoseconds.
func Now() uint64 {
	var ts unix.Timespec
	// Cannot fail: the clock exists on all kernels and ts is ours.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return uint64(ts.Nano())
}

// ReadMaps reads the mappings of a process in ascending order. To keep one of them keeps
// its path and nothing else of the text.
func ReadMaps(pid int) ([]Mapping, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, fmt.Errorf("reading the mappings of process %d: %w", pid, err)
	}
	var out []Mapping
	for line := range strings.Lines(string(b)) {
		m, err := parseMapping(strings.TrimSuffix(line, "\n"))
		if err != nil {
			return nil, fmt.Errorf("reading the mappings of process %d: %w", pid, err)
		}
		out = append(out, m)
	}
	return out, nil
}

// parseMapping reads one line of /proc/PID/maps (show_map_vma in fs/proc/task_mmu.c):
//
//	7f10c000-7f10d000 r-xp 00001000 08:01 1234    /usr/lib/libc.so.6
func parseMapping(line string) (Mapping, error) {
	var field [5]string
	rest := line
	for i := range field {
		var ok bool
		field[i], rest, ok = strings.Cut(rest, " ")
		if !ok && i < len(field)-1 {
			return Mapping{}, fmt.Errorf("parsing mapping %q: too few fields", line)
		}
	}
	start, end, _ := strings.Cut(field[0], "-")
	major, minor, _ := strings.Cut(field[3], ":")
	var n [6]uint64
	for i, s := range [...]string{start, end, field[2], major, minor} {
		v, err := strconv.ParseUint(s, 16, 64)
		if err != nil {
			return Mapping{}, fmt.Errorf("parsing mapping %q: %w", line, err)
		}
		n[i] = v
	}
	inode, err := strconv.ParseUint(field[4], 10, 64)
	if err != nil {
		return Mapping{}, fmt.Errorf("parsing mapping %q: %w", line, err)
	}
	m := Mapping{
		Start: n[0], End: n[1],
		PgOff: n[2] / pageSize,
		Flags: fault.PermFlags(field[1]),
		Inode: inode,
		Dev:   Dev(uint32(n[3]), uint32(n[4])),
		Path:  strings.Clone(unescape(strings.TrimLeft(rest, " "))),
	}
	// Named anonymous memory ([anon:NAME], PR_SET_VMA_ANON_NAME) is anonymous still.
	m.Label, m.Deleted = Label(m.Path, inode)
	if strings.HasPrefix(m.Label, "[anon") {
		m.Label = "[anon]"
	}
	// The offset of a mapping without a file is not shown: the field is 0 then. System V
	// shared memory may have inode 0, but not device 0.
	m.HasPgOff = inode != 0 || m.Dev != 0
	return m, nil
}

// unescape undoes the only escape in maps: a newline is printed as \012
// (seq_path in show_map_vma).
func unescape(path string) string { return strings.ReplaceAll(path, `\012`, "\n") }
