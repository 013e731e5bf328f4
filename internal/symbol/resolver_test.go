package symbol

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// What the linker puts into .noptrdata and .noptrbss of the test binary.
var (
	dataArray = [64 << 10]byte{1}
	bssArray  [1 << 20]byte
)

const known = fault.HasVMA | fault.HasPgOff | fault.HasLabel

// write makes a file and lets the clock of file times go on.
func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	settle()
}

// settle waits until the coarse clock of file times has passed.
func settle() { time.Sleep(20 * time.Millisecond) }

// faultOn is a fault at an address of a mapping of the file that is at path now.
func faultOn(t *testing.T, path string, v fault.VMA, addr uint64) fault.Fault {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	v.Path, v.Label = path, filepath.Base(path)
	v.Dev, v.Inode = process.Dev(unix.Major(st.Dev), unix.Minor(st.Dev)), st.Ino
	return fault.Fault{
		End: process.Now(), PID: 1 << 22, Process: fault.MakeComm("program"), Known: known,
		Address: addr, PgOff: v.PgOff + (addr-v.Start)/page, VMA: v,
	}
}

func anonymous(v fault.VMA, addr uint64) fault.Fault {
	v.Inode, v.Label = 0, "[anon]"
	return fault.Fault{End: process.Now(), PID: 1 << 22, Process: fault.MakeComm("program"), Known: known, Address: addr, VMA: v}
}

func newResolver(t *testing.T) *Resolver {
	t.Helper()
	r := NewResolver(Options{PageSize: page, Symbols: true, Proc: true})
	t.Cleanup(r.Close)
	return r
}

// resolve is SECTION SYMBOL of one fault.
func resolve(r *Resolver, f fault.Fault) string {
	batch := []fault.Fault{f}
	r.Resolve(batch)
	return strings.TrimSpace(batch[0].Section + " " + shown(&batch[0]))
}

func same(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

const loadedAt = 0x555555554000

var (
	dataMapping = mapping(loadedAt+0x2000, loadedAt+0x5000, 1, "rw-p")
	bssMapping  = mapping(loadedAt+0x5000, loadedAt+0xc000, 0, "rw-p")
)

// TestTail: memory without a file is .bss if the file's mapping before it is known.
func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	write(t, path, program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64))
	data := faultOn(t, path, dataMapping, loadedAt+0x2900)
	bss := anonymous(bssMapping, loadedAt+0x5010)
	r := newResolver(t)
	same(t, "before", resolve(r, bss), "")
	same(t, "data", resolve(r, data), ".data table+0xf0")
	same(t, "bss", resolve(r, bss), ".bss array+0xe10")

	heap := anonymous(mapping(loadedAt+0x5000, loadedAt+0x20000, 0, "rw-p"), loadedAt+0xb7ff)
	heap.VMA.Label = "[heap]"
	same(t, "one with the heap", resolve(r, heap), ".bss")
	heap.Address++
	same(t, "the heap", resolve(r, heap), "")

	elsewhere := anonymous(mapping(loadedAt+0x6000, loadedAt+0xc000, 0, "rw-p"), loadedAt+0x6010)
	same(t, "memory that begins elsewhere", resolve(r, elsewhere), "")
	remote := bss
	remote.Mode, remote.Known = fault.Remote, known|fault.HasMode
	same(t, "memory of another process", resolve(r, remote), "")
	stack := bss
	stack.VMA.Label = "[stack]"
	same(t, "the stack", resolve(r, stack), "")
	other := bss
	other.PID--
	same(t, "another process", resolve(r, other), "")
	renamed := bss
	renamed.Process = fault.MakeComm("other")
	same(t, "after a change of name", resolve(r, renamed), resolve(r, bss))
	execed := bss
	execed.Image++
	same(t, "after an exec", resolve(r, execed), "")

	// A source that knows all mappings is believed alone.
	told := NewResolver(Options{PageSize: page, Symbols: true, Timeline: true})
	defer told.Close()
	same(t, "data", resolve(told, data), ".data table+0xf0")
	same(t, "not told", resolve(told, bss), "")
	bss.Continues = &data.VMA
	same(t, "told", resolve(told, bss), ".bss array+0xe10")
}

