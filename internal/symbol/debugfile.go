package symbol

import (
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"
)

// Bounds of looking for separate debug files.
const (
	// maxChecked is the size of a file whose CRC is worked out.
	maxChecked = 512 << 20
	maxLinks   = 4 // symbolic links that are followed
)

// debugFile is a separate debug file.
type debugFile struct {
	*os.File
	version
	// own: it was found in a file system of ours, not in one that only the process has.
	own bool
}

// current reports whether the file's content is what it was.
func (d *debugFile) current() bool {
	var st unix.Stat_t
	return unix.Fstat(int(d.Fd()), &st) == nil && d.version == version{st.Mtim, st.Size}
}

// findDebugFile looks for what was split off the file at a path of a process: by build-id
// and by link, in the root of the process and in ours. The id, or the CRC of the content,
// must be right.
func findDebugFile(pid uint32, of, buildID, link string, crc uint32, hasLink bool) (*debugFile, *object) {
	roots := []uint32{0}
	if pid != 0 {
		roots = []uint32{pid, 0}
	}
	for _, root := range roots {
		for _, c := range candidates(of, buildID, link, hasLink) {
			f, err := openDebug(root, c.path)
			if err != nil {
				continue
			}
			if o := f.verify(buildID, crc, c.byLink); o != nil {
				f.own = root == 0
				return f, o
			}
			f.Close()
		}
	}
	return nil, nil
}

type candidate struct {
	path   string
	byLink bool
}

const debugFolder = "/usr/lib/debug"

func candidates(of, buildID, link string, hasLink bool) []candidate {
	var out []candidate
	if len(buildID) > 2 {
		out = append(out, candidate{fmt.Sprintf("%s/.build-id/%s/%s.debug", debugFolder, buildID[:2], buildID[2:]), false})
	}
	if hasLink && path.IsAbs(of) {
		dir := path.Dir(path.Clean(of))
		for _, p := range [...]string{path.Join(dir, link), path.Join(dir, ".debug", link), path.Join(debugFolder, dir, link)} {
			if p != of {
				out = append(out, candidate{p, true})
			}
		}
	}
	return out
}

// openDebug opens a regular file at a path of a process, 0 for ours. Debug files are often
// symbolic links to others: these are followed here, so that each step is asked for the
// file system that it leads to.
func openDebug(pid uint32, at string) (*debugFile, error) {
	for range maxLinks {
		fd, err := openLocally(pid, at)
		if err != nil {
			return nil, err
		}
		// With O_PATH a link is opened itself, and not with an empty path if it is none.
		b := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", b)
		if err != nil {
			return openRegular(fd, at)
		}
		unix.Close(fd)
		next := string(b[:n])
		if !path.IsAbs(next) {
			next = path.Join(path.Dir(at), next)
		}
		at = path.Clean(next)
	}
	return nil, &os.PathError{Op: "open", Path: at, Err: unix.ELOOP}
}

// openRegular opens what was found with O_PATH, and closes that.
func openRegular(fd int, name string) (*debugFile, error) {
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, &os.PathError{Op: "open", Path: name, Err: errOther}
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	return &debugFile{File: f, version: version{st.Mtim, st.Size}}, nil
}

// verify reads the headers of a file if it is the one that is wanted.
func (d *debugFile) verify(buildID string, crc uint32, byLink bool) *object {
	o, err := readObject(d.File)
	if err != nil || (!byLink || o.buildID != "" && buildID != "") && o.buildID != buildID {
		return nil
	}
	if byLink {
		if d.size > maxChecked {
			return nil
		}
		sum := crc32.NewIEEE()
		if _, err := io.Copy(sum, io.NewSectionReader(d.File, 0, d.size)); err != nil || sum.Sum32() != crc {
			return nil
		}
	}
	return o
}
