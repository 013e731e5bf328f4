package main

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// liveFrame is an element of the arrays stack and mapper. Pointers are nil for null.
type liveFrame struct {
	Func    *string
	File    *string
	Line    *uint32
	Module  *string
	Offset  *hexNumber
	BuildID *string `json:"build_id"`
	Lang    *string
	Inlined bool
}

// at is the frame in short: FUNCTION:LINE, or the module where no function is known.
func (f *liveFrame) at() string {
	switch {
	case f.Func != nil && f.Line != nil:
		return fmt.Sprintf("%s:%d", *f.Func, *f.Line)
	case f.Func != nil:
		return *f.Func
	}
	return filepath.Base(words(f.Module)) + "+"
}

// shortStack is a stack in short, the innermost frame first.
func shortStack(frames []liveFrame) string {
	at := make([]string, len(frames))
	for i := range frames {
		at[i] = frames[i].at()
	}
	return strings.Join(at, " ")
}

// What the programs of these tests touch, at an address that also 32-bit programs have.
const (
	touchAddress = 0x6d000000
	touchPages   = 400
)

// touched are the faults of a program's run on the memory that it is known to touch.
func touched(t *testing.T, tr *traced, process string) []liveFault {
	t.Helper()
	var in []liveFault
	for _, f := range tr.faults {
		if f.Process == process && f.Address >= touchAddress && uint64(f.Address) < touchAddress+touchPages*uint64(os.Getpagesize()) {
			in = append(in, f)
		}
	}
	if len(in) != touchPages {
		t.Fatalf("%d records of %s, want %d; stderr:\n%s", len(in), process, touchPages, tr.stderr)
	}
	return in
}

// checkFrames fails unless 99 % of the faults have a stack that begins with these frames.
func checkFrames(t *testing.T, faults []liveFault, want ...string) {
	t.Helper()
	checkStacks(t, faults, "^"+regexp.QuoteMeta(strings.Join(want, " ")+" "))
}

// checkStacks fails unless 99 % of the faults have a stack that matches, in short and with a
// blank behind it.
func checkStacks(t *testing.T, faults []liveFault, want string) {
	t.Helper()
	pattern := regexp.MustCompile(want)
	var wrong, all int
	var example string
	for _, f := range faults {
		all++
		if s := shortStack(f.Stack); !pattern.MatchString(s + " ") {
			wrong++
			example = fmt.Sprintf("%s (%s)", s, words(f.StackEnd))
		}
	}
	if wrong*100 > all {
		t.Errorf("%d of %d stacks do not match %s, but are as %s", wrong, all, pattern, example)
	}
}

// compiler skips a test where programs cannot be made, as in guests of the kernel matrix.
func compiler(t *testing.T, commands ...string) {
	t.Helper()
	needRoot(t)
	for _, c := range commands {
		if _, err := exec.LookPath(c); err != nil {
			t.Skipf("%s, which makes the programs of this test, is not installed", c)
		}
	}
}

// build runs a command in a folder.
func build(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%q: %v\n%s", args, err, out)
	}
}

// writeSource writes a file into a folder and returns its name.
func writeSource(t *testing.T, dir, name, text string) string {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

// lineOf is the line of a text that has a word, from 1.
func lineOf(t *testing.T, text, word string) int {
	t.Helper()
	before, _, ok := strings.Cut(text, word)
	if !ok {
		t.Fatalf("no line has %q", word)
	}
	return strings.Count(before, "\n") + 1
}

// openFolder is a temporary folder that other users can read.
func openFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(fileDir(), "faultsnoop-stack-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// enlarge makes a program of more than 2 GiB, most of which is a hole, of one of 64 bits: all that
// is not loaded, with symbols and lines, is behind the hole.
func enlarge(t *testing.T, from, to string) {
	t.Helper()
	const hole = 3 << 30
	program, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	write := func(b []byte, off uint64) {
		t.Helper()
		if _, err := f.WriteAt(b, int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	order := binary.NativeEndian
	// Places in the structures Elf64_Ehdr and Elf64_Shdr.
	const sectionsAt, sectionSize, sectionCount, flagsAt, offsetAt, sizeAt = 40, 64, 60, 8, 24, 32
	sections := order.Uint64(program[sectionsAt:])
	for i := range uint64(order.Uint16(program[sectionCount:])) {
		header := program[sections+i*sectionSize:][:sectionSize]
		off, size := order.Uint64(header[offsetAt:]), order.Uint64(header[sizeAt:])
		if elf.SectionFlag(order.Uint64(header[flagsAt:]))&elf.SHF_ALLOC != 0 || size == 0 {
			continue
		}
		write(program[off:off+size], off+hole)
		clear(program[off : off+size])
		order.PutUint64(header[offsetAt:], off+hole)
	}
	order.PutUint64(program[sectionsAt:], sections+hole)
	write(program[sections:], sections+hole)
	write(program, 0)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// inSymbol reports whether an offset in a file lies in one of its functions, by its table
// of symbols, as debug/elf reads it.
func inSymbol(t *testing.T, path, name string, offset hexNumber) bool {
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
		if s.Name == name && uint64(offset) >= s.Value && uint64(offset) < s.Value+s.Size {
			return true
		}
	}
	return false
}

// buildID of a file, as readelf tells it.
func buildID(t *testing.T, path string) string {
	t.Helper()
	out, err := exec.Command("readelf", "-n", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(out), "Build ID: ")
	if !ok {
		t.Fatalf("%s has no build-id", path)
	}
	return strings.Fields(rest)[0]
}
