package fault

import (
	"bytes"
	"slices"
	"time"
)

// Filter selects faults. The zero value selects all. Conditions of different
// fields must all hold; of the values of one field any one must.
type Filter struct {
	// PIDs are thread groups and TIDs single threads, in the observer's pid namespace.
	PIDs, TIDs []uint32
	// Comms are substrings of the thread's or the process's comm; one longer than
	// 15 bytes is a substring of the executable's file name.
	Comms []string
	// Cgroup is the folder of a cgroup v2; its descendants belong to it.
	Cgroup string
	// UID is the real user id in the initial user namespace.
	UID *uint32
	// Major selects major faults only if true and minor ones only if false.
	Major *bool
	Mode  *Mode
	// Access selects by what the faulting instruction wanted.
	Access *Access
	// Kinds selects faults of any of these kinds.
	Kinds []Kind
	// Addr selects faults in [Start, End) if End is not 0.
	AddrStart, AddrEnd uint64
	MinLatency         time.Duration
	// Children makes the processes that a selected one starts selected too.
	Children bool
	// Self includes the tool's own faults.
	Self bool
}

// MaxComm is the longest task name the kernel keeps, in bytes.
const MaxComm = 15

// MatchRecord applies the conditions that a record itself answers: major, mode,
// access, kind, address and latency. A fact the record does not know does not match.
func (flt *Filter) MatchRecord(f *Fault) bool {
	switch {
	case flt.Major != nil && (!f.Is(HasMajor) || f.Major != *flt.Major),
		flt.Mode != nil && (!f.Is(HasMode) || f.Mode != *flt.Mode),
		flt.Access != nil && (!f.Is(HasAccess) || f.Access != *flt.Access),
		len(flt.Kinds) > 0 && (!f.Is(HasKind) || !slices.Contains(flt.Kinds, f.Kind)),
		flt.AddrEnd != 0 && (f.Address < flt.AddrStart || f.Address >= flt.AddrEnd),
		flt.MinLatency > 0 && (!f.Is(HasLatency) || f.Latency < flt.MinLatency):
		return false
	}
	return true
}

// MatchComm applies Comms to a record and the file name of its executable. exe
// is only called when a pattern is too long for a comm.
func (flt *Filter) MatchComm(f *Fault, exe func() string) bool {
	if len(flt.Comms) == 0 {
		return true
	}
	for _, pattern := range flt.Comms {
		p := []byte(pattern)
		switch {
		case len(p) <= MaxComm && (bytes.Contains(f.Comm.Bytes(), p) || bytes.Contains(f.Process.Bytes(), p)):
			return true
		case len(p) > MaxComm && bytes.Contains([]byte(exe()), p):
			return true
		}
	}
	return false
}
