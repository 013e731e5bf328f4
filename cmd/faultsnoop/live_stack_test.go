package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/pprof/profile"

	"faultsnoop/internal/fault"
)

// mapperC maps memory in functions that are known, by system calls of its own: the C
// library's keep no frame pointers.
const mapperC = `#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#define PAGES 40
#define BYTES (PAGES * 4096L)
#define FIXED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED)
#define FRAME __asm__ volatile("" : : "r"(__builtin_frame_address(0))) // leaves have none
static inline __attribute__((always_inline)) long call(long nr, long a, long b, long c, long d, long e, long f) {
  register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
  __asm__ volatile("syscall" : "+a"(nr) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
  return nr;
}
__attribute__((noipa)) void by_mmap(long at) { FRAME; call(SYS_mmap, at, BYTES, 3, FIXED, -1, 0); }
__attribute__((noipa)) void by_odd_mmap(long at) { FRAME; call(SYS_mmap, at, BYTES - 4095, 3, FIXED, -1, 0); }
__attribute__((noipa)) long by_brk(void) {
  FRAME;
  long end = (call(SYS_brk, 0, 0, 0, 0, 0, 0) + 4095) & -4096L;
  call(SYS_brk, end + BYTES - 4095, 0, 0, 0, 0, 0);
  return end + 4000;
}
__attribute__((noipa)) void by_mremap(long from, long to) {
  FRAME;
  call(SYS_mremap, from, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, to, 0);
}
__attribute__((noipa)) void touch(long at) {
  FRAME;
  for (long i = 0; i < PAGES; i++)
    ((volatile char *)at)[i * 4096] = 1;
  __asm__ volatile("" ::: "memory");
}
__attribute__((noipa)) void again(long at) { touch(at); __asm__ volatile(""); }
int main(int argc, char **argv) {
  if (argc > 1)
    sleep(1);
  by_mmap(0x6d000000);
  touch(0x6d000000);
  again(by_brk());
  by_mmap(0x6c000000);
  by_odd_mmap(0x6c000000);
  touch(0x6c000000 + 4000);
  by_mmap(0x6e000000);
  by_mremap(0x6e000000, 0x6e800000);
  touch(0x6e800000);
  by_mmap(0x6f000000);
  pid_t child = fork();
  if (!child) {
    touch(0x6f000000);
    _exit(0);
  }
  waitpid(child, 0, 0);
  return 0;
}
`

// The stack of the call that has mapped the memory is beside that which touches it.
func TestMapper(t *testing.T) {
	compiler(t, "gcc")
	if runtime.GOARCH != "amd64" {
		t.Skip("its program makes system calls of x86-64")
	}
	const pages = 40
	dir := openFolder(t)
	writeSource(t, dir, "mapper.c", mapperC)
	build(t, dir, slices.Concat([]string{"gcc"}, withFrames, []string{"-o", "mapper", "mapper.c"})...)
	check := func(t *testing.T, tr *traced, some bool) {
		for _, c := range []struct {
			name   string
			in     func(*liveFault) bool
			mapper string // its functions
		}{
			{"mmap", at(0x6d000000, pages), "by_mmap main"},
			{"mmap of less than whole pages", at(0x6c000000, pages), "by_odd_mmap main"},
			{"brk", func(f *liveFault) bool { return f.VMA != nil && words(f.VMA.Label) == "[heap]" }, "by_brk main"},
			{"mremap", at(0x6e800000, pages), "by_mremap main"},
			{"fork", at(0x6f000000, pages), "by_mmap main"},
		} {
			t.Run(c.name, func(t *testing.T) {
				n := 0
				for i := range tr.faults {
					f := &tr.faults[i]
					if f.Process != "mapper" || !c.in(f) {
						continue
					}
					n++
					if (!some || len(f.Stack) > 0) && !strings.HasPrefix(functions(f.Stack), "touch ") {
						t.Fatalf("touched by %s", shortStack(f.Stack))
					}
					if got := functions(f.Mapper); !strings.HasPrefix(got, c.mapper) {
						t.Fatalf("mapped by %q, want %q", got, c.mapper)
					}
				}
				if n != pages {
					t.Errorf("%d faults, want %d", n, pages)
				}
			})
		}
	}
	hooks(t, bpfHooks, func(t *testing.T, hook string) {
		check(t, trace(t, hook, "--stack=fp", "--mapper", "--", filepath.Join(dir, "mapper")), false)
	})
	hooks(t, someHooks(), func(t *testing.T, hook string) { // of stacks of any language some are missing
		check(t, traceFull(t, hook, "--mapper", "--", filepath.Join(dir, "mapper"), "slowly"), true)
	})
}

