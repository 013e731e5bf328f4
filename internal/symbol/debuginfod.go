package symbol

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxFetched is the size of a file that is fetched, and fetchWithin how long that may
	// take. Servers that do not have one, or do not answer, are not asked again for missesFor.
	maxFetched  = 512 << 20
	fetchWithin = 20 * time.Second
	missesFor   = 10 * time.Minute
	// maxAtOnce are fetched at a time, and maxFetches wait for that.
	maxAtOnce  = 4
	maxFetches = 256
)

// debuginfod fetches debug files by build-id from the servers of DEBUGINFOD_URLS, and keeps
// them where elfutils' client looks for them too. It is for use by one goroutine.
type debuginfod struct {
	urls   []string
	cache  string
	client http.Client
	within time.Duration // how long a server may take
	wait   time.Duration // how long a file is waited for

	ctx     context.Context // ends with the use of it
	cancel  context.CancelFunc
	running sync.WaitGroup
	turns   chan struct{}
	fetches map[string]*fetch // by build-id, those that go on
	// slow is a fetch that was waited for in vain. While it goes on none is waited for.
	slow *fetch

	mu   sync.Mutex
	down map[string]time.Time // servers that did not answer, until then
}

// fetch is what goes on for one build-id.
type fetch struct {
	done  chan struct{} // closed at the end
	found bool          // to be read after that
}

// over reports whether a file has come meanwhile.
func (f *fetch) over() (ended, found bool) {
	select {
	case <-f.done:
		return true, f.found
	default:
		return false, false
	}
}

// newDebuginfod is nil unless the environment names a server. A file that takes longer than
// wait is there later.
func newDebuginfod(wait time.Duration) *debuginfod {
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
	d := &debuginfod{
		urls: urls, cache: cache, within: fetchWithin, wait: wait,
		turns: make(chan struct{}, maxAtOnce), fetches: map[string]*fetch{}, down: map[string]time.Time{},
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d
}

// close ends what goes on.
func (d *debuginfod) close() {
	if d != nil {
		d.cancel()
		d.running.Wait()
	}
}

// find is the file with a build-id, from the cache or from a server. later is not nil if it
// may come yet.
func (d *debuginfod) find(buildID string) (file *debugFile, o *object, later *fetch) {
	if buildID == "" {
		return nil, nil, nil
	}
	f, o, missed := d.cached(buildID)
	if f != nil || missed {
		return f, o, nil
	}
	for id, f := range d.fetches {
		if ended, _ := f.over(); ended {
			delete(d.fetches, id)
		}
	}
	later = d.fetches[buildID]
	if later == nil {
		if len(d.fetches) >= maxFetches {
			return nil, nil, nil
		}
		later = &fetch{done: make(chan struct{})}
		d.fetches[buildID] = later
		d.running.Go(func() {
			defer close(later.done)
			later.found = d.ask(buildID)
		})
	}
	if d.slow != nil {
		if ended, _ := d.slow.over(); ended {
			d.slow = nil
		}
	}
	var wait time.Duration
	if d.slow == nil {
		wait = d.wait
	}
	select {
	case <-later.done:
		f, o, _ = d.cached(buildID)
		return f, o, nil
	case <-time.After(wait):
		d.slow = cmp.Or(d.slow, later)
		return nil, nil, later
	}
}

// cached is what the cache has: a file, or that there is none.
func (d *debuginfod) cached(buildID string) (f *debugFile, o *object, missed bool) {
	f, err := openOwn(filepath.Join(d.cache, buildID, "debuginfo"))
	if err != nil {
		return nil, nil, false
	}
	if o := f.verify(buildID, 0, false); o != nil {
		return f, o, false
	}
	missed = f.size == 0 && time.Since(time.Unix(f.modified.Unix())) < missesFor
	f.Close()
	return nil, nil, missed
}

// ask fetches a file from the first server that has it.
func (d *debuginfod) ask(buildID string) (found bool) {
	select {
	case d.turns <- struct{}{}:
		defer func() { <-d.turns }()
	case <-d.ctx.Done():
		return false
	}
	dir := filepath.Join(d.cache, buildID)
	name := filepath.Join(dir, "debuginfo")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return false
	}
	answered := true
	for _, server := range d.urls {
		d.mu.Lock()
		down := time.Now().Before(d.down[server])
		d.mu.Unlock()
		if down {
			answered = false
			continue
		}
		err := d.fetch(server, buildID, dir, name)
		if err == nil {
			return true
		}
		if errors.Is(err, errNoAnswer) {
			answered = false
			d.mu.Lock()
			d.down[server] = time.Now().Add(missesFor)
			d.mu.Unlock()
		}
	}
	if answered {
		// An empty file says that there is none. Without it they are only asked again.
		_ = os.Remove(name)
		_ = os.WriteFile(name, nil, 0o400)
	}
	return false
}

// errNoAnswer: a server did not answer in time.
var errNoAnswer = errors.New("the server does not answer")

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
	ctx, cancel := context.WithTimeout(d.ctx, d.within)
	defer cancel()
	ask, err := http.NewRequestWithContext(ctx, http.MethodGet, at, http.NoBody)
	if err != nil {
		return fmt.Errorf("fetching a debug file: %w", err)
	}
	answer, err := d.client.Do(ask)
	if err != nil {
		return fmt.Errorf("fetching a debug file: %w: %w", errNoAnswer, err)
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
