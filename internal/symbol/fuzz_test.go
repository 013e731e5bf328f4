package symbol

import (
	"bytes"
	"compress/zlib"
	"debug/elf"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// small is a program that is compiled with these flags, for a corpus. Without a compiler the
// corpus in testdata must do.
func small(f *testing.F, flags ...string) []byte {
	f.Helper()
	dir := f.TempDir()
	source := filepath.Join(dir, "p.c")
	if err := os.WriteFile(source, []byte("static inline __attribute__((always_inline)) int g(int x) { return x * 3; }\nint f(int x) { return g(x) + 1; }\n"), 0o644); err != nil {
		f.Fatal(err)
	}
	out := filepath.Join(dir, "p.so")
	args := append([]string{"-O1", "-shared", "-nostdlib", "-fPIC", "-Wl,-z,noseparate-code", "-Wl,--build-id", "-o", out, source}, flags...)
	if exec.Command("gcc", args...).Run() != nil {
		return nil
	}
	b, err := os.ReadFile(out)
	if err != nil {
		f.Fatal(err)
	}
	return b
}

// ask asks for all addresses that code can have, some at a time.
func ask(c *Code) {
	if c == nil {
		return
	}
	for _, p := range c.object.f.Progs {
		for i := range uint64(16) {
			c.AddrOf(p.Off + i*p.Filesz/16)
			c.At(p.Vaddr + i*p.Memsz/16)
		}
	}
	for _, s := range c.object.f.Sections {
		for i := range uint64(4) {
			c.At(s.Addr + i*s.Size/4)
		}
	}
	c.At(0)
	c.At(^uint64(0))
	c.Size()
}

// FuzzELF: a file may say anything.
func FuzzELF(f *testing.F) {
	for _, flags := range [][]string{{"-g"}, {"-gdwarf-4"}, {"-g", "-gz=zlib"}, {"-s"}, {"-g0", "-static"}} {
		if b := small(f, flags...); b != nil {
			f.Add(b)
		}
	}
	f.Add(program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64))
	f.Add(program(elf.ET_DYN, 0).bytes(elf.ELFCLASS32))
	f.Fuzz(func(t *testing.T, b []byte) {
		if im, err := readImage(bytes.NewReader(b), page); err == nil {
			im.symbols.at(0x1000, true)
		}
		c, err := NewCode(bytes.NewReader(b))
		if err != nil {
			return
		}
		c.object.debugLink()
		ask(c)
	})
}

// FuzzDWARF: sections of DWARF, of a file that is none otherwise.
func FuzzDWARF(f *testing.F) {
	names := []string{".debug_info", ".debug_abbrev", ".debug_line", ".debug_str", ".debug_line_str", ".debug_rnglists", ".debug_ranges", ".debug_aranges", ".debug_addr"}
	for _, flags := range [][]string{{"-g"}, {"-gdwarf-4"}, {"-gdwarf-3"}, {"-gdwarf-2"}, {"-gdwarf-5", "-gdwarf64"}} {
		b := small(f, flags...)
		if b == nil {
			continue
		}
		o, err := readObject(bytes.NewReader(b))
		if err != nil {
			f.Fatal(err)
		}
		var sections [][]byte
		for _, name := range names {
			s := o.section(name)
			sections = append(sections, s.bytes(0, s.size))
		}
		f.Add(sections[0], sections[1], sections[2], sections[3], sections[4], sections[5], sections[6], sections[7], sections[8])
	}
	f.Fuzz(func(t *testing.T, info, abbrev, line, str, lineStr, rnglists, ranges, aranges, addr []byte) {
		of := func(b []byte) extent { return extent{bytes.NewReader(b), 0, uint64(len(b))} }
		l := &lines{
			order: binary.LittleEndian, addrSize: 8, code: func(uint64) bool { return true },
			info: of(info), abbrev: of(abbrev), line: of(line), str: of(str), lineStr: of(lineStr),
			rnglists: of(rnglists), ranges: of(ranges), aranges: of(aranges), addr: of(addr), strOffsets: of(addr),
		}
		for addr := range uint64(64) {
			l.at(0x1000 + addr)
		}
		for i := range l.cover {
			if i > 100 {
				break
			}
			l.at(l.cover[i].start)
			l.at(l.cover[i].end - 1)
		}
		l.size()
	})
}

