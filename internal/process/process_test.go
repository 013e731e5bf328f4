package process

import (
	"cmp"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The VM_* bits that a permission string shows (include/linux/mm.h).
const (
	vmRead     = 0x1
	vmMayShare = 0x80
)

func TestLabel(t *testing.T) {
	for path, want := range map[string]string{
		"":                            "[anon]",
		"//anon":                      "[anon]",
		"[heap]":                      "[heap]",
		"/usr/lib/libc.so.6":          "libc.so.6",
		"/usr/lib/gone.so (deleted)":  "gone.so deleted",
		"/memfd:a/b (deleted)":        "memfd:a/b",
		"/tmp/memfd:a (deleted)":      "memfd:a deleted",
		"/dev/zero":                   "zero",
		"/dev/zero (deleted)":         "[shmem]",
		"/anon_hugepage (deleted)":    "[hugetlb]",
		"/SYSV00000000 (deleted)":     "[sysv:0x00000000:32768]",
		"/SYSVff00002a (deleted)":     "[sysv:0xff00002a:32768]",
		"/SYSV0000002a":               "SYSV0000002a",
		"/SYSV2a (deleted)":           "SYSV2a deleted",
		"/SYSV0000002x (deleted)":     "SYSV0000002x deleted",
		"/tmp/SYSV0000002a (deleted)": "SYSV0000002a deleted",
	} {
		got, gone := Label(path, 32768)
		if gone {
			got += " deleted"
		}
		if got != want {
			t.Errorf("%q is called %q, want %q", path, got, want)
		}
	}
}

func TestParseMapping(t *testing.T) {
	for _, test := range []struct {
		line string
		want Mapping
	}{
		{
			"7f100000-7f102000 r-xp 00003000 08:01 1234                       /usr/lib/libc.so.6",
			Mapping{
				Start: 0x7f100000, End: 0x7f102000, PgOff: 3, HasPgOff: true, Flags: vmRead | vmExec,
				Dev: 8<<20 | 1, Inode: 1234, Path: "/usr/lib/libc.so.6", Label: "libc.so.6",
			},
		},
		{
			"1000-2000 rw-s 00000000 00:01 77 /memfd:a b\\012c (deleted)",
			Mapping{
				Start: 0x1000, End: 0x2000, HasPgOff: true, Flags: vmRead | vmWrite | vmMayShare,
				Dev: 1, Inode: 77, Path: "/memfd:a b\nc (deleted)", Label: "memfd:a b\nc",
			},
		},
		{
			"1000-2000 rw-s 00001000 00:01 0                          /SYSV0000002a (deleted)",
			Mapping{
				Start: 0x1000, End: 0x2000, PgOff: 1, HasPgOff: true, Flags: vmRead | vmWrite | vmMayShare,
				Dev: 1, Path: "/SYSV0000002a (deleted)", Label: "[sysv:0x0000002a:0]",
			},
		},
		{
			"1000-2000 rw-p 00000000 00:00 0 ",
			Mapping{Start: 0x1000, End: 0x2000, Flags: vmRead | vmWrite, Label: "[anon]"},
		},
		{
			"1000-2000 rw-p 00000000 00:00 0                                          [anon:arena]",
			Mapping{Start: 0x1000, End: 0x2000, Flags: vmRead | vmWrite, Path: "[anon:arena]", Label: "[anon]"},
		},
		{
			"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]",
			Mapping{Start: 0xffffffffff600000, End: 0xffffffffff601000, Flags: vmExec, Path: "[vsyscall]", Label: "[vsyscall]"},
		},
	} {
		got, err := parseMapping(test.line)
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%q:\n got %+v, %v\nwant %+v", test.line, got, err, test.want)
		}
	}
	for _, line := range []string{"", "x", "1-2 r", "1-2 rw-p 0 0:0 x f", "g-2 rw-p 0 0:0 1 f"} {
		if _, err := parseMapping(line); err == nil {
			t.Errorf("%q: no error", line)
		}
	}
}

// TestMappingsApart: a mapping may be kept for long, and the text it was in may be large.
func TestMappingsApart(t *testing.T) {
	for _, name := range []string{"/usr/lib/libc.so.6", "/usr/lib/x (deleted)", "[heap]", "[anon:name]", `/a\012b`} {
		line := "7f100000-7f102000 r-xp 00003000 08:01 1234    " + name
		m, err := parseMapping(line)
		if err != nil {
			t.Fatal(err)
		}
		begin := uintptr(unsafe.Pointer(unsafe.StringData(line)))
		for _, s := range []string{m.Path, m.Label} {
			if at := uintptr(unsafe.Pointer(unsafe.StringData(s))); at >= begin && at < begin+uintptr(len(line)) {
				t.Errorf("%q is a part of the line", s)
			}
		}
	}
}

