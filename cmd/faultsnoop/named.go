package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// endTick is how often it is asked whether the named tasks have ended.
const endTick = 100 * time.Millisecond

// named are the processes or threads that were asked for by id, held by descriptors
// so that the next owner of an id is not taken for the one before.
type named struct {
	processes []*os.File // pidfds
	threads   []*os.File // stat files in /proc
	// deathless: of some it cannot be told when they end.
	deathless bool
}

// holdNamed takes hold of all that the filter names; what has ended by now is left out.
// Where there are threads, only they matter: nothing else can match.
func holdNamed(flt *fault.Filter, log *slog.Logger) *named {
	n := new(named)
	note := func(kind string, id uint32, err error) {
		if !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrNotExist) {
			n.deathless = true
			log.Warn(fmt.Sprintf("watching for the end of %s %d: %v; end the trace by INT", kind, id, err))
		}
	}
	for _, tid := range flt.TIDs {
		f, err := os.Open(fmt.Sprintf("/proc/%[1]d/task/%[1]d/stat", tid))
		if err != nil {
			note("thread", tid, err)
			continue
		}
		n.threads = append(n.threads, f)
	}
	if len(flt.TIDs) > 0 {
		return n
	}
	for _, pid := range flt.PIDs {
		fd, err := unix.PidfdOpen(int(pid), 0)
		if err != nil {
			note("process", pid, err)
			continue
		}
		n.processes = append(n.processes, os.NewFile(uintptr(fd), "pidfd"))
	}
	return n
}

// await returns true when all have ended, and false when ctx is done before. It lets go
// of them.
func (n *named) await(ctx context.Context) bool {
	tick := time.NewTicker(endTick)
	defer tick.Stop()
	defer func() {
		for _, f := range slices.Concat(n.processes, n.threads) {
			f.Close()
		}
	}()
	for {
		n.processes = slices.DeleteFunc(n.processes, closedIf(processEnded))
		n.threads = slices.DeleteFunc(n.threads, closedIf(threadEnded))
		if len(n.processes)+len(n.threads) == 0 && !n.deathless {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
}

func closedIf(ended func(*os.File) bool) func(*os.File) bool {
	return func(f *os.File) bool {
		if !ended(f) {
			return false
		}
		f.Close()
		return true
	}
}

// processEnded asks a pidfd, which is readable when the last thread has ended, be the
// process waited for or not.
func processEnded(f *os.File) bool {
	fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// threadEnded asks a stat file of /proc. The first thread of a process stays there as
// a zombie while others run.
func threadEnded(f *os.File) bool {
	b := make([]byte, 128) // the name, which the state follows, has 15 bytes at most
	n, err := f.ReadAt(b, 0)
	if n == 0 {
		return err != nil
	}
	i := bytes.LastIndexByte(b[:n], ')')
	return i >= 0 && i+2 < n && (b[i+2] == 'Z' || b[i+2] == 'X')
}
