package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// needHook skips when this kernel cannot run a hook, naming the reason; the
// kernel matrix covers each hook on some kernel.
func needHook(t *testing.T, hook Hook) (Features, Options) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("BPF hooks need root")
	}
	f, _ := Probe(hook)
	if s := f.support(hook); !s.OK {
		t.Skipf("hook %s: %s", hook, s.Found)
	}
	return f, Options{Hook: hook}
}

func bpfHooks(t *testing.T, run func(t *testing.T, hook Hook)) {
	for _, hook := range []Hook{Fentry, Kprobe, Tracepoint} {
		t.Run(string(hook), func(t *testing.T) { run(t, hook) })
	}
}

func openHook(t *testing.T, f Features, opt Options) *Live {
	t.Helper()
	plans, err := f.Plans(opt)
	if err != nil {
		t.Fatal(err)
	}
	l, err := Open(plans[0], opt)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// drain stops l and returns all records.
func drain(t *testing.T, l *Live) []fault.Fault {
	t.Helper()
	if err := l.Stop(); err != nil {
		t.Fatal(err)
	}
	var all []fault.Fault
	for {
		b, err := l.Next(context.Background())
		if errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, b.Faults...)
	}
}

// region maps n fresh pages until the end of the test.
func region(t *testing.T, n int) []byte {
	t.Helper()
	mem, err := FreshPages(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	return mem
}

// Beside memory that huge pages may fill, fresh pages remain those of small ones.
func TestFreshPages(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Skipf("this kernel has no huge pages to keep out: %v", err)
	}
	around, err := unix.Mmap(-1, 0, 8<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(around)
	mem := region(t, 1)
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	var start, end uint64
	for line := range strings.Lines(string(smaps)) {
		var from, to uint64
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			start, end = from, to
		}
		flags, ok := strings.CutPrefix(line, "VmFlags:")
		if ok && start <= addressOf(mem) && addressOf(mem) < end {
			if !slices.Contains(strings.Fields(flags), "nh") {
				t.Errorf("flags %q of %#x-%#x lack nh", flags, start, end)
			}
			return
		}
	}
	t.Errorf("no mapping has %#x\n%s", addressOf(mem), smaps)
}

func TestOwnPages(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		const pages = 23
		f, opt := needHook(t, hook)
		mem := region(t, pages)
		opt.Filter = fault.Filter{
			PIDs: []uint32{uint32(os.Getpid())}, Self: true,
			AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem)),
		}
		l := openHook(t, f, opt)
		defer withoutSignals(t)()
		var before, after unix.Rusage
		unix.Getrusage(unix.RUSAGE_THREAD, &before)
		unix.Getrusage(unix.RUSAGE_THREAD, &before)
		for i := range pages {
			mem[i*os.Getpagesize()+i] = 1
		}
		unix.Getrusage(unix.RUSAGE_THREAD, &after)

		faults := drain(t, l)
		if len(faults) != pages {
			t.Fatalf("%d records of %d faults", len(faults), pages)
		}
		if got := after.Minflt - before.Minflt; got != pages {
			t.Errorf("getrusage counts %d minor faults of %d", got, pages)
		}
		for i := range faults {
			checkOwnPage(t, &faults[i], addressOf(mem)+uint64(i*os.Getpagesize()+i), mem)
		}
		c, err := l.Counters()
		if err != nil {
			t.Fatal(err)
		}
		if c.Seen != pages || c.Minor != pages || c.Major != 0 || c.Failed != 0 {
			t.Errorf("counters %+v, want %d minor", c, pages)
		}
	})
}

func checkOwnPage(t *testing.T, f *fault.Fault, address uint64, mem []byte) {
	t.Helper()
	if err := checkSelfTest(f, address, uint32(unix.Gettid()), addressOf(mem), addressOf(mem)+uint64(len(mem))); err != nil {
		t.Error(err)
	}
	if !f.Is(fault.HasLatency) || f.Latency <= 0 {
		t.Errorf("latency %v, known %v", f.Latency, f.Is(fault.HasLatency))
	}
	if want := address / uint64(os.Getpagesize()); f.PgOff != want {
		t.Errorf("pgoff %#x, want %#x: that of anonymous memory is the address's page", f.PgOff, want)
	}
	if f.VMA.Label != "[anon]" {
		t.Errorf("label %q, want [anon]", f.VMA.Label)
	}
	if f.Is(fault.HasFlags) && f.Attempts != 1 {
		t.Errorf("%d attempts, want 1", f.Attempts)
	}
}

