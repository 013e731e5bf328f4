package view

import (
	"path"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/docker/go-units"

	"faultsnoop/internal/aggregate"
	"faultsnoop/internal/fault"
)

// appendStackText appends the innermost frames of a stack, depth of them or all if that is
// 0, one a line, and after them how many more there are and why, if the last is not the outermost.
func appendStackText(b []byte, s *fault.Stack, depth int) []byte {
	const indent = "    "
	if !aggregate.HasStack(s) {
		b = append(b, indent...)
		b = append(b, aggregate.NoStack...)
		return append(b, '\n')
	}
	frames := s.Frames
	if depth > 0 && len(frames) > depth {
		frames = frames[:depth]
	}
	for i := range frames {
		f := &frames[i]
		b = append(b, indent...)
		b = append(b, '#')
		n := len(b)
		b = appendUint(b, uint64(i))
		b = appendBlanks(b, max(4-(len(b)-n), 1))
		b = appendFrameName(b, f)
		if f.Inlined {
			b = append(b, " (inlined)"...)
		}
		b = appendPlace(b, f)
		b = append(b, '\n')
	}
	if more := len(s.Frames) - len(frames); more > 0 {
		b = append(append(b, indent...), "... "...)
		b = append(append(b, plural(uint64(more), "more frame")...), '\n')
	}
	if end := aggregate.EndName(s.End); end != "" {
		b = append(b, indent...)
		b = append(b, end...)
		b = append(b, '\n')
	}
	return b
}

// appendPlace appends, behind a blank, the file and line of a frame or, where they are not
// known, the module of a function whose name does not say it.
func appendPlace(b []byte, f *fault.Frame) []byte {
	switch {
	case f.File != "":
		b = appendEscaped(append(b, ' '), f.File, 0)
		b = appendLine(b, f)
	case f.Func != "" && f.Module != "":
		b = append(b, " ("...)
		b = append(appendEscaped(b, path.Base(f.Module), 0), ')')
	}
	return b
}

// appendSource appends, behind a blank, the name of a frame's source file, without its folder,
// and the line; nothing if they are not known.
func appendSource(b []byte, f *fault.Frame) []byte {
	if f.File == "" {
		return b
	}
	return appendLine(append(append(b, ' '), shown(path.Base(f.File))...), f)
}

func appendLine(b []byte, f *fault.Frame) []byte {
	if f.Line == 0 {
		return b
	}
	return appendUint(append(b, ':'), uint64(f.Line))
}

// appendFrameName appends a frame's function or, where that is not known, its module and the
// place there.
func appendFrameName(b []byte, f *fault.Frame) []byte {
	name, offset := frameName(f)
	return append(appendEscaped(b, name, 0), offset...)
}

// frameName is what a frame is called, and behind it the offset that tells functions without
// a name apart. The name may be hostile.
func frameName(f *fault.Frame) (name, offset string) {
	switch {
	case f.Func != "":
		return f.Func, ""
	case f.Module != "" && f.Offset == 0 && f.Addr == 0:
		return path.Base(f.Module), "" // where in it is not known
	case f.Module != "":
		return path.Base(f.Module), "+0x" + strconv.FormatUint(f.Offset, 16)
	case f.Addr != 0:
		return "", "0x" + strconv.FormatUint(f.Addr, 16)
	case f.Lang != fault.LangUnknown:
		return "[" + f.Lang.String() + "]", ""
	}
	return "[unknown]", ""
}

// shown is a name for files that other programs show: as it is if it is harmless, and else in
// the notation of [appendEscaped].
func shown(name string) string {
	for i := 0; i < len(name); i++ {
		if c := name[i]; c < ' ' || c >= 0x7f {
			return string(appendEscaped(nil, name, 0))
		}
	}
	return name
}

// shownFrame is the name of a frame for such files.
func shownFrame(f *fault.Frame) string {
	name, offset := frameName(f)
	return shown(name) + offset
}

// appendStackJSON appends the members KEY and KEY_end with a comma before each. What
// is not known of a frame is null; bytes that are not UTF-8 are also in FACT_hex.
func appendStackJSON(b []byte, key string, s *fault.Stack) []byte {
	b = append(append(append(b, `,"`...), key...), `":`...)
	end := fault.StackNone
	if aggregate.HasStack(s) {
		b, end = appendFrames(b, s), s.End
	} else {
		b = append(b, "null"...)
	}
	b = append(append(append(b, `,"`...), key...), `_end":"`...)
	return append(append(b, end.String()...), '"')
}

