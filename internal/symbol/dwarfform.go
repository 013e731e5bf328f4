package symbol

import (
	"bytes"
	"debug/dwarf"
	"encoding/binary"
	"errors"
	"slices"
)

// cursor reads bytes in their order. After the end all is 0, and bad is true.
type cursor struct {
	b     []byte
	at    int
	order binary.ByteOrder
	bad   bool
}

func (c *cursor) take(n uint64) []byte {
	if c.bad || n > uint64(len(c.b)-c.at) {
		c.bad = true
		return nil
	}
	b := c.b[c.at : c.at+int(n)]
	c.at += int(n)
	return b
}

// number reads an unsigned one of 1 to 8 bytes.
func (c *cursor) number(size int) uint64 {
	b := c.take(uint64(size))
	switch {
	case b == nil:
		return 0
	case size == 1:
		return uint64(b[0])
	case size == 2:
		return uint64(c.order.Uint16(b))
	case size == 4:
		return uint64(c.order.Uint32(b))
	case size == 8:
		return c.order.Uint64(b)
	case size == 3 && c.order.Uint16([]byte{1, 0}) == 1:
		return uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16
	case size == 3:
		return uint64(b[2]) | uint64(b[1])<<8 | uint64(b[0])<<16
	}
	c.bad = true
	return 0
}

func (c *cursor) offset(dwarf64 bool) uint64 {
	if dwarf64 {
		return c.number(8)
	}
	return c.number(4)
}

// length reads how long a unit is.
func (c *cursor) length() (n uint64, dwarf64 bool) {
	if n = c.number(4); n == 0xffffffff {
		return c.number(8), true
	}
	return n, false
}

func (c *cursor) uleb() uint64 {
	var v uint64
	for shift := 0; ; shift += 7 {
		if c.bad || c.at == len(c.b) {
			c.bad = true
			return 0
		}
		b := c.b[c.at]
		c.at++
		if shift < 64 {
			v |= uint64(b&0x7f) << shift
		}
		if b < 0x80 {
			return v
		}
	}
}

func (c *cursor) sleb() int64 {
	var v int64
	for shift := 0; ; shift += 7 {
		if c.bad || c.at == len(c.b) {
			c.bad = true
			return 0
		}
		b := c.b[c.at]
		c.at++
		if shift < 64 {
			v |= int64(b&0x7f) << shift
		}
		if b < 0x80 {
			if shift+7 < 64 && b&0x40 != 0 {
				v |= -1 << (shift + 7)
			}
			return v
		}
	}
}

func (c *cursor) skipText() {
	if c.bad {
		return
	}
	end := bytes.IndexByte(c.b[c.at:], 0)
	if end < 0 {
		c.bad = true
		return
	}
	c.at += end + 1
}

// abbreviation is what entries of one kind have.
type abbreviation struct {
	tag      dwarf.Tag
	children bool
	attrs    []attribute
}

type attribute struct {
	attr  dwarf.Attr
	form  form
	value int64 // of formImplicit
}

// abbreviation finds that of one code in a table.
func (l *lines) abbreviation(off, code uint64) (found abbreviation, err error) {
	err = l.eachAbbreviation(off, func(of uint64, a abbreviation) bool {
		if of == code {
			found = a
			found.attrs = slices.Clone(a.attrs)
		}
		return of != code
	})
	return found, err
}

// abbreviations are a table.
type abbreviations struct {
	// dense has those with the codes 1, 2 and so on, as compilers give them.
	dense  []abbreviation
	sparse map[uint64]abbreviation
}

func (t *abbreviations) find(code uint64) (a *abbreviation, ok bool) {
	if code-1 < uint64(len(t.dense)) {
		return &t.dense[code-1], true
	}
	other, ok := t.sparse[code]
	return &other, ok
}

// abbreviations reads a table.
func (l *lines) abbreviations(off uint64) (*abbreviations, error) {
	table := &abbreviations{}
	err := l.eachAbbreviation(off, func(code uint64, a abbreviation) bool {
		if _, twice := table.find(code); twice {
			return true
		}
		a.attrs = slices.Clone(a.attrs)
		if code == uint64(len(table.dense))+1 {
			table.dense = append(table.dense, a)
			return true
		}
		if table.sparse == nil {
			table.sparse = map[uint64]abbreviation{}
		}
		table.sparse[code] = a
		return true
	})
	return table, err
}

