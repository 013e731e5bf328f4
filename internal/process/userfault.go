package process

import (
	"fmt"
	"os"
	"path/filepath"
)

// HoldsUserfault reports whether a process has a userfaultfd open, which may serve
// faults of it.
func HoldsUserfault(pid int) (bool, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := numbers(dir)
	if err != nil {
		return false, fmt.Errorf("listing the descriptors of process %d: %w", pid, err)
	}
	for _, fd := range fds {
		name, err := os.Readlink(filepath.Join(dir, fmt.Sprint(fd)))
		if err == nil && name == "anon_inode:[userfaultfd]" {
			return true, nil
		}
	}
	return false, nil
}