// TestReplacedFile: what is at a path now need not be what was mapped.
func TestReplacedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	l := program(elf.ET_DYN, 0)
	first := l.bytes(elf.ELFCLASS64)
	l.symbols[1].name = "other"
	second := l.bytes(elf.ELFCLASS64)
	fresh := func() fault.Fault { return faultOn(t, path, dataMapping, loadedAt+0x2900) }

	write(t, path, first)
	old := fresh()
	settle()
	r := newResolver(t)
	same(t, "first", resolve(r, old), ".data table+0xf0")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	same(t, "open still", resolve(r, old), ".data table+0xf0")
	same(t, "deleted", resolve(newResolver(t), old), "")
	write(t, path, second)
	same(t, "first again", resolve(r, old), ".data table+0xf0")
	same(t, "second", resolve(r, fresh()), ".data other+0xf0")

	// Its inode number may be the first one's here, its age is not.
	reused := newResolver(t)
	old.VMA.Inode = fresh().VMA.Inode
	same(t, "of the time before", resolve(reused, old), "")
	now := fresh()
	settle()
	same(t, "second", resolve(reused, now), ".data other+0xf0")

	// The same file with other content.
	write(t, path, first)
	same(t, "before it was written to", resolve(reused, now), "")
	same(t, "after", resolve(reused, fresh()), ".data table+0xf0")
	write(t, path, first[:0x100])
	same(t, "no ELF file any more", resolve(reused, fresh()), "")
	write(t, path, first)
	same(t, "a failure is remembered", resolve(reused, fresh()), "")
	for _, fl := range reused.files {
		fl.retry = 0
	}
	same(t, "for a while", resolve(reused, fresh()), ".data table+0xf0")
}

// TestOtherFiles are none whose names are wanted, and opening some does harm.
func TestOtherFiles(t *testing.T) {
	dir := t.TempDir()
	real, link, pipe := filepath.Join(dir, "real"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	write(t, real, program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64))
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, link); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "text"), []byte("text"))
	for _, name := range []string{"pipe", "text", "link", "none"} {
		path := filepath.Join(dir, name)
		f := faultOn(t, real, dataMapping, loadedAt+0x2900)
		if name != "link" && name != "none" {
			f = faultOn(t, path, dataMapping, loadedAt+0x2900)
		}
		f.VMA.Path = path
		same(t, name, resolve(newResolver(t), f), "")
	}
	f := faultOn(t, real, dataMapping, loadedAt+0x2900)
	f.VMA.Dev++
	same(t, "another device", resolve(newResolver(t), f), "")
}

// TestSelf has the mappings of this process looked at.
func TestSelf(t *testing.T) {
	maps, err := process.ReadMaps(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		section, symbol string
		addr            uint64
	}{
		{".noptrdata", "dataArray+0x8010", addressOf(&dataArray[0x8010])},
		{".noptrbss", "bssArray+0x80010", addressOf(&bssArray[0x80010])},
	} {
		i := slices.IndexFunc(maps, func(m process.Mapping) bool { return test.addr >= m.Start && test.addr < m.End })
		m := &maps[i]
		path, _ := process.FilePath(m.Path)
		f := fault.Fault{
			End: process.Now(), PID: uint32(os.Getpid()), Known: known, Address: test.addr, PgOff: m.PgOff + (test.addr-m.Start)/page,
			VMA: fault.VMA{Start: m.Start, End: m.End, PgOff: m.PgOff, Flags: m.Flags, Inode: m.Inode, Dev: m.Dev, Label: m.Label, Path: path},
		}
		got := resolve(newResolver(t), f)
		section, name, _ := strings.Cut(got, " ")
		// go test leaves the symbols out, unless it keeps the binary.
		if section != test.section || name != "" && !strings.HasSuffix(name, "symbol."+test.symbol) {
			t.Errorf("%#x is %q, want %s in %s", test.addr, got, test.symbol, test.section)
		}
		if m.Inode == 0 {
			continue
		}
		// A living process has what it has mapped, under whatever name.
		for _, gone := range []string{"", "/no/such/file"} {
			f.VMA.Path = gone
			if got := resolve(newResolver(t), f); got != section+strings.TrimRight(" "+name, " ") && os.Geteuid() == 0 {
				t.Errorf("by the mapping: %q", got)
			}
		}
	}
}