func TestFilePath(t *testing.T) {
	for path, want := range map[string]struct {
		file string
		gone bool
	}{
		"/usr/lib/libc.so.6":        {"/usr/lib/libc.so.6", false},
		"/tmp/a b (deleted)":        {"/tmp/a b", true},
		"/program":                  {"/program", false},
		"/memfd:x (deleted)":        {},
		"/SYSV00000000 (deleted)":   {},
		"/dev/zero (deleted)":       {},
		"/anon_hugepage (deleted)":  {},
		"/dev/shm/object (deleted)": {"/dev/shm/object", true},
		"//anon":                    {},
		"[heap]":                    {},
		"":                          {},
	} {
		if file, gone := FilePath(path); file != want.file || gone != want.gone {
			t.Errorf("%q: %q, %v, want %+v", path, file, gone, want)
		}
	}
}

func TestParseStatus(t *testing.T) {
	got, err := parseStatus("Name:\tx\nTgid:\t40\nUid:\t1000\t0\t0\t0\nNStgid:\t40\t3\nNSpid:\t41\t4\n")
	want := Status{TGID: 40, UID: 1000, InnerTGID: 3, InnerTID: 4, Nested: true}
	if err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	for _, text := range []string{"", "Uid:\t1\n", "Tgid:\tx\n"} {
		if _, err := parseStatus(text); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

// span is a mapping of whole pages from page a to page b.
func span(a, b uint64, label string, pgoff uint64) Mapping {
	return Mapping{
		Start: a * pageSize, End: b * pageSize, Label: label,
		PgOff: pgoff, HasPgOff: true, ExactSince: Never,
	}
}

type brief struct {
	start, end uint64
	label      string
	pgoff      uint64
}

func list(s *Space) []brief {
	var out []brief
	for _, m := range s.maps {
		out = append(out, brief{m.Start / pageSize, m.End / pageSize, m.Label, m.PgOff})
	}
	return out
}

func TestSpaceInsert(t *testing.T) {
	base := []Mapping{span(10, 20, "a", 100), span(30, 40, "b", 200)}
	for _, test := range []struct {
		name string
		add  Mapping
		want []brief
	}{
		{"before", span(1, 2, "x", 0), []brief{{1, 2, "x", 0}, {10, 20, "a", 100}, {30, 40, "b", 200}}},
		{"between", span(20, 30, "x", 0), []brief{{10, 20, "a", 100}, {20, 30, "x", 0}, {30, 40, "b", 200}}},
		{"inside", span(12, 14, "x", 0), []brief{{10, 12, "a", 100}, {12, 14, "x", 0}, {14, 20, "a", 104}, {30, 40, "b", 200}}},
		{"across", span(15, 35, "x", 0), []brief{{10, 15, "a", 100}, {15, 35, "x", 0}, {35, 40, "b", 205}}},
		{"over all", span(5, 50, "x", 0), []brief{{5, 50, "x", 0}}},
		{"same", span(10, 20, "x", 7), []brief{{10, 20, "x", 7}, {30, 40, "b", 200}}},
		{"empty", span(12, 12, "x", 0), []brief{{10, 20, "a", 100}, {30, 40, "b", 200}}},
	} {
		var s Space
		for _, m := range base {
			s.Insert(m)
		}
		s.Insert(test.add)
		if got := list(&s); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", test.name, got, test.want)
		}
	}
}

func TestSpaceFind(t *testing.T) {
	var s Space
	s.Insert(span(10, 20, "a", 100))
	for page, want := range map[uint64]bool{9: false, 10: true, 19: true, 20: false} {
		m := s.Find(page*pageSize + 5)
		if (m != nil) != want {
			t.Errorf("page %d: found %v, want %v", page, m, want)
		}
		if m == nil {
			continue
		}
		if off, ok := m.PgOffAt(page*pageSize + 5); !ok || off != 100+page-10 {
			t.Errorf("page %d: pgoff %d, %v", page, off, ok)
		}
	}
}

func TestSpaceContinued(t *testing.T) {
	var s Space
	file := span(10, 20, "file", 0)
	file.Inode = 1
	s.Insert(file)
	for _, m := range []Mapping{span(20, 30, "[anon]", 0), span(30, 31, "[anon]", 0), span(32, 40, "[anon]", 0)} {
		s.Insert(m)
	}
	for page, want := range map[uint64]string{10: "", 20: "file", 30: "file", 32: ""} {
		var got string
		if m := s.Continued(s.Find(page * pageSize)); m != nil {
			got = m.Label
		}
		if got != want {
			t.Errorf("page %d continues %q, want %q", page, got, want)
		}
	}
}

func TestSpaceFork(t *testing.T) {
	var parent Space
	parent.Insert(span(10, 20, "a", 0))
	child := parent.Fork()
	child.Insert(span(10, 20, "child", 0))
	parent.Insert(span(30, 40, "parent", 0))
	if got := list(&child); !slices.Equal(got, []brief{{10, 20, "child", 0}}) {
		t.Errorf("child: %v", got)
	}
	if got := list(&parent); !slices.Equal(got, []brief{{10, 20, "a", 0}, {30, 40, "parent", 0}}) {
		t.Errorf("parent: %v", got)
	}
	child.Reset()
	if child.Len() != 0 || parent.Len() != 2 {
		t.Errorf("after exec: child %d, parent %d mappings", child.Len(), parent.Len())
	}
}

func TestSpaceConfirm(t *testing.T) {
	var s Space
	s.Insert(span(10, 20, "[anon]", 10)) // unchanged
	s.Insert(span(30, 40, "[anon]", 30)) // to be split by madvise
	s.Insert(span(50, 60, "gone", 0))    // to be unmapped
	s.Insert(span(85, 90, "[anon]", 85)) // to be merged with what is mapped below it
	anon := func(a, b uint64) Mapping {
		m := span(a, b, "[anon]", 0)
		m.HasPgOff = false
		return m
	}
	s.Confirm([]Mapping{anon(10, 20), anon(30, 33), anon(33, 40), anon(70, 80), anon(82, 90)}, 1000)

	for _, test := range []struct {
		page, at uint64
		label    string
		exact    bool
		pgoff    uint64 // 0: unknown
	}{
		{15, 500, "[anon]", true, 15},
		{15, 1001, "[anon]", false, 15}, // nobody has looked since
		{35, 500, "[anon]", false, 35},  // whole or split: not known
		{35, 1000, "[anon]", true, 35},
		{55, 500, "gone", false, 5},
		{75, 500, "[anon]", false, 0},
		{75, 1000, "[anon]", true, 0},
		{87, 500, "[anon]", false, 87},
		{87, 1000, "[anon]", true, 87},
		{83, 1000, "[anon]", true, 83},
	} {
		m := s.Find(test.page * pageSize)
		if m == nil {
			t.Errorf("page %d: not found", test.page)
			continue
		}
		off, has := m.PgOffAt(test.page * pageSize)
		if m.Label != test.label || s.Exact(m, test.at) != test.exact || has != (test.pgoff != 0) || has && off != test.pgoff {
			t.Errorf("page %d at %d: %q exact %v pgoff %d %v, want %+v", test.page, test.at, m.Label, s.Exact(m, test.at), off, has, test)
		}
	}
}

// What a place showed at a time is certain if a list has it that was made later, and as
// long as it is known to have been so.
func TestSpaceCertain(t *testing.T) {
	const r, w, x = 0x1, vmWrite, vmExec
	m := func(a, b, flags, since uint64, label string) Mapping {
		m := span(a, b, label, a)
		m.Flags, m.Since, m.ExactSince = flags, since, Never
		return m
	}
	var s Space
	s.Insert(m(10, 20, r, 50, "a"))   // to be cut by the next
	s.Insert(m(15, 20, r|w, 60, "a")) // and made read-only:
	s.Insert(m(15, 20, r, 70, "a"))
	s.Insert(m(30, 40, r, 50, "gone"))
	s.Insert(m(50, 60, r, 50, "replaced"))
	s.Insert(m(70, 75, r, 50, "b"))
	s.Insert(m(80, 85, r, 50, "c"))
	s.Confirm([]Mapping{
		m(10, 15, r, 0, "a"), m(15, 20, r, 0, "a"), m(50, 60, r|w, 0, "[anon]"),
		m(70, 80, r, 0, "b"), m(90, 91, r, 0, "old"), m(92, 93, r|x, 0, "code"),
		m(80, 82, r, 0, "c"), m(83, 85, r, 0, "c"), // a hole was made
	}, 1000)
	child := s.Fork()
	for _, test := range []struct {
		page, at uint64
		certain  bool
		written  bool
	}{
		{12, 50, true, false},
		{12, 49, false, false},
		{12, 1000, true, false},
		{12, 1001, false, false}, // nobody has looked since
		{17, 500, true, true},
		{17, 65, false, true},
		{35, 500, false, false},
		{55, 500, false, true},
		{55, 1000, true, true},
		{72, 500, false, true}, // what it has been merged with is not known
		{72, 1000, true, true},
		{81, 500, true, false},
		{84, 500, true, false},
		{90, 999, false, true},
		{90, 1000, true, true},
		{92, 1000, true, false},
	} {
		got := s.Find(test.page * pageSize)
		if got == nil || s.Certain(got, test.at) != test.certain || got.Written != test.written {
			t.Errorf("page %d at %d: %+v, want %+v", test.page, test.at, got, test)
			continue
		}
		if of := child.Find(test.page * pageSize); child.Certain(of, test.at) {
			t.Errorf("page %d of the child is certain by its parent's list", test.page)
		}
	}
	s.Confirm([]Mapping{m(10, 15, r, 0, "a")}, 2000)
	if !s.Certain(s.Find(12*pageSize), 1500) || s.Certain(s.Find(55*pageSize), 500) {
		t.Error("after a second list")
	}
}

func TestParseMounts(t *testing.T) {
	got := parseMounts("30 25 0:26 / /dev/shm rw,nosuid shared:4 master:1 - tmpfs tmp-fs rw\n" +
		"31 25 254:1 /a\\040-\\040b /x\\011\\012\\134040 rw - ext4 /dev/vda1 rw\n" +
		"32 25 0:30 / /y\u00a0\v\\7 rw - fuse.a\\043b you@there:/ rw\nbroken\n33 25 zero / / rw - ext4 x rw\n")
	want := []Mount{
		{Dev: Dev(0, 26), Root: "/", Point: "/dev/shm", Type: "tmpfs"},
		{Dev: Dev(254, 1), Root: "/a - b", Point: "/x\t\n\\040", Type: "ext4"},
		{Dev: Dev(0, 30), Root: "/", Point: "/y\u00a0\v\\7", Type: "fuse.a#b"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestMountPoint mounts where the kernel's list has to escape the place.
func TestMountPoint(t *testing.T) {
	if got := MountPoint("proc"); got == "" || MountPoint("no such type") != "" {
		t.Errorf("proc is mounted at %q", got)
	}
	const kind = "ramfs"
	before := MountPoint(kind)
	dir := filepath.Join(t.TempDir(), "a b\tc\\d\n")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", dir, kind, 0, ""); err != nil {
		t.Skipf("mounting: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	if got := MountPoint(kind); got != cmp.Or(before, dir) {
		t.Errorf("mounted at %q, want %q", got, dir)
	}
	mounts, err := ReadMounts(os.Getpid())
	if err != nil || !slices.ContainsFunc(mounts, func(m Mount) bool { return m.Point == dir && m.Type == kind && m.Root == "/" }) {
		t.Errorf("%+v, %v", mounts, err)
	}
}

func TestMounts(t *testing.T) {
	m, err := OpenMounts()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var st syscall.Stat_t
	if err := syscall.Stat("/proc/self", &st); err != nil {
		t.Fatal(err)
	}
	// Its number is below 256, which every encoding shows alike.
	if got := m.Type(uint32(st.Dev)); got != "proc" && st.Dev < 256 {
		t.Errorf("the file system of /proc is %q", got)
	}
	m.types = map[uint32]string{uint32(st.Dev): "other"}
	if err := m.read(); err != nil || m.Type(uint32(st.Dev)) != "" {
		t.Errorf("%q, %v of a number that has had two file systems", m.Type(uint32(st.Dev)), err)
	}
	if _, err := m.Refresh(); err != nil {
		t.Error(err)
	}
}

func TestHoldsUserfault(t *testing.T) {
	holds := func() bool {
		t.Helper()
		got, err := HoldsUserfault(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if holds() {
		t.Fatal("a userfaultfd that nobody has opened")
	}
	const userModeOnly = 1
	fd, _, errno := syscall.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|userModeOnly, 0, 0)
	if errno == syscall.EINVAL { // before Linux 5.11
		fd, _, errno = syscall.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	}
	if errno != 0 {
		t.Skipf("no userfaultfd here: %v", errno)
	}
	defer syscall.Close(int(fd))
	if !holds() {
		t.Error("its own userfaultfd is not found")
	}
	if _, err := HoldsUserfault(1<<22 + 1); err == nil {
		t.Error("the descriptors of a process that cannot be")
	}
}

func TestSpaceBounded(t *testing.T) {
	var s Space
	for i := range uint64(maxMappings + 10) {
		s.Insert(span(2*i, 2*i+1, "a", 0))
	}
	if s.Len() > maxMappings || s.Len() == 0 {
		t.Errorf("%d mappings kept", s.Len())
	}
}

// TestSelf compares what is said of this process with what it knows of itself.
func TestSelf(t *testing.T) {
	pid := os.Getpid()
	st, err := ReadStatus(pid)
	if err != nil || int(st.TGID) != pid || int(st.UID) != os.Getuid() || st.Nested {
		t.Errorf("status %+v, %v", st, err)
	}
	exe, _ := os.Executable()
	if name, err := Executable(pid); err != nil || name != filepath.Base(exe) {
		t.Errorf("executable %q, %v, want %q", name, err, exe)
	}
	if !ProcIsOurs() || !Alive(pid) || Alive(1<<22+1) {
		t.Error("this process is not seen alive, or one that cannot be is")
	}
	if tids, err := Threads(pid); err != nil || !slices.Contains(tids, pid) {
		t.Errorf("threads %v, %v", tids, err)
	}
	page, err := syscall.Mmap(-1, 0, 3*int(pageSize), syscall.PROT_READ, syscall.MAP_SHARED|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Munmap(page)
	list, err := ReadMaps(pid)
	if err != nil {
		t.Fatal(err)
	}
	var s Space
	s.Confirm(list, Now())
	m := s.Find(uint64(uintptr(unsafe.Pointer(&page[pageSize]))))
	if m == nil || m.Label != "[shmem]" || m.Flags != vmRead|vmMayShare {
		t.Fatalf("shared anonymous memory is %+v", m)
	}
	if off, ok := m.PgOffAt(m.Start + pageSize); !ok || off != 1 {
		t.Errorf("its second page has offset %d, %v", off, ok)
	}
}

func TestCgroupBelow(t *testing.T) {
	const mounts = "30 25 0:26 / /sys rw - sysfs sysfs rw\n" +
		"36 30 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n" +
		"37 30 0:30 /slice /mnt/inner rw - cgroup2 cgroup2 rw\n" +
		"38 30 0:30 /a\\040b /mnt/outer\\040one rw - cgroup2 cgroup2 rw\n"
	for dir, want := range map[string]string{
		"/sys/fs/cgroup":       "/",
		"/sys/fs/cgroup/a/b":   "/a/b",
		"/mnt/inner/x":         "/slice/x",
		"/mnt/outer one/x y":   "/a b/x y",
		"/sys/fs/cgroupother":  "",
		"/sys/fs/not/a/cgroup": "",
	} {
		if got, ok := cgroupBelow(parseMounts(mounts), dir); got != want || ok != (want != "") {
			t.Errorf("%s: got %q, %v, want %q", dir, got, ok, want)
		}
	}
	for _, test := range []struct {
		parent, path string
		want         bool
	}{
		{"/a", "/a", true},
		{"/a", "/a/b", true},
		{"/a", "/ab", false},
		{"/", "/x", true},
	} {
		if got := CgroupHolds(test.parent, test.path); got != test.want {
			t.Errorf("%s in %s: %v", test.path, test.parent, got)
		}
	}
	for _, dir := range []string{"/proc", "/no/such"} {
		if _, err := CgroupOf(dir); err == nil {
			t.Errorf("%s taken for a cgroup", dir)
		}
	}
}

func FuzzParseMapping(f *testing.F) {
	f.Add("7f100000-7f102000 r-xp 00003000 08:01 1234    /usr/lib/libc.so.6")
	f.Fuzz(func(t *testing.T, line string) {
		if m, err := parseMapping(line); err == nil && m.Label == "" {
			t.Errorf("%q has no label", line)
		}
	})
}
