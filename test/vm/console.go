package main

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"faultsnoop/test/vm/guest"
)

// report is what a guest's console said.
type report struct {
	ready, done bool
	fault       string // what /init could not set up
	programs    []*programReport
	trouble     []string // lines in which the kernel complains about itself
}

// programReport is what became of one program.
type programReport struct {
	name   string
	ended  bool
	status int
	tests  []testReport
}

// testReport is the outcome of one test or subtest.
type testReport struct {
	name    string
	outcome string // PASS, FAIL or SKIP
	reason  string // last message of a test that did not pass
}

// program returns the report of the named program, or nil if it never began.
func (r *report) program(name string) *programReport {
	for _, p := range r.programs {
		if p.name == name {
			return p
		}
	}
	return nil
}

// console takes in the bytes of a serial console, line by line.
type console struct {
	nonce string
	// log takes every byte as it comes.
	log io.Writer
	// echo, if not nil, takes the printable form of what the programs write.
	echo io.Writer
	// onReady, if not nil, is called when the guest is ready or has failed to be.
	onReady func()

	report
	partial []byte
	current string // test that is running in the last program
	message string // its last message
}

// Write implements [io.Writer].
func (c *console) Write(b []byte) (int, error) {
	c.partial = append(c.partial, b...)
	for {
		line, rest, ok := bytes.Cut(c.partial, []byte("\n"))
		if !ok {
			break
		}
		c.partial = rest
		if err := c.line(strings.TrimRight(string(line), "\r")); err != nil {
			return 0, err
		}
	}
	return c.log.Write(b)
}

// kernelTrouble matches the first line of what the kernel prints about its own bugs.
var kernelTrouble = regexp.MustCompile(`\[ *\d+\.\d{6}\].*(Kernel panic|\bBUG: |\bOops: |WARNING: (CPU|\S+:\d+))`)

// A busy host stops an emulated CPU for as long as it likes. That is not a bug of
// the guest's kernel.
const stall = "soft lockup"

func (c *console) line(line string) error {
	if m, ok := guest.ParseMark(line, c.nonce); ok {
		c.mark(m)
		return nil
	}
	if kernelTrouble.MatchString(line) && !strings.Contains(line, stall) {
		c.trouble = append(c.trouble, printable(line))
	}
	if p := c.running(); p != nil {
		c.testLine(p, line)
		if c.echo != nil {
			if _, err := fmt.Fprintln(c.echo, printable(line)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *console) mark(m guest.Mark) {
	if (m.Event == guest.Ready || m.Event == guest.Fault) && c.onReady != nil {
		c.onReady()
	}
	switch m.Event {
	case guest.Ready:
		c.ready = true
	case guest.Fault:
		c.fault = printable(m.Text)
	case guest.Begin:
		c.programs = append(c.programs, &programReport{name: m.Name})
		c.current, c.message = "", ""
	case guest.End:
		if p := c.program(m.Name); p != nil {
			p.ended, p.status = true, m.Status
		}
	case guest.Done:
		c.done = true
	}
}

// running returns the program that began last, unless it ended.
func (c *console) running() *programReport {
	if len(c.programs) == 0 || c.programs[len(c.programs)-1].ended {
		return nil
	}
	return c.programs[len(c.programs)-1]
}

// With -test.v=test2json a test binary puts this byte before its framing lines, so
// that they are found behind output that lacks a line end, and nothing else is
// taken for one.
const frame = "\x16"

var (
	testStart   = regexp.MustCompile(`^=== (?:RUN|NAME|CONT) +(\S*)`)
	testEnd     = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(`)
	testMessage = regexp.MustCompile(`^ *\S+\.go:\d+: (.*)`)
)

func (c *console) testLine(p *programReport, line string) {
	if _, framed, ok := strings.Cut(line, frame); ok {
		if m := testStart.FindStringSubmatch(framed); m != nil && m[1] != c.current {
			c.current, c.message = m[1], ""
		}
		if m := testEnd.FindStringSubmatch(framed); m != nil {
			t := testReport{name: printable(m[2]), outcome: m[1]}
			if m[1] != "PASS" && m[2] == c.current {
				t.reason = c.message
			}
			p.tests = append(p.tests, t)
		}
		return
	}
	if m := testMessage.FindStringSubmatch(line); m != nil {
		c.message = printable(m[1])
	}
}

// printable returns the line with everything that could steer a terminal spelled out.
func printable(line string) string {
	var out strings.Builder
	for i, r := range line {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(line[i:], string(utf8.RuneError)):
			fmt.Fprintf(&out, `\x%02x`, line[i])
		case r == '\t' || unicode.IsPrint(r):
			out.WriteRune(r)
		case string(r) == frame: // framing of test output, not content
		case r < utf8.RuneSelf:
			fmt.Fprintf(&out, `\x%02x`, r)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	return out.String()
}
