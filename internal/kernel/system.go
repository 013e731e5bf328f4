package kernel

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/process"
)

// System is the state of the machine that explains why something is refused.
type System struct {
	Release string
	Arch    string
	// Lockdown is none, integrity, confidentiality, or empty where it cannot be read.
	Lockdown string
	// Caps are the effective capabilities, a bit each (linux/capability.h).
	Caps uint64
	UID  int
	// PerfParanoid is kernel.perf_event_paranoid; nil where it cannot be read.
	PerfParanoid *int
	// KptrRestrict is kernel.kptr_restrict; nil where it cannot be read.
	KptrRestrict *int
	// Memlock is the soft limit of RLIMIT_MEMLOCK in bytes.
	Memlock uint64
	// Tracefs is where tracefs is mounted, empty if nowhere.
	Tracefs string
	// Preemption is how the kernel preempts itself: none, voluntary, lazy, full or rt;
	// empty where it cannot be told.
	Preemption string
	// Container names the container runtime or namespace seen, empty on a plain host.
	Container string
	WSL       bool
}

// ReadSystem looks at the machine; what cannot be read is left zero.
func ReadSystem() System {
	s := System{Arch: runtime.GOARCH, UID: os.Geteuid()}
	var uts unix.Utsname
	if unix.Uname(&uts) == nil {
		s.Release = unix.ByteSliceToString(uts.Release[:])
	}
	s.WSL = strings.Contains(strings.ToLower(s.Release), "microsoft")
	s.Lockdown = lockdown()
	s.Caps = effectiveCaps()
	s.PerfParanoid = sysctl("kernel/perf_event_paranoid")
	s.KptrRestrict = sysctl("kernel/kptr_restrict")
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) == nil {
		s.Memlock = lim.Cur
	}
	s.Tracefs = process.MountPoint("tracefs")
	s.Preemption = preemption(unix.ByteSliceToString(uts.Version[:]), process.MountPoint("debugfs"))
	s.Container = container()
	return s
}

// HasCap reports whether one of the capabilities is effective.
func (s *System) HasCap(caps ...int) bool {
	for _, c := range caps {
		if s.Caps&(1<<c) != 0 {
			return true
		}
	}
	return false
}

// lockdown reads the word in brackets of securityfs' lockdown file.
func lockdown() string {
	b, err := os.ReadFile("/sys/kernel/security/lockdown")
	if err != nil {
		return ""
	}
	_, s, _ := strings.Cut(string(b), "[")
	s, _, _ = strings.Cut(s, "]")
	return s
}

func effectiveCaps() uint64 {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 0
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		if v, ok := strings.CutPrefix(sc.Text(), "CapEff:"); ok {
			caps, _ := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
			return caps
		}
	}
	return 0
}

func sysctl(name string) *int {
	b, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return nil
	}
	v, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return nil
	}
	return &v
}

func container() string {
	for file, name := range map[string]string{"/.dockerenv": "docker", "/run/.containerenv": "podman"} {
		if _, err := os.Stat(file); err == nil {
			return name
		}
	}
	if ns, err := process.PIDNamespace(); err == nil && ns != process.InitialPIDNamespace {
		return "pid namespace"
	}
	return ""
}

const unlock = "boot with lockdown=integrity or none"

// mayNotRead is why BPF programs cannot read kernel memory
// (LOCKDOWN_BPF_READ_KERNEL in kernel/trace/bpf_trace.c).
func (s *System) mayNotRead() Support {
	cause := "kernel lockdown (confidentiality) forbids it"
	if s.Lockdown == "" {
		cause = "refused; perhaps by kernel lockdown, whose state cannot be read here"
	}
	return Support{Found: "reading kernel memory from a BPF program: " + cause, Remedy: unlock}
}

// refusal turns an error of the kernel into its likely cause. The library's own
// text is not passed on for EPERM: it suspects RLIMIT_MEMLOCK, which does not
// matter since Linux 5.11.
func (s *System) refusal(doing string, err error) Support {
	asRoot := "run as root"
	switch {
	case errors.Is(err, unix.ENOSYS):
		return Support{Found: doing + ": the kernel has no bpf(2) system call", Remedy: "use a kernel with CONFIG_BPF_SYSCALL"}
	case (errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES)) && !s.HasCap(unix.CAP_SYS_ADMIN) &&
		(!s.HasCap(unix.CAP_BPF) || !s.HasCap(unix.CAP_PERFMON)):
		return Support{Found: doing + ": needs root, or CAP_BPF and CAP_PERFMON", Remedy: asRoot}
	case errors.Is(err, unix.EPERM) && s.Lockdown == "confidentiality":
		return Support{Found: doing + ": kernel lockdown (confidentiality) forbids it", Remedy: unlock}
	case errors.Is(err, unix.EPERM):
		return Support{Found: doing + ": operation not permitted by this kernel"}
	case errors.Is(err, fs.ErrNotExist):
		return Support{Found: doing + ": not in this kernel"}
	}
	var ve *ebpf.VerifierError
	if errors.As(err, &ve) {
		return Support{Found: fmt.Sprintf("%s: refused by the verifier: %v", doing, ve)}
	}
	return Support{Found: fmt.Sprintf("%s: %v", doing, err)}
}
