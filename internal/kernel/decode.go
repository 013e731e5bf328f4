package kernel

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
	"unsafe"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// Values of bpf/fault.h that are not in the generated types.
const (
	recordFault    = 1
	recordName     = 2
	recordSelftest = 3
	recordMax      = 4
	recordStack    = 5
	recordMapping  = 6

	// In place of a table's number in the key of a row.
	tableKinds  = 254
	tableOthers = 255

	labelAnon     = 1
	labelHeap     = 2
	labelStack    = 3
	labelAnonName = 4
	labelFile     = 5
	// The stack of the thread that faults, if that is not its process's first.
	labelThreadStack = 6

	resultUnknown = 255

	outcomeMinor   = 0
	outcomeMajor   = 1
	outcomeFailed  = 2
	outcomeUnknown = 3
	outcomes       = 4
)

// knownFields translates enum known.
var knownFields = [...]struct {
	bit   uint16
	field fault.Field
}{
	{1 << 0, fault.HasLatency},
	{1 << 1, fault.HasMajor},
	{1 << 2, fault.HasFlags},
	{1 << 3, fault.HasSomeFlag},
	{1 << 4, fault.HasAttempts},
	{1 << 5, fault.HasIP},
	{1 << 6, fault.HasVMA | fault.HasPgOff},
	{1 << 7, fault.HasAccess},
	{1 << 8, fault.HasKind},
	{1 << 9, fault.HasBefore},
	{1 << 10, fault.HasAfter},
	{1 << 11, fault.HasAgain},
}

// maxNames bounds the memory for file names: so many that no row is named by, and as
// many from before.
const maxNames = 1 << 16

// decoder turns ring buffer records into faults.
type decoder struct {
	pageSize  uint64
	pageShift int
	// frames: tell frames, which belong to these nodes.
	frames bool
	nodes  []process.NodeRange
	// reclaim: the programs on reclaim and compaction are attached.
	reclaim bool
	// names are those that came, or that rows were named by, since the last forgetting, and
	// older those before it. kept is how many of names rows were named by.
	names, older map[faultNameKey]fileName
	kept         int
	// longest are the latencies, in ns, by which rows' longest ones were raised.
	longest map[faultStatKey]uint64
	// fields is knownFields for every combination of its bits.
	fields [1 << len(knownFields)]fault.Field
	// stacks have come and were not handed on yet.
	stacks   []fault.RawStack
	mappings []fault.MappingCall
	// selftest holds the last record of that type.
	selftest *fault.Fault
}

func newDecoder(pageSize uint64) decoder {
	d := decoder{pageSize: pageSize, pageShift: bits.TrailingZeros64(pageSize), names: map[faultNameKey]fileName{}, longest: map[faultStatKey]uint64{}}
	for known := range d.fields {
		for _, k := range knownFields {
			if uint16(known)&k.bit != 0 {
				d.fields[known] |= k.field
			}
		}
	}
	return d
}

// decode reads one record. It reports false for what is not a fault: names and longest
// latencies, which it keeps, and records of another size or type.
func (d *decoder) decode(raw []byte) (fault.Fault, bool) {
	if len(raw) < 4 {
		return fault.Fault{}, false
	}
	switch *(*uint32)(unsafe.Pointer(&raw[0])) {
	case recordName:
		if len(raw) >= int(unsafe.Sizeof(faultNameRecord{})) {
			d.addName((*faultNameRecord)(unsafe.Pointer(&raw[0])))
		}
	case recordMax:
		if len(raw) >= int(unsafe.Sizeof(faultMaxRecord{})) {
			r := (*faultMaxRecord)(unsafe.Pointer(&raw[0]))
			d.longest[r.Key] = max(d.longest[r.Key], r.Ns)
		}
	case recordStack:
		d.addStack(raw)
	case recordMapping:
		if len(raw) >= int(unsafe.Sizeof(faultMappingRecord{})) {
			r := (*faultMappingRecord)(unsafe.Pointer(&raw[0]))
			d.mappings = append(d.mappings, fault.MappingCall{
				PID: r.Pid, Image: r.Image, Time: r.TimeNs, Start: r.Start, End: r.End, Brk: r.Brk != 0, StackID: r.Stack,
				Parent: r.Parent, ParentImage: r.ParentImage,
			})
		}
	case recordFault:
		if len(raw) >= int(unsafe.Sizeof(faultFaultRecord{})) {
			return d.fault((*faultFaultRecord)(unsafe.Pointer(&raw[0]))), true
		}
	case recordSelftest:
		if len(raw) >= int(unsafe.Sizeof(faultFaultRecord{})) {
			r := (*faultFaultRecord)(unsafe.Pointer(&raw[0]))
			f := d.fault(r)
			// Nobody is shown this one, and its frame is worth a comparison.
			f.EntryBefore = r.EntryBefore
			d.selftest = &f
		}
	}
	return fault.Fault{}, false
}

