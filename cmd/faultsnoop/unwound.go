package main

import (
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"slices"
	"time"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
	"faultsnoop/internal/symbol"
	"faultsnoop/internal/unwind"
)

// What is remembered, of each two times as many: different stacks as they come, with their names
// if faults are counted by them (about 3 KiB each), and mappings of modules.
const (
	maxUnwound = 1 << 14
	maxCounted = 1 << 15
	maxModules = 1 << 12
)

// countedHold is how long a fault that is counted may wait for its stack: nobody waits for it.
const countedHold = 3 * time.Second

// unwound takes stacks of any language and gives them to the faults that they were taken of.
type unwound struct {
	*unwind.Unwinder
	joiner *unwind.Joiner
	joined []unwind.Joined
	// stacked is how many faults have got one.
	stacked uint64
	// counter counts the faults that have a stack by the ids of stacks, nil if they are shown.
	counter *aggregate.Counter
	stacks  recent[uint64, countedStack]
	seed    maphash.Seed

	named recent[unwoundKey, unwoundStack]
	// files are mappings of the modules that frames were in.
	files recent[moduleKey, *fault.VMA]
}

// execution is a process between two execs.
type execution struct{ pid, image uint32 }

// unwoundKey is a stack without names, of a process of this name. Without build-ids the names
// are those of one program.
type unwoundKey struct {
	stack   *fault.Stack
	process fault.Comm
	of      execution
}

type unwoundStack struct {
	*fault.Stack
	id uint64
}

type countedStack struct {
	*fault.Stack
	process fault.Comm
}

// moduleKey is a file: without a build-id what one program has mapped from its path.
type moduleKey struct {
	path, buildID string
	of            execution
}

// openUnwound loads the unwinder for what is to be traced, or says why not.
func openUnwound(o *sourceOptions, every uint64) (*unwound, error) {
	hook, err := o.plannedHook()
	if err != nil {
		return nil, err
	}
	when := unwind.AtEnd
	switch {
	case hook == kernel.Perf:
		return nil, errors.New("the unwinder needs another hook than perf")
	case hook.UnwindsAtBegin():
		when = unwind.AtBegin
	}
	u, err := unwind.Open(unwind.Options{When: when, Every: uint32(min(every, 1<<31))})
	if err != nil {
		return nil, err
	}
	joiner := unwind.NewJoiner(when)
	if o.CountOnly {
		joiner.Unordered, joiner.Hold = true, countedHold
	}
	return newUnwound(u, joiner, o.Tables), nil
}

// newUnwound counts faults by their stacks if there are tables, of which the last is by these.
func newUnwound(u *unwind.Unwinder, joiner *unwind.Joiner, tables []fault.By) *unwound {
	w := &unwound{
		Unwinder: u, joiner: joiner, seed: maphash.MakeSeed(),
		named: recent[unwoundKey, unwoundStack]{limit: maxUnwound},
		files: recent[moduleKey, *fault.VMA]{limit: maxModules},
	}
	if n := len(tables); n > 0 {
		w.counter = aggregate.NewCounter(tables[n-1:], maxRecordRows)
	}
	w.stacks = recent[uint64, countedStack]{limit: maxCounted, forgotten: func(stacks map[uint64]countedStack) {
		w.counter.Forget(func(k *fault.Key) bool { _, ok := stacks[k.Value]; return ok })
	}}
	return w
}

// join puts in place of the faults of a batch those whose stacks have come, or will not. All
// that ended before the time that it returns have been.
func (w *unwound) join(batch *fault.Batch, end bool) (until uint64) {
	for i := range batch.Faults {
		w.joiner.AddFault(&batch.Faults[i])
	}
	if end {
		w.Stop()
		for t := range w.Traces() {
			w.joiner.AddTrace(t)
		}
		w.joined = w.joiner.Flush(w.joined[:0])
		until = 1<<64 - 1
	} else {
		w.receive()
		w.joined = w.joiner.Take(batch.Until, w.joined[:0])
		until = batch.Until - min(batch.Until, uint64(w.joiner.Hold))
	}
	batch.Faults = batch.Faults[:0]
	for i := range w.joined {
		f := w.joined[i].Fault
		if s := w.joined[i].Stack; s != nil && len(s.Frames) > 0 {
			f.Stack = s
			w.stacked++
		}
		batch.Faults = append(batch.Faults, f)
	}
	return until
}

// receive takes what has come.
func (w *unwound) receive() {
	for {
		select {
		case t, ok := <-w.Traces():
			if !ok {
				return
			}
			w.joiner.AddTrace(t)
		default:
			return
		}
	}
}

// count counts the faults of a batch whose stack was asked for.
func (w *unwound) count(batch *fault.Batch) {
	for i := range batch.Faults {
		if batch.Faults[i].Sampled != 0 {
			w.counter.Add(&batch.Faults[i])
		}
	}
}

// name gives a fault the stack whose native frames have the names of our symbols.
func (w *unwound) name(f *fault.Fault, n *stackNamer) {
	key := unwoundKey{stack: f.Stack, process: f.Process}
	if slices.ContainsFunc(f.Stack.Frames, func(f fault.Frame) bool { return inFile(&f) && f.BuildID == "" }) {
		key.of = execution{f.PID, f.Image}
	}
	named, ok := w.named.get(key)
	if !ok {
		named.Stack = w.nameFrames(f, n)
		if w.counter != nil {
			named.id = w.id(named.Stack, f.Process)
		}
		w.named.put(key, named)
	} else if w.counter != nil {
		if _, ok := w.stacks.get(named.id); !ok { // it has been forgotten
			w.stacks.put(named.id, countedStack{named.Stack, f.Process})
		}
	}
	f.Stack, f.StackID = named.Stack, named.id
}