// manyC maps memory that is of many mappings, as each is of other rights than its neighbours, and
// touches some of it.
const manyC = `#define _GNU_SOURCE
#include <sys/mman.h>
#define MANY 30000
#define AT ((char *)0x6d000000)
__attribute__((noipa)) char *map_one(long i) {
  char *at = AT + i * 4096;
  return mmap(at, 4096, 3 + i % 2 * 4, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at ? at : 0;
}
__attribute__((noipa)) long map_all(void) {
  long n = 0;
  for (long i = 0; i < MANY; i++)
    n += map_one(i) != 0;
  return n;
}
__attribute__((noipa)) void touch(void) {
  __asm__ volatile("" : : "r"(__builtin_frame_address(0))); // so it has one
  for (long i = 0; i < MANY; i += 100)
    AT[i * 4096] = 1;
  __asm__ volatile("" ::: "memory");
}
int main(void) {
  if (map_all() != MANY)
    return 1;
  touch();
  return 0;
}
`

// Stacks and mappers are those of a process with mappings by the ten thousand, too.
func TestManyMappings(t *testing.T) {
	compiler(t, "gcc")
	const many, touched = 30_000, 300
	dir := openFolder(t)
	writeSource(t, dir, "many.c", manyC)
	build(t, dir, slices.Concat([]string{"gcc"}, withFrames, []string{"-o", "many", "many.c"})...)
	hooks(t, someSources(), func(t *testing.T, hook string) {
		args := []string{"--stack=fp", "--", filepath.Join(dir, "many")}
		mapper := hook != "perf" && runtime.GOARCH == "amd64"
		if mapper {
			args = slices.Concat([]string{"--mapper"}, args)
		}
		tr := trace(t, hook, args...)
		if tr.code != 0 {
			t.Fatalf("exit code %d; stderr:\n%s", tr.code, tr.stderr)
		}
		n, unheard := 0, 0
		for i := range tr.faults {
			f := &tr.faults[i]
			if f.Process != "many" || !at(0x6d000000, many)(f) {
				continue
			}
			n++
			if got := functions(f.Stack); !strings.HasPrefix(got, "touch main ") {
				t.Fatalf("touched by %s", shortStack(f.Stack))
			}
			switch got := functions(f.Mapper); {
			case !mapper:
			case got == "": // Linux 7.0 lets a call go unheard now and then
				unheard++
			case !strings.Contains(got, "map_all main "):
				t.Fatalf("%#x is mapped by %q", f.Address, got)
			}
		}
		if n != touched || unheard > touched/20 {
			t.Errorf("%d faults, want %d; of %d nobody knows who has mapped the memory", n, touched, unheard)
		}
	})
}

// traceFull traces with stacks of any language, of each fault.
func traceFull(t *testing.T, hook string, args ...string) *traced {
	t.Helper()
	args = slices.Concat([]string{self(t), "trace", "--json", "--hook", hook, "--stack=full", "--stack-every", "1"}, args)
	tr := traceBy(t, hook, onStageCmd([]string{"memlock"}, args))
	if strings.Contains(tr.stderr, "stacks by frame pointers") {
		t.Fatal(tr.stderr)
	}
	return tr
}

func at(start hexNumber, pages hexNumber) func(*liveFault) bool {
	return func(f *liveFault) bool { return f.Address >= start && f.Address < start+pages*4096 }
}

// functions are the names of a stack's frames, each with a blank behind.
func functions(frames []liveFrame) string {
	var b strings.Builder
	for _, f := range frames {
		b.WriteString(words(f.Func) + " ")
	}
	return b.String()
}

// codeTable is a table of stat --json by the code that faulted.
type codeTable struct {
	By   string
	Rows []struct {
		Faults uint64
		Func   *string
		Line   *int
		Module *string
		Stack  json.RawMessage
	}
	More *struct{ Faults uint64 }
}

