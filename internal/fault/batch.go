package fault

import "time"

// Batch is what a source yields at a time. The slices belong to the source and
// are valid until its next call.
type Batch struct {
	// Faults in the order in which they were complete.
	Faults []Fault
	// Until is a time, in nanoseconds of CLOCK_MONOTONIC: but for some that are late by
	// milliseconds, faults that ended before it are in no later batch. 0 if the source does not
	// say.
	Until uint64
	// Stacks are those that faults of this batch or of later ones are the first to have.
	Stacks []RawStack
	// Samples are what was counted by stack and is in no earlier batch, where faults are counted
	// with stacks.
	Samples []RawSample
	// Mappings are calls in the order of their times, if they were asked for.
	Mappings []MappingCall
	// Lost holds what has been lost since the last batch, by cause.
	Lost []Loss
}

// Loss is a number of faults that happened and matched, but of which no record
// could be delivered.
type Loss struct {
	// Where names the place of the loss, for example "ring buffer full".
	Where string
	Count uint64
}

// Unfiltered ends Where of a loss that the filters could not be asked about.
const Unfiltered = ", matching the filters or not"

// Counters are totals since the source was opened. They are counted where the
// faults happen, so neither sampling nor a slow reader changes them.
type Counters struct {
	// Seen is the number of records of matching faults, those skipped by sampling included.
	Seen uint64
	// Lost is the number of matching faults without a record. Seen + Lost is what happened.
	Lost []Loss
	// Filtered is the number of faults that the hook heard of and the filters rejected.
	Filtered uint64
	// Untimed is how many of the records have no latency because the completion
	// was not heard of (a missed return probe, a CPU that had just come online).
	Untimed uint64
	// Unremembered is how many faults found no room in the memory of pages, so that Again
	// is not known of them.
	Unremembered uint64
	// Stackless is how many faults have no stack since there was no room for one more, and
	// StacksLost since the way to us was full.
	Stackless, StacksLost uint64
	// Asked is of how many faults the stack was asked for from another library's unwinder.
	Asked uint64
	// MappingsLost is how many calls of [MappingCall] were not told of.
	MappingsLost uint64
	// Minor, Major and Failed divide Seen; what is in none of them had an unknown result.
	Minor, Major, Failed uint64
}

// LostTotal adds up all causes.
func (c *Counters) LostTotal() uint64 {
	var n uint64
	for _, l := range c.Lost {
		n += l.Count
	}
	return n
}

// BitName names one bit of a kernel flag word.
type BitName struct {
	Bit  uint32
	Name string // without the FAULT_FLAG_ prefix
}

// Session is what stays the same for all faults of a source.
type Session struct {
	// Hook is how faults are heard of: fentry, kprobe, tracepoint or perf.
	Hook string
	// Reason says why this hook was chosen and what spoke against better ones.
	Reason string
	// Covers lists what the hook can see: user, kernel, remote, failed.
	Covers []string
	// Blind lists, in words for a user, what the hook cannot see or know.
	Blind []string
	// Unseen lists those of Blind that are classes of faults neither seen nor counted.
	Unseen []string
	// Compared says, in words for a user, what of the self-test the kernel's own
	// handle_pte_fault has confirmed or why it could not be asked; empty where the kernel
	// does not expose it.
	Compared string

	Kernel, Host string
	CPUs         int
	Command      []string
	// Started is the wall clock at MonoStarted of CLOCK_MONOTONIC, in nanoseconds.
	Started     time.Time
	MonoStarted uint64
	// FlagNames are the running kernel's FAULT_FLAG_* bits, in ascending order.
	FlagNames []BitName
	// PageSize in bytes.
	PageSize uint64
}

// Wall converts a CLOCK_MONOTONIC reading in nanoseconds to wall time.
func (s *Session) Wall(mono uint64) time.Time {
	return s.Started.Add(time.Duration(int64(mono - s.MonoStarted)))
}