func addressOf(p *byte) uint64 { return uint64(uintptr(unsafe.Pointer(p))) }

// TestMapped compares how a file is identified where stat tells another device.
func TestMapped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	write(t, path, []byte("x"))
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := faultOn(t, path, dataMapping, dataMapping.Start).VMA
	if id, err := mappedID(f); err != nil || id.ino != want.Inode {
		t.Errorf("%+v, %v, want inode %d", id, err, want.Inode)
	}
}

func TestTails(t *testing.T) {
	m := func(start, end, inode uint64, label string) process.Mapping {
		return process.Mapping{Start: start, End: end, Inode: inode, HasPgOff: inode != 0, Label: label}
	}
	got := tails([]process.Mapping{
		m(1, 2, 7, "a"), m(2, 3, 7, "a"), m(3, 4, 0, "[anon]"), m(4, 6, 0, "[heap]"), // divided
		m(8, 9, 8, "b"), m(10, 11, 0, "[anon]"), // apart
		m(11, 12, 9, "c"), m(12, 13, 0, "[stack]"), m(13, 14, 0, "[anon]"),
	})
	if len(got) != 1 || got[0].of.Start != 2 || got[0].of.End != 3 || got[0].end != 6 {
		t.Errorf("got %+v", got)
	}
	var p tailed
	p.add(got[0])
	for start, want := range map[uint64]bool{2: false, 3: true, 4: true, 6: false} {
		if of := p.find(&fault.VMA{Start: start}); (of != nil) != want {
			t.Errorf("memory from %d: %v", start, of)
		}
	}
	p.add(tail{of: fault.VMA{Start: 1, End: 5, Inode: 10}, end: 6})
	if len(p.tails) != 1 || p.tails[0].of.Inode != 10 {
		t.Errorf("what was mapped over stays: %+v", p.tails)
	}
}

// TestBounds: neither files nor failures pile up.
func TestBounds(t *testing.T) {
	dir := t.TempDir()
	b := program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64)
	r := newResolver(t)
	for i := range maxOpen + 10 {
		path := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(path, b, 0o755); err != nil {
			t.Fatal(err)
		}
		f := faultOn(t, path, dataMapping, loadedAt+0x2900)
		r.saved = maxSaved // however slow the machine is
		same(t, path, resolve(r, f), ".data table+0xf0")
	}
	if n := len(r.files) - r.failed; n != maxOpen {
		t.Errorf("%d files are open", n)
	}
	f := faultOn(t, dir, dataMapping, loadedAt+0x2900)
	for i := range uint64(maxFailed + 10) {
		f.VMA.Inode += i
		resolve(r, f)
	}
	if r.failed > maxFailed {
		t.Errorf("%d failures are remembered", r.failed)
	}
	for _, fl := range r.files {
		fl.used = 0
	}
	r.swept = 0
	r.Resolve(nil)
	if len(r.files) != 0 || r.failed != 0 {
		t.Errorf("%d files and %d failures are kept", len(r.files), r.failed)
	}
	if open, err := os.ReadDir("/proc/self/fd"); err != nil || len(open) > 64 {
		t.Errorf("%d descriptors are open, %v", len(open), err)
	}
}