// Tables of code add up to all faults, and so do rows of known functions.
func TestStatByCode(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	buildTouch(t, dir, "touch", withFrames...)
	exe := filepath.Join(dir, "touch")
	hooks(t, allHooks, func(t *testing.T, hook string) {
		code, stdout, stderr := outcome(t, program("stat", "--hook", hook, "--stack=fp", "--json", "--top", "0",
			"--by", "function,line,module,stack", "--", "sh", "-c", `for i in 1 2 3; do "$1"; done; exit 5`, "sh", exe))
		if code != 5 {
			t.Fatalf("exit code %d, want that of the command; stderr:\n%s", code, stderr)
		}
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		var whole struct {
			Seen   uint64
			Tables []codeTable
		}
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &whole); err != nil {
			t.Fatal(err)
		}
		if len(whole.Tables) != 4 {
			t.Fatalf("%d tables", len(whole.Tables))
		}
		line := lineOf(t, touchC, "] = 1; // touch")
		for _, table := range whole.Tables {
			var sum, known uint64
			for _, r := range table.Rows {
				sum += r.Faults
				var is bool
				switch table.By {
				case "function":
					is = words(r.Func) == "touch_pages"
				case "line":
					is = words(r.Func) == "touch_pages" && r.Line != nil && *r.Line == line
				case "stack":
					is = bytes.Contains(r.Stack, []byte(`{"func":"touch_pages"`))
				case "module": // the program's own start is in it too
					if words(r.Module) == exe {
						if r.Faults < 3*touchPages || r.Faults > 3*touchPages+100 {
							t.Errorf("%d faults of module %s", r.Faults, exe)
						}
						is, known = false, 3*touchPages
					}
				}
				if is {
					known += r.Faults
				}
			}
			if table.More != nil {
				sum += table.More.Faults
			}
			if sum != whole.Seen {
				t.Errorf("by %s: rows have %d faults, there were %d", table.By, sum, whole.Seen)
			}
			if known != 3*touchPages {
				t.Errorf("by %s: %d faults of touch_pages, want %d", table.By, known, 3*touchPages)
			}
		}
	})
}

// A flame graph of each format has what is known of the program, and hook and format
// change nothing in that.
func TestFlame(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	buildTouch(t, dir, "touch", withFrames...)
	exe := filepath.Join(dir, "touch")
	hooks(t, []string{bestHook(t), "perf"}, func(t *testing.T, hook string) {
		for _, format := range flameFormats {
			out := filepath.Join(t.TempDir(), "out")
			code, stdout, stderr := outcome(t, program("flame", "--hook", hook, "--stack=fp", "--format", format, "-o", out,
				"--", "sh", "-c", `"$1"; echo told; exit 7`, "sh", exe))
			if code != 7 || stdout != "told\n" {
				t.Fatalf("%s: exit code %d, want that of the command; stdout %q, stderr:\n%s", format, code, stdout, stderr)
			}
			b, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			switch format {
			case "pprof":
				checkPprof(t, b, exe)
			case "folded":
				checkFolded(t, string(b))
			case "speedscope":
				checkSpeedscope(t, b)
			default:
				if !bytes.Contains(b, []byte("touch_pages")) || format == "svg" && !bytes.Contains(b, []byte("<svg")) {
					t.Errorf("%s: no touch_pages in %d bytes", format, len(b))
				}
			}
		}
	})
}

