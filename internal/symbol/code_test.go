package symbol

import (
	"bufio"
	"bytes"
	"debug/elf"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
)

// need skips a test if a command is not there.
func need(t testing.TB, commands ...string) {
	t.Helper()
	for _, c := range commands {
		if _, err := exec.LookPath(c); err != nil {
			t.Skipf("%s is not installed", c)
		}
	}
}

func run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func openCode(t testing.TB, path string) *Code {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	c, err := newCode(f, func(buildID, link string, crc uint32, hasLink bool) *object {
		d, o := findDebugFile(0, path, buildID, link, crc, hasLink)
		if d != nil {
			t.Cleanup(func() { d.Close() })
		}
		return o
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// marks are the lines of a source that have a text, from 1.
func mark(t testing.TB, source, text string) uint32 {
	t.Helper()
	for i, line := range strings.Split(source, "\n") {
		if strings.Contains(line, text) {
			return uint32(i + 1)
		}
	}
	t.Fatalf("no line has %q", text)
	return 0
}

const cSource = `
#include <stdlib.h>
volatile char sink;
static inline __attribute__((always_inline)) void deepest(char *p) {
	*(volatile char *)p = 1; // deepest
}
static inline __attribute__((always_inline)) void middle(char *p) {
	deepest(p); // middle
}
__attribute__((noinline)) void touch_pages(char *p, long n) {
	for (long i = 0; i < n; i += 4096)
		middle(p + i); // outer
}
__attribute__((noinline)) static long plain(long n) {
	sink = n; // plain
	return n + 1;
}
__asm__(".text\n.globl assembled\nassembled:\n\tnop\n\tnop\n\tret\n");
int main(int argc, char **argv) {
	char *p = malloc(16 << 12);
	touch_pages(p, argc << 12); // main
	return plain(argc) == 1;
}
`

// symbolNamed is a function of the file's own table of symbols, as debug/elf reads it.
func symbolNamed(t testing.TB, path, name string) elf.Symbol {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range symbols {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("%s has no symbol %s", path, name)
	return elf.Symbol{}
}

// builtC is one way to build the program.
type builtC struct {
	name  string
	flags []string
	lines bool
}

var builds = []builtC{
	{"plain", []string{"-O1"}, false},
	{"frame pointers", []string{"-O1", "-g", "-fno-omit-frame-pointer"}, true},
	{"no frame pointers", []string{"-O2", "-g", "-fomit-frame-pointer"}, true},
	{"DWARF 4", []string{"-O2", "-gdwarf-4"}, true},
	{"DWARF 3", []string{"-O2", "-gdwarf-3"}, true},
	{"DWARF 64", []string{"-O2", "-gdwarf-5", "-gdwarf64"}, true},
	{"compressed", []string{"-O2", "-g", "-gz=zlib"}, true},
	{"old compressed", []string{"-O2", "-g", "-gz=zlib-gnu"}, true},
	{"static-pie", []string{"-O2", "-g", "-static-pie"}, true},
	{"static", []string{"-O2", "-g", "-static"}, true},
	{"no-pie", []string{"-O2", "-g", "-no-pie"}, true},
	{"one segment", []string{"-O2", "-g", "-Wl,-z,noseparate-code"}, true},
	{"aligned", []string{"-O2", "-g", "-Wl,-z,max-page-size=2097152"}, true},
	{"sections", []string{"-O2", "-g", "-ffunction-sections", "-Wl,--gc-sections"}, true},
	{"link time", []string{"-O2", "-g", "-flto"}, true},
	{"lld", []string{"-O2", "-g", "-fuse-ld=lld"}, true},
}

// buildC builds the program; the folder has no other name than the one that DWARF has.
func buildC(t testing.TB, b builtC) string {
	t.Helper()
	need(t, "gcc")
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "touch.c"), []byte(cSource), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, flag := range b.flags {
		if flag == "-fuse-ld=lld" {
			need(t, "ld.lld")
		}
	}
	run(t, dir, "gcc", append(b.flags, "-o", "touch", "touch.c")...)
	return filepath.Join(dir, "touch")
}

// show is FUNCTION FILE:LINE of frames, with i if it is inlined.
func show(frames []fault.Frame) string {
	var out []string
	for _, f := range frames {
		s := f.Func
		if f.Line != 0 {
			s += fmt.Sprintf(" %s:%d", path.Base(f.File), f.Line)
		}
		if f.Inlined {
			s += " i"
		}
		out = append(out, s)
	}
	return strings.Join(out, ", ")
}

// checkC asks for the functions of the program where they are known to be.
func checkC(t *testing.T, c *Code, truth string, lines, statics bool) {
	t.Helper()
	deepest, middle, outer := mark(t, cSource, "// deepest"), mark(t, cSource, "// middle"), mark(t, cSource, "// outer")
	touch := symbolNamed(t, truth, "touch_pages")
	inlined := false
	for addr := touch.Value; addr < touch.Value+touch.Size; addr++ {
		frames := c.At(addr)
		if last := frames[len(frames)-1]; last.Func != "touch_pages" || last.Inlined || last.Offset != addr {
			t.Fatalf("touch_pages+%d: %s", addr-touch.Value, show(frames))
		}
		want := fmt.Sprintf("deepest touch.c:%d i, middle touch.c:%d i, touch_pages touch.c:%d", deepest, middle, outer)
		inlined = inlined || show(frames) == want
	}
	if inlined != lines {
		t.Errorf("inlined functions were found: %t, want %t", inlined, lines)
	}
	if frames := c.At(touch.Value + touch.Size); frames[len(frames)-1].Func == "touch_pages" {
		t.Error("touch_pages goes beyond its end")
	}
	main := symbolNamed(t, truth, "main")
	seen := false
	for addr := main.Value; addr < main.Value+main.Size; addr++ {
		seen = seen || show(c.At(addr)) == fmt.Sprintf("main touch.c:%d", mark(t, cSource, "// main"))
	}
	if seen != lines {
		t.Errorf("the line of main was found: %t, want %t", seen, lines)
	}
	if statics {
		plain := symbolNamed(t, truth, "plain")
		if frames := c.At(plain.Value); frames[len(frames)-1].Func != "plain" {
			t.Errorf("plain: %s", show(frames))
		}
		// It has no size: it goes on to the next symbol.
		assembled := symbolNamed(t, truth, "assembled")
		if assembled.Size != 0 {
			t.Fatal("the assembler has given it a size")
		}
		for i := range uint64(3) {
			if frames := c.At(assembled.Value + i); frames[len(frames)-1].Func != "assembled" {
				t.Errorf("assembled+%d: %s", i, show(frames))
			}
		}
	}
}

func TestC(t *testing.T) {
	for _, b := range builds {
		t.Run(b.name, func(t *testing.T) {
			bin := buildC(t, b)
			c := openCode(t, bin)
			checkC(t, c, bin, b.lines, b.name != "sections")
			if c.BuildID == "" && b.name != "lld" {
				t.Error("it has no build-id")
			}
			checkOffsets(t, c, bin)
			// Of the last two binutils 2.40 tells nothing.
			if _, err := exec.LookPath("addr2line"); err != nil || !b.lines || b.name == "link time" || b.name == "DWARF 64" {
				return
			}
			var addrs []uint64
			for _, name := range []string{"main", "touch_pages", "plain"} {
				s := symbolNamed(t, bin, name)
				for addr := s.Value; addr < s.Value+s.Size; addr++ {
					addrs = append(addrs, addr)
				}
			}
			compare(t, c, bin, addrs)
		})
	}
}

// checkOffsets compares places in the file with the bytes that a loader would put at their
// addresses.
func checkOffsets(t *testing.T, c *Code, bin string) {
	t.Helper()
	s := symbolNamed(t, bin, "touch_pages")
	f, err := elf.Open(bin)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	text := f.Section(".text")
	for _, section := range f.Sections {
		if section.Flags&elf.SHF_EXECINSTR != 0 && s.Value >= section.Addr && s.Value-section.Addr < section.Size {
			text = section
		}
	}
	if addr, ok := c.AddrOf(text.Offset + (s.Value - text.Addr)); !ok || addr != s.Value {
		t.Errorf("the address is %#x, want %#x", addr, s.Value)
	}
	if _, ok := c.AddrOf(1 << 40); ok {
		t.Error("what is not in the file has an address")
	}
}

// TestSeparate: what was stripped is elsewhere.
func TestSeparate(t *testing.T) {
	need(t, "objcopy", "strip")
	bin := buildC(t, builtC{flags: []string{"-O2", "-g"}})
	dir := filepath.Dir(bin)
	run(t, dir, "objcopy", "--only-keep-debug", "touch", "touch.dbg")
	run(t, dir, "strip", "-o", "bare", "touch")
	touch := symbolNamed(t, bin, "touch_pages")

	bare := openCode(t, filepath.Join(dir, "bare"))
	for addr := touch.Value; addr <= touch.Value+touch.Size; addr++ {
		if f := bare.At(addr); len(f) != 1 || f[0].Func != "" || f[0].Line != 0 || f[0].Offset != addr || f[0].BuildID != bare.BuildID {
			t.Fatalf("a stripped program has %+v", f)
		}
	}

	for _, where := range []string{"touch.dbg", ".debug/touch.dbg"} {
		linked := filepath.Join(t.TempDir(), "linked")
		if err := os.MkdirAll(filepath.Join(filepath.Dir(linked), ".debug"), 0o755); err != nil {
			t.Fatal(err)
		}
		run(t, dir, "objcopy", "--add-gnu-debuglink=touch.dbg", "bare", linked)
		debug := filepath.Join(filepath.Dir(linked), where)
		run(t, dir, "cp", "touch.dbg", debug)
		checkC(t, openCode(t, linked), bin, true, true)

		// One byte more has another CRC.
		f, err := os.OpenFile(debug, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("x"); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if f := openCode(t, linked).At(touch.Value); f[0].Func != "" {
			t.Errorf("a debug file with another CRC is believed: %+v", f)
		}
	}

	if os.Geteuid() != 0 {
		t.Skip("only root may write to /usr/lib/debug")
	}
	id := bare.BuildID
	byID := filepath.Join(debugFolder, ".build-id", id[:2], id[2:]+".debug")
	if err := os.MkdirAll(filepath.Dir(byID), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.Remove(byID)
		os.Remove(filepath.Dir(byID)) // unless there are others
	})
	run(t, dir, "cp", "touch.dbg", byID)
	checkC(t, openCode(t, filepath.Join(dir, "bare")), bin, true, true)
	// As distributions have it: a link to the file by its name.
	os.Remove(byID)
	if err := os.Symlink(filepath.Join(dir, "touch.dbg"), byID); err != nil {
		t.Fatal(err)
	}
	checkC(t, openCode(t, filepath.Join(dir, "bare")), bin, true, true)
	other := buildC(t, builtC{flags: []string{"-O1", "-g"}})
	os.Remove(byID)
	run(t, dir, "cp", other, byID)
	if f := openCode(t, filepath.Join(dir, "bare")).At(touch.Value); f[0].Func != "" {
		t.Errorf("a debug file with another build-id is believed: %+v", f)
	}
}

// TestDynamic: what is exported has its name, and ends where it does.
func TestDynamic(t *testing.T) {
	need(t, "strip")
	bin := buildC(t, builtC{flags: []string{"-O2", "-shared", "-fPIC"}})
	dir := filepath.Dir(bin)
	run(t, dir, "strip", "-o", "bare", "touch")
	c := openCode(t, filepath.Join(dir, "bare"))
	checkC(t, c, bin, false, false)
	if f := c.At(symbolNamed(t, bin, "plain").Value); f[0].Func != "" {
		t.Errorf("a function that is not exported is %+v", f)
	}
	if f := c.At(symbolNamed(t, bin, "assembled").Value); f[0].Func != "" {
		t.Errorf("a symbol without an end is %+v", f)
	}
}

// TestMiniDebugInfo: symbols that are packed into the program itself.
func TestMiniDebugInfo(t *testing.T) {
	need(t, "objcopy", "strip", "xz")
	bin := buildC(t, builtC{flags: []string{"-O2", "-g"}})
	dir := filepath.Dir(bin)
	run(t, dir, "objcopy", "-S", "--keep-symbol=plain", "--keep-symbol=touch_pages", "--keep-symbol=main",
		"--keep-symbol=assembled", "--remove-section=.gnu_debuglink", "touch", "mini")
	for _, check := range []string{"crc64", "crc32", "sha256", "none"} {
		run(t, dir, "xz", "-kf", "--check="+check, "mini")
		run(t, dir, "strip", "-o", "bare", "touch")
		run(t, dir, "objcopy", "--add-section", ".gnu_debugdata=mini.xz", "bare", "packed")
		checkC(t, openCode(t, filepath.Join(dir, "packed")), bin, false, true)
	}
	b, err := os.ReadFile(filepath.Join(dir, "mini.xz"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unxz(bytes.NewReader(b), 100); err == nil {
		t.Error("more than the limit is unpacked")
	}
}

const cppSource = `
#include <vector>
namespace space {
struct thing {
	volatile char *p;
	template <typename T> __attribute__((noinline)) void touch(T n) const {
		for (T i = 0; i < n; i += 4096)
			p[i] = 1; // touch
	}
};
}
int main(int argc, char **) {
	std::vector<char> v(65536);
	space::thing{v.data()}.touch<long>(argc * 4096); // main
}
`

func TestCPP(t *testing.T) {
	need(t, "g++")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "p.cc"), []byte(cppSource), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, flag := range []string{"-g", "-g0"} {
		run(t, dir, "g++", "-O2", flag, "-o", "p", "p.cc")
		bin := filepath.Join(dir, "p")
		s := symbolNamed(t, bin, "_ZNK5space5thing5touchIlEEvT_")
		found := ""
		c := openCode(t, bin)
		for addr := s.Value; addr < s.Value+s.Size; addr++ {
			f := c.At(addr)
			if f[0].Lang != fault.LangCPP {
				t.Fatalf("the language is %v", f[0].Lang)
			}
			if flag == "-g0" || f[0].Line == mark(t, cppSource, "// touch") {
				found = show(f)
			}
		}
		want := fmt.Sprintf("space::thing::touch<long> p.cc:%d", mark(t, cppSource, "// touch"))
		if flag == "-g0" {
			want = "space::thing::touch<long>"
		}
		same(t, flag, found, want)
	}
}

const inlinedSource = `
#include <vector>
#define INLINE __attribute__((always_inline)) inline
namespace outer {
namespace {
struct thing {
	INLINE void method(volatile char *p) { *p = 1; }
	template <class T> INLINE void generic(volatile T *p) { *p = 2; }
	struct inner;
};
struct thing::inner {
	INLINE void deep(volatile char *p) { *p = 3; }
};
INLINE void helper(volatile char *p) { *p = 4; }
}
inline namespace v1 {
class shown {
public:
	INLINE void method(volatile char *p) { *p = 5; }
};
}
__attribute__((noinline)) void holder(volatile char *p) {
	struct local {
		INLINE static void method(volatile char *p) { *p = 6; }
	};
	local::method(p);
}
}
static INLINE void plain(volatile char *p) { *p = 7; }
int main(int argc, char **argv) {
	std::vector<long> v;
	for (long i = 0; i < argc; i++)
		v.push_back(i);
	outer::thing t;
	t.method(argv[0]);
	t.generic<char>(argv[0]);
	outer::thing::inner().deep(argv[0]);
	outer::helper(argv[0]);
	outer::shown().method(argv[0]);
	outer::holder(argv[0]);
	plain(argv[0]);
	return v.size();
}
`

// TestQualifiedNames: functions that were inlined have the names of what they are in, though
// the linker knows none of them.
func TestQualifiedNames(t *testing.T) {
	ran := false
	for _, compiler := range []string{"g++", "clang++", "clang++-19"} {
		if _, err := exec.LookPath(compiler); err != nil {
			continue
		}
		for _, flags := range [][]string{{"-g"}, {"-gdwarf-4", "-flto"}} {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "p.cc"), []byte(inlinedSource), 0o644); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(compiler, slices.Concat([]string{"-O2"}, flags, []string{"-o", "p", "p.cc"})...)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Logf("%s %q: %v: %s", compiler, flags, err, out)
				continue // it comes without what it needs for this
			}
			ran = true
			bin := filepath.Join(dir, "p")
			c := openCode(t, bin)
			got := map[string]bool{}
			for _, name := range []string{"main", "_ZN5outer6holderEPVc"} {
				s := symbolNamed(t, bin, name)
				for addr := s.Value; addr < s.Value+s.Size; addr++ {
					for _, f := range c.At(addr) {
						if f.Inlined {
							got[f.Func] = true
						}
					}
				}
			}
			for _, want := range []string{
				"std::vector<long, std::allocator<long> >::push_back",
				"outer::(anonymous namespace)::thing::method",
				"outer::(anonymous namespace)::thing::generic<char>",
				"outer::(anonymous namespace)::thing::inner::deep",
				"outer::(anonymous namespace)::helper",
				"outer::v1::shown::method",
				"local::method", // to some linkers it is in holder
				"plain",
			} {
				if !got[want] && !(want == "local::method" && got["outer::holder(char volatile*)::local::method"]) {
					t.Errorf("%s %q: no %q in %q", compiler, flags, want, slices.Sorted(maps.Keys(got)))
				}
			}
		}
	}
	if !ran {
		t.Skip("no compiler for C++")
	}
}

const rustSource = `
mod space {
    #[inline(never)]
    pub fn touch<T: Into<usize>>(p: &mut [u8], n: T) {
        let n = n.into();
        let mut i = 0;
        while i < n {
            p[i] = 1; // touch
            i += 4096;
        }
    }
}
fn main() {
    let mut v = vec![0u8; 65536];
    space::touch::<u16>(&mut v, std::env::args().count() as u16); // main
    std::hint::black_box(&v);
}
`

func TestRust(t *testing.T) {
	need(t, "rustc")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "p.rs"), []byte(rustSource), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, mangling := range []string{"legacy", "v0"} {
		cmd := exec.Command("rustc", "-O", "-g", "-Csymbol-mangling-version="+mangling, "p.rs")
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			if mangling == "legacy" { // newer compilers have it only for themselves
				continue
			}
			t.Fatalf("rustc: %v\n%s", err, out)
		}
		bin := filepath.Join(dir, "p")
		f, err := elf.Open(bin)
		if err != nil {
			t.Fatal(err)
		}
		symbols, _ := f.Symbols()
		f.Close()
		c := openCode(t, bin)
		found := ""
		for _, s := range symbols {
			if !strings.Contains(s.Name, "space") {
				continue
			}
			for addr := s.Value; addr < s.Value+s.Size; addr++ {
				frames := c.At(addr)
				if last := frames[len(frames)-1]; last.Lang == fault.LangRust && last.Line == mark(t, rustSource, "// touch") {
					found = last.Func
				}
			}
		}
		if found != "p::space::touch" && found != "p::space::touch::<u16>" {
			t.Errorf("%s: the function is %q", mangling, found)
		}
	}
}

