package unwind

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
)

// Each program maps the file of its first argument, shared, and touches the pages of it that are not
// warm in a function touch_pages, called by outer, after the unwinder had time to look at the process.
const (
	warmPages    = 8
	touchedPages = 2000
)

const pythonSource = `
import mmap, sys, time, threading
def touch_pages(m, low, high):
    for i in range(low, high):
        m[i * 4096] = 1
def outer(m, low, high):
    touch_pages(m, low, high)
f = open(sys.argv[1], "r+b")
m = mmap.mmap(f.fileno(), %d * 4096)
outer(m, 0, %d)
time.sleep(1)
threads = int(sys.argv[2])
if threads == 1:
    outer(m, %d, %d)
else:
    step = (%d - %d) // threads
    t = [threading.Thread(target=outer, args=(m, %d + i * step, %d + (i + 1) * step)) for i in range(threads)]
    for x in t: x.start()
    for x in t: x.join()
`

const pythonLine = 5

func python(t *testing.T) string {
	p, w := touchedPages, warmPages
	return source(t, "touch.py", fmt.Sprintf(pythonSource, p, w, w, p, p, w, w, w))
}

const javaSource = `
import java.io.RandomAccessFile;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
class Touch {
	static void touch_pages(MappedByteBuffer m, int low, int high) {
		for (int i = low; i < high; i++)
			m.put(i * 4096, (byte) 1);
	}
	static void outer(MappedByteBuffer m, int low, int high) { touch_pages(m, low, high); }
	public static void main(String[] a) throws Exception {
		RandomAccessFile f = new RandomAccessFile(a[0], "rw");
		MappedByteBuffer m = f.getChannel().map(FileChannel.MapMode.READ_WRITE, 0, %d * 4096);
		outer(m, 0, %d);
		Thread.sleep(1500);
		outer(m, %d, %d);
	}
}
`

const goSource = `
package main

import (
	"os"
	"syscall"
	"time"
)

//go:noinline
func touch_pages(m []byte, low, high int) {
	for i := low; i < high; i++ {
		m[i*4096] = 1
	}
}

//go:noinline
func outer(m []byte, low, high int) { touch_pages(m, low, high) }

func main() {
	f, _ := os.OpenFile(os.Args[1], os.O_RDWR, 0)
	m, _ := syscall.Mmap(int(f.Fd()), 0, %d*4096, 3, syscall.MAP_SHARED)
	outer(m, 0, %d)
	time.Sleep(time.Second)
	outer(m, %d, %d)
}
`

const cSource = `
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
__attribute__((noinline)) void touch_pages(volatile char *m, int low, int high)
{
	for (int i = low; i < high; i++)
		m[i * 4096L] = 1;
	__asm__("");
}
__attribute__((noinline)) int outer(volatile char *m, int low, int high)
{
	touch_pages(m, low, high);
	return low;
}
int main(int c, char **v)
{
	volatile char *m = mmap(0, %d * 4096L, 3, MAP_SHARED, open(v[1], O_RDWR), 0);
	outer(m, 0, %d);
	sleep(1);
	return outer(m, %d, %d) < 0;
}
`

// Node cannot map files: the buffer is the only memory that is large and may be written
// to. It is mapped, maybe with small neighbours, as soon as it is made. The function is hot by then:
// code that is compiled while it is touched is not known until it has been looked at.
const (
	nodeBuffer = 512 << 20
	nodeSource = `
function touch_pages(m, low, high) {
	for (let i = low; i < high; i++)
		m[i * 4096] = 1;
}
function outer(m, low, high) { touch_pages(m, low, high); }
const warm = Buffer.allocUnsafeSlow(%d * 4096);
for (let i = 0; i < 50000; i++)
	outer(warm, 0, %d);
const m = Buffer.allocUnsafeSlow(%d);
setTimeout(() => outer(m, 0, %d), 1500);
`
)

func source(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func fill(text string) string {
	return fmt.Sprintf(text, touchedPages, warmPages, warmPages, touchedPages)
}

func compile(t *testing.T, command ...string) {
	t.Helper()
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
}

// need skips a test of a language of which there is no program.
func need(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("there is no %s", program)
	}
	return path
}

