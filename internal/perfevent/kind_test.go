package perfevent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
	"faultsnoop/workload"
)

// Every combination of what is known, by the few that leave no doubt.
func TestKind(t *testing.T) {
	type sure struct {
		kind fault.Kind
		when func(e *evidence, perm string) bool
	}
	// untouched: nothing but the file's own pages can be in the mapping.
	untouched := func(e *evidence, perm string) bool { return perm[3] == 's' || perm[1] == '-' && !e.written }
	readOnly := func(perm string) bool { return perm[0] == 'r' && perm[1] == '-' }
	served := func(e *evidence) bool { return e.uffd && (e.major || e.server) }
	rules := map[backing]sure{
		unknownBacking: {},
		device:         {fault.Device, func(*evidence, string) bool { return true }},
		anon:           {fault.Swap, func(e *evidence, _ string) bool { return e.major && !e.uffd }},
		hugetlb:        {fault.HugeTLB, func(e *evidence, _ string) bool { return !served(e) }},
		shmem: {fault.Shmem, func(e *evidence, perm string) bool {
			return untouched(e, perm) && !served(e) && (!e.numa || readOnly(perm))
		}},
		file: {fault.File, func(e *evidence, perm string) bool {
			return untouched(e, perm) && perm[1] == '-' && (!e.numa || readOnly(perm))
		}},
	}
	known := map[fault.Kind]int{}
	for is, rule := range rules {
		for n := range 16 * 32 {
			perm := []byte("----")
			for i := range perm[:3] {
				if n>>i&1 != 0 {
					perm[i] = "rwx"[i]
				}
			}
			perm[3] = "ps"[n>>3&1]
			bit := func(i int) bool { return n>>(4+i)&1 != 0 }
			e := evidence{
				backing: is, flags: fault.PermFlags(string(perm)),
				major: bit(0), written: bit(1), uffd: bit(2), server: bit(3), numa: bit(4),
			}
			want := fault.KindUnknown
			if string(perm[:3]) != "---" && rule.when != nil && rule.when(&e, string(perm)) {
				want = rule.kind
			}
			if got := e.kind(); got != want {
				t.Errorf("%s %+v: %v, want %v", perm, e, got, want)
			}
			known[want]++
			if want != fault.KindUnknown && want != fault.Swap && !Tells(want) {
				t.Errorf("%v is told, but said to be never", want)
			}
		}
	}
	if len(known) != 6 {
		t.Errorf("kinds %v", known)
	}
}

// The same by examples.
func TestKindExamples(t *testing.T) {
	for _, test := range []struct {
		is    backing
		perm  string
		major bool
		want  fault.Kind
	}{
		{file, "r-xp", false, fault.File},
		{file, "r-xp", true, fault.File},
		{file, "r--s", true, fault.File},
		{file, "rw-p", false, fault.KindUnknown}, // or cow-file
		{file, "rw-s", false, fault.KindUnknown}, // or mkwrite
		{shmem, "rw-s", false, fault.Shmem},
		{shmem, "rw-s", true, fault.KindUnknown}, // or uffd
		{shmem, "rw-p", false, fault.KindUnknown},
		{shmem, "r--p", false, fault.Shmem},
		{hugetlb, "rw-p", false, fault.HugeTLB},
		{hugetlb, "rw-p", true, fault.KindUnknown},
		{device, "r-xp", false, fault.Device},
		{anon, "rw-p", false, fault.KindUnknown},
		{anon, "r--p", false, fault.KindUnknown},
		{anon, "rw-p", true, fault.KindUnknown}, // swap or uffd
		{file, "---p", false, fault.KindUnknown},
	} {
		e := evidence{backing: test.is, flags: fault.PermFlags(test.perm), major: test.major, uffd: true}
		if got := e.kind(); got != test.want {
			t.Errorf("%+v: %v", test, got)
		}
	}
}

