package view

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"

	"faultsnoop/internal/fault"
)

// cell appends one fact of a fault. It appends nothing when the fact is unknown.
type cell func(e *Encoder, b []byte, f *fault.Fault) []byte

// Column is one fact as it is shown: the same table feeds text, CSV, JSON and
// the help text.
type Column struct {
	// Name is what --columns takes.
	Name string
	// Title heads the column in text.
	Title string
	// Width is the room in text, in terminal columns. A longer cell takes the
	// room from the padding of the columns to its right.
	Width int
	Help  string

	// left aligns text to the left.
	left bool
	// text appends the form for people.
	text cell
	// name replaces text where the bytes come from the traced process: they are
	// escaped and cut to limit columns (0: not cut).
	name func(b []byte, f *fault.Fault, limit int) []byte

	// key names the fact in JSON and, with vma_ in front for a fact of the
	// mapping, in CSV. A column without a key is a short form of others.
	key string
	// raw appends the form for programs; json replaces it in JSON where a plain
	// number or string is not enough.
	raw, json cell
	// quoted makes raw a string in JSON.
	quoted bool
	// sparse leaves an unknown fact out of JSON instead of writing null.
	sparse bool
	// ofVMA puts the fact into the "vma" object.
	ofVMA bool
	// short lists the columns that a column without a key stands for in CSV and JSON.
	short []string
}