// addStack keeps a stack, whose record is as long as its frames need.
func (d *decoder) addStack(raw []byte) {
	var head faultStackRecord
	const frameSize = unsafe.Sizeof(head.Frames[0])
	if uintptr(len(raw)) < unsafe.Offsetof(head.Frames) {
		return
	}
	r := (*faultStackRecord)(unsafe.Pointer(&raw[0])) // only what is in raw may be read
	kernel, user := int(r.Kernel), int(r.User)
	if n := kernel + user; n > len(head.Frames) || uintptr(len(raw)) < unsafe.Offsetof(head.Frames)+uintptr(n)*frameSize {
		return
	}
	frames := slices.Clone(unsafe.Slice(&r.Frames[0], kernel+user))
	d.stacks = append(d.stacks, fault.RawStack{
		ID: r.Id, Time: r.TimeNs, PID: r.Pid, HostPID: r.HostPid, Image: r.Image, Process: *(*fault.Comm)(unsafe.Pointer(&r.Process)),
		Kernel: frames[:kernel:kernel], User: frames[kernel:], End: fault.StackEnd(r.End),
	})
}

// takeStacks hands on what has come since the last call.
func (d *decoder) takeStacks() []fault.RawStack {
	s := d.stacks
	d.stacks = nil
	return s
}

func (d *decoder) addName(r *faultNameRecord) {
	n := min(int(r.Len), len(r.Name))
	text := string(unsafe.Slice((*byte)(unsafe.Pointer(&r.Name[0])), n))
	d.names[r.Key] = makeFileName(text, r.Flags, r.Key.Ino)
}

// The bits of enum name_flag.
const (
	namePath    = 1
	nameDeleted = 2
	nameCut     = 4
)

// fileName is what a mapped file is called: its last name and, if it is in a folder,
// its path.
type fileName struct {
	label, path string
	deleted     bool
}

// makeFileName puts the components of a path, of which the last comes first, in order.
func makeFileName(text string, flags uint32, inode uint64) fileName {
	if flags&namePath == 0 {
		if label := process.InternalFile(text, inode); label != "" {
			text = label
		}
		return fileName{label: text}
	}
	parts := strings.Split(strings.TrimSuffix(text, "\x00"), "\x00")
	slices.Reverse(parts)
	path := "/" + strings.Join(parts, "/")
	if flags&nameCut != 0 {
		path = "..." + path
	}
	return fileName{label: parts[len(parts)-1], path: path, deleted: flags&nameDeleted != 0}
}

func (d *decoder) fault(r *faultFaultRecord) fault.Fault {
	f := fault.Fault{
		End: r.EndNs,
		PID: r.Pid, TID: r.Tid, HostPID: r.HostPid, HostTID: r.HostTid,
		InnerPID: r.InnerPid, InnerTID: r.InnerTid, CPU: r.Cpu,
		Comm: *(*fault.Comm)(unsafe.Pointer(&r.Comm)), Process: *(*fault.Comm)(unsafe.Pointer(&r.Process)),
		Known:    d.fields[r.Known&(1<<len(knownFields)-1)] | fault.HasMode | fault.HasIDs,
		Mode:     fault.Mode(r.Mode),
		Access:   fault.Access(r.Access),
		Major:    r.Major != 0,
		Attempts: r.Attempts,
		Flags:    r.Flags,
		Address:  r.Address,
		IP:       r.Ip,
		Cause:    fault.Cause(r.Cause),
		Again:    r.Again != 0,
		Image:    r.Image,
		StackID:  r.Stack,
		Sampled:  r.SampledNs,
		Stands:   r.SampledWeight,

		// Frames are nobody's business: they tell where in the machine's memory a page is.
		EntryBefore: r.EntryBefore &^ frameBits, EntryAfter: r.EntryAfter &^ frameBits, Level: r.LevelAfter, Pages: r.Pages, Folio: r.Folio,
	}
	if d.frames && f.Is(fault.HasAfter) && present(r.EntryAfter) {
		d.place(&f, r)
	}
	if f.Is(fault.HasKind) {
		f.Kind, f.KindExact = fault.Kind(r.Kind), f.Is(fault.HasBefore)
	}
	if r.InnerPid != 0 {
		f.Known |= fault.HasInnerIDs
	}
	if r.Result != resultUnknown {
		f.Known |= fault.HasResult
		f.Result = fault.Result(r.Result)
	}
	if f.Is(fault.HasLatency) {
		f.Latency = time.Duration(r.EndNs - r.StartNs)
		// A clock that runs backwards between CPUs must not become 584 years.
		if r.EndNs < r.StartNs {
			f.Known &^= fault.HasLatency
			f.Latency = 0
		} else {
			d.divide(&f, r)
		}
	}
	if f.Is(fault.HasVMA) {
		f.VMA = fault.VMA{
			Start: r.VmaStart, End: r.VmaEnd, PgOff: r.VmaPgoff, Flags: r.VmaFlags,
			Inode: r.File.Ino, Dev: r.File.Dev,
		}
		f.PgOff = (r.Address-r.VmaStart)>>d.pageShift + r.VmaPgoff
		d.label(&f, r)
	}
	return f
}