// Mappings of this process, of which it is known what they are.
func TestBackings(t *testing.T) {
	size := int(pageSize)
	var want []struct {
		name string
		addr uint64
		is   backing
	}
	add := func(name string, is backing, fd, flags int) {
		t.Helper()
		b, err := unix.MmapPtr(fd, 0, nil, uintptr(size), unix.PROT_READ, flags)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		t.Cleanup(func() { unix.MunmapPtr(b, uintptr(size)) })
		want = append(want, struct {
			name string
			addr uint64
			is   backing
		}{name, uint64(uintptr(b)), is})
	}
	addFile := func(path string, is backing, flags int) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		add(path, is, int(f.Fd()), flags)
	}
	ordinary := func(dir string) string {
		t.Helper()
		f, err := os.CreateTemp(dir, "faultsnoop-backing-*")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		t.Cleanup(func() { os.Remove(f.Name()) })
		if err := f.Truncate(int64(size)); err != nil {
			t.Fatal(err)
		}
		return f.Name()
	}
	b := newBackings()
	defer b.close()

	add("private anonymous", anon, -1, unix.MAP_PRIVATE|unix.MAP_ANON)
	add("shared anonymous", shmem, -1, unix.MAP_SHARED|unix.MAP_ANON)
	fd, err := unix.MemfdCreate("/etc/passwd", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	add("memfd", shmem, fd, unix.MAP_PRIVATE)
	// It is anonymous memory, with the name of a device.
	addFile("/dev/zero", unknownBacking, unix.MAP_PRIVATE)
	for _, dir := range []string{"/dev/shm", t.TempDir(), "/var/tmp", "/"} {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil || unix.Access(dir, unix.W_OK) != nil {
			continue
		}
		name := ordinary(dir)
		var root unix.Stat_t
		if err := unix.Stat(dir, &root); err != nil {
			t.Fatal(err)
		}
		if b.mounts.Type(deviceOf(&root)) == "rootfs" { // of an initramfs: tmpfs or ramfs
			addFile(name, unknownBacking, unix.MAP_SHARED)
			continue
		}
		switch st.Type {
		case unix.TMPFS_MAGIC:
			addFile(name, shmem, unix.MAP_SHARED)
		case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC:
			addFile(name, file, unix.MAP_SHARED)
		case unix.OVERLAYFS_SUPER_MAGIC:
			addFile(name, unknownBacking, unix.MAP_SHARED)
		}
	}
	if huge, err := unix.MmapPtr(-1, 0, nil, 1<<21, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_HUGETLB|unix.MAP_NORESERVE); err == nil {
		defer unix.MunmapPtr(huge, 1<<21)
		want = append(want, want[0])
		last := &want[len(want)-1]
		last.name, last.addr, last.is = "huge pages", uint64(uintptr(huge)), hugetlb
	}

	list, err := process.ReadMaps(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var space process.Space
	space.Confirm(list, 1)
	for _, w := range want {
		m := space.Find(w.addr)
		if m == nil {
			t.Errorf("%s: not found", w.name)
			continue
		}
		if got := b.of(m); got != w.is {
			t.Errorf("%s: %d, want %d: %+v", w.name, got, w.is, *m)
		}
	}
	for _, m := range list {
		if m.Path == "[vdso]" && b.of(&m) != device {
			t.Errorf("[vdso]: %d", b.of(&m))
		}
	}
}

// TestNode: the path of a node is chosen by who has mapped it, and may lead anywhere.
func TestNode(t *testing.T) {
	dir, err := os.Open("/dev")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	var st unix.Stat_t
	if err := unix.Stat("/dev/tty", &st); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]backing{
		"/dev/tty":                                    device,
		"/dev/zero":                                   unknownBacking,
		"/dev/none":                                   unknownBacking,
		"/proc/self/root/dev/tty":                     unknownBacking,
		fmt.Sprintf("/dev/fd/%d/tty", dir.Fd()):       unknownBacking,
		"/dev/../proc/self/root/dev/tty":              unknownBacking,
		fmt.Sprintf("/proc/self/fd/%d/tty", dir.Fd()): unknownBacking,
	} {
		if got := ofNode(&process.Mapping{Path: path, Inode: st.Ino, Dev: deviceOf(&st)}); got != want {
			t.Errorf("%s: %d, want %d", path, got, want)
		}
	}
}

// TestKindOfWorkloads has workloads stay until their mappings were looked at.
func TestKindOfWorkloads(t *testing.T) {
	dir := "/var/tmp"
	if _, err := os.Stat("/mnt/lost+found"); err == nil {
		dir = "/mnt" // in a guest of the kernel matrix
	}
	for _, test := range []struct {
		args []string
		// known: the kind of each fault is that of the workload. Else it is unknown of all.
		known bool
	}{
		{[]string{"touch", "--pages", "50", "--threads", "2"}, false},
		{[]string{"cow", "--pages", "50"}, false},
		{[]string{"reuse", "--pages", "50"}, false},
		{[]string{"zero", "--pages", "50"}, false},
		{[]string{"uffd", "--pages", "8"}, false},
		{[]string{"thp", "--pages", "2"}, false},
		{[]string{"swap", "--pages", "50"}, false},
		{[]string{"cow-file", "--pages", "50", "--dir", dir}, false},
		{[]string{"cow-file", "--mapped", "--pages", "50", "--dir", dir}, false},
		{[]string{"mkwrite", "--pages", "50", "--dir", dir}, false},
		{[]string{"file", "--pages", "50", "--dir", dir}, true},
		{[]string{"file", "--cold", "--pages", "50", "--dir", dir}, true},
		{[]string{"shmem", "--pages", "50"}, true},
		{[]string{"hugetlb", "--pages", "2"}, true},
		{[]string{"device", "--pages", "50"}, true},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			s, rep, faults := runUntilLooked(t, fault.Filter{}, test.args...)
			want := "unknown"
			if test.known {
				want = rep.Threads[0].Ranges[0].FaultKind
			}
			switch numa, _ := process.BalancesNUMA(); {
			case numa && want == "shmem":
				want = "unknown"
			case want == "file" && !s.knowsFiles(t, rep.File):
				want = "unknown"
			case rep.Kind == "swap" && !s.uffd && rep.Majflt == rep.Faults:
				want = "swap"
			}
			for i := range faults {
				f, want := &faults[i], want
				if f.Major && s.uffd && (want == "shmem" || want == "hugetlb") {
					want = "unknown" // Linux 5.10 was seen to try the first one again
				}
				if f.Kind.String() != want || f.Is(fault.HasKind) != (want != "unknown") || f.KindExact {
					t.Fatalf("kind %v, want %s: %+v", f.Kind, want, f)
				}
			}
		})
	}
}