// The row of a file that does not fault again keeps its name, however many names come
// after it.
func TestRowsKeepNames(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		feat, opt := needHook(t, hook)
		f, err := os.Create(t.TempDir() + "/row")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		// In the page cache: a fault that has to wait for the page may be taken twice, as two rows.
		if _, err := f.Write(make([]byte, os.Getpagesize())); err != nil {
			t.Fatal(err)
		}
		mem, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(mem)
		opt.CountOnly, opt.Tables = true, []fault.By{fault.ByFile}
		opt.Filter = fault.Filter{PIDs: []uint32{uint32(os.Getpid())}, Self: true, AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem))}
		l := openHook(t, feat, opt)
		release := withoutSignals(t)
		mem[0] = 1
		release()
		var first fault.Key
		for round := range 3 {
			rows, err := l.Rows()
			if err != nil {
				t.Fatal(err)
			}
			if len(rows.Tables[0].Rows) != 1 {
				c, err := l.Counters()
				t.Fatalf("round %d: rows of one file: %+v; kinds %+v, counters %+v, %v", round, rows.Tables[0], rows.Kinds[0].Cost, c, err)
			}
			for key := range rows.Tables[0].Rows {
				if round == 0 {
					first = key
				}
				if key != first || rows.Names[key.File] != f.Name() {
					t.Errorf("round %d: %+v, named %q", round, key, rows.Names[key.File])
				}
			}
			for i := uint64(0); !l.decoder.crowded(); i++ {
				l.decoder.names[faultNameKey{Hash: i}] = fileName{label: "x"}
			}
			l.nextUpkeep = time.Time{}
			if err := l.upkeep(); err != nil {
				t.Fatal(err)
			}
			if len(l.decoder.names) != 1 {
				t.Errorf("%d names kept", len(l.decoder.names))
			}
		}
	})
}

// Two CPUs that raise the longest latency of a row at once may leave the shorter one there.
// It is written over here: what is shown is the longest all the same.
func TestRowsKeepMax(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		const pages = 3
		feat, opt := needHook(t, hook)
		mem := region(t, pages)
		opt.CountOnly, opt.Tables = true, []fault.By{fault.ByMode, fault.ByUID, fault.ByPage}
		opt.Filter = fault.Filter{PIDs: []uint32{uint32(os.Getpid())}, Self: true, AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem))}
		plans, err := feat.Plans(opt)
		if err != nil {
			t.Fatal(err)
		}
		plans[0].StatRows = 2 // none for pages
		l, err := Open(plans[0], opt)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		for i := range pages {
			release := withoutSignals(t)
			mem[i*os.Getpagesize()] = 1
			release()
			dropMaxima(t, l)
		}
		rows, err := l.Rows()
		if err != nil {
			t.Fatal(err)
		}
		var kind *fault.KindCost
		for i := range rows.Kinds {
			if rows.Kinds[i].Faults() == pages {
				kind = &rows.Kinds[i]
			}
		}
		if kind == nil {
			t.Fatalf("no kind of %d faults: %+v", pages, rows.Kinds)
		}
		highest := len(kind.Buckets) - 1
		for kind.Buckets[highest] == 0 {
			highest--
		}
		if aggregate.Bucket(kind.Max) != highest {
			t.Errorf("kind: longest %v, which is in bucket %d; there are some in %d", kind.Max, aggregate.Bucket(kind.Max), highest)
		}
		if other := &rows.Tables[2].Other; other.Faults() != pages || other.Max != kind.Max {
			t.Errorf("without a row: %d faults, longest %v of %v", other.Faults(), other.Max, kind.Max)
		}
		// The first one stood in the row when it was made, where no other writes a shorter one.
		for i, table := range rows.Tables[:2] {
			for key, row := range table.Rows {
				if row.Faults() != pages || row.Max == 0 || row.Max > kind.Max {
					t.Errorf("table %d, row %+v: %d faults, longest %v of %v", i, key, row.Faults(), row.Max, kind.Max)
				}
			}
			if len(table.Rows) != 1 {
				t.Errorf("table %d: %d rows", i, len(table.Rows))
			}
		}
	})
}

