package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// Programs that are gone before anybody could look them up: the kernel's own names of
// their files are taken when they fault.
// https://github.com/bpftrace/bpftrace/issues/246
func TestCaseShortLived(t *testing.T) {
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		programs := inGuest(20, 5)
		loop := "i=0; while [ $i -lt " + strconv.Itoa(programs) + " ]; do " + self(t) + " workload touch --pages 1 2>/dev/null; i=$((i+1)); done"
		tr := trace(t, hook, "--", "sh", "-c", loop)
		own := map[int]bool{}
		var st unix.Stat_t
		if err := unix.Stat(self(t), &st); err != nil {
			t.Fatal(err)
		}
		dev := fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev))
		for _, f := range tr.faults {
			kind := words(f.Kind)
			if kind != "file" && kind != "cow-file" {
				continue
			}
			if f.VMA == nil || f.VMA.Path == nil {
				t.Fatalf("a fault in a file that has no path: %+v", f)
			}
			if *f.VMA.Path == self(t) {
				own[f.PID] = true
				if words(f.VMA.Dev) != dev || f.VMA.Inode == nil || *f.VMA.Inode != st.Ino {
					t.Fatalf("file %s:%v, want %s:%d", words(f.VMA.Dev), f.VMA.Inode, dev, st.Ino)
				}
			}
		}
		if len(own) < programs {
			t.Errorf("faults of %d processes in %s, want %d", len(own), self(t), programs)
		}
	})
}

// A path is told as its process sees it, however long it is and whatever it holds.
func TestWorkloadsPaths(t *testing.T) {
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		base, err := os.MkdirTemp(fileDir(), "faultsnoop-paths-*")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(base)
		strange := filepath.Join(base, "two\nlines \x1b[31m")
		long := base
		for len(long) < 3700 {
			long = filepath.Join(long, strings.Repeat("d", 200))
		}
		inner, outer := filepath.Join(base, "inner"), filepath.Join(base, "outer")
		merged := filepath.Join(base, "merged")
		for _, dir := range []string{strange, long, inner, outer, merged} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		// One trace for all: to start one takes long in an emulated machine.
		write := self(t) + " workload cow-file --pages 4 --dir "
		script := write + "\"$1\" && " + write + "\"$2\""
		want := []string{strange, long}
		if _, err := exec.LookPath("unshare"); err == nil {
			// As in a container: the layers are in a file system that can hold them.
			script += ` && unshare -m sh -c 'mount --bind "$1" "$2" && ` + write + `"$2" && mount -t tmpfs none "$1" &&
				mkdir "$1/lower" "$1/upper" "$1/work" && mount -t overlay -o lowerdir="$1/lower",upperdir="$1/upper",workdir="$1/work" none "$3" &&
				exec ` + write + `"$3"' sh "$3" "$4" "$5"`
			want = append(want, outer, merged)
		} else {
			t.Logf("a bind mount is not tried: %v", err)
		}
		tr := trace(t, hook, "--", "sh", "-c", script, "sh", strange, long, inner, outer, merged)
		reports := workload.NewDecoder(strings.NewReader(tr.stderr))
		for _, dir := range want {
			rep, err := reports.Next()
			if err != nil {
				t.Fatalf("%q: %v: %s", dir, err, tr.stderr)
			}
			if filepath.Dir(rep.File) != dir {
				t.Fatalf("the workload's file is %q, want it in %q", rep.File, dir)
			}
			in := ofProcess(tr.inRange(rep), rep.PID)
			if int64(len(in)) != rep.Faults {
				t.Errorf("%q: %d records, want %d", dir, len(in), rep.Faults)
			}
			for _, f := range in {
				if f.VMA == nil || f.VMA.Path == nil || *f.VMA.Path != rep.File || f.VMA.Deleted == nil || *f.VMA.Deleted {
					t.Fatalf("vma %+v, want path %q", f.VMA, rep.File)
				}
			}
		}
	})
}
