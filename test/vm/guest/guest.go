// Package guest is the contract between the host program of the kernel matrix and
// the /init that it boots: what is to be run, and the lines on the serial console
// by which /init says how it went. It imports the standard library only.
package guest

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// ConfigPath is where the host puts the [Config], as JSON, into the initramfs.
const ConfigPath = "/vm.json"

// ModuleDir holds the kernel modules to load. Their file names begin with a
// number, and loading them in the order of their names satisfies every dependency.
const ModuleDir = "/modules"

// Environment variables that every program in the guest finds.
const (
	// EnvKernel is the matrix's name of the running kernel, such as "6.12-arm64".
	// A test that finds it set owns the whole machine: it may take CPUs offline,
	// lock the kernel down or fill the swap.
	EnvKernel = "FAULTSNOOP_VM"
	// EnvDisk names a folder on an ext4 file system with a real (virtual) disk.
	EnvDisk = "FAULTSNOOP_VM_DISK"
)

// Config is all that /init needs to know.
type Config struct {
	// Nonce distinguishes the marks of this boot from anything a test may print.
	Nonce string
	// Kernel is the value of EnvKernel.
	Kernel string
	// Disk and Swap name the block devices to mount on DiskPath and to swap on.
	Disk, Swap string
	Programs   []Program
}

// DiskPath is the mount point of Config.Disk. Its folder tmp is /var/tmp too.
const DiskPath = "/mnt"

// Program is one command to run to its end, as root, before the next one begins.
type Program struct {
	Name string // unique within a Config, without white space
	Args []string
	Dir  string
	// Timeout kills the program. It is a second line of defence behind the
	// program's own limit, which can say more about what hung.
	Timeout time.Duration
}

// Event is a mark's kind.
type Event string

const (
	Ready Event = "ready" // the machine is set up
	Begin Event = "begin" // the named program starts
	End   Event = "end"   // the named program ended with Status
	Done  Event = "done"  // every program ended; power goes off
	Fault Event = "fault" // setting up went wrong; Text says how
)

// Mark is one line that /init writes to the console for the host.
type Mark struct {
	Event  Event
	Name   string // of the program, for Begin and End
	Status int    // for End: exit code, or 128 + signal number
	Text   string // for Fault
}

// Format returns the mark as a line without a line end.
func (m Mark) Format(nonce string) string {
	s := prefix(nonce) + string(m.Event)
	switch m.Event {
	case Begin:
		s += " " + m.Name
	case End:
		s += fmt.Sprintf(" %s %d", m.Name, m.Status)
	case Fault:
		s += " " + strings.ReplaceAll(m.Text, "\n", " ")
	}
	return s
}

// ParseMark recognises a line written by [Mark.Format]. The kernel may have left
// something unfinished in front of it on the same line.
func ParseMark(line, nonce string) (Mark, bool) {
	_, rest, ok := strings.Cut(line, prefix(nonce))
	if !ok {
		return Mark{}, false
	}
	event, rest, _ := strings.Cut(strings.TrimRight(rest, "\r\n"), " ")
	m := Mark{Event: Event(event)}
	switch m.Event {
	case Ready, Done:
	case Begin:
		m.Name = rest
	case End:
		name, status, _ := strings.Cut(rest, " ")
		n, err := strconv.Atoi(status)
		if err != nil {
			return Mark{}, false
		}
		m.Name, m.Status = name, n
	case Fault:
		m.Text = rest
	default:
		return Mark{}, false
	}
	return m, true
}

func prefix(nonce string) string { return "=vm=" + nonce + "= " }