// Columns lists every column in the order of JSON and of the preset wide.
var Columns = []Column{
	{
		Name: "time", Title: "TIME", Width: 15, Help: "when the fault was complete: local time in text, RFC 3339 in UTC elsewhere",
		key: "time", text: (*Encoder).appendClock, raw: (*Encoder).appendRFC3339, quoted: true,
	},
	{
		Name: "mono", Title: "MONO(ns)", Width: 16, Help: "the same as nanoseconds of CLOCK_MONOTONIC",
		key: "mono_ns", raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return appendUint(b, f.End) },
	},
	{
		Name: "pid", Title: "PID", Width: 7, Help: "process (thread group) id, in the pid namespace of faultsnoop",
		key: "pid", raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return appendID(b, f.PID) },
	},
	{
		Name: "tid", Title: "TID", Width: 7, Help: "thread id",
		key: "tid", raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return appendID(b, f.TID) },
	},
	{
		Name: "thread", Title: "TID", Width: 7, Help: "thread id where it differs from pid, else \".\"",
		text: appendThread, short: []string{"tid"},
	},
	{
		Name: "nspid", Title: "NSPID", Width: 7, Help: "process id inside its own pid namespace where it differs from pid",
		key: "nspid", raw: appendInnerPID, sparse: true,
	},
	{
		Name: "host_pid", Title: "HOSTPID", Width: 7, Help: "process id in the initial pid namespace where it differs from pid",
		key: "host_pid", raw: appendHostPID, sparse: true,
	},
	{
		Name: "cpu", Title: "CPU", Width: 3, Help: "CPU that took the fault",
		key: "cpu", raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return appendUint(b, uint64(f.CPU)) },
	},
	{
		Name: "comm", Title: "COMM", Width: 15, left: true, Help: "name of the thread; strange bytes are escaped, a cut name ends in +",
		key: "comm", json: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return appendJSONName(b, "comm", f.Comm.Bytes()) },
		name: func(b []byte, f *fault.Fault, limit int) []byte { return appendEscaped(b, f.Comm.Bytes(), limit) },
	},
	{
		Name: "process", Title: "PROCESS", Width: 15, left: true, Help: "name of the process (of its first thread)",
		key: "process", json: func(_ *Encoder, b []byte, f *fault.Fault) []byte {
			if name := f.Process.Bytes(); len(name) > 0 {
				return appendJSONName(b, "process", name)
			}
			return b // nobody names its first thread "", so it is not known
		},
		name: func(b []byte, f *fault.Fault, limit int) []byte { return appendEscaped(b, f.Process.Bytes(), limit) },
	},
	{
		Name: "mode", Title: "MODE", Width: 6, left: true, Help: "user, kernel (on a user address) or remote (get_user_pages on another task)",
		key: "mode", raw: appendMode, quoted: true,
	},
	{
		Name: "access", Title: "ACCESS", Width: 6, left: true, Help: "read, write or exec",
		key: "access", raw: appendAccess, quoted: true,
	},
	{
		Name: "how", Title: "HOW", Width: 3, left: true, Help: "mode and access in short: U user, K kernel, R remote / r read, w write, x exec",
		text: appendHow, short: []string{"mode", "access"},
	},
	{
		Name: "major", Title: "MAJ", Width: 3, left: true, Help: "maj: the kernel counted it in ru_majflt; min: in ru_minflt; failed in text: bus, seg, oom, hwp, int, efa (see result)",
		key: "major", text: (*Encoder).appendMajor, raw: appendMajorBool,
	},
	{
		Name: "address", Title: "ADDRESS(hex)", Width: 12, Help: "faulting address with its offset in the page",
		key: "address", raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return appendHex(b, f.Address) }, quoted: true,
		text: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.Address, 16) },
	},
	{
		Name: "ip", Title: "IP(hex)", Width: 16, Help: "instruction that faulted",
		key: "ip", raw: known(fault.HasIP, func(b []byte, f *fault.Fault) []byte { return appendHex(b, f.IP) }), quoted: true,
		text: known(fault.HasIP, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.IP, 16) }),
	},
	{
		Name: "flags", Title: "FLAGS", Width: 54, left: true, Help: "FAULT_FLAG_* by the running kernel's names, unknown bits in hex",
		key: "flags", raw: (*Encoder).appendFlags, json: (*Encoder).appendFlagsJSON,
	},
	{
		Name: "flags_raw", Title: "FLAGS(hex)", Width: 10, Help: "the same as a number",
		key: "flags_raw", raw: known(fault.HasFlags, func(b []byte, f *fault.Fault) []byte { return appendHex(b, uint64(f.Flags)) }), quoted: true,
	},
	{
		Name: "attempts", Title: "TRY", Width: 3, Help: "how often the kernel tried",
		key: "attempts", raw: known(fault.HasAttempts, func(b []byte, f *fault.Fault) []byte { return appendUint(b, uint64(f.Attempts)) }),
	},
	{
		Name: "result", Title: "RESULT", Width: 8, left: true, Help: "ok, sigbus, sigsegv, oom, hwpoison, interrupted or efault",
		key: "result", raw: known(fault.HasResult, func(b []byte, f *fault.Fault) []byte { return append(b, f.Result.String()...) }), quoted: true,
	},
	{
		Name: "cause", Title: "CAUSE", Width: 6, left: true, Help: "why it ended with SIGSEGV: maperr (no mapping), accerr (not permitted) or pkuerr (protection key)",
		key: "cause", quoted: true,
		raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte { return append(b, f.Cause.String()...) },
	},
	{
		Name: "kind", Title: "KIND", Width: 8, left: true, Help: "what the kernel did: anon, zero, thp, file, cow-file, cow, reuse, mkwrite, shmem, swap, hugetlb, numa, uffd, device or spurious",
		key: "kind", raw: known(fault.HasKind, func(b []byte, f *fault.Fault) []byte { return append(b, f.Kind.String()...) }), quoted: true,
	},
	{
		Name: "kind_by", Title: "BY", Width: 8, left: true, Help: "exact: the page table told the kind; inferred: the mapping and the access did",
		key: "kind_by", raw: known(fault.HasKind, appendKindBy), quoted: true,
	},
	{
		Name: "pfn", Title: "PFN(hex)", Width: 9, Help: "frame number of the page afterwards (with --pfn)",
		key: "pfn", raw: known(fault.HasPFN, func(b []byte, f *fault.Fault) []byte { return appendHex(b, f.PFN) }), quoted: true,
		text: known(fault.HasPFN, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.PFN, 16) }),
	},
	{
		Name: "node", Title: "NODE", Width: 4, Help: "NUMA node that the page is on afterwards (with --pfn)",
		key: "node", raw: known(fault.HasPFN, func(b []byte, f *fault.Fault) []byte {
			if f.Node < 0 {
				return b
			}
			return appendUint(b, uint64(f.Node))
		}),
	},
	{
		Name: "again", Title: "AGAIN", Width: 5, left: true, Help: "again: the page has faulted before in this run (with --again)",
		key: "again", raw: known(fault.HasAgain, func(b []byte, f *fault.Fault) []byte { return strconv.AppendBool(b, f.Again) }),
		text: known(fault.HasAgain, func(b []byte, f *fault.Fault) []byte {
			if !f.Again {
				return append(b, "first"...)
			}
			return append(b, "again"...)
		}),
	},
	{
		Name: "page_size", Title: "SIZE", Width: 4, Help: "what was mapped at once: 4K, 16K, 32K or 64K of a large folio, 2M, 1G; bytes in CSV and JSON",
		key: "page_size", raw: known(fault.HasAfter, func(b []byte, f *fault.Fault) []byte { return appendUint(b, f.PageSize()) }),
		text: known(fault.HasAfter, func(b []byte, f *fault.Fault) []byte {
			return append(b, units.CustomSize("%.0f%s", float64(f.PageSize()), 1024, []string{"B", "K", "M", "G"})...)
		}),
	},
	{
		Name: "pte_before", Title: "PTE BEFORE(hex)", Width: 16, Help: "page-table entry that the fault found, without its frame",
		key: "pte_before", raw: known(fault.HasBefore, func(b []byte, f *fault.Fault) []byte { return appendHex(b, f.EntryBefore) }), quoted: true,
		text: known(fault.HasBefore, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.EntryBefore, 16) }),
	},
	{
		Name: "pte_after", Title: "PTE AFTER(hex)", Width: 16, Help: "the entry that it left, without its frame",
		key: "pte_after", raw: known(fault.HasAfter, func(b []byte, f *fault.Fault) []byte { return appendHex(b, f.EntryAfter) }), quoted: true,
		text: known(fault.HasAfter, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.EntryAfter, 16) }),
	},
	{
		Name: "latency", Title: "LAT", Width: 6, Help: "from the first entry into the kernel's handler to the last exit",
		key: "latency_ns", raw: known(fault.HasLatency, func(b []byte, f *fault.Fault) []byte { return strconv.AppendInt(b, int64(f.Latency), 10) }),
		text: known(fault.HasLatency, func(b []byte, f *fault.Fault) []byte { return appendDuration(b, f.Latency) }),
	},
	{
		Name: "offcpu", Title: "OFFCPU", Width: 6, Help: "the part of it in which the thread did not run; nanoseconds in CSV and JSON",
		key: "offcpu_ns", raw: known(fault.HasOffCPU, func(b []byte, f *fault.Fault) []byte { return strconv.AppendInt(b, int64(f.OffCPU), 10) }),
		text: known(fault.HasOffCPU, func(b []byte, f *fault.Fault) []byte { return appendDuration(b, f.OffCPU) }),
	},
	{
		Name: "wait", Title: "WAIT", Width: 9, left: true, Help: "why, for the most of it: preempted, throttled (the CPU quota of its cgroup was used up), io, lock (uninterruptible, not for I/O) or sleep (as for userfaultfd)",
		key: "wait", raw: known(fault.HasOffCPU, appendWait), quoted: true,
	},
	{
		Name: "reclaim", Title: "RECLM", Width: 6, Help: "the part of it in which the thread had to free memory itself (direct reclaim); nanoseconds in CSV and JSON",
		key: "reclaim_ns", raw: known(fault.HasReclaim, func(b []byte, f *fault.Fault) []byte { return strconv.AppendInt(b, int64(f.Reclaim), 10) }),
		text: known(fault.HasReclaim, func(b []byte, f *fault.Fault) []byte { return appendDuration(b, f.Reclaim) }),
	},
	{
		Name: "compaction", Title: "COMPCT", Width: 6, Help: "the part of it in which the thread moved pages to make room for a large one",
		key: "compaction_ns", raw: known(fault.HasReclaim, func(b []byte, f *fault.Fault) []byte { return strconv.AppendInt(b, int64(f.Compaction), 10) }),
		text: known(fault.HasReclaim, func(b []byte, f *fault.Fault) []byte { return appendDuration(b, f.Compaction) }),
	},
	{
		Name: "start", Title: "START(hex)", Width: 12, Help: "first address of the mapping",
		key: "start", ofVMA: true, raw: known(fault.HasVMA, func(b []byte, f *fault.Fault) []byte { return appendHex(b, f.VMA.Start) }), quoted: true,
		text: known(fault.HasVMA, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.VMA.Start, 16) }),
	},
	{
		Name: "end", Title: "END(hex)", Width: 12, Help: "first address behind the mapping",
		key: "end", ofVMA: true, raw: known(fault.HasVMA, func(b []byte, f *fault.Fault) []byte { return appendHex(b, f.VMA.End) }), quoted: true,
		text: known(fault.HasVMA, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.VMA.End, 16) }),
	},
	{
		Name: "perm", Title: "PERM", Width: 4, left: true, Help: "permissions of the mapping as in /proc/PID/maps",
		key: "perm", ofVMA: true, raw: known(fault.HasVMA, appendPerm), quoted: true,
	},
	{
		Name: "vm_flags", Title: "VMFLAGS", Width: 24, left: true, Help: "flags of the mapping as in VmFlags of /proc/PID/smaps, for example rd wr mr mw me ac",
		key: "flags", ofVMA: true, raw: known(fault.HasVMA, func(b []byte, f *fault.Fault) []byte { return f.VMA.AppendFlags(b) }), quoted: true,
	},
	{
		Name: "vma_pgoff", Title: "VPGOFF(hex)", Width: 11, Help: "the mapping's own offset in its file, in pages",
		key: "pgoff", ofVMA: true, raw: known(fault.HasVMA, func(b []byte, f *fault.Fault) []byte { return appendUint(b, f.VMA.PgOff) }),
		text: known(fault.HasVMA, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.VMA.PgOff, 16) }),
	},
	{
		Name: "pgoff", Title: "PGOFF(hex)", Width: 10, Help: "the page's offset in its file, in pages, as the kernel computes it (for anonymous memory too); decimal in CSV and JSON",
		key: "pgoff", raw: known(fault.HasPgOff, func(b []byte, f *fault.Fault) []byte { return appendUint(b, f.PgOff) }),
		text: known(fault.HasPgOff, func(b []byte, f *fault.Fault) []byte { return strconv.AppendUint(b, f.PgOff, 16) }),
	},
	{
		Name: "offset", Title: "OFFSET(hex)", Width: 11, Help: "the same in bytes, of the address itself, for mapped files only; decimal in CSV and JSON",
		key: "file_offset", raw: func(e *Encoder, b []byte, f *fault.Fault) []byte { return e.appendOffset(b, f, 10) },
		text: func(e *Encoder, b []byte, f *fault.Fault) []byte { return e.appendOffset(b, f, 16) },
	},
	{
		Name: "section", Title: "SECTION", Width: 12, left: true, Help: "section of the mapped ELF file that holds the address: .text, .rodata, .data, .bss ...",
		key: "section", json: func(_ *Encoder, b []byte, f *fault.Fault) []byte {
			if f.Section == "" {
				return b
			}
			return appendJSONName(b, "section", f.Section)
		},
		name: func(b []byte, f *fault.Fault, limit int) []byte { return appendEscaped(b, f.Section, limit) },
	},
	{
		Name: "symbol", Title: "SYMBOL", Width: 24, left: true, Help: "the object or function there, as the file's symbol table calls it, with +0x and the distance from its beginning",
		key: "symbol", json: func(_ *Encoder, b []byte, f *fault.Fault) []byte {
			if f.Symbol == "" {
				return b
			}
			var room [128]byte
			return appendJSONName(b, "symbol", appendSymbol(room[:0], f))
		},
		name: func(b []byte, f *fault.Fault, limit int) []byte {
			var room [128]byte
			return appendEscaped(b, appendSymbol(room[:0], f), limit)
		},
	},
	{
		Name: "vma_lock", Title: "VMALOCK", Width: 7, left: true, Help: "whether the first attempt was made under the mapping's own lock (since Linux 6.4) instead of mmap_lock",
		key: "vma_lock", raw: (*Encoder).appendVMALock,
	},
	{
		Name: "hook", Title: "HOOK", Width: 10, left: true, Help: "how the fault was heard of",
		key: "hook", raw: func(e *Encoder, b []byte, _ *fault.Fault) []byte { return append(b, e.session.Hook...) }, quoted: true,
	},
	{
		Name: "mapping", Title: "MAPPING", Width: 20, left: true, Help: "file name, [heap], [stack], [stack:TID], [anon], [vdso] ... of the mapping",
		key: "label", ofVMA: true, json: appendLabelJSON,
		name: func(b []byte, f *fault.Fault, limit int) []byte {
			if !f.Is(fault.HasLabel) {
				return b
			}
			return appendEscaped(b, f.VMA.Label, limit)
		},
	},
	{
		Name: "path", Title: "PATH", Width: 40, left: true, Help: "path of the mapped file in the mount namespace of the process",
		key: "path", ofVMA: true, json: appendPathJSON, name: appendPath,
	},
	{
		Name: "deleted", Title: "DEL", Width: 3, left: true, Help: "del: the file had been deleted when it was first seen",
		key: "deleted", ofVMA: true, raw: known(fault.HasLabel, func(b []byte, f *fault.Fault) []byte { return strconv.AppendBool(b, f.VMA.Deleted) }),
		text: func(_ *Encoder, b []byte, f *fault.Fault) []byte {
			if f.VMA.Deleted {
				return append(b, "del"...)
			}
			return b
		},
	},
	{
		Name: "dev", Title: "DEV", Width: 6, left: true, Help: "device of the mapped file, MAJOR:MINOR in hexadecimal as in /proc/PID/maps",
		key: "dev", ofVMA: true, quoted: true, raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte {
			if !ofFile(f) {
				return b
			}
			return appendDev(b, f.VMA.Dev)
		},
	},
	{
		Name: "inode", Title: "INODE", Width: 10, Help: "inode of the mapped file",
		key: "inode", ofVMA: true, raw: func(_ *Encoder, b []byte, f *fault.Fault) []byte {
			if !ofFile(f) {
				return b
			}
			return appendUint(b, f.VMA.Inode)
		},
	},
}