// checkPprof demands what makes a profile useful elsewhere.
// https://github.com/google/pprof/issues/120
func checkPprof(t *testing.T, b []byte, exe string) {
	t.Helper()
	p, err := profile.Parse(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if p.TimeNanos == 0 || p.DurationNanos == 0 || p.Period == 0 || len(p.SampleType) != 3 || p.SampleType[0].Type != "faults" || p.SampleType[0].Unit != "count" {
		t.Errorf("time %d, duration %d, period %d, types %v", p.TimeNanos, p.DurationNanos, p.Period, p.SampleType)
	}
	var faults int64
	for _, s := range p.Sample {
		if leaf := s.Location[0]; len(leaf.Line) > 0 && leaf.Line[0].Function.Name == "touch_pages" {
			if leaf.Line[0].Line == int64(lineOf(t, touchC, "] = 1; // touch")) {
				faults += s.Value[0]
			}
			if caller := s.Location[1].Line[0].Function.Name; caller != "outer" {
				t.Errorf("touch_pages is called by %s", caller)
			}
		}
		for _, l := range s.Location {
			if m := l.Mapping; m != nil && (l.Address < m.Start || l.Address >= m.Limit) {
				t.Errorf("address %#x is not in its mapping %#x-%#x of %s", l.Address, m.Start, m.Limit, m.File)
			}
		}
	}
	if faults != touchPages {
		t.Errorf("pprof: %d faults of touch_pages, want %d", faults, touchPages)
	}
	i := slices.IndexFunc(p.Mapping, func(m *profile.Mapping) bool { return m.File == exe })
	if i < 0 || !p.Mapping[i].HasFunctions || !p.Mapping[i].HasLineNumbers || p.Mapping[i].BuildID == "" {
		t.Errorf("no good mapping of %s: %v", exe, p.Mapping)
	}
}

func checkFolded(t *testing.T, s string) {
	t.Helper()
	n := 0
	for line := range strings.Lines(s) {
		stack, count, _ := strings.Cut(strings.TrimSpace(line), "touch_pages")
		if strings.Contains(stack, ";main:") && strings.Contains(stack, ";outer:") {
			v, err := strconv.Atoi(count[strings.LastIndexByte(count, ' ')+1:])
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			n += v
		}
	}
	if n != touchPages {
		t.Errorf("folded: %d faults of touch_pages, want %d:\n%s", n, touchPages, s)
	}
}

func checkSpeedscope(t *testing.T, b []byte) {
	t.Helper()
	var file struct {
		Shared   struct{ Frames []struct{ Name string } }
		Profiles []struct {
			Name    string
			Samples [][]int
			Weights []float64
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Profiles) == 0 {
		t.Fatal("speedscope: no profile")
	}
	p, n := file.Profiles[0], 0.0
	for i, stack := range p.Samples {
		if len(stack) > 0 && strings.HasPrefix(file.Shared.Frames[stack[len(stack)-1]].Name, "touch_pages") {
			n += p.Weights[i]
		}
	}
	if n != touchPages {
		t.Errorf("speedscope: %v faults of touch_pages in profile %q, want %d", n, p.Name, touchPages)
	}
}

// pprof shows what the tool says itself, in another folder, without a network and when the
// program is gone.
func TestFlamePprofTool(t *testing.T) {
	compiler(t, "gcc", "go")
	dir := openFolder(t)
	buildTouch(t, dir, "touch", withFrames...)
	file := filepath.Join(t.TempDir(), "faults.pb.gz")
	code, _, stderr := outcome(t, program("flame", "--hook", bestHook(t), "--stack=fp", "--format", "pprof", "-o", file, "--", filepath.Join(dir, "touch")))
	if code != 0 {
		t.Fatalf("exit code %d; stderr:\n%s", code, stderr)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for _, value := range []string{"faults", "time", "bytes"} {
		code, folded, stderr := outcome(t, program("flame", "--format", "folded", "--value", value, file))
		if code != 0 {
			t.Fatalf("exit code %d; stderr:\n%s", code, stderr)
		}
		want := functionSums(t, folded)
		units := map[string]string{"faults": "count", "time": "ns", "bytes": "B"}
		cmd := exec.Command("go", "tool", "pprof", "-top", "-functions", "-nodecount=100000", "-nodefraction=0", "-edgefraction=0",
			"-sample_index="+value, "-unit="+units[value], file)
		cmd.Dir = t.TempDir()
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "GOPROXY=off", "PPROF_TMPDIR="+cmd.Dir, "PPROF_BINARY_PATH="+cmd.Dir, "DEBUGINFOD_URLS=")
		code, top, stderr := outcome(t, cmd)
		if code != 0 {
			t.Fatalf("pprof: exit code %d; stderr:\n%s", code, stderr)
		}
		if strings.Contains(stderr, "binary") || strings.Contains(stderr, "symbol") {
			t.Errorf("pprof looks for more: %s", stderr)
		}
		shown := 0
		for line := range strings.Lines(top) {
			// FLAT FLAT% SUM% CUM CUM% FUNCTION
			fields := strings.Fields(line)
			if len(fields) < 6 || !strings.HasSuffix(fields[1], "%") {
				continue
			}
			sums, ok := want[strings.TrimSuffix(strings.Join(fields[5:], " "), " (inline)")]
			if !ok {
				t.Errorf("%s: pprof has %q, folded has not", value, line)
				continue
			}
			shown++
			for i, field := range []string{fields[0], fields[3]} {
				n, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSuffix(field, "ns"), "B"), 64)
				if err != nil || uint64(n) != sums[i] {
					t.Errorf("%s: pprof has %q, folded %d alone and %d in all", value, line, sums[0], sums[1])
				}
			}
		}
		if shown != len(want) || value == "faults" && want["touch_pages"] != [2]uint64{touchPages, touchPages} || value == "faults" && want["outer"] != [2]uint64{0, touchPages} {
			t.Errorf("%s: pprof shows %d functions of %d:\n%s", value, shown, len(want), top)
		}
	}
}

// functionSums are the values of each function of a folded profile: where it is innermost,
// and of all stacks that it is in.
func functionSums(t *testing.T, folded string) map[string][2]uint64 {
	t.Helper()
	sums := map[string][2]uint64{}
	for line := range strings.Lines(folded) {
		at := strings.LastIndexByte(line, ' ')
		n, err := strconv.ParseUint(strings.TrimSpace(line[at:]), 10, 64)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		frames := strings.Split(line[:at], ";")[1:] // the first one is the process
		in := map[string]bool{}
		for i, frame := range frames {
			name := strings.TrimSuffix(strings.TrimSuffix(frame, "_[k]"), "_[i]")
			if j := strings.LastIndexByte(name, ':'); j > 0 {
				name = name[:j]
			}
			s := sums[name]
			if i == len(frames)-1 {
				s[0] += n
			}
			if !in[name] {
				s[1] += n
			}
			in[name], sums[name] = true, s
		}
	}
	return sums
}