// TestKept: what is kept of all files is counted and bounded.
func TestKept(t *testing.T) {
	dir := t.TempDir()
	r := newResolver(t)
	look := func(name string) {
		t.Helper()
		path := filepath.Join(dir, name)
		write(t, path, program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64))
		same(t, name, resolve(r, faultOn(t, path, dataMapping, loadedAt+0x2900)), ".data table+0xf0")
		sum := 0
		for _, fl := range r.files {
			sum += fl.image.size()
		}
		if r.kept != sum || sum == 0 {
			t.Errorf("%d bytes are counted, %d kept", r.kept, sum)
		}
	}
	look("a")
	look("b")
	look("a") // once more
	if len(r.files) != 2 {
		t.Errorf("%d files are kept", len(r.files))
	}
	for _, fl := range r.files { // each is as large as all may be
		fl.kept += maxKept
		r.kept += maxKept
	}
	look("c")
	if len(r.files) != 1 {
		t.Errorf("%d files are kept", len(r.files))
	}
	r.Close()
	if r.kept != 0 {
		t.Errorf("%d bytes stay counted", r.kept)
	}
}

// TestKeptTails: what is kept of mappings is counted, bounded and not for ever.
func TestKeptTails(t *testing.T) {
	r := NewResolver(Options{PageSize: page})
	r.now = process.Now()
	tailAt := func(i uint64, path string) tail {
		v := mapping(i*0x10000, i*0x10000+0x1000, 0, "rw-p")
		v.Path, v.Label = path, filepath.Base(path)
		return tail{of: v, end: v.End + page}
	}
	counted := func(what string) {
		t.Helper()
		sum := 0
		for _, p := range r.processes {
			names := 0
			for i := range p.tails {
				sum += p.tails[i].size()
				names += len(p.tails[i].of.Path)
			}
			if p.bytes < names {
				t.Errorf("%s: %d bytes are counted, of paths alone %d", what, p.bytes, names)
			}
		}
		if r.tailBytes != sum || sum > maxTailBytes {
			t.Errorf("%s: %d bytes are counted, %d kept", what, r.tailBytes, sum)
		}
	}
	of := func(pid uint32, name string) *tailed {
		return r.process(&fault.Fault{PID: pid, Process: fault.MakeComm(name)})
	}
	long := "/" + strings.Repeat("n", 4000)
	for pid := range uint32(8) {
		for i := range uint64(maxTails - 1) {
			r.addTails(of(1+pid, "a"), tailAt(i, long))
		}
		counted("many")
	}
	if n := len(r.processes); n < 2 || n == 8 {
		t.Errorf("%d processes are kept", n)
	}
	last := of(8, "a")
	r.addTails(last, tailAt(0, "/short"))
	counted("another at its place")
	r.addTails(last, tail{of: mapping(0, 1<<40, 0, "rw-p"), end: 1<<40 + 1})
	counted("one over all")
	if len(last.tails) != 1 {
		t.Errorf("%d are kept", len(last.tails))
	}
	for i := range uint64(maxTails + 1) {
		r.addTails(last, tailAt(i, "/x"))
	}
	counted("too many")
	of(8, "b")
	counted("after exec")
	r.now, r.swept = r.now+partAfter+1, 0
	of(8, "b")
	r.sweep()
	counted("later")
	if len(r.processes) != 1 || r.processes[8] == nil {
		t.Errorf("%d processes are kept", len(r.processes))
	}
	for pid := range uint32(maxProcesses) {
		r.addTails(of(9+pid, "a"), tailAt(0, "/x"))
	}
	counted("many processes")
}

