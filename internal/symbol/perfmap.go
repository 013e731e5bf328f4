package symbol

import (
	"bytes"
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// Bounds of what is read and kept of a map of compiled code.
const (
	maxMapBytes   = 256 << 20 // read of one file
	maxMapEntries = 512 << 10
	maxMapKept    = 32 << 20 // bytes of names
	maxMapLine    = 4 << 10
	mapStep       = 1 << 20 // bytes that are read at once
)

// PerfMap is the functions that a process has compiled while it runs, and has listed for
// profilers in /tmp/perf-PID.map: START SIZE NAME, in hexadecimal, one a line. It is not
// safe for concurrent use. The owner must call [PerfMap.Close].
type PerfMap struct {
	file *os.File
	id   fileID
	// written is when the file had last been written to, as of the latest look.
	written unix.Timespec
	size    int64
	read    int64 // bytes
	// entries are in the order in which they were listed, and cover is made of them when it
	// is needed.
	entries []mapEntry
	cover   []piece
	stale   bool
	names   int // bytes
	// changes counts how often what is listed has changed.
	changes uint64

	// Skipped is the number of lines that are none, or that are too many to keep.
	Skipped uint64
}

type mapEntry struct {
	start, end uint64
	name       string
}

var errMapOwner = errors.New("it belongs to neither the user of the process nor root")

// OpenPerfMap opens the map of a process, in its own file system and under its own number.
// The error wraps [fs.ErrNotExist] if it has none.
func OpenPerfMap(pid uint32) (*PerfMap, error) {
	f, id, err := openMap(pid)
	if err != nil {
		return nil, err
	}
	m := &PerfMap{file: f, id: id}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err == nil {
		m.written = st.Mtim
	}
	return m, nil
}

// sameAs reports whether nothing was written since another map of the file was looked at.
func (m *PerfMap) sameAs(other *PerfMap) bool {
	return m.id == other.id && m.written == other.written
}

func openMap(pid uint32) (*os.File, fileID, error) {
	inner, uid, err := statusOf(pid)
	if err != nil {
		return nil, fileID{}, err
	}
	name := fmt.Sprintf("/tmp/perf-%d.map", inner)
	fd, err := openLocally(pid, name)
	if err != nil {
		return nil, fileID{}, err
	}
	defer unix.Close(fd)
	path := fmt.Sprintf("/proc/%d/root%s", pid, name)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fileID{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fileID{}, &os.PathError{Op: "open", Path: path, Err: errOther}
	}
	if st.Uid != 0 && st.Uid != uid {
		return nil, fileID{}, &os.PathError{Op: "open", Path: path, Err: errMapOwner}
	}
	// What was found is opened, whatever is at the path by now.
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fileID{}, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return f, fileID{process.Dev(unix.Major(st.Dev), unix.Minor(st.Dev)), st.Ino}, nil
}

// statusOf is the number that a process has for itself, and its user.
func statusOf(pid uint32) (inner, uid uint32, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, fmt.Errorf("reading the status of process %d: %w", pid, err)
	}
	inner = pid
	for line := range strings.Lines(string(b)) {
		key, rest, _ := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		switch {
		case key == "Uid" && len(fields) == 4:
			n, err := strconv.ParseUint(fields[1], 10, 32) // the effective one
			if err != nil {
				return 0, 0, fmt.Errorf("reading the status of process %d: %w", pid, err)
			}
			uid = uint32(n)
		case key == "NSpid" && len(fields) > 0:
			n, err := strconv.ParseUint(fields[len(fields)-1], 10, 32)
			if err != nil {
				return 0, 0, fmt.Errorf("reading the status of process %d: %w", pid, err)
			}
			inner = uint32(n)
		}
	}
	return inner, uid, nil
}

// Close closes the file. What was read stays known.
func (m *PerfMap) Close() error { return m.file.Close() }

// Refresh reads what was added to the file, some at a time, and reports whether there is
// more. A file that is shorter than it was is read again.
func (m *PerfMap) Refresh() (more bool, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(m.file.Fd()), &st); err != nil {
		return false, os.NewSyscallError("fstat", err)
	}
	if st.Size < m.read {
		m.forget()
	}
	m.size, m.written = st.Size, st.Mtim
	return m.readFrom(m.file)
}

// Replace opens the map of the process again if there is another file now.
func (m *PerfMap) Replace(pid uint32) error {
	f, id, err := openMap(pid)
	if err != nil {
		return err
	}
	if id == m.id {
		return f.Close()
	}
	m.file.Close()
	m.file, m.id = f, id
	m.forget()
	return nil
}

func (m *PerfMap) forget() {
	m.read, m.entries, m.cover, m.names, m.stale = 0, nil, nil, 0, false
	m.changes++
}

// readFrom reads on. A line without an end is still being written.
func (m *PerfMap) readFrom(r io.ReaderAt) (more bool, err error) {
	if m.read >= maxMapBytes || m.read >= m.size {
		return false, nil
	}
	b := make([]byte, min(mapStep, m.size-m.read))
	n, err := r.ReadAt(b, m.read)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, fmt.Errorf("reading a map of compiled code: %w", err)
	}
	b = b[:n]
	end := bytes.LastIndexByte(b, '\n') + 1
	if end == 0 {
		if n <= maxMapLine {
			return false, nil
		}
		end = n // no line is as long
	}
	m.read += int64(end)
	m.add(b[:end])
	return m.read < m.size && end > 0 && n > 0, nil
}

