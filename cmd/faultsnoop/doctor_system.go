package main

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/kernel"
)

func kernelCheck(sys *kernel.System) check {
	var major, minor int
	_, err := fmt.Sscanf(sys.Release, "%d.%d", &major, &minor)
	c := check{Name: "kernel", Found: sys.Release, OK: err == nil && (major > 5 || major == 5 && minor >= 10)}
	c.Follows = "supported"
	if !c.OK {
		c.Follows = "not tested on kernels before 5.10; the self-test decides"
	}
	return c
}

func paranoidCheck(sys *kernel.System) check {
	c := check{Name: "perf_event_paranoid", Found: "cannot be read", Follows: "hook perf may be refused"}
	if sys.PerfParanoid == nil {
		return c
	}
	v := *sys.PerfParanoid
	c.Found, c.OK = fmt.Sprint(v), v <= 2
	switch {
	case v <= 0:
		c.Follows = "anyone may trace all processes by hook perf"
	case v == 1:
		c.Follows = "anyone may trace own processes by hook perf, kernel mode included"
	case v == 2:
		c.Follows = "anyone may trace own processes by hook perf, user mode only"
	default:
		c.Follows = "hook perf needs privilege"
		c.Remedy = "sysctl kernel.perf_event_paranoid=2"
	}
	return c
}

func lockdownCheck(sys *kernel.System) check {
	switch sys.Lockdown {
	case "":
		return check{Name: "lockdown", Found: "unknown (securityfs is not mounted or the kernel has none)", Follows: "what it forbids, if anything, shows in the checks above"}
	case "none":
		return check{Name: "lockdown", OK: true, Found: "none", Follows: "nothing is forbidden"}
	case "integrity":
		return check{Name: "lockdown", OK: true, Found: "integrity", Follows: "BPF may read kernel memory"}
	}
	return check{
		Name: "lockdown", Found: sys.Lockdown, Follows: "BPF may not read kernel memory: only hook perf can work",
		Remedy: "boot with lockdown=integrity or none",
	}
}

var capNames = []struct {
	name string
	bit  int
}{
	{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN},
	{"CAP_BPF", unix.CAP_BPF},
	{"CAP_PERFMON", unix.CAP_PERFMON},
	{"CAP_SYS_RESOURCE", unix.CAP_SYS_RESOURCE},
}

func capsCheck(sys *kernel.System) check {
	var have []string
	for _, c := range capNames {
		if sys.HasCap(c.bit) {
			have = append(have, c.name)
		}
	}
	c := check{
		Name: "capabilities", Found: strings.Join(have, " "),
		OK: sys.HasCap(unix.CAP_SYS_ADMIN) || sys.HasCap(unix.CAP_BPF) && sys.HasCap(unix.CAP_PERFMON),
	}
	if c.Found == "" {
		c.Found = "none of those that matter"
	}
	c.Follows = "BPF hooks are permitted"
	if !c.OK {
		c.Follows = "only hook perf, for own processes"
		c.Remedy = "run as root, or with CAP_BPF and CAP_PERFMON"
	}
	return c
}

func memlockCheck(sys *kernel.System, full error) check {
	limit := "unlimited"
	if sys.Memlock != math.MaxUint64 {
		limit = units.BytesSize(float64(sys.Memlock))
	}
	c := check{
		Name: "memlock", OK: true, Found: limit,
		Follows: "does not limit BPF since Linux 5.11; bounds the buffers of hook perf without privilege",
	}
	if errors.Is(full, unix.EPERM) {
		c.OK, c.Follows = false, "may not be raised: --stack=full insists on that; hooks do not need it since Linux 5.11"
		c.Remedy = "add CAP_SYS_RESOURCE, or ulimit -l unlimited"
	}
	return c
}

// stacksCheck tells which stacks can be taken. Frame pointers are followed with every hook.
func stacksCheck(f *kernel.Features, full error) check {
	switch {
	case !f.BPF.OK:
		return check{Name: "stacks", Found: "--stack=fp", Follows: "by frame pointers only; --stack=full, of any language, needs BPF"}
	case full != nil:
		return check{Name: "stacks", Found: "--stack=fp", Follows: fmt.Sprintf("by frame pointers only; --stack=full, of any language: %v", full)}
	}
	return check{Name: "stacks", OK: true, Found: "--stack=full, --stack=fp", Follows: "of any language, if the kernel takes the unwinder's programs, and by frame pointers"}
}

func tracefsCheck(f *kernel.Features, sys *kernel.System) check {
	c := check{Name: "tracefs", OK: sys.Tracefs != "", Found: sys.Tracefs, Follows: "hook kprobe can ask for enough return probes"}
	if !c.OK {
		c.Found = "not mounted"
	}
	switch {
	case !f.Kprobes.OK:
		c.Follows = "matters to hook kprobe only, which cannot work"
	case !c.OK:
		c.Follows = "hook kprobe may miss returns under load; those records have no latency"
		c.Remedy = "mount -t tracefs nodev /sys/kernel/tracing"
	}
	return c
}

func placeCheck(sys *kernel.System) check {
	switch {
	case sys.WSL:
		return check{Name: "place", OK: true, Found: "Windows Subsystem for Linux", Follows: "its kernel decides; see the checks above"}
	case sys.Container == "pid namespace":
		return check{Name: "place", OK: true, Found: "a pid namespace", Follows: "pids are those of this namespace; processes outside are shown with pid 0"}
	case sys.Container != "":
		return check{Name: "place", OK: true, Found: "a container (" + sys.Container + ")", Follows: "its runtime may withhold capabilities and system calls; see the checks above"}
	}
	return check{Name: "place", OK: true, Found: "no container seen", Follows: "pids are those of the host"}
}
