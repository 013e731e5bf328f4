package view

import (
	"slices"

	"faultsnoop/internal/fault"
)

// field is a column made ready for JSON: either a fact or the "vma" object.
type field struct {
	prefix  string // `,"pid":`
	value   cell
	quoted  bool
	sparse  bool
	members []field
}

// makeFields puts columns into the order of the table, since keys have none of
// their own, and those of the mapping into one object.
func makeFields(columns []Column) []field {
	var fields []field
	vma := -1
	for i := range Columns {
		c := &Columns[i]
		if !slices.ContainsFunc(columns, func(o Column) bool { return o.Name == c.Name }) {
			continue
		}
		f := field{prefix: `,"` + c.key + `":`, value: c.raw, quoted: c.quoted, sparse: c.sparse}
		if c.json != nil {
			f.value, f.quoted = c.json, false
		}
		switch {
		case !c.ofVMA:
			fields = append(fields, f)
		case vma < 0:
			vma = len(fields)
			f.prefix = f.prefix[1:]
			fields = append(fields, field{prefix: `,"vma":`, members: []field{f}})
		default:
			fields[vma].members = append(fields[vma].members, f)
		}
	}
	return fields
}

func (e *Encoder) appendJSON(b []byte, f *fault.Fault) []byte {
	b = append(b, `{"type":"fault"`...)
	b = e.appendFields(b, e.fields, f)
	if e.opts.Stacks {
		b = appendStackJSON(b, "stack", f.Stack)
	}
	if e.opts.Mappers {
		b = appendStackJSON(b, "mapper", f.Mapper)
	}
	return append(b, "}\n"...)
}

func (e *Encoder) appendFields(b []byte, fields []field, f *fault.Fault) []byte {
	for i := range fields {
		fl := &fields[i]
		before := len(b)
		b = append(b, fl.prefix...)
		switch {
		case fl.members != nil:
			if f.Known&(fault.HasVMA|fault.HasLabel) == 0 {
				b = append(b, "null"...)
				continue
			}
			b = append(e.appendFields(append(b, '{'), fl.members, f), '}')
			continue
		case fl.quoted:
			b = append(b, '"')
		}
		n := len(b)
		b = fl.value(e, b, f)
		switch {
		case len(b) > n && fl.quoted:
			b = append(b, '"')
		case len(b) > n:
		case fl.sparse:
			b = b[:before]
		default:
			b = append(b[:before+len(fl.prefix)], "null"...)
		}
	}
	return b
}

func (e *Encoder) appendJSONHeader(b []byte) []byte {
	s := e.session
	b = append(b, `{"type":"header","hook":`...)
	b, _ = appendJSONString(b, s.Hook)
	b = append(b, `,"reason":`...)
	b, _ = appendJSONString(b, s.Reason)
	b = append(b, `,"kernel":`...)
	b, _ = appendJSONString(b, s.Kernel)
	b = append(b, `,"host":`...)
	b, _ = appendJSONString(b, s.Host)
	b = append(b, `,"cpus":`...)
	b = appendUint(b, uint64(s.CPUs))
	b = append(b, `,"started":"`...)
	b = s.Started.UTC().AppendFormat(b, "2006-01-02T15:04:05.000000000Z07:00")
	b = append(b, `","command":`...)
	if len(s.Command) == 0 {
		b = append(b, "null"...)
	} else {
		b = appendStrings(b, s.Command)
	}
	b = append(b, `,"covers":`...)
	b = appendStrings(b, s.Covers)
	b = append(b, `,"blind":`...)
	b = appendStrings(b, s.Blind)
	b = append(b, `,"unseen":`...)
	b = appendStrings(b, s.Unseen)
	return append(b, "}\n"...)
}

func appendStrings(b []byte, list []string) []byte {
	b = append(b, '[')
	for i, s := range list {
		if i > 0 {
			b = append(b, ',')
		}
		b, _ = appendJSONString(b, s)
	}
	return append(b, ']')
}

// appendFlags appends the flags by name, as in WRITE|USER; 0 where none is set.
func (e *Encoder) appendFlags(b []byte, f *fault.Fault) []byte {
	if f.Known&(fault.HasFlags|fault.HasSomeFlag) == 0 {
		return b
	}
	n := len(b)
	rest := f.Flags
	for _, name := range e.session.FlagNames {
		if name.Bit == 0 || f.Flags&name.Bit != name.Bit {
			continue
		}
		rest &^= name.Bit
		if len(b) > n {
			b = append(b, '|')
		}
		b = append(b, name.Name...)
	}
	switch {
	case rest == 0 && len(b) == n:
		return append(b, '0')
	case rest != 0 && len(b) > n:
		b = append(b, '|')
	case rest == 0:
		return b
	}
	return appendHex(b, uint64(rest))
}

// appendFlagsJSON appends the flags as an array of names, unknown bits as one
// hexadecimal string at its end.
func (e *Encoder) appendFlagsJSON(b []byte, f *fault.Fault) []byte {
	if f.Known&(fault.HasFlags|fault.HasSomeFlag) == 0 {
		return b
	}
	b = append(b, '[')
	n := len(b)
	rest := f.Flags
	for _, name := range e.session.FlagNames {
		if name.Bit == 0 || f.Flags&name.Bit != name.Bit {
			continue
		}
		rest &^= name.Bit
		b = append(b, '"')
		b = append(b, name.Name...)
		b = append(b, `",`...)
	}
	if rest != 0 {
		b = append(appendHex(append(b, '"'), uint64(rest)), `",`...)
	}
	if len(b) > n {
		b = b[:len(b)-1]
	}
	return append(b, ']')
}