// add takes lines.
func (m *PerfMap) add(b []byte) {
	m.changes++
	for line := range bytes.Lines(b) {
		e, ok := parseMapLine(line)
		if !ok || len(m.entries) >= maxMapEntries || m.names+len(e.name) > maxMapKept {
			m.Skipped++
			continue
		}
		m.names += len(e.name)
		m.entries = append(m.entries, e)
		m.stale = true
	}
}

func parseMapLine(line []byte) (e mapEntry, ok bool) {
	if len(line) > maxMapLine {
		return e, false
	}
	text := strings.TrimRight(string(line), "\r\n")
	start, rest, _ := strings.Cut(text, " ")
	size, name, _ := strings.Cut(rest, " ")
	a, err1 := strconv.ParseUint(strings.TrimPrefix(start, "0x"), 16, 64)
	n, err2 := strconv.ParseUint(strings.TrimPrefix(size, "0x"), 16, 64)
	if err1 != nil || err2 != nil || n == 0 || a > math.MaxUint64-n || name == "" {
		return e, false
	}
	return mapEntry{a, a + n, strings.Clone(name)}, true
}

// At is the function at an address of the process; its name is empty if none is listed
// there. Of two it is the one that was listed later: code is thrown away, and its place
// used again.
func (m *PerfMap) At(addr uint64) fault.Frame {
	if m.stale {
		m.stale = false
		m.cover = latest(m.entries)
	}
	f := fault.Frame{Addr: addr}
	if i := pieceAt(m.cover, addr); i >= 0 {
		f.Func, f.File, f.Line, f.Lang = compiledName(m.entries[m.cover[i].name].name)
	}
	return f
}

// latest divides what entries cover, so that each piece belongs to the one that is last in
// the list.
func latest(entries []mapEntry) []piece {
	type edge struct {
		at    uint64
		entry uint32
		ends  bool
	}
	edges := make([]edge, 0, 2*len(entries))
	for i := range entries {
		edges = append(edges, edge{entries[i].start, uint32(i), false}, edge{entries[i].end, uint32(i), true})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.entry, b.entry)) })
	var out []piece
	var open newestFirst
	for i := 0; i < len(edges); {
		at := edges[i].at
		for ; i < len(edges) && edges[i].at == at; i++ {
			if !edges[i].ends {
				heap.Push(&open, edges[i].entry)
			}
		}
		for len(open) > 0 && entries[open[0]].end <= at {
			heap.Pop(&open)
		}
		if len(open) == 0 || i == len(edges) {
			continue
		}
		end, of := edges[i].at, open[0]
		if last := len(out) - 1; last >= 0 && out[last].end == at && out[last].name == of {
			out[last].end = end
			continue
		}
		out = append(out, piece{at, end, entries[of].start, of})
	}
	return slices.Clip(out)
}

// newestFirst is a heap of indices with the greatest first.
type newestFirst []uint32

func (h newestFirst) Len() int           { return len(h) }
func (h newestFirst) Less(i, j int) bool { return h[i] > h[j] }
func (h newestFirst) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *newestFirst) Push(v any)        { *h = append(*h, v.(uint32)) }

func (h *newestFirst) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// Size is how many bytes are kept, about.
func (m *PerfMap) Size() int {
	return m.names + cap(m.entries)*int(unsafe.Sizeof(mapEntry{})) + cap(m.cover)*int(unsafe.Sizeof(piece{}))
}

// nodePrefixes are the kinds of code that V8 lists.
var nodePrefixes = [...]string{
	"LazyCompile:", "JS:", "Function:", "Script:", "Eval:", "RegExp:", "Builtin:", "BytecodeHandler:",
}

// compiledName takes the name of a function apart, as far as its form is certain.
func compiledName(name string) (function, file string, line uint32, lang fault.Lang) {
	// py::FUNCTION:FILE (Python/perf_trampoline.c).
	if rest, ok := strings.CutPrefix(name, "py::"); ok {
		if i := strings.Index(rest, ":/"); i >= 0 {
			return name[:len("py::")+i], rest[i+1:], 0, fault.LangPython
		}
		if i := strings.LastIndexByte(rest, ':'); i >= 0 {
			return name[:len("py::")+i], rest[i+1:], 0, fault.LangPython
		}
		return name, "", 0, fault.LangPython
	}
	for _, prefix := range nodePrefixes {
		rest, ok := strings.CutPrefix(name, prefix)
		if !ok {
			continue
		}
		// A mark tells which compiler made it: KIND:*FUNCTION FILE:LINE:COLUMN.
		rest = strings.TrimLeft(rest, "*~^+'")
		if i := strings.LastIndexByte(rest, ' '); i >= 0 {
			if file, line, ok := sourcePlace(rest[i+1:]); ok {
				if rest = rest[:i]; rest == "" {
					rest = "(anonymous)"
				}
				return rest, file, line, fault.LangNode
			}
		}
		return name, "", 0, fault.LangNode
	}
	if mangled(name) {
		return demangled(name), "", 0, langOfName(name)
	}
	return name, "", 0, fault.LangUnknown
}

// sourcePlace takes FILE:LINE:COLUMN apart.
func sourcePlace(s string) (file string, line uint32, ok bool) {
	rest, column, ok1 := cutLast(s, ':')
	file, number, ok2 := cutLast(rest, ':')
	if _, err := strconv.ParseUint(column, 10, 32); !ok1 || !ok2 || err != nil || file == "" {
		return "", 0, false
	}
	n, err := strconv.ParseUint(number, 10, 32)
	return file, uint32(n), err == nil
}

func cutLast(s string, sep byte) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}
