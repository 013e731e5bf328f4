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

// CgroupName is the path of the cgroup v2 with an id, which is the inode of its
// folder, below the place where cgroups are mounted. It is empty if there is no such
// cgroup any more or v2 is not mounted.
func CgroupName(id uint64) string {
	root := MountPoint("cgroup2")
	if root == "" {
		return ""
	}
	var name string
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // it has gone meanwhile
		}
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || st.Ino != id {
			return nil
		}
		name = "/"
		if rel, err := filepath.Rel(root, path); err == nil && rel != "." {
			name += rel
		}
		return fs.SkipAll
	})
	return name
}