// knowsFiles reports whether the file system of a file is one that hands mappings on to
// none else.
func (s *Session) knowsFiles(t *testing.T, name string) bool {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(filepath.Dir(name), &st); err != nil {
		t.Fatal(err)
	}
	known := s.backings.ofDevice(deviceOf(&st)) == file
	if !known {
		t.Logf("%s is on a file system that is not known: %q", name, s.backings.mounts.Type(deviceOf(&st)))
	}
	return known
}

// runUntilLooked runs a workload that stays until all records of its range were read, or
// all that pass the filter.
func runUntilLooked(t *testing.T, flt fault.Filter, args ...string) (*Session, *workload.Report, []fault.Fault) {
	t.Helper()
	c := startChild(t, false, append([]string{"workload"}, args...)...)
	if !c.out.Scan() {
		t.Skipf("this machine cannot run it: %v", c.cmd.Wait())
	}
	ready, err := workload.Decode(strings.NewReader(strings.Replace(c.out.Text(), `"ready":true,`, "", 1) + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	// That of another process would use up the time for looking at mappings.
	flt.PIDs = []uint32{uint32(ready.PID)}
	s := open(t, Options{Filter: flt})
	c.release()
	rep, err := workload.Decode(strings.NewReader(c.line() + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	// All is old enough to be merged and looked up.
	for process.Now() < s.nextLook+uint64(20*time.Millisecond) {
		time.Sleep(20 * time.Millisecond)
	}
	var faults []fault.Fault
	for deadline := time.Now().Add(time.Minute); int64(len(faults)) < rep.Faults; {
		b, err := s.Next(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range b.Faults {
			if rep.Contains(f.Address) && int(f.PID) == rep.PID && f.OK() {
				faults = append(faults, f)
			}
		}
		if counters, _ := s.Counters(); len(flt.Kinds) > 0 && int64(counters.Seen+counters.Filtered) >= rep.Faults {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d records of %d faults", len(faults), rep.Faults)
		}
	}
	c.release()
	for c.out.Scan() {
	}
	return s, rep, faults
}

// What is not known does not match.
func TestFilterByKind(t *testing.T) {
	_, rep, faults := runUntilLooked(t, fault.Filter{Kinds: []fault.Kind{fault.Device, fault.Anon}}, "device", "--pages", "20")
	if int64(len(faults)) != rep.Faults || slices.ContainsFunc(faults, func(f fault.Fault) bool { return f.Kind != fault.Device }) {
		t.Errorf("%d records of %d faults: %+v", len(faults), rep.Faults, faults)
	}
	s, rep, faults := runUntilLooked(t, fault.Filter{Kinds: []fault.Kind{fault.Anon, fault.File}}, "touch", "--pages", "20")
	if c, _ := s.Counters(); len(faults) != 0 || c.Seen != 0 || int64(c.Filtered) < rep.Faults {
		t.Errorf("%d records, counters %+v", len(faults), c)
	}
}

// Memory that was moved to where a file was mapped before: nothing tells of it, and what
// is known of the place is wrong.
func TestKindOfMoved(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, make([]byte, pageSize), 0o600); err != nil {
		t.Fatal(err)
	}
	c := startChild(t, false, "moved", name)
	if got := c.line(); got != "ready" {
		t.Fatal(got)
	}
	s := open(t, Options{Filter: fault.Filter{PIDs: []uint32{uint32(c.pid())}}})
	c.release()
	c.wait() // nobody can look any more
	done := make(chan struct{})
	close(done)
	faults, _ := collect(t, s, done)
	moved := slices.DeleteFunc(faults, func(f fault.Fault) bool { return f.Address != movedTo })
	if len(moved) != 1 || moved[0].Is(fault.HasKind) {
		t.Errorf("%d records, want one without a kind: %+v", len(moved), moved)
	}
}

const movedTo = 0x6e1000000000

// moveOver maps a file and puts a fresh page of anonymous memory into its place.
func moveOver(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	size := uintptr(pageSize)
	fmt.Println("ready")
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return err
	}
	at := unsafe.Add(nil, movedTo)
	if _, err := unix.MmapPtr(int(f.Fd()), 0, at, size, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_FIXED_NOREPLACE); err != nil {
		return err
	}
	mem, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	moved, err := unix.MremapPtr(mem, size, at, size, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED)
	if err != nil {
		return err
	}
	*(*byte)(moved) = 1
	return nil
}
