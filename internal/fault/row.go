package fault

import "time"

// By is what faults are counted by in a table.
type By uint8

// The order is that of enum by in bpf/fault.h.
const (
	ByProcess By = iota
	ByThread
	ByKind
	ByFile
	ByMapping
	ByPage
	ByCgroup
	ByUID
	ByCPU
	ByAccess
	ByMode
	ByResult
	// ByStack: each stack, which belongs to one program of one process.
	ByStack
	// BySample: a thread's faults with a stack, of a kind, major or not.
	BySample
)

var byNames = [...]string{
	"process", "thread", "kind", "file", "mapping", "page", "cgroup", "uid", "cpu", "access", "mode", "result", "stack", "sample",
}

func (b By) String() string { return name(byNames[:], b) }

// ParseBy is the inverse of [By.String].
func ParseBy(s string) (By, bool) { return parse[By](byNames[:], s) }

// MaxTables is how many tables are counted at a time.
const MaxTables = 4

// Unset is the ID of a [Key] whose fact is not known, of access and result.
const Unset = 255

// Stackless is the Value of the [Key] of faults whose stack was asked for in vain. That of those
// whose stack was not asked for is 0.
const Stackless = 1<<64 - 1

// NoUID is the ID of a [Key] whose user is not known: no user has this number.
const NoUID = 1<<32 - 1

// Key names a row of a table. What the table is not by is zero.
type Key struct {
	// ID is a process, thread, user or CPU, or the value of a Kind, Access, Mode or Result.
	ID uint32
	// Value is the process of a thread, the address of a page or of the mapping's start,
	// the id of a cgroup v2 (the inode of its folder), or that of a stack.
	Value uint64
	// End is that of a mapping that is a stack, whose start moves: Value is 0 then.
	End uint64
	// Name is that of a process or thread.
	Name Comm
	// Label is that of a file's or mapping's VMA. It is empty if it is not known or, as yet,
	// only in [Rows.Names].
	Label string
	File  FileKey
	// Process, Kind and Major are of a sample, whose thread is ID.
	Process uint32
	Kind    Kind
	Major   bool
}

// FileKey is what a row by file or mapping is of.
type FileKey struct {
	Dev   uint32
	Inode uint64
	// Mount, Hash and Anon tell apart the names of a source that learns names by
	// themselves: the mount and a hash of the name, or of that of anonymous memory.
	Mount uint32
	Hash  uint64
	Anon  bool
}

// Cost is how often, and what it took.
type Cost struct {
	Minor, Major, Failed uint64
	// Unknown are faults whose result is not known.
	Unknown uint64
	// Untimed are faults whose latency is not known; Time and Max are of all others.
	Untimed   uint64
	Time, Max time.Duration
	// OffCPU is the part of Time in which threads were not running.
	OffCPU time.Duration
	// Bytes were mapped, as far as that is known.
	Bytes uint64
	// Others are those for which these faults stand, as stacks are not asked for of all.
	Others Estimate
}

// Estimate is what some faults cost, as others do that chance has chosen among them.
type Estimate struct {
	Faults uint64
	Time   time.Duration
	Bytes  uint64
}

// Faults is how many there were.
func (c *Cost) Faults() uint64 { return c.Minor + c.Major + c.Failed + c.Unknown }

// Add adds another cost.
func (c *Cost) Add(o *Cost) {
	c.Minor += o.Minor
	c.Major += o.Major
	c.Failed += o.Failed
	c.Unknown += o.Unknown
	c.Untimed += o.Untimed
	c.Time += o.Time
	c.Max = max(c.Max, o.Max)
	c.OffCPU += o.OffCPU
	c.Bytes += o.Bytes
	c.Others.Faults += o.Others.Faults
	c.Others.Time += o.Others.Time
	c.Others.Bytes += o.Others.Bytes
}

// KindCost is the cost of all faults of a kind.
type KindCost struct {
	Cost
	// Buckets count latencies; see package aggregate for their bounds.
	Buckets []uint64
}

// Table is one way to divide the same faults.
type Table struct {
	By   By
	Rows map[Key]Cost
	// Other is what found no room: its sum and that of the rows are all faults.
	Other Cost
}

// Rows are faults counted instead of listed.
type Rows struct {
	// Kinds has a row for each [Kind], KindUnknown for faults whose kind is not known.
	Kinds  [Spurious + 1]KindCost
	Tables []Table
	// Names are the labels of files as far as the keys of rows do not have them: a name
	// may come, or change, after its row was made, which is the same row all the time.
	Names map[FileKey]string
	// Stacks and Samples are those that are in no batch and in no earlier Rows. Where a source
	// has samples, its table by stack has no rows, and their sum with Other is all faults.
	Stacks  []RawStack
	Samples []RawSample
}
