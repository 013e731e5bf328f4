//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"faultsnoop/test/vm/guest"
)

// Conventional exit codes of a shell for a program that could not be run.
const (
	statusTimeout  = 124
	statusNotRun   = 127
	statusBySignal = 128
)

// run runs one program to its end and returns its exit status as a shell would.
func run(p guest.Program, kernel string, out *console) int {
	ctx, cancel := context.WithTimeout(context.Background(), p.Timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.Args[0], p.Args[1:]...)
	cmd.Dir = p.Dir
	cmd.Env = []string{
		"PATH=/bin", "HOME=/root", "TMPDIR=/var/tmp", "USER=root", "SHELL=/bin/sh", "TERM=dumb", "LANG=C.UTF-8",
		guest.EnvKernel + "=" + kernel,
		guest.EnvDisk + "=" + guest.DiskPath,
	}
	// What a program leaves running in the background must not keep its output, and
	// with it the machine, open forever.
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = 2 * time.Second

	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		out.line(fmt.Sprintf("init: killed %s after %v", p.Name, p.Timeout))
		return statusTimeout
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return 0
	case !errors.As(err, &exit):
		out.line("init: " + err.Error())
		return statusNotRun
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return statusBySignal + int(status.Signal())
	}
	return exit.ExitCode()
}

// console is the serial console. It is not an *os.File, which makes os/exec put a
// pipe between a program and the console: programs see no terminal.
type console struct {
	file    *os.File
	midLine bool // a program left the last line without an end
}

// Write implements [io.Writer]. os/exec calls it from one goroutine at a time.
func (c *console) Write(b []byte) (int, error) {
	if len(b) > 0 {
		c.midLine = b[len(b)-1] != '\n'
	}
	return c.file.Write(b)
}

// line writes s on a line of its own. There is nobody to tell of an error.
func (c *console) line(s string) {
	if c.midLine {
		s = "\n" + s
	}
	_, _ = c.Write([]byte(s + "\n"))
}