// appendFrames appends the frames as an array.
func appendFrames(b []byte, s *fault.Stack) []byte {
	b = append(b, '[')
	for i := range s.Frames {
		f := &s.Frames[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = appendFrameText(append(b, '{'), "func", f.Func)
		b = appendFrameText(append(b, ','), "file", f.File)
		b = append(b, `,"line":`...)
		if f.Line == 0 {
			b = append(b, "null"...)
		} else {
			b = appendUint(b, uint64(f.Line))
		}
		b = appendFrameText(append(b, ','), "module", f.Module)
		b = append(b, `,"offset":`...)
		if !inModule(f) {
			b = append(b, "null"...)
		} else {
			b = append(appendHex(append(b, '"'), f.Offset), '"')
		}
		b = appendFrameText(append(b, ','), "build_id", f.BuildID)
		b = append(b, `,"address":`...)
		if inModule(f) || f.Addr == 0 {
			b = append(b, "null"...)
		} else {
			b = append(appendHex(append(b, '"'), f.Addr), '"')
		}
		b = append(b, `,"lang":`...)
		if f.Lang == fault.LangUnknown {
			b = append(b, "null"...)
		} else {
			b = append(append(append(b, '"'), f.Lang.String()...), '"')
		}
		b = strconv.AppendBool(append(b, `,"inlined":`...), f.Inlined)
		b = append(b, '}')
	}
	return append(b, ']')
}

func appendFrameText(b []byte, key, text string) []byte {
	b = append(append(append(b, '"'), key...), `":`...)
	if text == "" {
		return append(b, "null"...)
	}
	b, valid := appendJSONString(b, text)
	if !valid {
		b = append(append(append(b, `,"`...), key...), `_hex":"`...)
		b = append(appendHexBytes(b, text), '"')
	}
	return b
}

// place is what the formats of profiles make one frame of.
func place(f *fault.Frame) fault.Frame { return aggregate.Place(f) }

// Value is what a flame graph is drawn of.
type Value uint8

const (
	Faults Value = iota
	Time
	Bytes
)

var valueNames = [...]string{"faults", "time", "bytes"}

func (v Value) String() string {
	if int(v) < len(valueNames) {
		return valueNames[v]
	}
	return "unknown"
}

// ParseValue is the inverse of [Value.String].
func ParseValue(s string) (Value, bool) {
	i := slices.Index(valueNames[:], s)
	return Value(max(i, 0)), i >= 0
}

// of is the value of a cost.
func (v Value) of(c *aggregate.StackCost) uint64 {
	switch v {
	case Time:
		return uint64(max(c.Time, 0))
	case Bytes:
		return c.Bytes
	}
	return c.Faults
}

// format writes a value for people.
func (v Value) format(n uint64) string {
	switch v {
	case Time:
		return duration(time.Duration(n))
	case Bytes:
		return units.BytesSize(float64(n))
	}
	return plural(n, "fault")
}

// nameOfProcess is the first frame of a process in formats that have no other place for it.
func nameOfProcess(s *fault.StackSample) string {
	name := s.Process.Bytes()
	if len(name) == 0 {
		name = s.Comm.Bytes()
	}
	if len(name) == 0 || !utf8.Valid(name) {
		return string(appendEscaped(nil, name, 0))
	}
	return shown(string(name))
}

// langColours are the fills of frames. They are light enough for dark text, and differ in
// lightness as well as in hue, so that they stay apart for eyes that tell few hues apart.
var langColours = [...]string{
	fault.LangUnknown: "#c3c7cd", fault.LangKernel: "#e9a23b", fault.LangNative: "#9cc3e6", fault.LangCPP: "#6ea6dc",
	fault.LangRust: "#e0805a", fault.LangGo: "#5bc0ae", fault.LangPython: "#f3e36a", fault.LangJava: "#d99cc4",
	fault.LangNode: "#b4d66a", fault.LangRuby: "#f2a7a7", fault.LangPerl: "#bcaae3", fault.LangPHP: "#a9b4ea",
	fault.LangDotNet: "#caa2de", fault.LangBEAM: "#d88fb0",
}
