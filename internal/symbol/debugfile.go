package symbol

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/process"
)

// Bounds of looking for separate debug files.
const (
	// maxChecked is the size of a file whose CRC is worked out.
	maxChecked = 512 << 20
	// maxFetched is the size of a file that is fetched, and fetchWithin how long that may
	// take. A server that does not have one is not asked again for missesFor.
	maxFetched  = 512 << 20
	fetchWithin = 20 * time.Second
	missesFor   = 10 * time.Minute
	maxLinks    = 4
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

// debuginfod fetches debug files by build-id from the servers of DEBUGINFOD_URLS, and keeps
// them where elfutils' client looks for them too.
type debuginfod struct {
	urls   []string
	cache  string
	client http.Client
}

// newDebuginfod is nil unless the environment names a server.
func newDebuginfod() *debuginfod {
	urls := strings.Fields(os.Getenv("DEBUGINFOD_URLS"))
	if len(urls) == 0 {
		return nil
	}
	cache := os.Getenv("DEBUGINFOD_CACHE_PATH")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return nil
		}
		cache = filepath.Join(dir, "debuginfod_client")
	}
	return &debuginfod{urls: urls, cache: cache, client: http.Client{Timeout: fetchWithin}}
}

// find is the file with a build-id, from the cache or from a server.
func (d *debuginfod) find(buildID string) (*debugFile, *object) {
	if buildID == "" {
		return nil, nil
	}
	dir := filepath.Join(d.cache, buildID)
	name := filepath.Join(dir, "debuginfo")
	if f, err := openOwn(name); err == nil {
		if o := f.verify(buildID, 0, false); o != nil {
			return f, o
		}
		missed := f.size == 0 && time.Since(time.Unix(f.modified.Unix())) < missesFor
		f.Close()
		if missed {
			return nil, nil
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil
	}
	for _, server := range d.urls {
		if d.fetch(server, buildID, dir, name) == nil {
			f, err := openOwn(name)
			if err != nil {
				return nil, nil
			}
			if o := f.verify(buildID, 0, false); o != nil {
				return f, o
			}
			f.Close()
		}
	}
	// An empty file says that there is none.
	_ = os.WriteFile(name, nil, 0o400) // it is only asked again
	return nil, nil
}

// openOwn opens a file of the cache.
func openOwn(name string) (*debugFile, error) {
	fd, err := unix.Open(name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	f, err := openRegular(fd, name)
	if err == nil {
		f.own = true
	}
	return f, err
}

func (d *debuginfod) fetch(server, buildID, dir, name string) error {
	at, err := url.JoinPath(server, "buildid", buildID, "debuginfo")
	if err != nil {
		return fmt.Errorf("fetching a debug file: %w", err)
	}
	answer, err := d.client.Get(at)
	if err != nil {
		return fmt.Errorf("fetching a debug file: %w", err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK || answer.ContentLength > maxFetched {
		return fmt.Errorf("fetching %s: %s, %d bytes", at, answer.Status, answer.ContentLength)
	}
	f, err := os.CreateTemp(dir, "debuginfo.*")
	if err != nil {
		return fmt.Errorf("fetching a debug file: %w", err)
	}
	defer os.Remove(f.Name()) // unless it has got its name
	n, err := io.Copy(f, io.LimitReader(answer.Body, maxFetched+1))
	if err == nil && n > maxFetched {
		err = errTooMuch
	}
	if err = errors.Join(err, f.Chmod(0o400), f.Close()); err != nil {
		return fmt.Errorf("fetching %s: %w", at, err)
	}
	if o, err := openOwn(f.Name()); err != nil {
		return err
	} else if verified := o.verify(buildID, 0, false); errors.Join(o.Close()) != nil || verified == nil {
		return fmt.Errorf("fetching %s: it has another build-id", at)
	}
	return os.Rename(f.Name(), name)
}

// vdso is the code that the kernel maps into all processes of 64 bits: an ELF image, read
// from our own memory.
func readVDSO() (*Code, error) {
	maps, err := process.ReadMaps(os.Getpid())
	if err != nil {
		return nil, err
	}
	for _, m := range maps {
		if m.Label != "[vdso]" {
			continue
		}
		f, err := os.Open("/proc/self/mem")
		if err != nil {
			return nil, fmt.Errorf("reading the vdso: %w", err)
		}
		defer f.Close()
		b := make([]byte, min(m.End-m.Start, maxVDSO))
		if _, err := f.ReadAt(b, int64(m.Start)); err != nil {
			return nil, fmt.Errorf("reading the vdso: %w", err)
		}
		c, err := NewCode(strings.NewReader(string(b)))
		if err != nil {
			return nil, fmt.Errorf("reading the vdso: %w", err)
		}
		return c, nil
	}
	return nil, errors.New("reading the vdso: there is none")
}

const maxVDSO = 1 << 20