// record opens the hook that asks for stacks.
func record(t *testing.T, u *Unwinder, opt kernel.Options) *kernel.Live {
	t.Helper()
	opt.Unwinder = u.Shared()
	f, _ := kernel.Probe(opt.Hook)
	plans, err := f.Plans(opt)
	if err != nil {
		t.Fatal(err)
	}
	live, err := kernel.Open(plans[0], opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { live.Close() })
	return live
}

// open loads the unwinder for the best hook that works here.
func open(t *testing.T, o Options) (*Unwinder, kernel.Hook) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the unwinder needs root")
	}
	f, _ := kernel.Probe(kernel.Fentry, kernel.Kprobe, kernel.Tracepoint)
	plans, err := f.Plans(kernel.Options{Filter: fault.Filter{PIDs: []uint32{1}}})
	if err != nil || plans[0].Hook == kernel.Perf {
		t.Skipf("no BPF hook works here: %v", err)
	}
	if plans[0].Hook.UnwindsAtBegin() {
		o.When = AtBegin
	}
	u, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	return u, plans[0].Hook
}

// trace runs a command with a hook and the unwinder and joins what they say.
func trace(t *testing.T, u *Unwinder, hook kernel.Hook, command ...string) []Joined {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", `read _; exec "$@"`, "sh"}, command...)...)
	cmd.Stderr = os.Stderr
	release, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := uint32(cmd.Process.Pid)
	live := record(t, u, kernel.Options{Hook: hook, Filter: fault.Filter{PIDs: []uint32{pid}}})
	j := NewJoiner(u.sampler.options.When)
	j.MaxFaults, j.MaxTraces = 1<<20, 1<<20
	traced := make(chan []Trace)
	go func() {
		var all []Trace
		for tr := range u.Traces() {
			all = append(all, tr)
		}
		traced <- all
	}()
	ended := make(chan error, 1)
	release.Close()
	go func() {
		err := cmd.Wait()
		ended <- err
		live.Stop()
	}()
	for {
		b, err := live.Next(context.Background())
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		for i := range b.Faults {
			j.AddFault(&b.Faults[i])
		}
	}
	if err := <-ended; err != nil {
		t.Errorf("%s: %v", strings.Join(command, " "), err)
	}
	u.Stop()
	for _, tr := range <-traced {
		j.AddTrace(tr)
	}
	joined := j.Flush(nil)
	c, err := u.Counts()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d faults: %+v, %d missing; %+v", len(joined), c, c.Missing(), j.Counts())
	return joined
}

// demand wants 99 of 100 stacks of the faults that in selects to be good, and a stack for
// nine in ten.
func demand(t *testing.T, joined []Joined, in func(*fault.Fault) bool, good func(*fault.Stack) bool) {
	t.Helper()
	faults, stacks, named := 0, 0, 0
	bad := map[string]int{}
	for i := range joined {
		f := &joined[i]
		if !in(&f.Fault) {
			continue
		}
		faults++
		if f.Stack == nil {
			continue
		}
		stacks++
		if good(f.Stack) {
			named++
		} else {
			bad[format(f.Stack)]++
		}
	}
	t.Logf("%d of %d faults have a stack, %d of them a good one", stacks, faults, named)
	if faults < touchedPages*8/10 || stacks*10 < faults*9 {
		t.Errorf("%d faults and %d stacks, want a stack for most of %d", faults, stacks, touchedPages)
	}
	if named*100 < stacks*99 {
		t.Errorf("%d of %d stacks are as they should be", named, stacks)
		for s, n := range bad {
			t.Errorf("%d times\n%s", n, s)
		}
	}
}

func format(s *fault.Stack) string {
	var b strings.Builder
	fmt.Fprintf(&b, "  %s\n", s.End)
	for _, f := range s.Frames {
		fmt.Fprintf(&b, "    %s %q %s:%d %s+%#x %#x\n", f.Lang, f.Func, f.File, f.Line, f.Module, f.Offset, f.Addr)
	}
	return b.String()
}

