package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// shimEnv makes this program the shim of a command: a process that waits until
// it is released and then becomes the command. Its value is the shim's two
// descriptors, "RELEASE,REPORT".
const shimEnv = "FAULTSNOOP_SHIM"

const (
	shimReady = 'r' // the shim's first word: it waits
	shimGo    = 'g' // the tracer's only word
)

// command is a program that was started stopped. Its process is a shim of
// ours until Release, with the same standard streams, environment and process
// group as the command will have.
type command struct {
	name    string
	process *os.Process
	release *os.File // a byte runs the command, its closing ends the shim
	report  *os.File // what execve said; closed by success

	released atomic.Bool
	ended    chan struct{} // closed when status is final
	status   int
}

// resolve finds a program the way a shell does, and fails with the shell's codes.
func resolve(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	// A relative entry in PATH: a shell runs it, and so do we.
	case err == nil, errors.Is(err, exec.ErrDot):
		return path, nil
	case errors.Is(err, syscall.EISDIR):
		return "", &exitError{exitNotExecutable, fmt.Errorf("command %q cannot be executed: it is a directory; name a program", name)}
	case errors.Is(err, fs.ErrPermission):
		return "", &exitError{exitNotExecutable, fmt.Errorf("command %q cannot be executed: permission denied; chmod +x makes a program of it", name)}
	case strings.Contains(name, "/"):
		return "", &exitError{exitNotFound, fmt.Errorf("command %q does not exist; check its path", name)}
	}
	return "", &exitError{exitNotFound, fmt.Errorf("command %q is in no directory of PATH; check its spelling or give its path", name)}
}

// startStopped starts argv with the program at path and returns when its process
// waits to be released. All work of the process up to then is the shim's own.
func startStopped(path string, argv []string) (*command, error) {
	release, err := makePipe()
	if err != nil {
		return nil, fmt.Errorf("starting %q: %w", argv[0], err)
	}
	defer release.reader.Close()
	report, err := makePipe()
	if err != nil {
		release.writer.Close()
		return nil, fmt.Errorf("starting %q: %w", argv[0], err)
	}
	defer report.writer.Close()

	// The descriptors keep their numbers, so that all others that the command
	// inherits keep theirs too. No other process is started at this time.
	for _, end := range []*os.File{release.reader, report.writer} {
		if _, err := unix.FcntlInt(end.Fd(), unix.F_SETFD, 0); err != nil {
			return nil, errors.Join(fmt.Errorf("starting %q: %w", argv[0], err), release.writer.Close(), report.reader.Close())
		}
	}
	process, err := os.StartProcess("/proc/self/exe", append([]string{"faultsnoop", path}, argv...), &os.ProcAttr{
		Env:   append(os.Environ(), fmt.Sprintf("%s=%d,%d", shimEnv, release.reader.Fd(), report.writer.Fd())),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		release.writer.Close()
		report.reader.Close()
		return nil, fmt.Errorf("starting a process for %q: %w", argv[0], err)
	}
	c := &command{name: argv[0], process: process, release: release.writer, report: report.reader, ended: make(chan struct{})}
	go c.wait()

	report.writer.Close() // the shim must be the only one to hold it
	if _, err := io.ReadFull(c.report, make([]byte, 1)); err != nil {
		c.Abort()
		return nil, fmt.Errorf("starting a process for %q: it ended with status %d before it could wait", argv[0], c.status)
	}
	return c, nil
}

type pipe struct{ reader, writer *os.File }

// makePipe makes a pipe whose ends block: os.Pipe would make both ends
// non-blocking, for the shim as well.
func makePipe() (pipe, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return pipe{}, fmt.Errorf("making a pipe: %w", err)
	}
	return pipe{os.NewFile(uintptr(fds[0]), "|0"), os.NewFile(uintptr(fds[1]), "|1")}, nil
}

