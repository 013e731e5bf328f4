package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// touchC touches known pages in a function that is known, as are its callers.
const touchC = `#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#define PAGES 400
#define AT ((char *)0x6d000000)
#define KEEP __asm__ volatile("" ::: "memory")
static inline __attribute__((always_inline)) void inlined(volatile char *p) {
  *p = 1; // inlined
}
__attribute__((noipa)) static void touch_pages(volatile char *p, long size) {
#ifndef LEAF
  __asm__ volatile("" : : "r"(__builtin_frame_address(0))); // so it has one
#endif
  for (long i = 0; i < PAGES; i++)
#ifdef INLINED
    inlined(p + i * size); // touch
#else
    p[i * size] = 1; // touch
#endif
  KEEP;
}
__attribute__((noipa)) void outer(int depth, long size) {
  if (depth > 0)
    outer(depth - 1, size); // deeper
  else
    touch_pages(AT, size); // outer
  KEEP;
}
__attribute__((noipa)) char *map_pages(long size) {
  char *p = mmap(AT, PAGES * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0); // map
  KEEP;
  return p;
}
int main(int argc, char **argv) {
  long size = sysconf(_SC_PAGESIZE);
  if (map_pages(size) != AT || madvise(AT, PAGES * size, MADV_NOHUGEPAGE)) // main maps
    return 1;
  outer(argc > 1 ? atoi(argv[1]) : 0, size); // main
  return 0;
}
`

