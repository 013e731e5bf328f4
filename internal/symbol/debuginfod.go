package symbol

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxFetched is the size of a file that is fetched, and fetchWithin how long that may
	// take. Servers that do not have one are not asked again for missesFor.
	maxFetched  = 512 << 20
	fetchWithin = 20 * time.Second
	missesFor   = 10 * time.Minute
)

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
	// An empty file says that there is none. Without it they are only asked again.
	_ = os.Remove(name)
	_ = os.WriteFile(name, nil, 0o400)
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
