package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// outputSize is when a buffer is written out.
	outputSize = 64 << 10
	// outputAge is how long a record may wait for the buffer to fill.
	outputAge = 100 * time.Millisecond
)

// output collects whole lines and writes them. It is a slice that encoders
// append to rather than a bufio.Writer, since that one would write half a line
// when it is full and leave it there if the program ends.
type output struct {
	buf     []byte
	w       io.Writer
	file    *os.File // w, if it is a file
	owned   bool     // file was opened here
	stale   bool     // it has what an earlier run has written
	width   int      // terminal columns, 0 if w is no terminal
	flushed time.Time
	err     error // the first failure; from then on nothing is written
}

func newOutput(w io.Writer) *output {
	o := &output{w: w, buf: make([]byte, 0, outputSize+4096)}
	o.file, _ = w.(*os.File)
	o.width = terminalWidth(w)
	return o
}

// terminalWidth is how many columns a terminal has, 0 if w is none.
func terminalWidth(w io.Writer) int {
	width := 0
	if f, ok := w.(*os.File); ok {
		control(f, func(fd int) {
			if size, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ); err == nil {
				width = max(int(size.Col), 1)
			}
		})
	}
	return width
}

// openOutput makes an output of a file, which keeps what it has until there is something to
// write in its place: a run that cannot even begin does not cost the last report. It is
// emptied then and not replaced, so that links, owner and mode stay, and devices work.
func openOutput(path string) (*output, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the output: %w; -o takes the path of a file that may be written", err)
	}
	o := newOutput(f)
	o.owned = true
	st, err := f.Stat()
	o.stale = err == nil && st.Mode().IsRegular() && st.Size() > 0
	return o, nil
}

// replace drops what the file had before this run, also if nothing will be written to it.
func (o *output) replace() {
	if !o.stale {
		return
	}
	o.stale = false
	if err := o.file.Truncate(0); err != nil && o.err == nil {
		o.err = err
	}
}

// close closes a file that was opened here; some file systems say only then that
// they could not write it.
func (o *output) close() {
	if !o.owned {
		return
	}
	o.owned = false
	if err := o.file.Close(); err != nil && o.err == nil {
		o.err = err
	}
}

// control calls do with the descriptor, which stays as blocking as it is.
func control(f *os.File, do func(fd int)) {
	if conn, err := f.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { do(int(fd)) }) // fails only when closed
	}
}

// settle writes the buffer out if it is full, old, or somebody watches.
func (o *output) settle(idle bool) {
	if len(o.buf) >= outputSize || idle || o.width > 0 || time.Since(o.flushed) >= outputAge {
		o.flush()
	}
}

func (o *output) flush() {
	if len(o.buf) > 0 {
		o.replace()
	}
	if len(o.buf) > 0 && o.err == nil {
		if _, err := o.w.Write(o.buf); err != nil {
			o.err = err
		}
	}
	o.buf = o.buf[:0]
	o.flushed = time.Now()
}

// probe notices a reader that has gone while there is nothing to write.
func (o *output) probe() {
	if o.file == nil || o.err != nil {
		return
	}
	control(o.file, func(fd int) {
		fds := []unix.PollFd{{Fd: int32(fd)}} // errors and hang-ups are always reported
		if n, err := unix.Poll(fds, 0); err == nil && n > 0 && fds[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0 {
			o.err = unix.EPIPE
		}
	})
}

// readerGone reports that the other end of a pipe was closed, which is no error.
func (o *output) readerGone() bool { return errors.Is(o.err, unix.EPIPE) }

// failure is the error to report, nil if there is none.
func (o *output) failure() error {
	if o.err == nil || o.readerGone() {
		return nil
	}
	var path *os.PathError
	if errors.As(o.err, &path) {
		return fmt.Errorf("writing the output: %w", path.Err)
	}
	return fmt.Errorf("writing the output: %w", o.err)
}
