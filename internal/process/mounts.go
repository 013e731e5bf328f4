package process

import (
	"errors"
	"fmt"
	"io"
	"os"
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
	types := mountTypes(string(b))
	for dev, typ := range types {
		// Which of the two a mapping is of depends on when it was made.
		if old, known := m.types[dev]; known && old != typ {
			types[dev] = ""
		}
	}
	m.types = types
	return nil
}

// mountTypes reads a mountinfo text (show_mountinfo in fs/proc_namespace.c), whose
// optional fields end with a dash:
//
//	36 30 0:30 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw
func mountTypes(mountinfo string) map[uint32]string {
	types := map[uint32]string{}
	for line := range strings.Lines(mountinfo) {
		mount, super, _ := strings.Cut(line, " - ")
		fields, of := strings.Fields(mount), strings.Fields(super)
		var major, minor uint32
		if len(fields) < 3 || len(of) == 0 {
			continue
		}
		if _, err := fmt.Sscanf(fields[2], "%d:%d", &major, &minor); err != nil {
			continue
		}
		types[Dev(major, minor)] = of[0]
	}
	return types
}
