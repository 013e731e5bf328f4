package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// value is a flag whose text is read by a function; its error completes the line
// that names flag and text, so it is the remedy.
type value struct {
	text string
	set  func(string) error
}

var _ pflag.Value = (*value)(nil)

func (v *value) String() string { return v.text }

func (v *value) Type() string { return "value" }

func (v *value) Set(text string) error {
	if err := v.set(text); err != nil {
		return err
	}
	v.text = text
	return nil
}

// into makes a flag that stores what parse returns.
func into[T any](dst *T, parse func(string) (T, error)) *value {
	return &value{set: func(text string) (err error) {
		*dst, err = parse(text)
		return err
	}}
}

// intoPtr is into for a value that may be absent.
func intoPtr[T any](dst **T, parse func(string) (T, error)) *value {
	return into(dst, func(text string) (*T, error) {
		v, err := parse(text)
		return &v, err
	})
}

// eachInto makes a repeatable flag that also takes lists with commas.
func eachInto[T any](dst *[]T, parse func(string) (T, error)) *value {
	return each(func(word string) error {
		v, err := parse(word)
		if err == nil {
			*dst = append(*dst, v)
		}
		return err
	})
}

// each makes a value of a flag whose words, in a list with commas or by several flags, are
// handed to add.
func each(add func(string) error) *value {
	return &value{set: func(text string) error {
		for word := range strings.SplitSeq(text, ",") {
			if err := add(strings.TrimSpace(word)); err != nil {
				return err
			}
		}
		return nil
	}}
}

// oneOf makes a parser that takes the words of a list.
func oneOf[T any](names []string, parse func(string) (T, bool)) func(string) (T, error) {
	return func(text string) (T, error) {
		v, ok := parse(text)
		if !ok {
			return v, fmt.Errorf("unknown word%s; valid are %s", suggestion(text, names), strings.Join(names, ", "))
		}
		return v, nil
	}
}

func parseID(text string) (uint32, error) {
	id, err := strconv.ParseUint(text, 10, 31)
	if err != nil || id == 0 {
		return 0, errors.New("write a number from 1 on, or several as in 12,34")
	}
	return uint32(id), nil
}

func parseCount(text string) (uint64, error) {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n == 0 {
		return 0, errors.New("write a number from 1 on")
	}
	return n, nil
}

func parseDuration(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, errors.New("write a positive number with its unit, as in 5s, 1m30s, 250ms or 100us")
	}
	return d, nil
}

func parsePath(text string) (string, error) {
	if text == "" {
		return "", errors.New("write the path of a file")
	}
	return text, nil
}

// addrRange is [start, end) in bytes.
type addrRange struct{ start, end uint64 }

func parseRange(text string) (addrRange, error) {
	first, last, ok := strings.Cut(text, "-")
	start, err1 := parseAddress(first)
	end, err2 := parseAddress(last)
	switch {
	case !ok || err1 != nil || err2 != nil:
		return addrRange{}, errors.New("write START-END in hexadecimal, as in 7f0000000000-7f0000200000")
	case start >= end:
		return addrRange{}, errors.New("the end must be greater than the start; it is the first address not included")
	}
	return addrRange{start, end}, nil
}

func parseAddress(text string) (uint64, error) {
	text = strings.TrimSpace(text)
	if len(text) > 2 && (text[:2] == "0x" || text[:2] == "0X") {
		text = text[2:]
	}
	return strconv.ParseUint(text, 16, 64)
}

// parseSize reads a number of bytes with an optional unit; units are powers of 1024.
func parseSize(text string) (int, error) {
	const most = 1 << 30 // what one ring buffer may take
	n, err := units.RAMInBytes(text)
	switch {
	case err != nil || n <= 0:
		return 0, errors.New("write a size as in 512K, 16M or 1G")
	case n < int64(os.Getpagesize()) || n > most:
		return 0, fmt.Errorf("write a size from %dK to 1G", os.Getpagesize()/1024)
	}
	return int(n), nil
}

// parseUser takes a user's name or number.
func parseUser(text string) (uint32, error) {
	if id, err := strconv.ParseUint(text, 10, 32); err == nil {
		return uint32(id), nil
	}
	u, err := user.Lookup(text)
	if err != nil {
		return 0, errors.New("no such user; write a name that \"getent passwd\" lists, or a number")
	}
	id, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("its user id %q is no number; write the number", u.Uid)
	}
	return uint32(id), nil
}

// threadGroup returns the process that a thread belongs to, as /proc tells.
func threadGroup(id uint32) (uint32, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(status) {
		if text, ok := bytes.CutPrefix(line, []byte("Tgid:")); ok {
			group, err := strconv.ParseUint(string(bytes.TrimSpace(text)), 10, 32)
			return uint32(group), err
		}
	}
	return 0, errors.New("its status names no thread group")
}

// parseCgroup checks that path is a folder of cgroup v2.
func parseCgroup(path string) (string, error) {
	var mounted unix.Statfs_t
	err := unix.Statfs(path, &mounted)
	switch {
	case err != nil && errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("no such cgroup%s", cgroupRemedy(path))
	case err != nil:
		return "", fmt.Errorf("%w; write a folder of cgroup v2", err)
	}
	if mounted.Type != unix.CGROUP2_SUPER_MAGIC {
		v2 := cgroupRoot()
		switch {
		case mounted.Type == unix.CGROUP_SUPER_MAGIC && v2 != "":
			return "", fmt.Errorf("this is cgroup v1; write a folder below %s, where v2 is", v2)
		case mounted.Type == unix.CGROUP_SUPER_MAGIC:
			return "", errors.New("this is cgroup v1, and v2 is not mounted; mount -t cgroup2 none /mnt gives it a place")
		case v2 != "":
			return "", fmt.Errorf("not a cgroup v2; write a folder below %s, where it is mounted", v2)
		}
		return "", errors.New("not a cgroup, and cgroup v2 is not mounted; mount -t cgroup2 none /mnt gives it a place")
	}
	if _, err := os.Stat(filepath.Join(path, "cgroup.procs")); err != nil {
		return "", errors.New("not the folder of a cgroup; write the one that holds cgroup.procs")
	}
	return path, nil
}

// cgroupRemedy points to the folder meant by a path as in /proc/PID/cgroup.
func cgroupRemedy(path string) string {
	v2 := cgroupRoot()
	if v2 == "" {
		return "; cgroup v2 is not mounted here"
	}
	if meant := filepath.Join(v2, path); path != "" {
		if _, err := os.Stat(filepath.Join(meant, "cgroup.procs")); err == nil {
			return fmt.Sprintf(", did you mean %s?", meant)
		}
	}
	return fmt.Sprintf("; \"systemd-cgls\" or \"find %s -type d\" lists them", v2)
}

// cgroupRoot is where cgroup v2 is mounted, "" if nowhere.
func cgroupRoot() string {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return f[1]
		}
	}
	return ""
}