// What cannot be written is an error, whatever the command's end was.
func TestFlameFullDisk(t *testing.T) {
	anyKernel(t)
	for _, format := range flameFormats {
		code, _, stderr := outcome(t, program("flame", "--hook", bestHook(t), "--stack=fp", "--format", format, "-o", "/dev/full", "--", "true"))
		if code != exitFailure || !strings.Contains(stderr, "no space left on device") {
			t.Errorf("%s: exit code %d, stderr %q", format, code, stderr)
		}
	}
}

// Names of functions, files and threads may be markup.
func TestFlameHostileNames(t *testing.T) {
	compiler(t, "gcc", "objcopy")
	const function, name = `</script><b a="&'>x`, `<i>&"'x`
	dir := openFolder(t)
	buildTouch(t, dir, "touch", slices.DeleteFunc(slices.Clone(withFrames), func(f string) bool { return f == "-g" })...)
	build(t, dir, "objcopy", "--redefine-sym", "touch_pages="+function, "touch", name)
	for _, format := range flameFormats {
		code, stdout, stderr := outcome(t, program("flame", "--hook", bestHook(t), "--stack=fp", "--format", format, "--", filepath.Join(dir, name)))
		if code != 0 {
			t.Fatalf("%s: exit code %d; stderr:\n%s", format, code, stderr)
		}
		switch format {
		case "html", "svg":
			if strings.Contains(stdout, "<b a=") || strings.Contains(stdout, "<i>&") {
				t.Errorf("%s has the markup", format)
			}
		case "folded":
			if !strings.Contains(stdout, function+" "+strconv.Itoa(touchPages)+"\n") {
				t.Errorf("folded: no %q in %q", function, stdout)
			}
		case "speedscope":
			if !json.Valid([]byte(stdout)) {
				t.Error("speedscope: no JSON")
			}
		case "pprof":
			if _, err := profile.ParseData([]byte(stdout)); err != nil {
				t.Errorf("pprof: %v", err)
			}
		}
	}
}

// An ordinary user has stacks of his own processes.
func TestStacksOfOrdinaryUser(t *testing.T) {
	compiler(t, "gcc")
	if b, err := os.ReadFile("/proc/sys/kernel/perf_event_paranoid"); err != nil || len(b) > 1 && b[0] > '2' && b[0] <= '9' {
		t.Skipf("kernel.perf_event_paranoid is %s: no perf events for ordinary users", b)
	}
	exe, dir := copyProgram(t, "faultsnoop"), openFolder(t)
	buildTouch(t, dir, "touch", withFrames...)
	as := func(args ...string) *exec.Cmd {
		cmd := exec.Command(exe, append(args, "--hook", "perf", "--stack=fp", "--", filepath.Join(dir, "touch"))...)
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), mainEnv+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		return cmd
	}
	checkFrames(t, touched(t, traceBy(t, "perf", as("trace", "--json")), "touch"), touchFrames(t)...)
	code, stdout, stderr := outcome(t, as("flame", "--format", "folded"))
	if code != 0 {
		t.Fatalf("exit code %d; stderr:\n%s", code, stderr)
	}
	checkFolded(t, stdout)
}

// pythonTouch touches 40 pages of its file in each round, pythonEach in a row in one way,
// until there is a file named stop.
const (
	pythonEach  = 8
	pythonTouch = `import functools, mmap, os, sys, threading, time
def leaf(m, low, high):
    for i in range(low, high):
        m[i * 4096] = 1  # touch
def outer(m, low, high):
    leaf(m, low, high)  # outer
def generating(m, low, high):
    def page(i):
        return (i + 0 * low) * 4096
    for i in range(low, high):
        m[page(i)] = 1  # generating
        yield i
def generator(m, low, high):
    for i in generating(m, low, high):  # generator
        pass
def extension(m, low, high):
    for i in range(low, high):
        functools.reduce(lambda a, b: leaf(m, b, b + 1), [i], None)  # extension
def thread(m, low, high):
    t = threading.Thread(target=outer, args=(m, low, high))
    t.start()
    t.join()
def interpreter(m, low, high):
    if not interpreters:
        return outer(m, low, high)  # without
    interpreters.run_string(other, "inside(%d, %d)" % (low, high))  # interpreter
interpreters = None
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
elif sys.version_info >= (3, 8):
    import _xxsubinterpreters as interpreters
if interpreters:
    other = interpreters.create()
    interpreters.run_string(other, """import mmap
def inside(low, high):
    for i in range(low, high):
        m[i * 4096] = 1
f = open(%r, "r+b")
m = mmap.mmap(f.fileno(), 40 * 4096)
""" % sys.argv[1])
f = open(sys.argv[1], "r+b")
m = mmap.mmap(f.fileno(), 40 * 4096)
while not os.path.exists("stop"):
    for size in 0, 40 * 4096:
        os.ftruncate(f.fileno(), size)
    for n, way in enumerate((outer, generator, extension, thread, interpreter)):
        way(m, n * 8, n * 8 + 8)  # way
    time.sleep(0.05)
`
)

