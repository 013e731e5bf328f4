package process

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Status holds what /proc/PID/status says of a thread.
type Status struct {
	// TGID is the thread group id, the process.
	TGID uint32
	// UID is the real user id in the caller's user namespace.
	UID uint32
	// InnerTGID and InnerTID are the ids in the thread's own pid namespace. They are
	// those of the caller's namespace unless Nested.
	InnerTGID, InnerTID uint32
	// Nested is set for a thread in a pid namespace below the caller's.
	Nested bool
}

// ReadStatus reads the status of a thread or, by its leader's id, of a process.
func ReadStatus(tid int) (Status, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return Status{}, fmt.Errorf("reading the status of thread %d: %w", tid, err)
	}
	st, err := parseStatus(string(b))
	if err != nil {
		return Status{}, fmt.Errorf("reading the status of thread %d: %w", tid, err)
	}
	return st, nil
}

func parseStatus(text string) (Status, error) {
	var st Status
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		if len(fields) == 0 {
			continue
		}
		var err error
		switch key {
		case "Tgid":
			st.TGID, err = number(fields[0])
		case "Uid":
			st.UID, err = number(fields[0])
		case "NStgid":
			st.InnerTGID, err = number(fields[len(fields)-1])
		case "NSpid":
			st.Nested = len(fields) > 1
			st.InnerTID, err = number(fields[len(fields)-1])
		}
		if err != nil {
			return Status{}, fmt.Errorf("parsing %s: %w", key, err)
		}
	}
	if st.TGID == 0 {
		return Status{}, fmt.Errorf("parsing Tgid: no such line")
	}
	return st, nil
}

func number(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}
