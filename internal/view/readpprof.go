package view

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/pprof/profile"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// givePprof is the remedy for what is no such profile.
const givePprof = "give one that faultsnoop flame --format pprof has written, as no other format is read"

// ReadPprof reads what [AppendPprof] has written. What that format has no place for, such as
// languages, is unknown.
func ReadPprof(r io.Reader) (*fault.Profile, error) {
	in, err := profile.Parse(r)
	if err != nil {
		return nil, fmt.Errorf("reading a profile: %w: %s", err, givePprof)
	}
	types := make([]string, len(in.SampleType))
	for i, t := range in.SampleType {
		types[i] = t.Type
	}
	if !slices.Equal(types, []string{"faults", "time", "bytes"}) {
		return nil, errors.New("reading a profile: it is not of page faults: " + givePprof)
	}
	p := &fault.Profile{Session: &fault.Session{}, Begin: time.Unix(0, in.TimeNanos), Duration: time.Duration(in.DurationNanos)}
	if len(in.Comments) > 0 {
		p.Session.Command = in.Comments[:1]
		_, taken, _ := strings.Cut(in.Comments[len(in.Comments)-1], estimated)
		taken, _, _ = strings.Cut(taken, " ")
		p.Taken, _ = strconv.ParseUint(strings.ReplaceAll(taken, ",", ""), 10, 64) // 0 if it is no estimate
	}
	stacks := map[string]int32{}
	for _, s := range in.Sample {
		out := fault.StackSample{
			Stack: readStack(&p.Stacks, stacks, s.Location), Faults: uint64(s.Value[0]), Time: time.Duration(s.Value[1]), Bytes: uint64(s.Value[2]),
		}
		for _, kind := range s.Label["kind"] {
			out.Kind, _ = fault.ParseKind(kind)
		}
		out.Major = slices.Contains(s.Label["major"], "true")
		for _, comm := range s.Label["comm"] {
			out.Comm = fault.MakeComm(comm)
		}
		for _, tid := range s.Label["thread"] {
			n, _ := strconv.ParseUint(tid, 10, 32) // 0 is unknown
			out.TID = uint32(n)
		}
		p.Faults += out.Faults
		p.Samples = append(p.Samples, out)
	}
	return p, nil
}

// readStack makes one stack of each list of locations.
func readStack(tree *fault.StackTree, known map[string]int32, locations []*profile.Location) int32 {
	var key []byte
	for _, l := range locations {
		key = appendUint(append(key, ','), l.ID)
	}
	if at, ok := known[string(key)]; ok {
		return at
	}
	s := &fault.Stack{End: fault.StackUntold}
	for _, l := range locations {
		for i := range l.Line {
			f := fault.Frame{Line: uint32(l.Line[i].Line), Inlined: i < len(l.Line)-1}
			if fn := l.Line[i].Function; fn != nil {
				f.Func, f.File = fn.Name, fn.Filename
			}
			if m := l.Mapping; m != nil {
				f.Module, f.BuildID = m.File, m.BuildID
				f.Offset = l.Address - m.Start + m.Offset
			}
			s.Frames = append(s.Frames, f)
		}
	}
	if len(s.Frames) == 1 && s.Frames[0].Func == aggregate.NoStack {
		s = &fault.Stack{End: fault.StackNone}
	}
	at := tree.Add(s)
	known[string(key)] = at
	return at
}