// pythonWays are the frames of Python of pythonTouch, the innermost first, by its ways.
func pythonWays(t *testing.T, interpreter string) []string {
	at := func(function, word string) string {
		return fmt.Sprintf("%s:%d ", function, lineOf(t, pythonTouch, "# "+word+"\n"))
	}
	leaf, outer, module := at("leaf", "touch"), at("outer", "outer"), at("<module>", "way")
	out, err := exec.Command(interpreter, "-c", "import sys; print(sys.version_info[1])").Output()
	minor, _ := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || minor == 0 {
		t.Fatalf("%s: %q, %v", interpreter, out, err)
	}
	inside := "inside:4 " // its caller is gone when the stack is named
	switch {
	case minor < 8:
		inside = leaf + outer + at("interpreter", "without") + module
	case minor < 12: // the thread still says that it runs the first one
		inside = at("interpreter", "interpreter") + module
	}
	return []string{
		leaf + outer + module,
		at("generating", "generating") + at("generator", "generator") + module,
		leaf + at("<lambda>", "extension") + at("extension", "extension") + module,
		leaf + outer,
		inside,
	}
}

// Lines of Python, of each interpreter that is found, in the stacks of any language.
// https://github.com/benfred/py-spy/issues/731
func TestFullStacks(t *testing.T) {
	needRoot(t)
	pythons, _ := filepath.Glob("/usr/bin/python3")
	if home, err := os.UserHomeDir(); err == nil {
		more, _ := filepath.Glob(filepath.Join(home, ".pyenv/versions/3.*/bin/python3"))
		pythons = append(pythons, more...)
	}
	if len(pythons) == 0 {
		t.Skip("there is no Python")
	}
	dir, err := os.MkdirTemp("/dev/shm", "faultsnoop-stack-*") // each of its pages is a fault
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	writeSource(t, dir, "touch.py", pythonTouch)
	for i := range pythons {
		writeSource(t, dir, strconv.Itoa(i+1), "")
		if err := os.Truncate(filepath.Join(dir, strconv.Itoa(i+1)), 40*4096); err != nil {
			t.Fatal(err)
		}
	}
	script := `cd "$1" && shift && n=0; for p; do n=$((n+1)); "$p" touch.py $n & done; wait`
	args := append([]string{self(t), "trace", "--json", "--hook", bestHook(t), "--stack=full", "--stack-every", "1", "--", "sh", "-c", script, "sh", dir}, pythons...)
	// The unwinder needs time to look at processes, and they have to be there when it names
	// their stacks: they go on until there are enough.
	files := make([]string, len(pythons))
	for i := range pythons {
		files[i] = filepath.Join(dir, strconv.Itoa(i+1))
	}
	faults := whileStacks(t, onStageCmd([]string{"memlock"}, args), "python", files, filepath.Join(dir, "stop"))
	for i, p := range pythons {
		t.Run(p, func(t *testing.T) {
			ways := pythonWays(t, p)
			var stacked, right [5]int
			wrong := map[string]int{}
			known := false // first stacks are of the interpreter's own code: they make the unwinder look
			for _, f := range faults {
				if f.VMA == nil || words(f.VMA.Path) != files[i] {
					continue
				}
				if len(f.Stack) == 0 {
					continue
				}
				python := slices.DeleteFunc(slices.Clone(f.Stack), func(f liveFrame) bool { return words(f.Lang) != "python" })
				if known = known || len(python) > 0; !known {
					continue
				}
				if strings.Contains(p, "/3.10.") && len(python) > 0 && python[0].Line == nil {
					continue // of its first stacks no line can be known
				}
				way := int(*f.PgOff) / pythonEach % len(ways)
				stacked[way]++
				// Names are qualified since 3.11.
				if strings.HasPrefix(strings.ReplaceAll(shortStack(python), "extension.<locals>.", "")+" ", ways[way]) {
					right[way]++
				} else {
					wrong[fmt.Sprintf("%s, want %s", shortStack(f.Stack), ways[way])]++
				}
			}
			for way := range ways {
				if stacked[way] < pythonEach || right[way]*100 < stacked[way]*99 {
					t.Errorf("%d faults have a stack, %d of them by %s", stacked[way], right[way], ways[way])
				}
			}
			for s, n := range wrong {
				t.Logf("%d times %s", n, s)
			}
		})
	}
}