func (w *unwound) nameFrames(f *fault.Fault, n *stackNamer) *fault.Stack {
	s := &fault.Stack{End: f.Stack.End}
	for i := range f.Stack.Frames {
		frame := &f.Stack.Frames[i]
		switch {
		case frame.Lang == fault.LangKernel && frame.Addr != 0:
			s.Frames = append(s.Frames, n.inKernel(frame.Addr, i > 0))
		case inFile(frame) && frame.Module != "":
			// The unwinder names Go's functions, but not those that are inlined, whose lines it
			// tells.
			s.Frames = append(s.Frames, w.native(frame, f, n, i > 0)...)
		default:
			s.Frames = append(s.Frames, interpreted(frame))
		}
	}
	s.Frames = outsideHandler(s.Frames)
	return s
}

// inFile reports whether a frame is of code in a file, which has symbols.
func inFile(f *fault.Frame) bool { return f.Lang == fault.LangNative || f.Lang == fault.LangGo }

// interpreted has the source file of a function for its module, as nothing else is mapped or
// loaded for it.
func interpreted(f *fault.Frame) fault.Frame {
	out := *f
	if out.File == "<unknown>" { // so the unwinder says
		out.File = ""
	}
	if out.Module == "" && out.Func != "" {
		out.Module = out.File
	}
	return out
}

// native names one frame, as far as its file can be read.
func (w *unwound) native(frame *fault.Frame, f *fault.Fault, n *stackNamer, caller bool) []fault.Frame {
	key := moduleKey{path: frame.Module, buildID: frame.BuildID}
	if frame.BuildID == "" {
		key.of = execution{f.PID, f.Image}
	}
	vma, ok := w.files.get(key)
	if !ok {
		if frame.Module == "[vdso]" {
			vma = &fault.VMA{Label: "[vdso]"}
		} else if space := n.maps.MappingsOf(f.PID, f.End); space != nil {
			if m := space.Mapped(frame.Module); m != nil {
				vma = m.VMA()
			}
		}
		if vma == nil {
			return []fault.Frame{*frame}
		}
		w.files.put(key, vma)
	}
	in := symbol.Instruction{VMA: vma, PID: f.PID, Image: f.Image, Time: f.End, Caller: caller}
	if frames := n.resolver.FramesIn(&in, frame.Offset, frame.BuildID); len(frames) > 0 {
		return frames
	}
	return []fault.Frame{*frame}
}

// id is that of a stack of processes of this name, by all that it consists of.
func (w *unwound) id(s *fault.Stack, process fault.Comm) uint64 {
	var h maphash.Hash
	h.SetSeed(w.seed)
	maphash.WriteComparable(&h, process)
	maphash.WriteComparable(&h, s.End)
	for i := range s.Frames {
		maphash.WriteComparable(&h, s.Frames[i])
	}
	for id := max(h.Sum64(), 1); ; id++ {
		have, ok := w.stacks.get(id)
		if !ok {
			w.stacks.put(id, countedStack{s, process})
			return id
		}
		if have.process == process && have.End == s.End && slices.Equal(have.Frames, s.Frames) {
			return id
		}
	}
}

// tellCounts says what has become of the stacks that were asked for.
func (w *unwound) tellCounts(src source, log *slog.Logger) {
	c, err := src.Counters()
	if err != nil || c.Asked == c.Seen && c.Asked == w.stacked {
		return
	}
	joined := w.joiner.Counts()
	text := fmt.Sprintf("stacks were asked for of %d of %d faults, of which %d have one", c.Asked, c.Seen, w.stacked)
	if joined.Early > 0 {
		text += fmt.Sprintf("; %d faults could not wait for theirs", joined.Early)
	}
	if joined.Unjoined > 0 {
		text += fmt.Sprintf("; %d stacks came too late, or their faults are left out", joined.Unjoined)
	}
	log.Info(text)
}

// recent remembers what was used last: at least limit, and at most two times as many.
type recent[K comparable, V any] struct {
	limit         int
	latest, older map[K]V
	// forgotten is told of the oldest, unless it is nil.
	forgotten func(map[K]V)
}

// peek is get without use.
func (r *recent[K, V]) peek(k K) (V, bool) {
	v, ok := r.latest[k]
	if !ok {
		v, ok = r.older[k]
	}
	return v, ok
}

func (r *recent[K, V]) get(k K) (V, bool) {
	v, ok := r.latest[k]
	if !ok {
		if v, ok = r.older[k]; ok {
			delete(r.older, k)
			r.put(k, v)
		}
	}
	return v, ok
}

// put remembers what is not remembered yet.
func (r *recent[K, V]) put(k K, v V) {
	if r.latest == nil {
		r.latest = map[K]V{}
	}
	if len(r.latest) >= r.limit {
		if r.forgotten != nil && len(r.older) > 0 {
			r.forgotten(r.older)
		}
		r.latest, r.older = map[K]V{}, r.latest
	}
	r.latest[k] = v
}
