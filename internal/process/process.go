// Package process tells what a pid is at a moment: its names, ids, user, cgroup
// and mappings, and keeps the mappings of an address space over time. It reads
// /proc when asked, starts no goroutine and keeps no state of its own.
//
// All functions take ids of the pid namespace that /proc was mounted in, which is
// the caller's own only if [ProcIsOurs] says so.
package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Comm is the name of one thread. Its bytes are chosen by the thread.
func Comm(pid, tid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/comm", pid, tid))
	if err != nil {
		return "", fmt.Errorf("reading a thread's name: %w", err)
	}
	return string(bytes.TrimSuffix(b, []byte("\n"))), nil
}

// Executable is the file name, without its folder, of the program that a process
// runs. A file that has been removed since keeps its name.
func Executable(pid int) (string, error) {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return "", fmt.Errorf("reading the executable's name: %w", err)
	}
	return filepath.Base(strings.TrimSuffix(path, deleted)), nil
}

// Threads lists the thread ids of a process in ascending order.
func Threads(pid int) ([]int, error) {
	tids, err := numbers(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, fmt.Errorf("listing the threads of process %d: %w", pid, err)
	}
	return tids, nil
}

// All lists the process ids that /proc shows.
func All() ([]int, error) {
	pids, err := numbers("/proc")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	return pids, nil
}

func numbers(dir string) ([]int, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			out = append(out, n)
		}
	}
	return out, nil
}

// Alive reports whether a process exists, a zombie included.
func Alive(pid int) bool {
	err := unix.Kill(pid, 0)
	return err == nil || errors.Is(err, unix.EPERM)
}

// InitialPIDNamespace is the inode number of the initial pid namespace
// (PROC_PID_INIT_INO in include/linux/proc_ns.h).
const InitialPIDNamespace = 0xEFFFFFFC

// PIDNamespace is the inode number of the caller's pid namespace.
func PIDNamespace() (uint32, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0, fmt.Errorf("reading the own pid namespace: %w; is /proc mounted?", err)
	}
	return uint32(st.Ino), nil
}

// InInitialNamespace reports whether the caller's pids are those of the whole
// machine.
func InInitialNamespace() bool {
	ns, err := PIDNamespace()
	return err == nil && ns == InitialPIDNamespace
}

// ProcIsOurs reports whether /proc shows the caller's pid namespace. After
// unshare(CLONE_NEWPID) without a new mount of /proc it does not, and pids found
// there are other processes.
func ProcIsOurs() bool {
	link, err := os.Readlink("/proc/self")
	return err == nil && link == strconv.Itoa(os.Getpid())
}