// Presets are the names for whole sets of columns. The preset wide is every
// column with a fact of its own.
var Presets = []struct {
	Name, Help string
	columns    []string
}{
	{"default", "fits 100 terminal columns", []string{"time", "pid", "thread", "cpu", "comm", "how", "major", "address", "pgoff", "latency", "mapping"}},
	{"mm", "what handle_mm_fault is called with", []string{"pid", "cpu", "comm", "address", "flags"}},
	{"pte", "what struct vm_fault says", []string{"cpu", "pid", "comm", "address", "pgoff"}},
	{"wide", "all that is known", nil},
}

// UnknownColumnError is the error for a name that is neither column nor preset.
type UnknownColumnError struct{ Name string }

func (e *UnknownColumnError) Error() string { return fmt.Sprintf("unknown column %q", e.Name) }

// ParseColumns turns a comma-separated list of columns and presets into
// columns, each once. The names of JSON keys are understood too.
func ParseColumns(list string) ([]Column, error) {
	var columns []Column
	for word := range strings.SplitSeq(list, ",") {
		word = strings.TrimSpace(word)
		more, ok := lookup(word)
		if !ok {
			return nil, &UnknownColumnError{Name: word}
		}
		for _, c := range more {
			if !slices.ContainsFunc(columns, func(o Column) bool { return o.Name == c.Name }) {
				columns = append(columns, c)
			}
		}
	}
	return columns, nil
}