// goProgram is a stripped Go program as its own table sees it.
func goProgram(f *testing.F) (table, inlined []byte, text uint64) {
	f.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		return nil, nil, 0
	}
	o, err := os.Open("/proc/self/exe")
	if err != nil {
		f.Fatal(err)
	}
	defer o.Close()
	c, err := NewCode(o)
	if err != nil || c.golang == nil {
		f.Fatal(err)
	}
	t := c.golang
	return t.table.bytes(0, 4096), t.inlined.bytes(0, 4096), t.text
}

// goTableFor is a small table of two functions, the first of which has an inlined call.
func goTableFor(order binary.ByteOrder) []byte {
	const ptr = 8
	var b bytes.Buffer
	put := func(v ...any) {
		for _, v := range v {
			_ = binary.Write(&b, order, v)
		}
	}
	names := []byte("main.f\x00main.g\x00")
	units := []uint32{0, 5}
	files := []byte("a.go\x00b.go\x00")
	pcs := []byte{0, 2, 16, 4, 16, 0, 2, 8, 2, 8, 0} // tables at 1 and 6
	head := uint64(8 + 8*ptr)
	at := []uint64{head, head + uint64(len(names)), 0, 0, 0}
	at[2] = at[1] + uint64(4*len(units))
	at[3] = at[2] + uint64(len(files))
	at[4] = (at[3] + uint64(len(pcs)) + 7) &^ 7
	put(uint32(go120), uint16(0), uint8(1), uint8(ptr), uint64(2), uint64(2), uint64(0x1000))
	for _, a := range at {
		put(a)
	}
	b.Write(names)
	put(units)
	b.Write(files)
	b.Write(pcs)
	b.Write(make([]byte, at[4]-uint64(b.Len())))
	const list = (2*2 + 1) * 4
	put(uint32(0), uint32(list), uint32(32), uint32(list+44+16+4), uint32(64))
	for i := range uint32(2) {
		put(i*32, i*7, uint32(0), uint32(0), uint32(1), uint32(1), uint32(1), uint32(3), uint32(0), int32(1), uint32(4)<<24)
		put(uint32(0), uint32(0), uint32(6))
		put(uint32(0), uint32(0), uint32(0), uint32(0))
	}
	return b.Bytes()
}

// FuzzGoTable: .gopclntab, and the trees behind it.
func FuzzGoTable(f *testing.F) {
	f.Add(goTableFor(binary.LittleEndian), make([]byte, 64), uint64(0x1000))
	f.Add(goTableFor(binary.BigEndian), make([]byte, 64), uint64(0x1000))
	if table, inlined, text := goProgram(f); table != nil {
		f.Add(table, inlined, text)
	}
	f.Fuzz(func(t *testing.T, table, inlined []byte, text uint64) {
		l := layout{kind: elf.ET_DYN, sections: []sectionOf{{".gopclntab", elf.SHT_PROGBITS, elf.SHF_ALLOC, 0x8000, 0, uint64(len(table))}}}
		o, err := readObject(bytes.NewReader(l.bytes(elf.ELFCLASS64)))
		if err != nil {
			t.Fatal(err)
		}
		o.r = bytes.NewReader(table)
		g := goTableOf(o)
		if g == nil {
			return
		}
		g.text, g.inlined = text, extent{bytes.NewReader(inlined), 0, uint64(len(inlined))}
		for i := range min(g.count, 100) {
			addr, _ := g.entry(i)
			g.at(addr)
			g.at(addr + 17)
		}
	})
}