// dropMaxima sets the longest latencies of all rows to 0.
func dropMaxima(t *testing.T, l *Live) {
	t.Helper()
	put := func(m *ebpf.Memory, at uintptr) {
		if _, err := m.WriteAt(make([]byte, 8), int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	maxAt := unsafe.Offsetof(faultCost{}.MaxNs)
	for at := unsafe.Offsetof(faultKindRow{}.Cost) + maxAt; at < uintptr(l.kinds.Size()); at += unsafe.Sizeof(faultKindRow{}) {
		put(l.kinds, at)
	}
	for at := maxAt; at < uintptr(l.others.Size()); at += unsafe.Sizeof(faultCost{}) {
		put(l.others, at)
	}
	var key faultStatKey
	var cost faultCost
	rows := l.coll.Maps[faultMapStatRows].Iterate()
	found := map[faultStatKey]faultCost{}
	for rows.Next(&key, &cost) {
		cost.MaxNs = 0
		found[key] = cost
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for key, cost := range found {
		if err := l.coll.Maps[faultMapStatRows].Put(key, cost); err != nil {
			t.Fatal(err)
		}
	}
}

// A thread changes its mappings between faults; each record must show the mapping
// as it was, whatever the hook remembers of the one before.
func TestMappingIsCurrent(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		const pages = 16
		f, opt := needHook(t, hook)
		page := os.Getpagesize()
		mem := region(t, pages)
		opt.Filter = fault.Filter{
			PIDs: []uint32{uint32(os.Getpid())}, Self: true,
			AddrStart: addressOf(mem), AddrEnd: addressOf(mem) + uint64(len(mem)),
		}
		l := openHook(t, f, opt)
		defer withoutSignals(t)()
		type bounds struct {
			start, end uint64
			perm       string
		}
		var want []bounds
		expect := func(from, to int, perm string) {
			want = append(want, bounds{addressOf(mem) + uint64(from*page), addressOf(mem) + uint64(to*page), perm})
		}
		touch := func(i int) { mem[i*page] = 1 }
		must := func(err error) {
			if err != nil {
				t.Helper()
				t.Fatal(err)
			}
		}
		// Neighbours of the same kind would be merged with the region; a wall of
		// other permissions at both ends keeps its bounds known.
		must(unix.Mprotect(mem[:page], unix.PROT_NONE))
		must(unix.Mprotect(mem[(pages-1)*page:], unix.PROT_NONE))

		touch(1)
		expect(1, pages-1, "rw-p")
		touch(2)
		expect(1, pages-1, "rw-p")
		must(unix.Mprotect(mem[8*page:10*page], unix.PROT_READ)) // splits
		touch(3)
		expect(1, 8, "rw-p")
		touch(11)
		expect(10, pages-1, "rw-p")
		must(unix.Mprotect(mem[8*page:10*page], unix.PROT_READ|unix.PROT_WRITE)) // merges
		touch(4)
		expect(1, pages-1, "rw-p")
		must(unix.Mprotect(mem[page:6*page], unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC))
		touch(5)
		expect(1, 6, "rwxp")
		replace(t, mem[2*page:5*page], unix.MAP_SHARED)
		touch(2)
		expect(2, 5, "rw-s")
		touch(12)
		expect(6, pages-1, "rw-p")

		faults := drain(t, l)
		if len(faults) != len(want) {
			t.Fatalf("%d records of %d faults", len(faults), len(want))
		}
		for i, w := range want {
			v := &faults[i].VMA
			if got := (bounds{v.Start, v.End, v.Perm()}); got != w || !faults[i].Is(fault.HasVMA) {
				t.Errorf("fault %d: mapping %#x, want %#x: %+v", i, got, w, faults[i])
			}
		}
	})
}

func withoutSignals(t *testing.T) (release func()) {
	t.Helper()
	release, err := holdSignals()
	if err != nil {
		t.Fatal(err)
	}
	return release
}

// replace puts a fresh anonymous mapping in the place of mem.
func replace(t *testing.T, mem []byte, flags int) {
	t.Helper()
	p, err := unix.MmapPtr(-1, 0, unsafe.Pointer(&mem[0]), uintptr(len(mem)),
		unix.PROT_READ|unix.PROT_WRITE, flags|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
	if err != nil || p != unsafe.Pointer(&mem[0]) {
		t.Fatalf("mapping at %p: %v", &mem[0], err)
	}
}

// A thread whose faults no program may hear of: an access by the kernel that fails,
// then pages that mlock(2) brings in. It takes no further fault and does not exit,
// so only the end of the trace can account for it.
func TestUnheardAddsUp(t *testing.T) {
	bpfHooks(t, func(t *testing.T, hook Hook) {
		const pages, nowhere = 500, 0x10
		f, opt := needHook(t, hook)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		mem := region(t, pages)
		var zero [1]byte
		fds := make([]int, 2)
		if err := unix.Pipe(fds); err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fds[0])
		defer unix.Close(fds[1])
		if _, err := unix.Write(fds[1], zero[:]); err != nil {
			t.Fatal(err)
		}
		opt.Filter = fault.Filter{TIDs: []uint32{uint32(unix.Gettid())}, Self: true}
		l := openHook(t, f, opt)
		var before, after unix.Rusage
		unix.Getrusage(unix.RUSAGE_THREAD, &before)
		base, err := l.Counters()
		if err != nil {
			t.Fatal(err)
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fds[0]), nowhere, 1); errno != unix.EFAULT {
			t.Fatalf("reading into %#x: %v", nowhere, errno)
		}
		if err := unix.Mlock(mem); err != nil {
			t.Fatal(err)
		}
		faults := drain(t, l)
		unix.Getrusage(unix.RUSAGE_THREAD, &after)

		for i := range faults {
			if r := &faults[i]; r.Address == nowhere && r.OK() {
				t.Errorf("an access that failed is a record with result ok")
			}
		}
		c, err := l.Counters()
		if err != nil {
			t.Fatal(err)
		}
		got := c.Minor + c.Major + c.LostTotal() - (base.Minor + base.Major + base.LostTotal())
		truth := uint64(after.Minflt + after.Majflt - before.Minflt - before.Majflt)
		// The thread faults on while it ends the trace, at most a few times.
		if got < pages || got > truth {
			t.Errorf("%d minor, %d major, %d lost; %d were locked and getrusage counts %d", c.Minor, c.Major, c.LostTotal(), pages, truth)
		}
		if hook != Tracepoint && c.LostTotal() != 0 {
			t.Errorf("%d lost by a hook that sees all", c.LostTotal())
		}
	})
}
