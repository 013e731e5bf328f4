package process

import (
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// UserName is the name of a user, empty if it has none.
func UserName(uid uint32) string {
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return ""
	}
	return u.Username
}

// CgroupNames are the paths of all cgroups v2 there are now, below the place where they
// are mounted, by their ids, which are the inodes of their folders. There are none if v2 is
// not mounted. It walks through all of them: thousands on a large machine.
func CgroupNames() map[uint64]string {
	names := map[uint64]string{}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return names
	}
	root := mountPoint(string(mounts), "cgroup2")
	if root == "" {
		return names
	}
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // it has gone meanwhile
		}
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil {
			return nil
		}
		name := "/"
		if rel, err := filepath.Rel(root, path); err == nil && rel != "." {
			name += rel
		}
		names[st.Ino] = name
		return nil
	})
	return names
}

// mountPoint is the first place where a type of file system is mounted, by a text like
// /proc/self/mounts; empty if there is none.
func mountPoint(mounts, kind string) string {
	for line := range strings.Lines(mounts) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == kind {
			return f[1]
		}
	}
	return ""
}