// eachAbbreviation reads a table until yield returns false. attrs are valid as long as that
// runs. It may begin again, with more of the table.
func (l *lines) eachAbbreviation(off uint64, yield func(code uint64, a abbreviation) bool) error {
	var attrs []attribute
	for room := uint64(512); ; room *= 8 {
		room = min(room, maxAbbrevBytes)
		c := &cursor{b: l.abbrev.bytes(off, room), order: l.order}
		if l.work += len(c.b); l.work > maxWork {
			return errTooMuch
		}
		for {
			code := c.uleb()
			if c.bad {
				break
			}
			if code == 0 {
				return nil
			}
			a := abbreviation{tag: dwarf.Tag(c.uleb()), children: c.number(1) != 0, attrs: attrs[:0]}
			for {
				t := attribute{attr: dwarf.Attr(c.uleb()), form: form(c.uleb())}
				if t.form == formImplicit {
					t.value = c.sleb()
				}
				if c.bad || t.attr == 0 && t.form == 0 {
					break
				}
				if len(a.attrs) == maxAttrs {
					return errTooMuch
				}
				a.attrs = append(a.attrs, t)
			}
			if c.bad {
				break
			}
			attrs = a.attrs
			if !yield(code, a) {
				return nil
			}
		}
		if room >= maxAbbrevBytes || uint64(len(c.b)) < room {
			return errors.New("a table of abbreviations has no end")
		}
	}
}

// form is how an attribute is written.
type form uint32

const (
	formAddr      form = 0x01
	formBlock2    form = 0x03
	formBlock4    form = 0x04
	formData2     form = 0x05
	formData4     form = 0x06
	formData8     form = 0x07
	formString    form = 0x08
	formBlock     form = 0x09
	formBlock1    form = 0x0a
	formData1     form = 0x0b
	formFlag      form = 0x0c
	formSdata     form = 0x0d
	formStrp      form = 0x0e
	formUdata     form = 0x0f
	formRefAddr   form = 0x10
	formRef1      form = 0x11
	formRef2      form = 0x12
	formRef4      form = 0x13
	formRef8      form = 0x14
	formRefUdata  form = 0x15
	formIndirect  form = 0x16
	formSecOffset form = 0x17
	formExprloc   form = 0x18
	formPresent   form = 0x19
	formStrx      form = 0x1a
	formAddrx     form = 0x1b
	formRefSup4   form = 0x1c
	formStrpSup   form = 0x1d
	formData16    form = 0x1e
	formLineStrp  form = 0x1f
	formRefSig8   form = 0x20
	formImplicit  form = 0x21
	formLoclistx  form = 0x22
	formRnglistx  form = 0x23
	formRefSup8   form = 0x24
	formStrx1     form = 0x25
	formStrx4     form = 0x28
	formAddrx1    form = 0x29
	formAddrx4    form = 0x2c
	formGNUAddr   form = 0x1f01
	formGNUStr    form = 0x1f02
	formGNURefAlt form = 0x1f20
	formGNUStrAlt form = 0x1f21
)

// value is an attribute as it stands there.
type value struct {
	form form
	n    uint64 // a number, an offset, an index, or the place of a text
}

// formSizes are those of forms of one size.
var formSizes = [...]uint8{
	formData1: 1, formData2: 2, formData4: 4, formData8: 8, formFlag: 1,
	formRef1: 1, formRef2: 2, formRef4: 4, formRef8: 8, formRefSup4: 4, formRefSup8: 8, formRefSig8: 8,
	formStrx1: 1, formStrx1 + 1: 2, formStrx1 + 2: 3, formStrx4: 4,
	formAddrx1: 1, formAddrx1 + 1: 2, formAddrx1 + 2: 3, formAddrx4: 4,
}

// value reads an attribute. base is where the cursor's bytes begin in .debug_info.
func (u *unit) value(c *cursor, base uint64, t attribute) value {
	f := t.form
	for f == formIndirect {
		f = form(c.uleb())
		if c.bad || f == formImplicit {
			c.bad = true
			return value{}
		}
	}
	v := value{form: f}
	switch f {
	case formAddr:
		v.n = c.number(int(u.addrSize))
	case formBlock1:
		c.take(c.number(1))
	case formBlock2:
		c.take(c.number(2))
	case formBlock4:
		c.take(c.number(4))
	case formBlock, formExprloc:
		c.take(c.uleb())
	case formString:
		v.n = base + uint64(c.at)
		c.skipText()
	case formSdata:
		v.n = uint64(c.sleb())
	case formUdata, formRefUdata, formStrx, formAddrx, formLoclistx, formRnglistx, formGNUAddr, formGNUStr:
		v.n = c.uleb()
	case formStrp, formLineStrp, formSecOffset, formStrpSup, formGNURefAlt, formGNUStrAlt:
		v.n = c.offset(u.dwarf64)
	case formRefAddr:
		if u.version == 2 {
			v.n = c.number(int(u.addrSize))
		} else {
			v.n = c.offset(u.dwarf64)
		}
	case formPresent:
		v.n = 1
	case formData16:
		c.take(16)
	case formImplicit:
		v.n = uint64(t.value)
	default:
		if int(f) >= len(formSizes) || formSizes[f] == 0 {
			c.bad = true
			return value{}
		}
		v.n = c.number(int(formSizes[f]))
	}
	return v
}
