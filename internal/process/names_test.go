package process

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// One walk names all cgroups, the root and those below it.
func TestCgroupNames(t *testing.T) {
	root := MountPoint("cgroup2")
	if root == "" {
		if names := CgroupNames(); len(names) != 0 {
			t.Errorf("no cgroup v2 is mounted, but there are %v", names)
		}
		return
	}
	folders, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	id := func(path string) uint64 {
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil {
			return 0
		}
		return st.Ino
	}
	want := map[string]uint64{"/": id(root)}
	for _, d := range folders {
		if d.IsDir() {
			want["/"+d.Name()] = id(filepath.Join(root, d.Name()))
		}
	}
	names := CgroupNames()
	for name, ino := range want {
		// Others may have gone meanwhile.
		if ino != 0 && names[ino] != name && id(filepath.Join(root, name)) == ino {
			t.Errorf("cgroup %d is called %q, want %q", ino, names[ino], name)
		}
	}
}