// region selects the faults on the pages of the file that were not touched for warmth.
func region(t *testing.T) (file string, in func(*fault.Fault) bool) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "region")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, touchedPages*4096); err != nil {
		t.Fatal(err)
	}
	return file, func(f *fault.Fault) bool {
		return f.VMA.Label == "region" && f.PgOff >= warmPages && f.Is(fault.HasMode) && f.Mode == fault.User
	}
}

// calls wants touch_pages at a line, or any if that is 0, and outer to be next to each
// other among the frames of a language.
func calls(lang fault.Lang, line uint32) func(*fault.Stack) bool {
	return func(s *fault.Stack) bool {
		inner := false
		for _, f := range s.Frames {
			if f.Lang != lang {
				continue
			}
			name, _, _ := strings.Cut(f.Func, "(")
			name = name[strings.LastIndexByte(name, '.')+1:]
			switch {
			case name == "touch_pages":
				inner = line == 0 || f.Line == line
			case inner:
				return name == "outer"
			}
		}
		return false
	}
}

func TestPython(t *testing.T) {
	found := []string{"/usr/bin/python3"}
	home, _ := os.UserHomeDir()
	others, _ := filepath.Glob(filepath.Join(home, ".pyenv/versions/3.*/bin/python3"))
	for _, interpreter := range append(found, others...) {
		if _, err := os.Stat(interpreter); err != nil {
			continue
		}
		t.Run(interpreter, func(t *testing.T) {
			u, hook := open(t, Options{Every: 1})
			file, in := region(t)
			demand(t, trace(t, u, hook, interpreter, python(t), file, "1"), in, calls(fault.LangPython, pythonLine))
		})
	}
}

func TestPythonThreads(t *testing.T) {
	interpreter := need(t, "/usr/bin/python3")
	u, hook := open(t, Options{Every: 1})
	file, in := region(t)
	demand(t, trace(t, u, hook, interpreter, python(t), file, "4"), in, calls(fault.LangPython, pythonLine))
}

// V8 forgets the lines of some functions that it has compiled, and those are not known
// then, so only what it interprets has to have them.
func TestNode(t *testing.T) {
	node := need(t, "node")
	for name, tt := range map[string]struct {
		flags []string
		line  uint32
	}{
		"compiled":    {},
		"interpreted": {flags: []string{"--no-opt", "--no-sparkplug"}, line: 4},
	} {
		t.Run(name, func(t *testing.T) {
			u, hook := open(t, Options{Every: 1})
			text := fmt.Sprintf(nodeSource, warmPages, warmPages, nodeBuffer, touchedPages)
			command := append(append([]string{node}, tt.flags...), source(t, "touch.js", text))
			demand(t, trace(t, u, hook, command...), func(f *fault.Fault) bool {
				return f.VMA.End-f.VMA.Start >= nodeBuffer && f.VMA.Perm() == "rw-p" && f.Mode == fault.User
			}, calls(fault.LangNode, tt.line))
		})
	}
}

func TestJava(t *testing.T) {
	java := need(t, "java")
	u, hook := open(t, Options{Every: 1})
	file, in := region(t)
	demand(t, trace(t, u, hook, java, "-Xshare:auto", source(t, "Touch.java", fill(javaSource)), file), in, calls(fault.LangJava, 8))
}

func TestGo(t *testing.T) {
	need(t, "go")
	for name, flags := range map[string]string{"whole": "", "stripped": "-s -w"} {
		t.Run(name, func(t *testing.T) {
			program := filepath.Join(t.TempDir(), "touch")
			compile(t, "go", "build", "-ldflags", flags, "-o", program, source(t, "touch.go", fill(goSource)))
			u, hook := open(t, Options{Every: 1})
			file, in := region(t)
			demand(t, trace(t, u, hook, program, file), in, calls(fault.LangGo, 13))
		})
	}
}

