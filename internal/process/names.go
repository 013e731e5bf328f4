package process

import (
	"io/fs"
	"os/user"
	"path/filepath"
	"strconv"

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
	root := MountPoint("cgroup2")
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
