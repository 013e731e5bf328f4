package symbol

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// fileID is what the kernel says that is mapped.
type fileID struct {
	dev uint32 // as in fault.VMA
	ino uint64
}

// version tells whether the content of a file is still what it was.
type version struct {
	modified unix.Timespec
	size     int64
}

// opened is a file that is what a mapping said. As long as it is open nobody else gets its
// inode number.
type opened struct {
	*os.File
	version
	// since is the time from which on it has been that file with this content, in
	// nanoseconds of CLOCK_MONOTONIC.
	since uint64
}

var errOther = errors.New("another file is there now")

// open opens the file of a mapping, whoever may have put something else in its place:
// by its path, by that of the process, or by the mapping itself if that is still there.
// It asks local file systems only. Mounts are read each time: a mount that moves with the
// folder above it is not told.
func open(v *fault.VMA, bounds bool, pid uint32) (*opened, error) {
	mounts, err := process.ReadMounts(0)
	if err != nil {
		return nil, err
	}
	of := typeOf(mounts, v.Dev)
	if of != "" && !local[of] {
		return nil, errRemote
	}
	want := fileID{v.Dev, v.Inode}
	errs := []error{errOther}
	if filepath.IsAbs(v.Path) {
		f, err := openPath(mounts, v.Path, want)
		if err != nil && pid != 0 {
			errs = append(errs, err)
			f, err = openInRoot(pid, v.Path, want)
		}
		if err == nil {
			return f, nil
		}
		errs = append(errs, err)
	}
	// Nothing but the number tells where the file is.
	if bounds && pid != 0 && of != "" {
		path := fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, v.Start, v.End)
		fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		f, err := openFound(path, fd, err, want, true)
		if err == nil {
			return f, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// openPath opens what is at a path of ours. The kernel's paths have no symbolic links;
// where there is one now, it may lead anywhere.
func openPath(mounts []process.Mount, path string, want fileID) (*opened, error) {
	if !leadsLocally(mounts, path) {
		return nil, &os.PathError{Op: "open", Path: path, Err: errRemote}
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS,
	})
	return openFound(path, fd, err, want, false)
}

// openInRoot opens what is at a path of a process.
func openInRoot(pid uint32, path string, want fileID) (*opened, error) {
	fd, err := openLocally(pid, path)
	if err != nil {
		return nil, err
	}
	return openFound(fmt.Sprintf("/proc/%d/root%s", pid, path), fd, nil, want, false)
}

// openLocally opens a path of a process, 0 for ours, with O_PATH, if all of it is on local file
// systems. There may be no symbolic links in it.
func openLocally(pid uint32, path string) (fd int, err error) {
	root := "/"
	if pid != 0 {
		root = fmt.Sprintf("/proc/%d/root", pid)
	}
	mounts, err := process.ReadMounts(int(pid))
	if err != nil {
		return -1, err
	}
	refused := &os.PathError{Op: "open", Path: root + path, Err: errRemote}
	if !leadsLocally(mounts, path) {
		return -1, refused
	}
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(dir)
	// Asked last: nobody comes back to a user namespace that he has left.
	if pid != 0 && !sharesUsers(pid) {
		return -1, refused
	}
	fd, err = unix.Openat2(dir, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: root + path, Err: err}
	}
	return fd, nil
}

// openFound opens what was found, with O_PATH, if it is the regular file that is wanted. To
// open anything else, a device for example, could do something.
func openFound(path string, fd int, err error, want fileID, byMapping bool) (*opened, error) {
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Ino != want.ino {
		return nil, &os.PathError{Op: "open", Path: path, Err: errOther}
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	id := fileID{process.Dev(unix.Major(st.Dev), unix.Minor(st.Dev)), st.Ino}
	if id != want {
		id, err = mappedID(f)
	}
	if err == nil && id != want {
		err = errOther
	}
	if err != nil {
		f.Close()
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	// A mapping holds its file, whatever is done to its names. A path may have been
	// given to another one, with the inode number of the first, until the last change;
	// the clock of these times stands still between ticks, which are 10 ms at most.
	changed := st.Ctim
	if byMapping {
		changed = st.Mtim
	}
	return &opened{f, version{st.Mtim, st.Size}, monotonic(changed)}, nil
}

// mappedID is the identity of a file as mappings have it. On btrfs and overlayfs stat tells
// another device.
func mappedID(f *os.File) (fileID, error) {
	size := os.Getpagesize()
	b, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return fileID{}, os.NewSyscallError("mmap", err)
	}
	defer unix.Munmap(b)
	maps, err := process.ReadMaps(os.Getpid())
	if err != nil {
		return fileID{}, err
	}
	at := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	for _, m := range maps {
		if at >= m.Start && at < m.End {
			return fileID{m.Dev, m.Inode}, nil
		}
	}
	return fileID{}, errOther
}

// current reports whether the file's content is what it was, and takes note of it if
// not.
func (o *opened) current() bool {
	var st unix.Stat_t
	if unix.Fstat(int(o.Fd()), &st) != nil {
		return false
	}
	now := version{st.Mtim, st.Size}
	if now == o.version {
		return true
	}
	o.version, o.since = now, monotonic(st.Mtim)
	return false
}

// monotonic converts a time of the wall clock; one in the future is of a clock that was
// wrong and says nothing.
func monotonic(t unix.Timespec) uint64 {
	var wall unix.Timespec
	if unix.ClockGettime(unix.CLOCK_REALTIME, &wall) != nil {
		return 0
	}
	age := wall.Nano() - t.Nano()
	now := process.Now()
	if age < 0 || uint64(age) > now {
		return 0
	}
	return now - uint64(age)
}
