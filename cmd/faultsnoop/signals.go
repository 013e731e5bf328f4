package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// doubled is how soon after the first a signal counts as the same one: timeout(1)
// sends its signal to the process and to the process group.
const doubled = 100 * time.Millisecond

// watchSignals makes the first INT, TERM or HUP the end of tracing and the second
// one the end of the program, whatever it does at that moment. While a command
// runs, the first one is the command's instead: its end then ends the tracing.
// The cause it gives to end is for the time before tracing.
// stop gives the signals their usual meaning back, unless there was one: the program
// is about to end then, and the double of a signal must not change its exit code.
func watchSignals(end context.CancelCauseFunc, child *command) (stop func()) {
	ch := make(chan os.Signal, 4)
	// INT is caught even where a shell without job control ignores it for
	// background jobs, since it is how scripts end a tracer. HUP is not, so that
	// nohup works.
	signal.Notify(ch, unix.SIGINT, unix.SIGTERM)
	if !signal.Ignored(unix.SIGHUP) {
		signal.Notify(ch, unix.SIGHUP)
	}
	// With a handler, a write to a closed pipe returns EPIPE instead of ending
	// the program. Ignoring SIGPIPE would do that for the command as well.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)

	done := make(chan struct{})
	var caught atomic.Bool
	go func() {
		var first time.Time
		for {
			select {
			case <-done:
				return
			case sig := <-ch:
				caught.Store(true)
				again := !first.IsZero()
				if again && time.Since(first) < doubled {
					continue
				}
				first = time.Now()
				running := child != nil && child.Released()
				if running && !(sig == unix.SIGINT && inForeground()) {
					_ = child.Signal(sig) // it may be anybody's by now
				}
				if again {
					os.Exit(exitSignal + int(sig.(unix.Signal)))
				}
				if !running {
					end(&exitError{exitSignal + int(sig.(unix.Signal)), fmt.Errorf("%v before tracing began", sig)})
				}
			}
		}
	}()
	return func() {
		if !caught.Load() {
			signal.Stop(ch)
		}
		close(done)
	}
}

// inForeground reports whether the terminal's interrupt key reaches this
// process, and so a command in the same process group too.
func inForeground() bool {
	tty, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(tty)
	group, err := unix.IoctlGetInt(tty, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
