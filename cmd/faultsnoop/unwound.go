package main

import (
	"fmt"
	"log/slog"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
	"faultsnoop/internal/process"
	"faultsnoop/internal/symbol"
	"faultsnoop/internal/unwind"
)

// maxUnwound is how many different stacks are told apart in a run that is counted, and
// maxNamed how many are remembered with their names.
const (
	maxUnwound = 1 << 17
	maxNamed   = 1 << 15
)

// unwound takes stacks of any language and gives them to the faults that they were taken in.
type unwound struct {
	*unwind.Unwinder
	joiner *unwind.Joiner
	wanted map[uint32]bool // nil if all processes are
	joined []unwind.Joined
	// counted says that faults are counted by the ids of their stacks, ids.
	counted bool
	ids     map[*fault.Stack]uint64
	named   map[*fault.Stack]*fault.Stack
	// files are mappings of the modules that frames were in.
	files map[moduleKey]*fault.VMA
	log   *slog.Logger
}

type moduleKey struct{ path, buildID string }

// openUnwound loads the unwinder for what is to be traced, or says why not.
func openUnwound(o *sourceOptions, every uint64, log *slog.Logger) (*unwound, error) {
	hook, err := plannedHook(o)
	if err != nil {
		return nil, err
	}
	when := unwind.AtEnd
	if hook == kernel.Fentry || hook == kernel.Kprobe {
		when = unwind.AtBegin
	}
	chosen := len(o.Filter.PIDs) > 0 || o.CommandPID != 0
	u, err := unwind.Open(unwind.Options{When: when, All: !chosen, Every: uint32(min(every, 1<<31))})
	if err != nil {
		return nil, err
	}
	w := &unwound{
		Unwinder: u, joiner: unwind.NewJoiner(when), log: log, counted: len(o.Tables) > 0,
		ids: map[*fault.Stack]uint64{}, named: map[*fault.Stack]*fault.Stack{}, files: map[moduleKey]*fault.VMA{},
	}
	if chosen {
		w.wanted = map[uint32]bool{}
		for _, pid := range append([]uint32{uint32(o.CommandPID)}, o.Filter.PIDs...) {
			w.want(pid)
		}
	}
	return w, nil
}

// want has stacks taken of a process from now on.
func (w *unwound) want(pid uint32) {
	if w.wanted == nil || w.wanted[pid] || pid == 0 {
		return
	}
	w.wanted[pid] = true
	if err := w.Want(pid); err != nil {
		w.log.Warn(err.Error())
	}
}

// join puts in place of the faults of a batch those whose stacks have come, or will not.
func (w *unwound) join(batch *fault.Batch, end bool) {
	for i := range batch.Faults {
		w.want(batch.Faults[i].PID)
		w.joiner.AddFault(&batch.Faults[i])
	}
	if end {
		w.Stop()
		for t := range w.Traces() {
			w.joiner.AddTrace(t)
		}
		w.joined = w.joiner.Flush(w.joined[:0])
	} else {
		w.receive()
		w.joined = w.joiner.Take(process.Now(), w.joined[:0])
	}
	batch.Faults = batch.Faults[:0]
	for i := range w.joined {
		f := w.joined[i].Fault
		if s := w.joined[i].Stack; s != nil && len(s.Frames) > 0 {
			f.Stack = s
			if w.counted {
				f.StackID = w.id(s)
			}
		}
		batch.Faults = append(batch.Faults, f)
	}
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

// id is that of a stack, 0 if there are too many.
func (w *unwound) id(s *fault.Stack) uint64 {
	id := w.ids[s]
	if id == 0 && len(w.ids) < maxUnwound {
		id = uint64(len(w.ids)) + 1
		w.ids[s] = id
	}
	return id
}

// name returns a stack whose native frames have the names of our symbols.
func (w *unwound) name(f *fault.Fault, n *stackNamer) *fault.Stack {
	if s := w.named[f.Stack]; s != nil {
		return s
	}
	if len(w.named) >= maxNamed {
		clear(w.named)
	}
	s := &fault.Stack{End: f.Stack.End}
	for i := range f.Stack.Frames {
		frame := &f.Stack.Frames[i]
		switch {
		case frame.Lang == fault.LangKernel && frame.Addr != 0:
			s.Frames = append(s.Frames, n.inKernel(frame.Addr, i > 0))
		case (frame.Lang == fault.LangNative || frame.Lang == fault.LangGo) && frame.Module != "":
			// The unwinder names Go's functions, but not those that are inlined, whose lines it
			// tells.
			s.Frames = append(s.Frames, w.native(frame, f, n, i > 0)...)
		default:
			s.Frames = append(s.Frames, interpreted(frame))
		}
	}
	s.Frames = outsideHandler(s.Frames)
	w.named[f.Stack] = s
	return s
}

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
	key := moduleKey{frame.Module, frame.BuildID}
	vma := w.files[key]
	if vma == nil {
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
		w.files[key] = vma
	}
	in := symbol.Instruction{VMA: vma, PID: f.PID, Image: f.Image, Time: f.End, Caller: caller}
	if frames := n.resolver.FramesIn(&in, frame.Offset, frame.BuildID); len(frames) > 0 {
		return frames
	}
	return []fault.Frame{*frame}
}

// tellCounts says what share of the stacks that were to be taken have come.
func (w *unwound) tellCounts() {
	c, err := w.Counts()
	if err != nil || c.Taken == 0 {
		return
	}
	if lost := c.Dropped + c.Missing(); lost > 0 || c.Taken < c.Seen {
		w.log.Info(fmt.Sprintf("stacks were taken of %d of %d faults, and of these %d did not come and %d are incomplete", c.Taken, c.Seen, lost, c.Aborted))
	}
}