// Native frames are named by internal/symbol: here the addresses are compared with the
// symbol table.
func TestNative(t *testing.T) {
	need(t, "gcc")
	text := source(t, "touch.c", fill(cSource))
	for name, flags := range map[string][]string{
		"frame pointers":    {"-O1", "-fno-omit-frame-pointer"},
		"no frame pointers": {"-O2", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"},
		"static-pie":        {"-O2", "-fomit-frame-pointer", "-static-pie", "-fno-optimize-sibling-calls"},
		"no-pie":            {"-O2", "-fomit-frame-pointer", "-no-pie", "-fno-optimize-sibling-calls"},
		"lld":               {"-O2", "-fomit-frame-pointer", "-fuse-ld=lld", "-Wl,--build-id", "-fno-optimize-sibling-calls"},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "lld" {
				need(t, "ld.lld")
			}
			program := filepath.Join(t.TempDir(), "touch")
			compile(t, append(append([]string{"gcc"}, flags...), "-o", program, text)...)
			functions := symbols(t, program)
			u, hook := open(t, Options{Every: 1})
			file, in := region(t)
			demand(t, trace(t, u, hook, program, file), in, func(s *fault.Stack) bool {
				for i, want := range []string{"touch_pages", "outer", "main"} {
					if i >= len(s.Frames) {
						return false
					}
					f := s.Frames[i]
					if f.Lang != fault.LangNative || f.Module != program || f.BuildID == "" {
						return false
					}
					caller := uint64(min(i, 1))
					if sym := functions[want]; f.Offset-caller < sym.Value || f.Offset-caller >= sym.Value+sym.Size {
						return false
					}
				}
				return s.End == fault.StackWhole
			})
		})
	}
}

func symbols(t *testing.T, program string) map[string]elf.Symbol {
	t.Helper()
	f, err := elf.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	list, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]elf.Symbol{}
	for _, s := range list {
		byName[s.Name] = s
	}
	return byName
}

// However fast faults come, stacks are taken as often as was asked for.
func TestRate(t *testing.T) {
	need(t, "gcc")
	program := filepath.Join(t.TempDir(), "storm")
	compile(t, "gcc", "-O2", "-o", program, source(t, "storm.c", stormSource))
	const perSecond = 1000
	u, hook := open(t, Options{PerSecond: perSecond})
	go func() {
		for range u.Traces() {
		}
	}()
	cmd := exec.Command("sh", "-c", `read _; exec "$0"`, program)
	release, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	live := record(t, u, kernel.Options{Hook: hook, CountOnly: true, Filter: fault.Filter{PIDs: []uint32{uint32(cmd.Process.Pid)}}})
	var before, after unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &before)
	begin := time.Now()
	release.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	seconds := time.Since(begin).Seconds()
	unix.Getrusage(unix.RUSAGE_SELF, &after)
	if err := live.Stop(); err != nil {
		t.Fatal(err)
	}
	u.Stop()
	c, err := u.Counts()
	if err != nil {
		t.Fatal(err)
	}
	counters, err := live.Counters()
	if err != nil {
		t.Fatal(err)
	}
	used := time.Duration(after.Utime.Nano() - before.Utime.Nano() + after.Stime.Nano() - before.Stime.Nano())
	t.Logf("%.2f s, %v of CPU, %+v, %d asked for", seconds, used, c, counters.Asked)
	// The first window takes half as many more each time it halves the rate.
	const halvings = 20
	window := perSecond * window.Seconds()
	if most := window*(1+halvings/2) + 2*perSecond*seconds; float64(c.Taken) > most {
		t.Errorf("%d stacks in %.2f s, want at most %.0f", c.Taken, seconds, most)
	}
	if counters.Seen < 200000 || c.Taken == 0 || counters.Asked != c.Taken {
		t.Errorf("%d stacks, asked for %d of %d faults, want some of 200000", c.Taken, counters.Asked, counters.Seen)
	}
}

const stormSource = `
#include <sys/mman.h>
int main(void)
{
	for (int n = 0; n < 100; n++) {
		volatile char *m = mmap(0, 2000 * 4096L, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		madvise((void *)m, 2000 * 4096L, MADV_NOHUGEPAGE);
		for (long i = 0; i < 2000; i++)
			m[i * 4096] = 1;
		munmap((void *)m, 2000 * 4096L);
	}
	return 0;
}
`

// What Close leaves behind would grow with each trace of a long-running process.
func TestCloseLeavesNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	u, _ := open(t, Options{})
	time.Sleep(300 * time.Millisecond)
	if err := u.Close(); err != nil {
		t.Fatal(err)
	}
	// The library finishes the process that it is looking at.
	for range 1000 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	stacks := make([]byte, 1<<20)
	t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
}
