//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/test/vm/guest"
)

type mount struct {
	source, target, kind string
	options              string
}

// mounts are in the order in which they are made. The tracing file systems must be
// there before the first test looks: cilium/ebpf reads mountinfo once and keeps it.
var mounts = []mount{
	{"proc", "/proc", "proc", ""},
	{"sysfs", "/sys", "sysfs", ""},
	{"tmpfs", "/tmp", "tmpfs", "mode=1777"},
	{"tmpfs", "/dev/shm", "tmpfs", "mode=1777"},
	{"devpts", "/dev/pts", "devpts", "mode=620,ptmxmode=666"},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", ""},
	{"bpf", "/sys/fs/bpf", "bpf", "mode=700"},
	{"debugfs", "/sys/kernel/debug", "debugfs", ""},
	{"tracefs", "/sys/kernel/tracing", "tracefs", ""},
	{"securityfs", "/sys/kernel/security", "securityfs", ""},
}

// settings are written into files of /proc and /sys, in this order.
var settings = []struct{ file, value string }{
	// What systemd sets on every 64-bit machine: process ids need more than 16 bits.
	{"/proc/sys/kernel/pid_max", "4194304"},
	// The kernel's own default. Debian's is 3, at which an ordinary user can trace nothing;
	// a test of that case sets it.
	{"/proc/sys/kernel/perf_event_paranoid", "2"},
	{"/sys/fs/cgroup/cgroup.subtree_control", "+cpu +memory +pids"},
	// Hints would be faults that no workload counts; a test of them switches it on.
	{"/proc/sys/kernel/numa_balancing", "0"},
}

func mountDevices() error {
	if err := os.MkdirAll("/dev", 0o755); err != nil {
		return err
	}
	err := unix.Mount("devtmpfs", "/dev", "devtmpfs", 0, "")
	// A kernel with CONFIG_DEVTMPFS_MOUNT may have done it.
	if err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mounting devtmpfs: %w", err)
	}
	return nil
}

// setUp turns the bare initramfs into a system on which tests can run.
func setUp(config guest.Config) error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.kind, 0, m.options); err != nil {
			return fmt.Errorf("mounting %s: %w", m.target, err)
		}
	}
	for _, w := range settings {
		if err := os.WriteFile(w.file, []byte(w.value), 0o644); err != nil {
			return fmt.Errorf("setting up the kernel: %w", err)
		}
	}
	for fd, name := range []string{"stdin", "stdout", "stderr"} {
		if err := os.Symlink(fmt.Sprintf("/proc/self/fd/%d", fd), "/dev/"+name); err != nil {
			return err
		}
	}
	if err := unix.Sethostname([]byte("faultsnoop-vm")); err != nil {
		return fmt.Errorf("setting host name: %w", err)
	}
	if out, err := exec.Command("/bin/busybox", "--install", "-s", "/bin").CombinedOutput(); err != nil {
		return fmt.Errorf("installing busybox: %w: %s", err, out)
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("bringing up lo: %w", err)
	}
	if err := holdPerfEvents(); err != nil {
		return fmt.Errorf("opening perf events: %w", err)
	}
	if err := loadModules(); err != nil {
		return err
	}
	if err := mountDisk(config.Disk); err != nil {
		return err
	}
	return swapOn(config.Swap)
}

// holdPerfEvents opens page-fault events on this process, which keeps them to its end.
// With the first such event the kernel patches the jumps to them into its code, with
// the last one out again, while other CPUs run that code. An emulated CPU may miss
// the last step of it: Linux 7.2 stopped at a breakpoint that nobody knew (in
// finish_task_switch, whose jump perf_sched_events is).
func holdPerfEvents() error {
	for _, counter := range []uint64{
		unix.PERF_COUNT_SW_PAGE_FAULTS, unix.PERF_COUNT_SW_PAGE_FAULTS_MIN, unix.PERF_COUNT_SW_PAGE_FAULTS_MAJ,
	} {
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: counter, Size: unix.PERF_ATTR_SIZE_VER0}
		if _, err := unix.PerfEventOpen(&attr, os.Getpid(), -1, -1, unix.PERF_FLAG_FD_CLOEXEC); err != nil {
			return err
		}
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

// loadModules loads every file of [guest.ModuleDir] in the order of their names.
func loadModules() error {
	files, err := filepath.Glob(filepath.Join(guest.ModuleDir, "*.ko"))
	if err != nil {
		return err
	}
	for _, name := range files { // Glob sorts
		if err := loadModule(name); err != nil {
			return fmt.Errorf("loading %s: %w", filepath.Base(name), err)
		}
	}
	return nil
}

func loadModule(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

func mountDisk(device string) error {
	if device == "" {
		return nil
	}
	if err := awaitDevice(device); err != nil {
		return err
	}
	if err := os.MkdirAll(guest.DiskPath, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(device, guest.DiskPath, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", guest.DiskPath, err)
	}
	// Programs that want a file that is not in memory use /var/tmp, on real systems.
	const varTmp = "/var/tmp"
	shared := filepath.Join(guest.DiskPath, "tmp")
	if err := errors.Join(os.MkdirAll(shared, 0o755), os.MkdirAll(varTmp, 0o755),
		os.Chmod(shared, 0o777|os.ModeSticky)); err != nil {
		return err
	}
	if err := unix.Mount(shared, varTmp, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", varTmp, err)
	}
	return nil
}

func swapOn(device string) error {
	if device == "" {
		return nil
	}
	if err := awaitDevice(device); err != nil {
		return err
	}
	for _, args := range [][]string{{"mkswap", device}, {"swapon", device}} {
		if out, err := exec.Command("/bin/busybox", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("running %s: %w: %s", args[0], err, out)
		}
	}
	return nil
}

// awaitDevice waits for a device node: a driver may find its devices some time
// after its module was loaded.
func awaitDevice(name string) error {
	const patience = 10 * time.Second
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(name); err == nil {
			return nil
		} else if time.Now().After(deadline) {
			return fmt.Errorf("waiting for a disk: %w", err)
		}
	}
}
