package process

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Mounts tells the types of the file systems that are mounted in the caller's mount
// namespace, by the device number that mappings show. It keeps /proc/self/mountinfo
// open, since that says when mounts have changed; the owner must call [Mounts.Close].
type Mounts struct {
	file  *os.File
	types map[uint32]string
}

// OpenMounts reads the mounts there are.
func OpenMounts() (*Mounts, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("opening the list of mounts: %w", err)
	}
	m := &Mounts{file: f}
	if err := m.read(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return m, nil
}

// Close gives the descriptor back. What was read stays known.
func (m *Mounts) Close() error { return m.file.Close() }

// Type is the type of a file system, such as "ext4", and empty if that is not known: it
// is mounted in other namespaces only, by the kernel itself, or has got the number of
// another one.
func (m *Mounts) Type(dev uint32) string { return m.types[dev] }

// Refresh reads the mounts again if they have changed since it was called last. After
// an error none is known.
func (m *Mounts) Refresh() (changed bool, err error) {
	polled := []unix.PollFd{{Fd: int32(m.file.Fd()), Events: unix.POLLPRI}}
	n, err := unix.Poll(polled, 0)
	switch {
	case errors.Is(err, unix.EINTR), err == nil && n == 0:
		return false, nil
	case err == nil:
		err = m.read()
	}
	if err != nil {
		m.types = nil
		return true, fmt.Errorf("following the mounts: %w", err)
	}
	return true, nil
}

func (m *Mounts) read() error {
	if _, err := m.file.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("reading the list of mounts: %w", err)
	}
	b, err := io.ReadAll(m.file)
	if err != nil {
		return fmt.Errorf("reading the list of mounts: %w", err)
	}
	types := map[uint32]string{}
	for _, mount := range parseMounts(string(b)) {
		types[mount.Dev] = mount.Type
	}
	for dev, typ := range types {
		// Which of the two a mapping is of depends on when it was made.
		if old, known := m.types[dev]; known && old != typ {
			types[dev] = ""
		}
	}
	m.types = types
	return nil
}

// Mount is one mount of a mount namespace.
type Mount struct {
	Dev uint32 // of its file system, as in [Mapping]
	// Root is the folder of the file system that is mounted.
	Root string
	// Point is where it is mounted, below the root folder of the process that was asked.
	Point string
	Type  string // of the file system, such as "ext4" or "fuse.sshfs"
}

// ReadMounts reads the mounts that a process sees, 0 for the caller, in the order of the
// kernel: of two at the same place the later one covers the other.
func ReadMounts(pid int) ([]Mount, error) {
	file := "/proc/self/mountinfo"
	if pid != 0 {
		file = fmt.Sprintf("/proc/%d/mountinfo", pid)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the list of mounts: %w", err)
	}
	return parseMounts(string(b)), nil
}

// MountPoint is the first place where the caller has a type of file system, empty if
// nowhere.
func MountPoint(kind string) string {
	mounts, _ := ReadMounts(0) // no list, no place
	for _, m := range mounts {
		if m.Type == kind {
			return m.Point
		}
	}
	return ""
}

// parseMounts reads a mountinfo text (show_mountinfo in fs/proc_namespace.c), whose
// optional fields end with a dash:
//
//	36 30 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw
//
// What is no such line is left out.
func parseMounts(mountinfo string) []Mount {
	var out []Mount
	for line := range strings.Lines(mountinfo) {
		mount, super, _ := strings.Cut(line, " - ")
		// Other kinds of white space are not escaped.
		fields := strings.Split(mount, " ")
		kind, _, ok := strings.Cut(super, " ")
		if len(fields) < 6 || !ok {
			continue
		}
		var major, minor uint32
		if _, err := fmt.Sscanf(fields[2], "%d:%d", &major, &minor); err != nil {
			continue
		}
		out = append(out, Mount{
			Dev: Dev(major, minor), Root: unmangle(fields[3]), Point: unmangle(fields[4]), Type: unmangle(kind),
		})
	}
	return out
}

// unmangle undoes what mangle_path does (fs/seq_file.c): white space, backslashes and
// hashes are printed as a backslash and three octal digits.
func unmangle(s string) string {
	if strings.IndexByte(s, '\\') < 0 {
		return strings.Clone(s) // not the whole list
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && len(s)-i >= 4 {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b = append(b, byte(c))
				i += 3
				continue
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}