// divide tells what the latency consists of.
func (d *decoder) divide(f *fault.Fault, r *faultFaultRecord) {
	if d.reclaim {
		f.Known |= fault.HasReclaim
		f.Reclaim, f.Compaction = time.Duration(r.ReclaimNs), time.Duration(r.CompactionNs)
	}
	f.Known |= fault.HasOffCPU
	f.OffCPU, f.Wait = min(time.Duration(r.OffcpuNs), f.Latency), fault.Wait(r.Wait)
}

// place tells where in the machine's memory the page is.
func (d *decoder) place(f *fault.Fault, r *faultFaultRecord) {
	// Of a huge page the entry holds the first frame.
	inPage := r.Address >> d.pageShift & (f.PageSize()>>d.pageShift - 1)
	if f.Level == 0 {
		inPage = 0
	}
	f.Known |= fault.HasPFN
	f.PFN = r.EntryAfter&frameBits>>d.pageShift&^(1<<(9*f.Level)-1) + inPage
	f.Node = -1
	for _, n := range d.nodes {
		if f.PFN >= n.Start && f.PFN < n.End {
			f.Node = n.Node
			break
		}
	}
}

func (d *decoder) label(f *fault.Fault, r *faultFaultRecord) {
	if name, ok := d.nameOf(r.Label, r.Tid, &r.File); ok {
		f.VMA.Label, f.VMA.Path, f.VMA.Deleted = name.label, name.path, name.deleted
		if r.Label == labelAnon && f.VMA.Perm() == "---p" {
			f.VMA.Label = "[guard]"
		}
		f.Known |= fault.HasLabel
	}
}

// nameOf is the name for one of enum label, of a mapping in which tid faults.
func (d *decoder) nameOf(label uint8, tid uint32, file *faultNameKey) (fileName, bool) {
	switch label {
	case labelAnon:
		return fileName{label: "[anon]"}, true
	case labelHeap:
		return fileName{label: "[heap]"}, true
	case labelStack:
		return fileName{label: "[stack]"}, true
	case labelThreadStack:
		return fileName{label: fmt.Sprintf("[stack:%d]", tid)}, true
	case labelAnonName:
		if name, ok := d.sentName(*file); ok {
			return fileName{label: "[anon:" + name.label + "]"}, true
		}
	case labelFile:
		return d.sentName(*file)
	}
	return fileName{}, false
}

func (d *decoder) sentName(key faultNameKey) (fileName, bool) {
	name, ok := d.names[key]
	if !ok {
		name, ok = d.older[key]
	}
	return name, ok
}

// crowded reports whether very many files have been seen.
func (d *decoder) crowded() bool { return len(d.names) >= d.kept+maxNames }

// forgetNames forgets all names but those of rows, and those since the call before: a
// fault in flight may have found its name sent and has no row yet.
func (d *decoder) forgetNames(rows []faultNameKey) {
	kept := map[faultNameKey]fileName{}
	for _, key := range rows {
		if name, ok := d.sentName(key); ok {
			kept[key] = name
		}
	}
	d.older, d.names, d.kept = d.names, kept, len(kept)
}