// wait collects the process; it is the only caller of Wait.
func (c *command) wait() {
	defer close(c.ended)
	state, err := c.process.Wait()
	if err != nil {
		c.status = exitFailure
		return
	}
	c.status = state.ExitCode()
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		c.status = exitSignal + int(ws.Signal())
	}
}

// PID is the id of the process, before and after its release.
func (c *command) PID() int { return c.process.Pid }

// Ended is closed when the command has ended.
func (c *command) Ended() <-chan struct{} { return c.ended }

// Released reports whether the process is, or tries to become, the command.
func (c *command) Released() bool { return c.released.Load() }

// Release lets the command run. It returns when the command's program is loaded,
// or with the reason why it cannot be.
func (c *command) Release() error {
	defer c.report.Close()
	c.released.Store(true)
	_, err := c.release.Write([]byte{shimGo})
	c.release.Close()
	if err != nil && !errors.Is(err, syscall.EPIPE) { // EPIPE: a signal ended it, Wait tells which
		return fmt.Errorf("releasing %q: %w", c.name, err)
	}
	said, err := io.ReadAll(c.report)
	if err != nil {
		return fmt.Errorf("releasing %q: %w", c.name, err)
	}
	if len(said) == 0 {
		return nil
	}
	n, err := strconv.Atoi(string(said))
	if err != nil {
		return fmt.Errorf("releasing %q: its process said %q", c.name, said)
	}
	errno := syscall.Errno(n)
	code := exitNotExecutable
	if errno == syscall.ENOENT {
		code = exitNotFound
	}
	<-c.ended
	return &exitError{code, fmt.Errorf("command %q cannot be executed: %w; check the program and, for a script, its first line", c.name, errno)}
}

// Abort ends the process if it was never released, and waits for its end. A
// command that runs is left alone.
func (c *command) Abort() {
	if c.released.Load() {
		return
	}
	c.release.Close()
	c.report.Close()
	_ = c.process.Kill() // it may have ended by itself
	<-c.ended
}

// Wait returns the command's exit code, or 128 + N if signal N ended it.
func (c *command) Wait() int {
	<-c.ended
	return c.status
}

// Signal passes a signal on. That the command has just ended is no error.
func (c *command) Signal(sig os.Signal) error {
	if err := c.process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("passing %v on to %q: %w", sig, c.name, err)
	}
	return nil
}

// init keeps a shim on the thread that bears the process's id: perf events are
// those of a thread, and one that is to begin with exec must be on the thread that
// calls it. Only before main is that thread known to run this.
func init() {
	if _, ok := os.LookupEnv(shimEnv); ok {
		runtime.LockOSThread()
	}
}

// beShim returns at once unless this process was started to be the shim of a
// command; then it never returns. It must come before all else in main.
func beShim() {
	value, ok := os.LookupEnv(shimEnv)
	if !ok || len(os.Args) < 3 {
		return
	}
	var release, report int
	if _, err := fmt.Sscanf(value, "%d,%d", &release, &report); err != nil {
		return
	}
	unix.CloseOnExec(release)
	unix.CloseOnExec(report)
	os.Unsetenv(shimEnv)
	path, argv, env := os.Args[1], os.Args[2:], os.Environ()

	// Executing a directory fails, but brings the code and memory that execve
	// needs into place: the faults for them are taken here, before anyone counts.
	_ = syscall.Exec("/", argv, env)
	word := []byte{shimReady}
	if _, err := unix.Write(report, word); err != nil {
		os.Exit(exitFailure)
	}
	for {
		n, err := unix.Read(release, word)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 || err != nil {
			os.Exit(exitFailure) // the tracer is gone
		}
		break
	}
	err := syscall.Exec(path, argv, env)
	if errors.Is(err, syscall.ENOEXEC) { // a script without #!, as execvp(3) runs it
		err = syscall.Exec("/bin/sh", append([]string{"/bin/sh", path}, argv[1:]...), env)
	}
	var errno syscall.Errno
	errors.As(err, &errno)
	_, _ = unix.Write(report, strconv.AppendInt(nil, int64(errno), 10))
	os.Exit(exitFailure)
}