// TestShareOfTime: whatever is read is paid for, and what cannot be is unknown for now.
func TestShareOfTime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "program")
	l := program(elf.ET_DYN, 0)
	write(t, path, l.bytes(elf.ELFCLASS64))
	fresh := func() fault.Fault { return faultOn(t, path, dataMapping, loadedAt+0x2900) }
	cleared := func() fault.Fault { return faultOn(t, path, dataMapping, loadedAt+0x4208) }
	r := newResolver(t)
	// Until it has looked at the clock, all time since the machine's start pays.
	const hour = 3600e9
	r.now = process.Now()
	poor := func(what string, f fault.Fault, want string) {
		t.Helper()
		r.saved = -hour
		same(t, what+", in debt", resolve(r, f), want)
		if r.saved < -hour {
			t.Errorf("%s: time was spent in debt", what)
		}
	}
	rich := func(what string, f fault.Fault, want string) {
		t.Helper()
		r.saved = maxSaved
		same(t, what, resolve(r, f), want)
		if r.saved == maxSaved {
			t.Errorf("%s: nothing was paid", what)
		}
	}
	poor("a file", fresh(), "")
	if len(r.files) != 0 {
		t.Error("what was not looked at is remembered")
	}
	r.opt.Symbols = false
	rich("a file", fresh(), ".data")
	r.opt.Symbols = true
	poor("symbols", fresh(), ".data")
	rich("symbols", fresh(), ".data table+0xf0")
	poor("a name that is known", fresh(), ".data table+0xf0")
	poor("another name", cleared(), ".bss")
	rich("another name", cleared(), ".bss array+0x8")

	l.symbols[1].name = "other"
	write(t, path, l.bytes(elf.ELFCLASS64))
	now := fresh()
	poor("a change", now, "")
	poor("the same change", now, "")
	rich("the change", now, ".data other+0xf0")

	self := anonymous(bssMapping, loadedAt+0x5010)
	self.PID = uint32(os.Getpid())
	poor("mappings", self, "")
	if r.process(&self).looked {
		t.Error("mappings are read in debt")
	}
	rich("mappings", self, "")

	// A debt is paid by time, and no more is saved than may be.
	r.saved, r.now = -1e9, process.Now()-(readShare*1e9+readShare*2)
	same(t, "later", resolve(r, now), ".data other+0xf0")
	if !r.affords() || r.saved > 1e9 {
		t.Errorf("%d ns are saved after a debt was paid", r.saved)
	}
	r.now = 0
	if resolve(r, now); r.saved > maxSaved {
		t.Errorf("%d ns are saved", r.saved)
	}
}

// BenchmarkResolve is the cost of one record, of objects of one file with thousands.
func BenchmarkResolve(b *testing.B) {
	libc, err := exec.Command("sh", "-c", "ldd /bin/sh | awk '/libc/ {print $3}'").Output()
	if err != nil {
		b.Skip(err)
	}
	path, err := filepath.EvalSymlinks(strings.TrimSpace(string(libc)))
	if err != nil {
		b.Skip(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		b.Fatal(err)
	}
	size := uint64(st.Size) &^ (page - 1)
	v := fault.VMA{
		Start: 0x7f0000000000, End: 0x7f0000000000 + size, Flags: fault.PermFlags("r--p"), Inode: st.Ino,
		Dev: process.Dev(unix.Major(st.Dev), unix.Minor(st.Dev)), Path: path, Label: "libc.so.6",
	}
	batch := make([]fault.Fault, 256)
	for i := range batch {
		addr := v.Start + uint64(i)*size/256
		batch[i] = fault.Fault{End: process.Now(), Known: known, Address: addr, PgOff: (addr - v.Start) / page, VMA: v}
	}
	r := NewResolver(Options{PageSize: page, Symbols: true})
	defer r.Close()
	b.Run("record", func(b *testing.B) {
		for b.Loop() {
			r.Resolve(batch)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(batch)), "ns/record")
	})
	b.Run("heap", func(b *testing.B) {
		heap := slices.Clone(batch)
		for i := range heap {
			f := &heap[i]
			f.HostPID, f.VMA = 1<<22, fault.VMA{Start: 0x10000, End: 0x20000, Label: "[heap]"}
		}
		p := r.process(&heap[0])
		for i := range uint64(64) {
			r.addTails(p, tail{of: fault.VMA{Start: i << 20, End: (i + 1) << 20, Inode: 1}, end: (i+1)<<20 + 1})
		}
		for b.Loop() {
			r.Resolve(heap)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(heap)), "ns/record")
	})
	b.Run("open", func(b *testing.B) {
		for b.Loop() {
			r := NewResolver(Options{PageSize: page, Symbols: true})
			r.Resolve(batch[:1])
			r.Close()
		}
	})
	if batch[128].Section == "" {
		b.Errorf("nothing is known of %+v", batch[128])
	}
}