const goSource = `package main

import "os"

//go:noinline
func touchPages(b []byte) {
	for i := 0; i < len(b); i += 4096 {
		set(b, i) // outer
	}
}

func set(b []byte, i int) {
	b[i] = 1 // inner
}

func main() {
	touchPages(make([]byte, len(os.Args)<<12)) // main
}
`

func TestGo(t *testing.T) {
	need(t, "go")
	dir := t.TempDir()
	for name, text := range map[string]string{"p.go": goSource, "go.mod": "module p\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	inner, outer, main := mark(t, goSource, "// inner"), mark(t, goSource, "// outer"), mark(t, goSource, "// main")
	for _, args := range [][]string{
		nil,
		{"-ldflags=-s -w"},
		{"-ldflags=-w"},
		{"-buildmode=pie", "-ldflags=-s -w"},
		{"-buildmode=pie"},
		{"-ldflags=-s -w -linkmode=external"},
		{"-buildmode=pie", "-ldflags=-s -w -linkmode=external"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			if strings.Contains(strings.Join(args, " "), "external") {
				need(t, "gcc")
			}
			run(t, dir, "go", append(append([]string{"build", "-o", "p"}, args...), ".")...)
			bin := filepath.Join(dir, "p")
			c := openCode(t, bin)
			if c.golang == nil {
				t.Fatal("there is no table of functions")
			}
			// The truth is in the order of the functions in the table itself, and in the
			// symbols where there are any.
			var outers, mains int
			for i := range c.golang.count {
				begin, _ := c.golang.entry(i)
				end, _ := c.golang.entry(i + 1)
				frames := c.At(begin)
				switch name := frames[len(frames)-1].Func; name {
				case "main.touchPages":
					for addr := begin; addr < end; addr++ {
						f := c.At(addr)
						if f[len(f)-1].Func != name || f[0].Lang != fault.LangGo {
							t.Fatalf("%s+%d: %s", name, addr-begin, show(f))
						}
						if show(f) == fmt.Sprintf("main.set p.go:%d i, main.touchPages p.go:%d", inner, outer) {
							outers++
						}
					}
				case "main.main":
					for addr := begin; addr < end; addr++ {
						if show(c.At(addr)) == fmt.Sprintf("main.main p.go:%d", main) {
							mains++
						}
					}
				}
			}
			if outers == 0 || mains == 0 {
				t.Errorf("%d instructions are of the inlined function, %d of main", outers, mains)
			}
			if !strings.Contains(strings.Join(args, " "), "-s") {
				s := symbolNamed(t, bin, "main.touchPages")
				if f := c.At(s.Value); f[len(f)-1].Func != "main.touchPages" {
					t.Errorf("at the symbol main.touchPages there is %s", show(f))
				}
			}
		})
	}
}