// FuzzPerfMap: whatever is in /tmp.
func FuzzPerfMap(f *testing.F) {
	f.Add([]byte("7f00 20 py::f:/a/b.py\n7f10 0x8 LazyCompile:*g /c.js:1:2\nx\n"), 7)
	f.Add([]byte("ffffffffffffffff 1 a\n0 ffffffffffffffff b\n1 1\n"), 1)
	f.Add([]byte("10 10 a\n18 10 b\n10 10 _ZN1a1bEv\n18 2 c"), 4)
	f.Fuzz(func(t *testing.T, b []byte, step int) {
		m := &PerfMap{}
		if step <= 0 || step > len(b) {
			step = max(len(b), 1)
		}
		for n := step; n-step < len(b); n += step {
			m.size = int64(min(n, len(b)))
			for more := true; more; {
				var err error
				if more, err = m.readFrom(bytes.NewReader(b)); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, e := range m.entries {
			// The one that is listed last holds its beginning.
			want := e.name
			for _, later := range m.entries {
				if later.start <= e.start && e.start < later.end {
					want = later.name
				}
			}
			function, _, _, _ := compiledName(want)
			if got := m.At(e.start).Func; got != function {
				t.Fatalf("%#x is %q, want %q", e.start, got, function)
			}
			if len(m.entries) > 200 {
				break
			}
		}
	})
}

// FuzzKernel: kallsyms is the kernel's, but its names are those of modules.
func FuzzKernel(f *testing.F) {
	f.Add([]byte("ffffffff81000000 T _text\nffffffff81000010 t f\nffffffffc0000000 t g\t[m]\n"), uint64(0xffffffff81000011))
	f.Add([]byte("0000000000000000 T _text\n"), uint64(0))
	f.Add([]byte("1 t\n1 t  \n\t\n1 d d\n2 T e"), uint64(1))
	f.Fuzz(func(t *testing.T, b []byte, addr uint64) {
		k, err := ReadKernel(bytes.NewReader(b))
		if err != nil {
			return
		}
		for _, s := range k.symbols {
			if f := k.At(s.addr); f.Func != "" && !bytes.Contains(b, []byte(f.Func)) {
				t.Fatalf("%#x is %q", s.addr, f.Func)
			}
		}
		k.At(addr)
	})
}

// FuzzUnXZ: what is packed into a program.
func FuzzUnXZ(f *testing.F) {
	if path, err := exec.LookPath("xz"); err == nil {
		for _, check := range []string{"none", "crc32", "crc64", "sha256"} {
			cmd := exec.Command(path, "-c", "--check="+check)
			cmd.Stdin = strings.NewReader(strings.Repeat("symbols ", 100))
			if out, err := cmd.Output(); err == nil {
				f.Add(out)
			}
		}
	}
	f.Add([]byte("\xfd7zXZ\x00\x00\x04\xe6\xd6\xb4\x46"))
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 1 << 16
		if out, err := unxz(bytes.NewReader(b), limit); err == nil && len(out) > limit {
			t.Fatalf("%d bytes", len(out))
		}
	})
}

// FuzzDemangle: a name of a few bytes may stand for one of gigabytes.
func FuzzDemangle(f *testing.F) {
	for _, s := range []string{"_ZNK5space5thing5touchIlEEvT_", "_RNvCs1234_7mycrate3foo", "_ZN4core3fmt5write17h0123456789abcdefE", "_Z1fSsSs"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > maxName {
			return
		}
		if out := demangled(s); len(out) > max(1<<maxDemangled, len(s)) {
			t.Fatalf("%d bytes are made of %d", len(out), len(s))
		}
		langOfName(s)
	})
}

// TestInflated: more than the bound is not unpacked.
func TestInflated(t *testing.T) {
	var b bytes.Buffer
	w := zlib.NewWriter(&b)
	zeros := make([]byte, 1<<20)
	for range maxInflated>>20 + 1 {
		if _, err := w.Write(zeros); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	const at = 0x20000
	header := append([]byte("ZLIB"), 0, 0, 0, 0, 0, 0, 1, 0) // the size, which is not true
	content := append(header, b.Bytes()...)
	l := layout{kind: elf.ET_DYN, sections: []sectionOf{{".zdebug_info", elf.SHT_PROGBITS, 0, 0, at, uint64(len(content))}}}
	file := l.bytes(elf.ELFCLASS64)
	file = append(append(file, make([]byte, at-len(file))...), content...)
	o, err := readObject(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	if n := o.section(".debug_info").size; n != 0 || o.held != 0 {
		t.Errorf("%d bytes are unpacked, %d kept", n, o.held)
	}
}