// Our own workloads' stacks by the unwinder of any language, which is triggered at
// different moments by different hooks.
func TestWorkloadsFullStacks(t *testing.T) {
	needRoot(t)
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		const pages = 400
		// The unwinder looks at the process while it waits.
		hold := strconv.Itoa(inGuest(2, 20)) + "s"
		tr := traceFull(t, hook, "--", self(t), "workload", "touch", "--pages", strconv.Itoa(pages), "--hold", hold)
		rep := tr.report(t)
		in := ofProcess(tr.inRange(rep), rep.PID)
		// Hook kprobe may miss some while the unwinder changes its maps, and counts them.
		if len(in) > pages || len(in)+int(tr.lost) < pages {
			t.Errorf("%d records and %d lost, want %d", len(in), tr.lost, pages)
		}
		stacked, right := 0, 0
		var wrong string
		for _, f := range in {
			if len(f.Stack) == 0 {
				continue
			}
			stacked++
			if last := len(f.Stack) - 1; words(f.Stack[0].Func) == "faultsnoop/workload.touchPages" && f.Stack[0].Line != nil &&
				words(f.Stack[last].Func) == "runtime.goexit" && words(f.StackEnd) == "whole" {
				right++
			} else {
				wrong = fmt.Sprintf("%s (%s)", shortStack(f.Stack), words(f.StackEnd))
			}
		}
		if stacked*10 < len(in)*9 || right*100 < stacked*99 {
			t.Errorf("%d of %d faults have a stack, %d of them by touchPages; another is %s", stacked, pages, right, wrong)
		}
	})
}

// whileStacks runs trace --json until faults of each file have 120 stacks with lines of a
// language, then makes a file that ends the command, and returns the faults up to there.
func whileStacks(t *testing.T, cmd *exec.Cmd, lang string, files []string, stop string) []liveFault {
	t.Helper()
	const enough = 120
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	startKilled(t, cmd)
	end := func() {
		if err := os.WriteFile(stop, nil, 0o644); err != nil {
			t.Error(err)
		}
	}
	timer := time.AfterFunc(patience, end)
	defer timer.Stop()
	var faults []liveFault
	stacks := map[string]int{}
	full := 0
	lines := bufio.NewReader(stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		if full == len(files) || !bytes.HasPrefix(line, []byte(`{"type":"fault",`)) {
			continue
		}
		var f liveFault
		if err := json.Unmarshal(line, &f); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		faults = append(faults, f)
		if f.VMA == nil || !slices.Contains(files, words(f.VMA.Path)) ||
			!slices.ContainsFunc(f.Stack, func(f liveFrame) bool { return words(f.Lang) == lang && f.Line != nil }) {
			continue
		}
		if path := words(f.VMA.Path); stacks[path] < enough {
			if stacks[path]++; stacks[path] == enough {
				full++
			}
		}
		if full == len(files) {
			end()
		}
	}
	if err := cmd.Wait(); err != nil || full < len(files) {
		t.Fatalf("%v; stacks: %v; stderr:\n%s", err, stacks, stderr.String())
	}
	return faults
}

// twoC touches two regions in turns, each in a function of its own.
const twoC = `#include <sys/mman.h>
#include <unistd.h>
#define PAGES 2000
static volatile char *map(long at) {
  char *p = mmap((void *)at, PAGES * 4096L, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  madvise(p, PAGES * 4096L, MADV_NOHUGEPAGE);
  return p;
}
__attribute__((noipa)) void touch_x(volatile char *p) { *p = 1; }
__attribute__((noipa)) void touch_y(volatile char *p) { *p = 1; }
int main(int argc, char **argv) {
  volatile char *x = map(0x6d000000), *y = map(0x6e000000);
  for (long i = 0; i < PAGES; i++) {
    if (i == 100) // the unwinder looks at the process
      sleep(argc);
    touch_y(y + i * 4096);
    touch_x(x + i * 4096);
  }
  return 0;
}
`