// TestThisProgram: Go's runtime knows the functions and lines of the test itself.
func TestThisProgram(t *testing.T) {
	c := openCode(t, "/proc/self/exe")
	var base uint64
	found := false
	self, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	exe, _ := os.Readlink("/proc/self/exe")
	for line := range strings.Lines(string(self)) {
		if strings.Contains(line, exe) && !found {
			first, _, _ := strings.Cut(line, "-")
			at, err := strconv.ParseUint(first, 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			addr, ok := c.object.loadOf(0)
			if !ok {
				t.Fatal("the first segment is not there")
			}
			base, found = at-addr, true
		}
	}
	pcs := make([]uintptr, 10)
	pcs = pcs[:runtime.Callers(1, pcs)]
	want := runtime.CallersFrames(pcs)
	var got []fault.Frame
	for _, pc := range pcs {
		got = append(got, c.At(uint64(pc)-base-1)...)
	}
	for i := 0; ; i++ {
		f, more := want.Next()
		if i >= len(got) || got[i].Func != f.Function || got[i].File != f.File || int(got[i].Line) != f.Line {
			t.Errorf("frame %d is %+v, want %s %s:%d", i, got[i:min(i+1, len(got))], f.Function, f.File, f.Line)
		}
		if !more {
			break
		}
	}
}

// compare compares with binutils, instruction by instruction.
func compare(t *testing.T, c *Code, bin string, addrs []uint64) {
	t.Helper()
	var in strings.Builder
	for _, addr := range addrs {
		fmt.Fprintf(&in, "%#x\n", addr)
	}
	cmd := exec.Command("addr2line", "-aifC", "-e", bin)
	cmd.Stdin = strings.NewReader(in.String())
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	want := map[uint64]string{}
	var addr uint64
	lines := bufio.NewScanner(bytes.NewReader(out))
	function := ""
	for lines.Scan() {
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, "0x"):
			addr, _ = strconv.ParseUint(line[2:], 16, 64)
			function = ""
		case function == "":
			function = line
		default:
			file, rest, _ := cutLast(line, ':')
			number, _, _ := strings.Cut(rest, " ")
			want[addr] += fmt.Sprintf("%s %s:%s, ", function, path.Base(file), number)
			function = ""
		}
	}
	wrong := 0
	for _, addr := range addrs {
		var got strings.Builder
		for _, f := range c.At(addr) {
			file, line := "??", "?"
			if f.Line != 0 {
				file, line = path.Base(f.File), fmt.Sprint(f.Line)
			}
			fmt.Fprintf(&got, "%s %s:%s, ", f.Func, file, line)
		}
		if got.String() != want[addr] {
			if wrong++; wrong < 10 {
				t.Errorf("%#x: %s\nwant    %s", addr, got.String(), want[addr])
			}
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d are wrong", wrong, len(addrs))
	}
}

// TestHuge: the size of a file says nothing about what is kept of it.
func TestHuge(t *testing.T) {
	bin := buildC(t, builtC{flags: []string{"-O2", "-g"}})
	before := openCode(t, bin)
	checkC(t, before, bin, true, true)
	if err := os.Truncate(bin, 2<<30+1); err != nil {
		t.Fatal(err)
	}
	after := openCode(t, bin)
	checkC(t, after, bin, true, true)
	if after.Size() != before.Size() || after.Size() > 1<<20 {
		t.Errorf("%d bytes are kept of 2 GiB, %d of the same file before", after.Size(), before.Size())
	}
}
