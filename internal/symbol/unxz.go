package symbol

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"io"

	"github.com/ulikunitz/xz/lzma"
)

var errXZ = errors.New("it is not compressed as expected")

// unxz reads what xz has compressed to at most so many bytes. The container is read here:
// the library reserves the memory that a block asks for, up to 4 GiB.
func unxz(r io.Reader, limit int) ([]byte, error) {
	const (
		magic     = "\xfd7zXZ\x00"
		dictLimit = 64 << 20
		lzma2     = 0x21
	)
	in := &counting{r: bufio.NewReader(r)}
	var head [12]byte
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return nil, err
	}
	if string(head[:len(magic)]) != magic || head[6] != 0 || crc32.ChecksumIEEE(head[6:8]) != binary.LittleEndian.Uint32(head[8:]) {
		return nil, errXZ
	}
	var out bytes.Buffer
	for {
		in.n = 0
		words, err := in.ReadByte()
		if err != nil {
			return nil, err
		}
		if words == 0 {
			return out.Bytes(), nil // the index
		}
		header := make([]byte, 4*(int(words)+1))
		header[0] = words
		if _, err := io.ReadFull(in, header[1:]); err != nil {
			return nil, err
		}
		body := header[:len(header)-4]
		if crc32.ChecksumIEEE(body) != binary.LittleEndian.Uint32(header[len(body):]) {
			return nil, errXZ
		}
		c := &cursor{b: body, at: 2, order: binary.LittleEndian}
		for _, size := range [...]byte{0x40, 0x80} { // compressed, and not
			if body[1]&size != 0 {
				c.uleb()
			}
		}
		filter, size, dict := c.uleb(), c.uleb(), c.number(1)
		if c.bad || body[1]&0x3f != 0 || filter != lzma2 || size != 1 || dict > 40 {
			return nil, errXZ
		}
		capacity := max(lzma.MinDictCap, (2|int(dict&1))<<(dict/2+11))
		if capacity > dictLimit {
			return nil, errTooMuch
		}
		var check hash.Hash
		switch head[7] {
		case 0:
		case 1:
			check = crc32.NewIEEE()
		case 4:
			check = crc64.New(crc64.MakeTable(crc64.ECMA))
		case 10:
			check = sha256.New()
		default:
			return nil, errXZ
		}
		d, err := lzma.Reader2Config{DictCap: capacity}.NewReader2(in)
		if err != nil {
			return nil, err
		}
		begin := out.Len()
		if _, err := io.Copy(&out, io.LimitReader(d, int64(limit-begin)+1)); err != nil {
			return nil, err
		}
		if out.Len() > limit {
			return nil, errTooMuch
		}
		for in.n%4 != 0 {
			if _, err := in.ReadByte(); err != nil {
				return nil, err
			}
		}
		if check == nil {
			continue
		}
		check.Write(out.Bytes()[begin:])
		want := make([]byte, check.Size())
		if _, err := io.ReadFull(in, want); err != nil {
			return nil, err
		}
		if sum := check.Sum(nil); !bytes.Equal(sum, want) && !bytes.Equal(sum, reversed(want)) {
			return nil, errXZ
		}
	}
}

// reversed: the numbers among the checks have their lowest byte first.
func reversed(b []byte) []byte {
	out := make([]byte, len(b))
	for i := range b {
		out[len(b)-1-i] = b[i]
	}
	return out
}

// counting counts what is read.
type counting struct {
	r *bufio.Reader
	n int
}

func (c *counting) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += n
	return n, err
}

func (c *counting) ReadByte() (byte, error) {
	b, err := c.r.ReadByte()
	if err == nil {
		c.n++
	}
	return b, err
}
