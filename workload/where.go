package workload

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// where is the program with known addresses.
type where struct{}

func whereFlags(*pflag.FlagSet) program { return where{} }

func (where) validate() error { return nil }

// WhereData is where kind where has its data, and WhereCode its code.
const (
	WhereData = OwnArea + 1<<44
	WhereCode = WhereData + 1<<20
)

// The layout of kind where. The offsets are of its data, but for atCall.
const (
	whereDataSize = 0x10000

	atRead  = 0x1234
	atWrite = 0x5678
	atOver  = 0x1abc // on the page of atRead
	atCall  = 0x10   // in the code
)

func (where) lay(p *plan) error {
	if p.pageSize != 4096 {
		return fmt.Errorf("kind where is made for pages of 4096 bytes, here they have %d", p.pageSize)
	}
	const fixed = unix.MAP_FIXED_NOREPLACE
	data, code, err := mapWhere(p, unsafe.Add(nil, WhereData), unsafe.Add(nil, WhereCode), fixed)
	if err != nil {
		return err
	}
	otherData, otherCode, err := mapWhere(p, nil, nil, 0)
	if err != nil {
		return err
	}
	zeroPage, err := mapsZeroPage(p)
	if err != nil {
		return err
	}
	twice := int64(1)
	if zeroPage {
		twice = 2
	}
	page := func(b []byte, at int, kind fault.Kind, faults int64, touches ...Touch) Range {
		start := at &^ (p.pageSize - 1)
		r := wholeRange(b[start:start+p.pageSize], fault.Read, kind, p.pageSize)
		r.Faults, r.Minor, r.Touches, r.Access = faults, faults, touches, touches[0].Access
		if len(touches) > 1 {
			r.Access, r.FaultKind = "", ""
		}
		return r
	}
	touch := func(b []byte, at int, access fault.Access) Touch {
		return Touch{addressOf(b) + Address(at), access.String()}
	}
	return p.addJob(&job{
		ranges: []Range{
			page(data, atRead, fault.Anon, twice, touch(data, atRead, fault.Read), touch(data, atOver, fault.Write)),
			page(data, atWrite, fault.Anon, 1, touch(data, atWrite, fault.Write)),
			page(code, atCall, fault.Shmem, 1, touch(code, atCall, fault.Exec)),
		},
		memory:    [][]byte{data, code},
		rehearsal: [][]byte{otherData, otherCode},
		toucher:   callEach{},
	})
}

// mapWhere maps data and code at the given addresses, or where the kernel likes.
func mapWhere(p *plan, dataAt, codeAt unsafe.Pointer, flags int) (data, code []byte, err error) {
	data, err = p.mapAt(dataAt, whereDataSize, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags, -1, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("%w at %#x", err, uintptr(dataAt))
	}
	if err := noHugePages(data); err != nil {
		return nil, nil, err
	}
	text, err := returns(p.pageSize)
	if err != nil {
		return nil, nil, err
	}
	fd, err := p.memfd("faultsnoop-code", 0)
	if err != nil {
		return nil, nil, err
	}
	if _, err := unix.Write(fd, text); err != nil {
		return nil, nil, fmt.Errorf("writing code to a memfd: %w", err)
	}
	code, err = p.mapAt(codeAt, p.pageSize, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_SHARED|flags, fd, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("%w at %#x", err, uintptr(codeAt))
	}
	return data, code, nil
}

// returns is a page of instructions each of which returns to the caller.
func returns(pageSize int) ([]byte, error) {
	switch runtime.GOARCH {
	case "amd64":
		return bytes.Repeat([]byte{0xc3}, pageSize), nil
	case "arm64":
		ret := binary.LittleEndian.AppendUint32(nil, 0xd65f03c0)
		return bytes.Repeat(ret, pageSize/len(ret)), nil
	}
	return nil, errors.New("kind where knows no instruction of architecture " + runtime.GOARCH)
}

// callEach reads, writes, overwrites and calls.
type callEach struct{}

//go:norace
//go:nosplit
func (callEach) touch(memory [][]byte) {
	data, code := memory[0], memory[1]
	c := data[atRead]
	data[atWrite] = 1
	data[atOver] = c
	// A func value points to a word with the address of its code; this code neither
	// takes nor changes anything.
	entry := unsafe.Pointer(&code[atCall])
	value := unsafe.Pointer(&entry)
	(*(*func())(unsafe.Pointer(&value)))()
}

// mapsZeroPage reports whether reading untouched anonymous memory maps the shared
// page of zeros, as it does unless the kernel was booted or built without.
func mapsZeroPage(p *plan) (bool, error) {
	b, err := p.mapAnon(p.pageSize)
	if err != nil {
		return false, err
	}
	readPages(b, p.pageSize)
	entries, err := pagemap(b, p.pageSize)
	if err != nil {
		return false, err
	}
	return entries[0]&pagemapExclusive == 0, nil
}
