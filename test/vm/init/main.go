//go:build linux

// Init is process 1 of the kernel matrix's guests: it mounts what a normal system
// has mounted, loads the modules it was given, runs the programs of
// [guest.ConfigPath] one after the other and powers the machine off.
//
// Process 1 itself only reaps orphans. The work is done by a child of it, the
// same file run again: reaping with wait4(-1) would otherwise steal the exit
// status of a program from os/exec.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"faultsnoop/test/vm/guest"
)

func main() {
	if os.Getpid() != 1 {
		os.Exit(work())
	}
	if err := openConsole(); err == nil {
		err = superviseWorker()
		if err != nil {
			fmt.Println("init:", err)
		}
	}
	unix.Sync()
	// Nothing is left to do with an error: process 1 returning is a kernel panic,
	// which ends the machine too.
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// openConsole makes /dev/console the standard files. The kernel does that only if
// the initramfs already holds the device node.
func openConsole() error {
	if err := mountDevices(); err != nil {
		return err
	}
	console, err := os.OpenFile("/dev/console", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	for fd := range 3 {
		if err := unix.Dup3(int(console.Fd()), fd, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return nil
}

// superviseWorker runs the worker and reaps every process until the worker is gone.
func superviseWorker() error {
	worker, err := os.StartProcess("/init", []string{"/init"}, &os.ProcAttr{
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
		Env:   []string{"PATH=/bin"},
	})
	if err != nil {
		return fmt.Errorf("starting worker: %w", err)
	}
	for {
		pid, err := unix.Wait4(-1, nil, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("waiting for worker: %w", err)
		case pid == worker.Pid:
			return nil
		}
	}
}

// work is the worker's whole life. What goes wrong is told to the host by a mark.
func work() int {
	config, err := readConfig()
	if err != nil {
		fmt.Println("init:", err)
		return 1
	}
	out := &console{file: os.Stdout}
	say := func(m guest.Mark) { out.line(m.Format(config.Nonce)) }
	if err := setUp(config); err != nil {
		say(guest.Mark{Event: guest.Fault, Text: err.Error()})
		return 1
	}
	say(guest.Mark{Event: guest.Ready})
	for _, p := range config.Programs {
		say(guest.Mark{Event: guest.Begin, Name: p.Name})
		status := run(p, config.Kernel, out)
		say(guest.Mark{Event: guest.End, Name: p.Name, Status: status})
	}
	say(guest.Mark{Event: guest.Done})
	return 0
}

func readConfig() (guest.Config, error) {
	var config guest.Config
	data, err := os.ReadFile(guest.ConfigPath)
	if err != nil {
		return config, err
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return config, fmt.Errorf("reading %s: %w", guest.ConfigPath, err)
	}
	return config, nil
}
