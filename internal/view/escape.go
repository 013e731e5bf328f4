package view

import (
	"strconv"
	"unicode"
	"unicode/utf8"

	"github.com/mattn/go-runewidth"
)

const hexDigits = "0123456789abcdef"

// maxMarks is how many combining marks may sit on one character. Real scripts
// need two; more is a way to paint over the lines above and below.
const maxMarks = 2

// appendEscaped appends s in the notation of a Go string literal without its
// quotes, so that no byte of it can steer a terminal and strconv.Unquote gives
// the bytes back. Printable characters stay as they are, except quote and
// backslash; bidirectional controls are not printable.
//
// With limit > 0 the result takes at most that many terminal columns. Then a
// name that was cut ends in "+", and an escape is never cut in two.
func appendEscaped[T []byte | string](b []byte, s T, limit int) []byte {
	var (
		width int        // columns appended so far
		keep  = len(b)   // where a cut leaves room for the "+"
		marks = maxMarks // a mark at the start would combine with what is left of it
	)
	for i := 0; i < len(s); {
		unit, w, n := len(b), 1, 1
		switch c := s[i]; {
		case c >= utf8.RuneSelf:
			var r rune
			r, n = decodeRune(s, i)
			switch w = runewidth.RuneWidth(r); {
			case r == utf8.RuneError && n == 1:
				b = appendHexEscape(b, c)
				w = 0
			case unicode.IsPrint(r) && w > 0:
				b = utf8.AppendRune(b, r)
				marks = 0
			case unicode.In(r, unicode.Mn, unicode.Me) && marks < maxMarks:
				b = utf8.AppendRune(b, r)
				marks++
			default:
				b = appendRuneEscape(b, r)
				w = 0
			}
			if w == 0 && b[unit] == '\\' {
				w, marks = len(b)-unit, maxMarks
			}
		case c == '\\' || c == '"':
			b = append(b, '\\', c)
			w, marks = 2, maxMarks
		case c < ' ' || c == 0x7f:
			b = appendControlEscape(b, c)
			w, marks = len(b)-unit, maxMarks
		default:
			b = append(b, c)
			marks = 0
		}
		i += n
		if width += w; limit <= 0 {
			continue
		}
		if width > limit {
			return append(b[:keep], '+')
		}
		if width < limit {
			keep = len(b)
		}
	}
	return b
}

// appendControlEscape appends one ASCII control character.
func appendControlEscape(b []byte, c byte) []byte {
	switch c {
	case '\n':
		return append(b, `\n`...)
	case '\r':
		return append(b, `\r`...)
	case '\t':
		return append(b, `\t`...)
	}
	return appendHexEscape(b, c)
}

func appendHexEscape(b []byte, c byte) []byte {
	return append(b, '\\', 'x', hexDigits[c>>4], hexDigits[c&0xf])
}

func appendRuneEscape(b []byte, r rune) []byte {
	digits, letter := 4, byte('u')
	if r > 0xffff {
		digits, letter = 8, 'U'
	}
	b = append(b, '\\', letter)
	for shift := 4 * (digits - 1); shift >= 0; shift -= 4 {
		b = append(b, hexDigits[r>>shift&0xf])
	}
	return b
}

// columnsOf measures text that appendEscaped or a cell of ours has written.
func columnsOf(b []byte) int {
	width := len(b)
	for i := 0; i < len(b); {
		if b[i] < utf8.RuneSelf {
			i++
			continue
		}
		r, n := utf8.DecodeRune(b[i:])
		width += runewidth.RuneWidth(r) - n
		i += n
	}
	return width
}

// plain marks the bytes that a JSON string can hold as they are.
var plain = func() (t [256]bool) {
	for c := ' '; c < 0x7f; c++ {
		t[c] = c != '"' && c != '\\'
	}
	return t
}()

// appendJSONString appends s as a JSON string and reports whether it was valid
// UTF-8; each byte that was not becomes U+FFFD. Characters that are not
// printable are escaped, since JSON lines are looked at in terminals too.
func appendJSONString[T []byte | string](b []byte, s T) ([]byte, bool) {
	valid := true
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		if plain[c] {
			b = append(b, c)
			i++
			continue
		}
		if c < utf8.RuneSelf {
			b = appendJSONControl(b, c)
			i++
			continue
		}
		r, n := decodeRune(s, i)
		i += n
		switch {
		case r == utf8.RuneError && n == 1:
			valid = false
			b = utf8.AppendRune(b, utf8.RuneError)
		case unicode.IsPrint(r):
			b = utf8.AppendRune(b, r)
		default:
			b = appendUTF16Escape(b, r)
		}
	}
	return append(b, '"'), valid
}

func appendJSONControl(b []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(b, '\\', c)
	case '\n', '\r', '\t':
		return appendControlEscape(b, c)
	}
	return appendRuneEscape(b, rune(c))
}

// appendUTF16Escape appends \uXXXX, or two of them for a rune beyond the basic plane.
func appendUTF16Escape(b []byte, r rune) []byte {
	const (
		beyond        = 0x10000
		highSurrogate = 0xd800
		lowSurrogate  = 0xdc00
	)
	if r < beyond {
		return appendRuneEscape(b, r)
	}
	r -= beyond
	b = appendRuneEscape(b, highSurrogate+r>>10)
	return appendRuneEscape(b, lowSurrogate+r&0x3ff)
}

// appendHexBytes appends the bytes of s as hexadecimal digits.
func appendHexBytes[T []byte | string](b []byte, s T) []byte {
	for i := 0; i < len(s); i++ {
		b = append(b, hexDigits[s[i]>>4], hexDigits[s[i]&0xf])
	}
	return b
}

// appendHex appends v as 0x and its digits.
func appendHex(b []byte, v uint64) []byte {
	return strconv.AppendUint(append(b, "0x"...), v, 16)
}

// decodeRune is utf8.DecodeRune for both kinds of string. The conversion is of
// at most four bytes and stays on the stack.
func decodeRune[T []byte | string](s T, i int) (rune, int) {
	return utf8.DecodeRuneInString(string(s[i:min(i+utf8.UTFMax, len(s))]))
}
