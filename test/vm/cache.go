package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// listsAge is how long package lists are believed before the mirror is asked
// again. Debian publishes kernels a few times a month.
const listsAge = 24 * time.Hour

// cache is the folder with everything that was downloaded. It survives between
// runs and may be deleted at any time.
type cache struct {
	dir string
}

// openCache creates the folder in the user's cache folder.
func openCache() (cache, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return cache{}, err
	}
	c := cache{dir: filepath.Join(base, "faultsnoop-vm")}
	return c, os.MkdirAll(filepath.Join(c.dir, "logs"), 0o755)
}

// workFolder makes a folder for one run, which has to remove it. What runs that
// were killed left behind long ago is removed on this occasion.
func (c cache) workFolder() (string, error) {
	old, err := filepath.Glob(filepath.Join(c.dir, "run-*"))
	if err != nil {
		return "", err
	}
	for _, dir := range old {
		if info, err := os.Stat(dir); err == nil && time.Since(info.ModTime()) > listsAge {
			if err := os.RemoveAll(dir); err != nil {
				return "", err
			}
		}
	}
	return os.MkdirTemp(c.dir, "run-")
}

// logPath returns where the console of a kernel's last run is kept.
func (c cache) logPath(k kernel) string {
	return filepath.Join(c.dir, "logs", k.name+".log")
}

// lock keeps other runs out until the returned function is called.
func (c cache) lock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(c.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

// kernel returns the files of a kernel, fetched if that was last tried too long ago.
func (c cache) kernel(ctx context.Context, k kernel) (kernelFiles, error) {
	return cached(filepath.Join(c.dir, "kernel-"+k.name), func(dir string) (kernelFiles, error) {
		files, err := fetchKernel(ctx, dir, k)
		if err != nil {
			return files, fmt.Errorf("fetching kernel %s: %w", k.name, err)
		}
		return files, nil
	}, func(f kernelFiles) bool {
		_, err := f.image()
		return err == nil
	})
}

// cached returns what fetch returned when it last ran for dir, or runs it again
// when that is older than listsAge or no longer valid. A failing fetch is no error
// as long as there is an older valid answer: a mirror may be away for an hour.
func cached[T any](dir string, fetch func(dir string) (T, error), valid func(T) bool) (T, error) {
	var last struct {
		At     time.Time
		Answer T
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return last.Answer, err
	}
	name := filepath.Join(dir, "answer.json")
	data, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return last.Answer, err
	}
	// A damaged file is the same as none: the zero answer is not valid.
	usable := json.Unmarshal(data, &last) == nil && valid(last.Answer)
	if usable && time.Since(last.At) < listsAge {
		return last.Answer, nil
	}
	slog.Info("looking for newer packages", "for", filepath.Base(dir))
	answer, err := fetch(dir)
	if err != nil {
		if usable {
			slog.Warn("using what was downloaded before", "from", last.At.Format(time.DateOnly), "err", err)
			return last.Answer, nil
		}
		return answer, err
	}
	last.At, last.Answer = time.Now(), answer
	data, err = json.Marshal(last)
	if err != nil {
		return answer, err
	}
	return answer, os.WriteFile(name, data, 0o644)
}