// withFrames are flags that keep frame pointers, but for functions that call none, and calls.
var withFrames = []string{"-O2", "-g", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"}

// buildTouch compiles touchC.
func buildTouch(t *testing.T, dir, name string, flags ...string) {
	t.Helper()
	writeSource(t, dir, "touch.c", touchC)
	build(t, dir, slices.Concat([]string{"gcc", "-include", "unistd.h"}, flags, []string{"-o", name, "touch.c"})...)
}

// touchFrames are the innermost frames of each fault of touchC.
func touchFrames(t *testing.T) []string {
	line := func(function, word string) string {
		return fmt.Sprintf("%s:%d", function, lineOf(t, touchC, word+"\n"))
	}
	return []string{line("touch_pages", "] = 1; // touch"), line("outer", "// outer"), line("main", "// main")}
}

// allOf is a shell line that runs each of its arguments, in a folder.
const allOf = `cd "$1" && shift && for program; do ./$program || exit; done`

// traceAll traces programs of a folder, by frame pointers, one after the other.
func traceAll(t *testing.T, hook, dir string, programs ...string) *traced {
	t.Helper()
	args := append([]string{"--stack=fp", "--", "sh", "-c", allOf, "sh", dir}, programs...)
	tr := trace(t, hook, args...)
	if tr.code != 0 {
		t.Fatalf("exit code %d; stderr:\n%s", tr.code, tr.stderr)
	}
	return tr
}

// Functions and lines of programs of all sorts.
// https://github.com/libbpf/blazesym/pull/1610
func TestCaseFunctionsAndLines(t *testing.T) {
	compiler(t, "gcc", "objcopy", "strip", "readelf")
	dir := openFolder(t)
	named := []string{"pie", "no-pie", "static-pie", "static", "segment", "aligned", "linked", "large"}
	buildTouch(t, dir, "pie", append(withFrames, "-fPIE", "-pie")...)
	buildTouch(t, dir, "no-pie", append(withFrames, "-no-pie")...)
	buildTouch(t, dir, "static-pie", append(withFrames, "-static-pie")...)
	buildTouch(t, dir, "static", append(withFrames, "-static")...)
	buildTouch(t, dir, "segment", append(withFrames, "-Wl,-z,noseparate-code")...)
	buildTouch(t, dir, "aligned", append(withFrames, "-Wl,-z,max-page-size=2097152")...)
	buildTouch(t, dir, "inlined", append(withFrames, "-DINLINED")...)
	// The leaf keeps no frame pointer, so that of its caller is taken for its own.
	buildTouch(t, dir, "leaf", append(withFrames, "-DLEAF")...)
	buildTouch(t, dir, "frameless", "-O2", "-g", "-fomit-frame-pointer", "-DLEAF")
	buildTouch(t, dir, "exported", append(withFrames, "-rdynamic")...)
	if _, err := exec.LookPath("ld.lld"); err != nil {
		t.Log("no program of lld: it is not installed")
	} else {
		buildTouch(t, dir, "lld", append(withFrames, "-fuse-ld=lld", "-Wl,--build-id")...)
		named = append(named, "lld")
	}

	for _, args := range [][]string{
		{"strip", "-o", "stripped", "pie"},
		{"strip", "-o", "dynsym", "exported"},
		{"objcopy", "--only-keep-debug", "pie", "pie.debug"},
		{"objcopy", "--add-gnu-debuglink=pie.debug", "stripped", "linked"},
		// What the link leads to is another file.
		{"objcopy", "--only-keep-debug", "aligned", "other.debug"},
		{"objcopy", "--add-gnu-debuglink=other.debug", "stripped", "mislinked"},
		{"objcopy", "--only-keep-debug", "no-pie", "other.debug"},
	} {
		build(t, dir, args...)
	}
	enlarge(t, filepath.Join(dir, "pie"), filepath.Join(dir, "large"))
	unnamed := []string{"stripped", "mislinked"}
	hooks(t, someSources(), func(t *testing.T, hook string) {
		tr := traceAll(t, hook, dir, slices.Concat(named, unnamed, []string{"inlined", "leaf", "frameless", "dynsym"})...)
		want := touchFrames(t)
		for _, name := range named {
			t.Run(name, func(t *testing.T) {
				in := touched(t, tr, name)
				checkFrames(t, in, want...)
				f := in[0].Stack[0]
				if words(f.Module) != filepath.Join(dir, name) || words(f.BuildID) != buildID(t, filepath.Join(dir, name)) {
					t.Errorf("module %s, build-id %s", words(f.Module), words(f.BuildID))
				}
				if words(f.File) != "touch.c" && filepath.Base(words(f.File)) != "touch.c" {
					t.Errorf("file %s", words(f.File))
				}
			})
		}
		for _, name := range unnamed {
			t.Run(name, func(t *testing.T) {
				in := touched(t, tr, name)
				checkFrames(t, in, name+"+", name+"+", name+"+")
				for i, function := range []string{"touch_pages", "outer", "main"} {
					f := in[0].Stack[i]
					if words(f.Module) != filepath.Join(dir, name) || f.Offset == nil || !inSymbol(t, filepath.Join(dir, "pie"), function, *f.Offset) {
						t.Errorf("frame %d is %s+%#x, want an address in %s", i, words(f.Module), f.Offset, function)
					}
				}
			})
		}
		t.Run("dynsym", func(t *testing.T) { // touch_pages is not exported, its neighbours are
			checkFrames(t, touched(t, tr, "dynsym"), "dynsym+", "outer", "main")
		})
		t.Run("inlined", func(t *testing.T) {
			in := touched(t, tr, "inlined")
			checkFrames(t, in, fmt.Sprintf("inlined:%d", lineOf(t, touchC, "// inlined")),
				fmt.Sprintf("touch_pages:%d", lineOf(t, touchC, "size); // touch")), want[1], want[2])
			if s := in[0].Stack; !s[0].Inlined || s[1].Inlined {
				t.Errorf("inlined: %v, %v, want true, false", s[0].Inlined, s[1].Inlined)
			}
		})
		t.Run("leaf", func(t *testing.T) {
			checkFrames(t, touched(t, tr, "leaf"), want[0], want[2])
		})
		t.Run("frameless", func(t *testing.T) {
			in := touched(t, tr, "frameless")
			checkFrames(t, in, want[0])
			for _, f := range in {
				for _, frame := range f.Stack {
					if frame.Module == nil {
						t.Fatalf("a frame is no code: %s", shortStack(f.Stack))
					}
				}
			}
		})
	})
}

const touchCPP = `#include <sys/mman.h>
#include <unistd.h>
namespace pages {
template <typename T> struct toucher {
  T *at;
  __attribute__((noinline)) void touch(long size) {
    __asm__ volatile("" : : "r"(__builtin_frame_address(0))); // so it has one
    for (long i = 0; i < 400; i++)
      *(volatile T *)((char *)at + i * size) = 1; // touch
  }
};
__attribute__((noinline)) void outer(toucher<short> &t, long size) {
  t.touch(size); // outer
  __asm__ volatile("" ::: "memory");
}
}
int main() {
  long size = sysconf(_SC_PAGESIZE);
  void *p = mmap((void *)0x6d000000, 400 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (p != (void *)0x6d000000 || madvise(p, 400 * size, MADV_NOHUGEPAGE))
    return 1;
  pages::toucher<short> t = {(short *)p};
  pages::outer(t, size); // main
  return 0;
}
`

// Mangled names, of functions and of what they are made for.
func TestCaseCPP(t *testing.T) {
	compiler(t, "g++")
	dir := openFolder(t)
	writeSource(t, dir, "touch.cc", touchCPP)
	build(t, dir, slices.Concat([]string{"g++"}, withFrames, []string{"-o", "cpp", "touch.cc"})...)
	hooks(t, someSources(), func(t *testing.T, hook string) {
		in := touched(t, traceAll(t, hook, dir, "cpp"), "cpp")
		checkFrames(t, in, fmt.Sprintf("pages::toucher<short>::touch:%d", lineOf(t, touchCPP, "// touch\n")),
			fmt.Sprintf("pages::outer:%d", lineOf(t, touchCPP, "// outer\n")), fmt.Sprintf("main:%d", lineOf(t, touchCPP, "// main\n")))
		if lang := words(in[0].Stack[0].Lang); lang != "c++" {
			t.Errorf("language %s", lang)
		}
	})
}

const touchRust = `
extern "C" {
    fn mmap(at: *mut u8, size: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> *mut u8;
    fn madvise(at: *mut u8, size: usize, advice: i32) -> i32;
    fn sysconf(name: i32) -> i64;
}
mod pages {
    #[inline(never)]
    pub fn touch<T: Into<u64>>(at: *mut u8, size: usize, n: T) {
        for i in 0..n.into() as usize {
            unsafe { at.add(i * size).write_volatile(1) } // touch
        }
    }
    #[inline(never)]
    pub fn outer(at: *mut u8, size: usize) -> usize {
        touch(at, size, 400u32); // outer
        std::hint::black_box(size)
    }
}
fn main() {
    unsafe {
        let size = sysconf(30) as usize;
        let p = mmap(0x6d000000 as *mut u8, 400 * size, 3, 0x100022, -1, 0);
        if p as usize != 0x6d000000 || madvise(p, 400 * size, 15) != 0 {
            std::process::exit(1);
        }
        std::hint::black_box(pages::outer(p, size)); // main
    }
}
`

func TestCaseRust(t *testing.T) {
	compiler(t, "rustc")
	dir := openFolder(t)
	writeSource(t, dir, "rust.rs", touchRust)
	build(t, dir, "rustc", "-Copt-level=1", "-g", "-Cforce-frame-pointers=yes", "rust.rs")
	hooks(t, someSources(), func(t *testing.T, hook string) {
		in := touched(t, traceAll(t, hook, dir, "rust"), "rust")
		checkStacks(t, in, fmt.Sprintf(`^(core::.* )?rust::pages::touch(::<u32>)?:%d rust::pages::outer:%d rust::main:%d `,
			lineOf(t, touchRust, "// touch\n"), lineOf(t, touchRust, "// outer\n"), lineOf(t, touchRust, "// main\n")))
		if lang := words(in[0].Stack[0].Lang); lang != "rust" {
			t.Errorf("language %s", lang)
		}
	})
}

// Symbols are in a file of their own, which the build-id finds.
// https://github.com/libbpf/blazesym/pull/1610
func TestCaseDebugFile(t *testing.T) {
	compiler(t, "gcc", "objcopy", "strip", "readelf")
	dir := openFolder(t)
	buildTouch(t, dir, "touch", withFrames...)
	build(t, dir, "strip", "-o", "stripped", "touch")
	id := buildID(t, filepath.Join(dir, "touch"))
	if err := os.MkdirAll(filepath.Join(dir, "debug/.build-id", id[:2]), 0o755); err != nil {
		t.Fatal(err)
	}
	build(t, dir, "objcopy", "--only-keep-debug", "touch", filepath.Join("debug/.build-id", id[:2], id[2:]+".debug"))
	hooks(t, someSources(), func(t *testing.T, hook string) {
		cmd := onStageCmd([]string{"debug-folder", filepath.Join(dir, "debug")},
			[]string{self(t), "trace", "--json", "--hook", hook, "--stack=fp", "--", filepath.Join(dir, "stripped")})
		checkFrames(t, touched(t, traceBy(t, hook, cmd), "stripped"), touchFrames(t)...)
	})
}

// The limit of frames cuts the outermost ones off, and says so.
// https://github.com/iovisor/bcc/issues/4735
func TestCaseDeepStack(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	buildTouch(t, dir, "deep", withFrames...)
	hooks(t, someSources(), func(t *testing.T, hook string) {
		const frames = 127 // touch_pages and outer
		tr := traceAll(t, hook, dir, "deep 100", "deep 400")
		in := map[int][]liveFault{} // by process
		for _, f := range tr.faults {
			if f.Process == "deep" && f.Address >= touchAddress && f.Address < touchAddress+touchPages<<12 {
				in[f.PID] = append(in[f.PID], f)
			}
		}
		pids := slices.Sorted(maps.Keys(in))
		if len(pids) != 2 {
			t.Fatalf("records of %d processes", len(pids))
		}
		want := touchFrames(t)
		deeper := fmt.Sprintf("outer:%d", lineOf(t, touchC, "// deeper"))
		checkFrames(t, in[pids[0]], slices.Concat(want[:2], slices.Repeat([]string{deeper}, 100), want[2:])...)
		checkFrames(t, in[pids[1]], slices.Concat(want[:2], slices.Repeat([]string{deeper}, frames-2))...)
		for _, f := range in[pids[1]] {
			if words(f.StackEnd) != "truncated" || len(f.Stack) != frames {
				t.Fatalf("%d frames, %s; want %d, truncated", len(f.Stack), words(f.StackEnd), frames)
			}
		}
	})
}

// The C library keeps no frame pointers: what is missing is said, and nothing is made up.
// https://github.com/iovisor/bcc/issues/4735
func TestCaseIncompleteStack(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	writeSource(t, dir, "hot.c", `#include <stdlib.h>
__attribute__((noinline)) void hot_alloc(void) { for (int i = 0; i < 20000; i++) { char *volatile q = malloc(1000); (void)q; } }
__attribute__((noinline)) void level(int d) { if (d) level(d - 1); else hot_alloc(); __asm__(""); }
int main(void) { level(3); return 0; }
`)
	build(t, dir, slices.Concat([]string{"gcc"}, withFrames, []string{"-o", "hot", "hot.c"})...)
	hooks(t, someSources(), func(t *testing.T, hook string) {
		n := 0
		for _, f := range traceAll(t, hook, dir, "hot").faults {
			if f.Process != "hot" || f.VMA == nil || words(f.VMA.Label) != "[heap]" {
				continue
			}
			n++
			s := shortStack(f.Stack)
			if whole := strings.Contains(s, "hot_alloc") && strings.Contains(s, "main"); !whole && words(f.StackEnd) != "incomplete" && hook != "perf" {
				t.Fatalf("%s is said to be %s", s, words(f.StackEnd))
			}
			for i, frame := range f.Stack {
				if frame.Module == nil || i > 0 && strings.HasPrefix(*frame.Module, "[") {
					t.Fatalf("frame %d of %s is no code", i, s)
				}
			}
		}
		if n < 4000 {
			t.Errorf("%d faults on the heap, want 4000 and more", n)
		}
	})
}

const touchGo = `package main

import (
	"os"
	"syscall"
	"unsafe"
)

//go:noinline
func touchPages(p unsafe.Pointer, size int) {
	for i := 0; i < 400; i = next(i) {
		*(*byte)(unsafe.Add(p, i*size)) = 1 // touch
	}
}

// A function that calls none has no frame.
//
//go:noinline
func next(i int) int { return i + 1 }

//go:noinline
func outer(p unsafe.Pointer, size int) {
	touchPages(p, size) // outer
}

func main() {
	size := syscall.Getpagesize()
	p, errno := mapPages(0x6d000000, uintptr(400*size))
	if errno != 0 || uintptr(p) != 0x6d000000 {
		println(errno)
		os.Exit(1)
	}
	outer(p, size) // main
}
`

const mapGo = `package main

import (
	"syscall"
	"unsafe"
)

func mapPages(at, size uintptr) (unsafe.Pointer, syscall.Errno) {
	const fixedNoReplace = 0x100000
	p, _, errno := syscall.Syscall6(%s, at, size, 3, syscall.MAP_PRIVATE|syscall.MAP_ANON|fixedNoReplace, ^uintptr(0), 0)
	return *(*unsafe.Pointer)(unsafe.Pointer(&p)), errno
}
`

// Go programs, of which symbols are kept apart, and 32-bit ones.
// https://github.com/parca-dev/parca-agent/issues/129
func TestCaseGo(t *testing.T) {
	compiler(t, "go")
	dir := openFolder(t)
	writeSource(t, dir, "touch.go", touchGo)
	compile := func(name, arch, call string, flags ...string) {
		writeSource(t, dir, "map.go", fmt.Sprintf(mapGo, call))
		env := []string{"env", "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOARCH=" + arch}
		build(t, dir, slices.Concat(env, []string{"go", "build", "-o", name}, flags, []string{"touch.go", "map.go"})...)
	}
	programs := []string{"go", "go-stripped"}
	compile("go", runtime.GOARCH, "syscall.SYS_MMAP")
	compile("go-stripped", runtime.GOARCH, "syscall.SYS_MMAP", "-ldflags=-s -w")
	if runtime.GOARCH == "amd64" {
		compile("go32", "386", "192") // mmap2
		err := exec.Command(filepath.Join(dir, "go32")).Run()
		if errors.Is(err, unix.ENOEXEC) {
			t.Log("the kernel runs no 32-bit programs (CONFIG_IA32_EMULATION)")
		} else {
			programs = append(programs, "go32")
		}
	}
	touch := fmt.Sprintf("main.touchPages:%d", lineOf(t, touchGo, "// touch"))
	outer := fmt.Sprintf("main.outer:%d", lineOf(t, touchGo, "// outer"))
	main := fmt.Sprintf("main.main:%d", lineOf(t, touchGo, "// main"))
	hooks(t, someSources(), func(t *testing.T, hook string) {
		tr := traceAll(t, hook, dir, programs...)
		for _, name := range programs[:2] {
			in := touched(t, tr, name)
			checkFrames(t, in, touch, outer, main)
			if f := in[0].Stack[0]; words(f.Lang) != "go" {
				t.Errorf("%s: language %s", name, words(f.Lang))
			}
		}
		if len(programs) > 2 { // it keeps no frame pointers
			in := touched(t, tr, "go32")
			checkFrames(t, in, touch)
			for _, f := range in {
				if len(f.Stack) > 1 && words(f.StackEnd) == "whole" {
					t.Fatalf("a stack of 32-bit code is said to be whole: %s", shortStack(f.Stack))
				}
			}
		}
	})
}

// Our own workloads are Go with frame pointers, also where there is no compiler. The code
// that the kernel maps into every process is named too.
// https://github.com/parca-dev/parca-agent/issues/129
func TestWorkloadsStacks(t *testing.T) {
	hooks(t, someSources(), func(t *testing.T, hook string) {
		const pages = 300
		tr := trace(t, hook, "--stack=fp", "--", self(t), "workload", "touch", "--pages", strconv.Itoa(pages))
		rep := tr.report(t)
		in := ofProcess(tr.inRange(rep), rep.PID)
		if len(in) != pages {
			t.Fatalf("%d records, want %d", len(in), pages)
		}
		for _, f := range in {
			last := len(f.Stack) - 1
			if last < 3 || words(f.Stack[0].Func) != "faultsnoop/workload.touchPages" || words(f.Stack[last].Func) != "runtime.goexit" || words(f.StackEnd) != "whole" && hook != "perf" {
				t.Fatalf("stack is %s: %s", words(f.StackEnd), shortStack(f.Stack))
			}
			for _, frame := range f.Stack[:last] {
				if !strings.HasPrefix(words(frame.Func), "faultsnoop/workload.") || frame.Line == nil {
					t.Fatalf("%s is none of ours: %s", frame.at(), shortStack(f.Stack))
				}
			}
		}
		vdso := 0
		for _, f := range tr.faults {
			if len(f.Stack) > 0 && words(f.Stack[0].Module) == "[vdso]" && f.Stack[0].Func != nil {
				vdso++
			}
		}
		if vdso == 0 {
			t.Error("no function of the vdso")
		}
	})
}

// Programs that are gone before anybody could look them up, by their stacks.
// https://github.com/bpftrace/bpftrace/issues/246
func TestCaseShortLivedStacks(t *testing.T) {
	hooks(t, someSources(), func(t *testing.T, hook string) {
		programs := inGuest(20, 5)
		loop := "i=0; while [ $i -lt " + strconv.Itoa(programs) + " ]; do " + self(t) + " workload touch --pages 5 2>/dev/null; i=$((i+1)); done"
		tr := trace(t, hook, "--stack=fp", "--", "sh", "-c", loop)
		touching := map[int]int{}
		for _, f := range tr.faults {
			if len(f.Stack) > 0 && words(f.Stack[0].Func) == "faultsnoop/workload.touchPages" {
				touching[f.PID]++
			}
		}
		if len(touching) != programs {
			t.Errorf("stacks of %d processes, want %d", len(touching), programs)
		}
		for pid, n := range touching {
			if n < 5 {
				t.Errorf("%d of 5 faults of process %d", n, pid)
			}
		}
	})
}

// The same of programs of the machine that live for no more than a moment.
// https://github.com/bpftrace/bpftrace/issues/246
func TestCaseMomentaryStacks(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	buildTouch(t, dir, "touch", withFrames...)
	hooks(t, someSources(), func(t *testing.T, hook string) {
		const programs = 50
		tr := traceAll(t, hook, dir, slices.Repeat([]string{"touch"}, programs)...)
		want := strings.Join(touchFrames(t), " ")
		all, named := 0, 0
		for _, f := range tr.faults {
			if f.Process == "touch" && f.Address >= touchAddress && f.Address < touchAddress+touchPages<<12 {
				all++
				if strings.HasPrefix(shortStack(f.Stack), want) {
					named++
				}
			}
		}
		if lost := int(tr.lost); all+lost < programs*touchPages {
			t.Errorf("%d records and %d lost, want %d", all, lost, programs*touchPages)
		}
		if named*100 < all*99 {
			t.Errorf("%d of %d stacks are named", named, all)
		}
	})
}

// Frames that are in swap: the stack ends there and says so, and every fault has its record.
// https://github.com/latchset/crypto-auditing/pull/301
func TestCaseColdStackFrames(t *testing.T) {
	if b, err := os.ReadFile("/proc/swaps"); err != nil || strings.Count(string(b), "\n") < 2 {
		t.Skip("no swap is on")
	}
	hooks(t, someSources(), func(t *testing.T, hook string) {
		tr := trace(t, hook, "--stack=fp", "--", "env", mainEnv+"=stage", self(t), "cold")
		if strings.Contains(tr.stderr, "stayed in memory") {
			t.Skip("swap is full: the stack stayed in memory")
		}
		n, cut := 0, 0
		for _, f := range tr.faults {
			if uint64(f.Address) < coldAddress || uint64(f.Address) >= coldAddress+coldPages*uint64(os.Getpagesize()) {
				continue
			}
			n++
			if !strings.HasPrefix(functions(f.Stack), "faultsnoop/cmd/faultsnoop.touchOnColdStack.func1 faultsnoop/cmd/faultsnoop.descend ") {
				t.Fatalf("%s (%s)", shortStack(f.Stack), words(f.StackEnd))
			}
			if len(f.Stack) < 10 && (words(f.StackEnd) == "unreadable" || hook == "perf") {
				cut++
			}
		}
		if n != coldPages || cut*100 < coldPages*99 {
			t.Errorf("%d records, %d with a stack that ends in swap; want %d", n, cut, coldPages)
		}
	})
}

// compiledC runs a copy of a function of its own as if it had been compiled just now, and
// says so in a map, unless it is told not to. Then it becomes another program, if there is one.
const compiledC = `#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define AT ((char *)0x6d000000)
__attribute__((noipa)) void touch(volatile char *p, long size) {
  __asm__ volatile("" : : "r"(__builtin_frame_address(0))); // so it has one
  for (long i = 0; i < 400; i++)
    p[i * size] = 1;
  __asm__ volatile("" ::: "memory");
}
int main(int argc, char **argv) {
  long size = sysconf(_SC_PAGESIZE);
  char *code = mmap((void *)0x6c000000, size, 7, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  char *p = mmap(AT, 400 * size, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  memcpy(code, (void *)touch, 256);
  madvise(p, 400 * size, MADV_NOHUGEPAGE);
  if (strcmp(argv[1], "silent")) {
    char name[64];
    snprintf(name, sizeof name, "/tmp/perf-%d.map", getpid());
    FILE *f = fopen(name, "w");
    fprintf(f, "garbage\n%lx 100 py::leaf:t.py\n", (long)code);
    fclose(f);
  }
  ((void (*)(volatile char *, long))code)(p, size);
  char end;
  read(0, &end, 1); // the map is of a process that is there
  if (argc > 2)
    execv(argv[2], argv + 2);
  return 0;
}
`

// Code that is in no file is named by the map that its process has written, in its own
// namespaces, until the process becomes another program.
// https://github.com/parca-dev/parca-agent/issues/129
func TestCaseCompiledCode(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	writeSource(t, dir, "compiled.c", compiledC)
	build(t, dir, slices.Concat([]string{"gcc"}, withFrames, []string{"-o", "compiled", "compiled.c"})...)
	build(t, dir, "cp", "compiled", "replaced")
	compiled, replaced := filepath.Join(dir, "compiled"), filepath.Join(dir, "replaced")
	leaf := []string{"py::leaf", "main:" + strconv.Itoa(lineOf(t, compiledC, "))code)(p"))}
	hooks(t, someSources(), func(t *testing.T, hook string) {
		// run traces a command until so many of its programs have touched their pages.
		run := func(t *testing.T, cmd *exec.Cmd, programs int64) *traced {
			a := startArmed(t, hook, "--stack=fp", "-c", "compiled", "-c", "replaced",
				"--addr", fmt.Sprintf("%x-%x", touchAddress, touchAddress+touchPages*os.Getpagesize()))
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			cmd.Stderr = os.Stderr
			startKilled(t, cmd)
			for n := range programs {
				a.waitLines(t, 1+(n+1)*touchPages)
				if _, err := stdin.Write([]byte{'\n'}); err != nil {
					t.Fatal(err)
				}
			}
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			return a.stop(t, hook)
		}
		t.Run("here", func(t *testing.T) {
			tr := run(t, exec.Command(compiled, "map"), 1)
			checkFrames(t, touched(t, tr, "compiled"), leaf...)
		})
		t.Run("namespace", func(t *testing.T) {
			cmd := exec.Command(self(t), "container", compiled, "map")
			cmd.Env = append(os.Environ(), mainEnv+"=stage")
			cmd.SysProcAttr = inNamespace()
			checkFrames(t, touched(t, run(t, cmd, 1), "compiled"), leaf...)
		})
		t.Run("exec", func(t *testing.T) {
			tr := run(t, exec.Command(compiled, "map", replaced, "silent"), 2)
			checkFrames(t, touched(t, tr, "compiled"), leaf...)
			checkFrames(t, touched(t, tr, "replaced"), "[anon]+", leaf[1])
		})
	})
}

// lateC runs code that it has made and lists it later, and then as another function.
const lateC = `#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
__attribute__((noipa)) void touch(volatile char *p, long size) {
  __asm__ volatile("" : : "r"(__builtin_frame_address(0))); // so it has one
  for (long i = 0; i < 100; i++)
    p[i * size] = 1;
  __asm__ volatile("" ::: "memory");
}
int main(void) {
  long size = sysconf(_SC_PAGESIZE);
  char *code = mmap((void *)0x6c000000, size, 7, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  char *p = mmap((void *)0x6d000000, 300 * size, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  memcpy(code, (void *)touch, 256);
  madvise(p, 300 * size, MADV_NOHUGEPAGE);
  char name[64], end;
  snprintf(name, sizeof name, "/tmp/perf-%d.map", getpid());
  for (int round = 0; round < 3; round++) {
    if (round) {
      FILE *f = fopen(name, "a");
      fprintf(f, "%lx 100 %s\n", (long)code, round == 1 ? "jit_first" : "jit_second");
      fclose(f);
      usleep(1500 * 1000); // a process without a map is asked for one once a second
    }
    ((void (*)(volatile char *, long))code)(p + round * 100 * size, size);
    read(0, &end, 1);
  }
  unlink(name);
  return 0;
}
`

// Code that is listed after its first fault, or listed anew, has that name from then on.
// https://github.com/parca-dev/parca-agent/issues/129
func TestCaseLateNames(t *testing.T) {
	compiler(t, "gcc")
	dir := openFolder(t)
	writeSource(t, dir, "late.c", lateC)
	build(t, dir, slices.Concat([]string{"gcc"}, withFrames, []string{"-o", "late", "late.c"})...)
	hooks(t, someSources(), func(t *testing.T, hook string) {
		pageSize := os.Getpagesize()
		a := startArmed(t, hook, "--stack=fp", "-c", "late", "--addr", fmt.Sprintf("%x-%x", touchAddress, touchAddress+300*pageSize))
		cmd := exec.Command(filepath.Join(dir, "late"))
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		startKilled(t, cmd)
		for round := range int64(3) {
			a.waitLines(t, 1+(round+1)*100)
			if _, err := stdin.Write([]byte{'\n'}); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
		names := map[string]int{}
		for _, f := range a.stop(t, hook).faults {
			name := fmt.Sprintf("%d ", (int(f.Address)-touchAddress)/(100*pageSize))
			if len(f.Stack) > 0 {
				name += words(f.Stack[0].Func)
			}
			names[name]++
		}
		if len(names) != 3 || names["1 jit_first"] != 100 || names["2 jit_second"] != 100 {
			t.Errorf("rounds have these names: %v", names)
		}
	})
}
