package main

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"faultsnoop/workload"
)

// withSymbols is a program that has workloads and a table of symbols: this one, or, as
// go test leaves them out, one with them.
func withSymbols(t *testing.T) string {
	t.Helper()
	if f, err := elf.Open(self(t)); err == nil {
		defer f.Close()
		if f.SectionByType(elf.SHT_SYMTAB) != nil {
			return self(t)
		}
	}
	path := filepath.Join(t.TempDir(), "faultsnoop")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("building a program with symbols: %v\n%s", err, out)
	}
	return path
}

// The pages of three arrays of a known size: each has one fault, which tells the
// section and the array, and so do none elsewhere.
func TestWorkloadsSymbols(t *testing.T) {
	needRoot(t)
	exe := withSymbols(t)
	hooks(t, append(slices.Clone(someHooks()), "perf"), func(t *testing.T, hook string) {
		tr := trace(t, hook, "--columns", "pid,address,section,symbol", "--", "env", mainEnv+"=1", exe, "workload", "image")
		rep := tr.report(t)
		for _, th := range rep.Threads {
			checkPlaces(t, ofProcess(tr.faults, rep.PID), th.Ranges[0])
		}
	})
}

func checkPlaces(t *testing.T, faults []liveFault, r workload.Range) {
	t.Helper()
	var within int64
	for _, f := range faults {
		at := int64(f.Address) - int64(r.Start)
		symbol := fmt.Sprintf("%s+%#x", r.Symbol, r.SymbolOffset+at)
		inside := at >= 0 && uint64(f.Address) < uint64(r.End)
		switch {
		case inside && (words(f.Section) != r.Section || r.Symbol != "" && words(f.Symbol) != symbol):
			t.Fatalf("%#x is %s in %s, want %s in %s", f.Address, words(f.Symbol), words(f.Section), symbol, r.Section)
		case inside:
			within++
		}
	}
	if within != r.Faults {
		t.Errorf("%d records in %s, want %d", within, r.Section, r.Faults)
	}
}

// A program that is replaced by another under the same name, and with the same inode
// number if the file system likes, has no names of the other.
func TestWorkloadsReplaced(t *testing.T) {
	needRoot(t)
	exe := withSymbols(t)
	hooks(t, someHooks()[:1], func(t *testing.T, hook string) {
		path := copyOf(t, exe, "replaced")
		script := `"$1" workload image; rm "$1"; cp /bin/sh "$1"`
		tr := trace(t, hook, "--columns", "pid,address,section,symbol", "--", "env", mainEnv+"=1", "sh", "-c", script, "sh", path)
		rep := tr.report(t)
		for _, th := range rep.Threads {
			r := th.Ranges[0]
			for _, f := range ofProcess(tr.faults, rep.PID) {
				if uint64(f.Address) < uint64(r.Start) || uint64(f.Address) >= uint64(r.End) {
					continue
				}
				if f.Section != nil && *f.Section != r.Section {
					t.Fatalf("%#x is in %s, want null or %s", f.Address, *f.Section, r.Section)
				}
			}
		}
	})
}

func copyOf(t *testing.T, from, name string) string {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}
