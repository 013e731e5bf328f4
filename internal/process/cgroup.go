package process

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// CgroupPath is the path of a process's cgroup v2 below the root of the
// hierarchy that the caller's cgroup namespace shows. It is "" where no cgroup v2
// is in use.
func CgroupPath(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", fmt.Errorf("reading the cgroup of process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(path, "\n"), nil
		}
	}
	return "", nil
}

// CgroupOf is the path, as in [CgroupPath], of the cgroup v2 that dir is the folder of.
func CgroupOf(dir string) (string, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return "", fmt.Errorf("opening cgroup %q: %w", dir, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return "", fmt.Errorf("opening cgroup %q: not a folder of cgroup v2: choose one below the mount of type cgroup2", dir)
	}
	abs, err := filepath.Abs(dir)
	if err == nil {
		abs, err = filepath.EvalSymlinks(abs)
	}
	if err != nil {
		return "", fmt.Errorf("opening cgroup %q: %w", dir, err)
	}
	mounts, err := ReadMounts(0)
	if err != nil {
		return "", fmt.Errorf("finding the mount of cgroup %q: %w", dir, err)
	}
	p, ok := cgroupBelow(mounts, abs)
	if !ok {
		return "", fmt.Errorf("finding the mount of cgroup %q: not in /proc/self/mountinfo", dir)
	}
	return p, nil
}

// cgroupBelow finds dir in the mounts of cgroup v2.
func cgroupBelow(mounts []Mount, dir string) (string, bool) {
	best, found := "", ""
	for _, m := range mounts {
		if m.Type != "cgroup2" {
			continue
		}
		below, ok := strings.CutPrefix(dir, m.Point)
		if ok && (below == "" || below[0] == '/') && len(m.Point) >= len(best) {
			best, found = m.Point, path.Join(m.Root, below)
		}
	}
	return found, best != ""
}

// CgroupHolds reports whether the cgroup at path is that at parent or below it.
func CgroupHolds(parent, path string) bool {
	return path == parent || strings.HasPrefix(path, strings.TrimSuffix(parent, "/")+"/")
}