// A stack is of the fault that it was taken of, also where neighbours are left out; what the
// kernel counts is counted of all, and its sums are those of the rows.
func TestFullStacksOfSomeFaults(t *testing.T) {
	compiler(t, "gcc")
	const pages = 2000
	dir := openFolder(t)
	writeSource(t, dir, "two.c", twoC)
	build(t, dir, "gcc", "-O2", "-o", "two", "two.c")
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		code, stdout, stderr := outcome(t, onStageCmd([]string{"memlock"}, []string{
			self(t), "stat", "--json", "--top", "0", "--hook", hook, "--stack=full", "--stack-every", "3",
			"--addr", fmt.Sprintf("6e000000-%x", 0x6e000000+pages*4096), "--by", "uid,cgroup,function", "--", filepath.Join(dir, "two"),
		}))
		if code != 0 || strings.Contains(stderr, "stacks by frame pointers") {
			t.Fatalf("exit code %d; stderr:\n%s", code, stderr)
		}
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		var whole struct {
			Seen   uint64
			Tables []struct {
				By        string
				Stacked   uint64
				Estimated bool
				Rows      []struct {
					Faults           uint64
					Func             *string
					UID              *uint32
					Cgroup, CgroupID any
				}
			}
		}
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &whole); err != nil {
			t.Fatal(err)
		}
		if whole.Seen != pages || len(whole.Tables) != 3 {
			t.Fatalf("%d faults in %d tables, want %d in 3:\n%s", whole.Seen, len(whole.Tables), pages, stdout)
		}
		for _, table := range whole.Tables {
			var sum, right uint64
			for _, r := range table.Rows {
				sum += r.Faults
				switch table.By {
				case "uid":
					if r.UID == nil || *r.UID != uint32(os.Getuid()) {
						t.Errorf("faults of another user: %+v", r)
					}
				case "function":
					if words(r.Func) == "touch_y" {
						right = r.Faults
					} else if r.Func != nil && *r.Func != "[no stack]" {
						t.Errorf("%d faults of %s", r.Faults, *r.Func)
					}
				}
			}
			if sum != pages {
				t.Errorf("by %s: rows have %d faults, there were %d", table.By, sum, pages)
			}
			// Of a third, by chance, from which the others are estimated.
			if table.By != "function" {
				continue
			}
			if n := table.Stacked; !table.Estimated || n < pages/5 || n > pages/2 {
				t.Errorf("%d faults have a stack, want about %d; stderr:\n%s", n, pages/3, stderr)
			}
			if right < pages*8/10 {
				t.Errorf("%d faults of touch_y by estimate, want about %d; stderr:\n%s", right, pages, stderr)
			}
		}
	})
}

// replacedC touches memory in a function whose name is given.
const replacedC = `#include <sys/mman.h>
#include <unistd.h>
#define PAGES 400
__attribute__((noipa)) void NAME(volatile char *p, int from) {
  for (int i = from; i < PAGES; i++)
    p[i * 4096L] = 1;
}
int main(void) {
  char *p = mmap((void *)0x6d000000, PAGES * 4096L, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  madvise(p, PAGES * 4096L, MADV_NOHUGEPAGE);
  *p = 1;
  sleep(1);
  NAME(p, 1);
  sleep(1);
  return 0;
}
`

// A file without a build-id that another one has replaced keeps its names.
func TestFullStacksOfReplacedFile(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	writeSource(t, dir, "replaced.c", replacedC)
	for file, function := range map[string]string{"prog": "alpha", "prog.new": "gamma"} {
		build(t, dir, "gcc", "-O2", "-Wl,--build-id=none", "-DNAME="+function, "-o", file, "replaced.c")
	}
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		tr := traceFull(t, hook, "--", "sh", "-c", `cd "$1" && cp prog old && ./prog && mv prog.new prog && ./prog; mv prog prog.new && mv old prog`, "sh", dir)
		names := map[int]map[string]int{} // by process
		var pids []int
		for _, f := range tr.faults {
			if f.Process == "prog" && f.Address > 0x6d000000 && f.Address < 0x6d000000+400*4096 && len(f.Stack) > 0 {
				if names[f.PID] == nil {
					names[f.PID] = map[string]int{}
					pids = append(pids, f.PID)
				}
				names[f.PID][words(f.Stack[0].Func)]++
			}
		}
		if len(pids) != 2 {
			t.Fatalf("stacks of %d processes, want 2; stderr:\n%s", len(pids), tr.stderr)
		}
		for i, want := range []string{"alpha", "gamma"} {
			if of := names[pids[i]]; len(of) != 1 || of[want] < 300 {
				t.Errorf("stacks of %v, want most of 399 of %s", of, want)
			}
		}
	})
}

// That there was no room for more stacks is told.
func TestStacklessIsTold(t *testing.T) {
	open := script(fakeSource{counters: fault.Counters{Stackless: 17}})
	for _, args := range [][]string{{"trace", "-d", "100ms"}, {"stat", "-d", "100ms"}} {
		code, _, stderr := runWith(open, args...)
		if code != 0 || !strings.Contains(stderr, "17 faults have no stack") {
			t.Errorf("%q: exit code %d, stderr %q", args, code, stderr)
		}
	}
}

// That calls were not heard of is told: who has mapped what may be wrong then.
func TestLostMappingsAreTold(t *testing.T) {
	open := script(fakeSource{counters: fault.Counters{MappingsLost: 17}})
	code, _, stderr := runWith(open, "trace", "-d", "100ms")
	if code != 0 || !strings.Contains(stderr, "17 calls that map memory or fork were not heard of") {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
}