// Names lists what --columns takes, presets first.
func Names() []string {
	var names []string
	for _, p := range Presets {
		names = append(names, p.Name)
	}
	for i := range Columns {
		names = append(names, Columns[i].Name)
	}
	return names
}

func lookup(word string) ([]Column, bool) {
	for _, p := range Presets {
		if p.Name != word {
			continue
		}
		if p.columns == nil {
			return keyed(), true
		}
		return pick(p.columns), true
	}
	for i := range Columns {
		if c := &Columns[i]; c.Name == word || (c.csvName() == word && c.key != "") {
			return []Column{*c}, true
		}
	}
	return nil, false
}

// pick returns the columns of these names; an unknown one is left out.
func pick(names []string) []Column {
	var columns []Column
	for _, name := range names {
		if i := slices.IndexFunc(Columns, func(c Column) bool { return c.Name == name }); i >= 0 {
			columns = append(columns, Columns[i])
		}
	}
	return columns
}

// keyed returns the columns with a fact of their own.
func keyed() []Column {
	return slices.DeleteFunc(slices.Clone(Columns), func(c Column) bool { return c.key == "" })
}

// spell replaces short forms by what they stand for, each fact once.
func spell(columns []Column) []Column {
	var names []string
	for i := range columns {
		parts := columns[i].short
		if columns[i].key != "" {
			parts = []string{columns[i].Name}
		}
		for _, name := range parts {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return pick(names)
}

// Elsewhere is how the column is called in CSV and JSON, in words; empty if the same.
func (c *Column) Elsewhere() string {
	switch {
	case c.key == "":
		return strings.Join(c.short, " and ") + " in CSV and JSON"
	case c.ofVMA:
		return c.csvName() + " in CSV, vma." + c.key + " in JSON"
	case c.key != c.Name:
		return c.key + " in CSV and JSON"
	}
	return ""
}

func (c *Column) csvName() string {
	if c.ofVMA {
		return "vma_" + c.key
	}
	return c.key
}
