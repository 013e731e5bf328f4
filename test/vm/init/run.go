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
func run(p guest.Program, kernel string) int {
	ctx, cancel := context.WithTimeout(context.Background(), p.Timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.Args[0], p.Args[1:]...)
	cmd.Dir = p.Dir
	cmd.Env = []string{
		"PATH=/bin", "HOME=/root", "TMPDIR=/tmp", "USER=root", "SHELL=/bin/sh", "TERM=dumb", "LANG=C.UTF-8",
		guest.EnvKernel + "=" + kernel,
		guest.EnvDisk + "=" + guest.DiskPath,
	}
	// Pipes instead of the console itself, so that programs see no terminal. What
	// a program leaves running in the background must not keep the pipe open forever.
	output := consoleWriter{}
	cmd.Stdout, cmd.Stderr = output, output
	cmd.WaitDelay = 2 * time.Second

	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		fmt.Printf("init: killed %s after %v\n", p.Name, p.Timeout)
		return statusTimeout
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return 0
	case !errors.As(err, &exit):
		fmt.Println("init:", err)
		return statusNotRun
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return statusBySignal + int(status.Signal())
	}
	return exit.ExitCode()
}

// consoleWriter is not an *os.File, which is what makes os/exec put a pipe between
// the program and the console.
type consoleWriter struct{}

func (consoleWriter) Write(b []byte) (int, error) { return os.Stdout.Write(b) }
