package symbol

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unsafe"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// Bounds of what is kept of the kernel's symbols.
const (
	maxKernelSymbols = 4 << 20
	maxKernelLine    = 1 << 10 // bytes
)

// ErrHiddenAddresses: the kernel shows its symbols without their addresses, as it does to
// those without privilege (kptr_restrict, perf_event_paranoid).
var ErrHiddenAddresses = errors.New("the kernel hides the addresses of its symbols (sysctl kernel.kptr_restrict)")

// Kernel is the functions of the running kernel and of its modules. It follows the modules
// that come and go, and is not safe for concurrent use.
type Kernel struct {
	symbols []kernelSymbol
	names   string
	modules []string

	proc string // where /proc is, empty if there is no more to read
	// loaded are the modules when symbols were read, and present those now.
	loaded, present []kernelModule
	looked          uint64 // when present was read
	rereadAt        uint64 // when symbols may be read again
}

// kernelModule is a module, whose code is between two addresses.
type kernelModule struct {
	name       string
	start, end uint64
}

type kernelSymbol struct {
	addr   uint64
	name   uint32 // place in names
	length uint16
	module uint16
	code   bool
}

// OpenKernel reads /proc/kallsyms and /proc/modules. The error wraps [ErrHiddenAddresses] if
// these have no addresses.
func OpenKernel() (*Kernel, error) { return openKernel("/proc") }

func openKernel(proc string) (*Kernel, error) {
	k := &Kernel{proc: proc}
	k.look()
	if err := k.read(); err != nil {
		return nil, err
	}
	return k, nil
}

// read reads the symbols, which are those of the modules that were looked at just before.
func (k *Kernel) read() error {
	begin := process.Now()
	f, err := os.Open(k.proc + "/kallsyms")
	if err != nil {
		return fmt.Errorf("reading the kernel's symbols: %w", err)
	}
	defer f.Close()
	read, err := ReadKernel(f)
	if err != nil {
		return err
	}
	k.symbols, k.names, k.modules, k.loaded = read.symbols, read.names, read.modules, k.present
	end := process.Now()
	k.rereadAt = end + (end-begin)*readShare
	return nil
}

// look reads which modules there are (m_show in kernel/module/procfs.c):
//
//	nf_tables 385024 92 nft_compat, Live 0xffffffffc0a00000
//
// The size is that of all parts of a module, which from Linux 6.4 on are apart, and the
// address that of its code.
func (k *Kernel) look() {
	k.looked = process.Now()
	// Kernels without modules have no such file.
	text, _ := os.ReadFile(k.proc + "/modules")
	k.present = nil
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || len(k.present) >= 1<<16 {
			continue
		}
		size, err1 := strconv.ParseUint(fields[1], 10, 32)
		start, err2 := strconv.ParseUint(strings.TrimPrefix(fields[5], "0x"), 16, 64)
		if err1 != nil || err2 != nil || start == 0 {
			continue
		}
		k.present = append(k.present, kernelModule{"[" + fields[0] + "]", start, start + size})
	}
	slices.SortFunc(k.present, func(a, b kernelModule) int { return cmp.Compare(a.start, b.start) })
}

// refresh follows the modules, as often as that may be worth it.
func (k *Kernel) refresh() {
	if now := process.Now(); k.proc == "" || now-k.looked < retryAfter {
		return
	}
	k.look()
	if k.looked >= k.rereadAt && !slices.Equal(k.present, k.loaded) {
		k.rereadAt = k.looked + retryAfter
		_ = k.read() // what was read stays
	}
}

// moduleAt is the module that has code at an address, nil if there is none.
func (k *Kernel) moduleAt(addr uint64) *kernelModule {
	i := sort.Search(len(k.present), func(i int) bool { return k.present[i].start > addr }) - 1
	if i < 0 || addr >= k.present[i].end {
		return nil
	}
	return &k.present[i]
}

// ReadKernel reads the text of /proc/kallsyms (s_show in kernel/kallsyms.c):
//
//	ffffffff81000000 T _text
//	ffffffffc0001000 t nf_hook	[nf_tables]
//
// What is no such line is left out.
func ReadKernel(r io.Reader) (*Kernel, error) {
	k := &Kernel{modules: []string{"[kernel]"}}
	modules := map[string]uint16{}
	var names strings.Builder
	lines, hidden := 0, 0
	in := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := in.ReadSlice('\n')
		for errors.Is(err, bufio.ErrBufferFull) { // no such symbol
			line = nil
			_, err = in.ReadSlice('\n')
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("reading the kernel's symbols: %w", err)
		}
		if s, name, module, ok := parseKernelSymbol(line); ok {
			lines++
			if s.addr == 0 {
				hidden++
			} else if len(k.symbols) < maxKernelSymbols {
				if module != "" {
					i, known := modules[module]
					if !known && len(k.modules) < 1<<16 {
						i = uint16(len(k.modules))
						modules[module] = i
						k.modules = append(k.modules, module)
					}
					s.module = i
				}
				s.name, s.length = uint32(names.Len()), uint16(len(name))
				names.WriteString(name)
				k.symbols = append(k.symbols, s)
			}
		}
		if err != nil {
			break
		}
	}
	// Those of CPUs' own memory are at 0 in any case.
	if len(k.symbols) == 0 || hidden > lines/2 {
		if lines == 0 {
			return nil, errors.New("reading the kernel's symbols: there are none")
		}
		return nil, fmt.Errorf("reading the kernel's symbols: %w", ErrHiddenAddresses)
	}
	k.names = names.String()
	slices.SortStableFunc(k.symbols, func(a, b kernelSymbol) int {
		switch {
		case a.addr != b.addr && a.addr < b.addr:
			return -1
		case a.addr != b.addr:
			return 1
		}
		return 0
	})
	// Of several names for one place the first that is code is kept.
	out := k.symbols[:0]
	for _, s := range k.symbols {
		if last := len(out) - 1; last >= 0 && out[last].addr == s.addr {
			if s.code && !out[last].code {
				out[last] = s
			}
			continue
		}
		out = append(out, s)
	}
	k.symbols = slices.Clip(out)
	return k, nil
}

func parseKernelSymbol(line []byte) (s kernelSymbol, name, module string, ok bool) {
	if len(line) > maxKernelLine {
		return s, "", "", false
	}
	text := strings.TrimRight(string(line), "\n")
	text, module, _ = strings.Cut(text, "\t")
	addr, rest, _ := strings.Cut(text, " ")
	kind, name, _ := strings.Cut(rest, " ")
	v, err := strconv.ParseUint(addr, 16, 64)
	if err != nil || len(kind) != 1 || name == "" {
		return s, "", "", false
	}
	s.addr = v
	switch kind[0] {
	case 'T', 't', 'W', 'w':
		s.code = true
	}
	return s, name, module, true
}

// At is the function at a kernel address. Module is [kernel] or that of the module, in
// brackets. Func is empty where there is none: the address is below all symbols, behind
// the last one of the kernel or of a module, or in a module that has come lately. Offset is
// the address. Of an address to return to the caller passes the byte before.
func (k *Kernel) At(addr uint64) fault.Frame {
	f := fault.Frame{Addr: addr, Offset: addr, Lang: fault.LangKernel, Module: "[kernel]"}
	i := k.symbolAt(addr)
	if !k.ownAt(i) {
		k.refresh()
		i = k.symbolAt(addr)
	}
	if k.ownAt(i) {
		return k.named(f, i)
	}
	if m := k.moduleAt(addr); m != nil {
		f.Module = m.name
		if i >= 0 && k.symbols[i].addr >= m.start && k.modules[k.symbols[i].module] == m.name && slices.Contains(k.loaded, *m) {
			return k.named(f, i)
		}
		return f
	}
	if i < 0 || i == len(k.symbols)-1 {
		return f
	}
	// What is no module, such as a BPF program, has no end that anybody tells.
	s := &k.symbols[i]
	if name := k.modules[s.module]; s.module == 0 || addr-s.addr >= maxPseudoFunction ||
		slices.ContainsFunc(k.loaded, func(m kernelModule) bool { return m.name == name }) {
		return f
	}
	return k.named(f, i)
}

// maxPseudoFunction is how far a function that is in no module goes at most, in bytes.
const maxPseudoFunction = 64 << 10

// symbolAt is the index of the last symbol that is not behind an address, or -1.
func (k *Kernel) symbolAt(addr uint64) int {
	return sort.Search(len(k.symbols), func(i int) bool { return k.symbols[i].addr > addr }) - 1
}

// ownAt reports whether what follows a symbol is the kernel itself, which does not change.
func (k *Kernel) ownAt(i int) bool {
	return i >= 0 && i < len(k.symbols)-1 && k.symbols[i].module == 0 && k.symbols[i+1].module == 0
}

// named gives a frame the name of a symbol, if that is code.
func (k *Kernel) named(f fault.Frame, i int) fault.Frame {
	if s := &k.symbols[i]; s.code {
		f.Func, f.Module = k.names[s.name:s.name+uint32(s.length)], k.modules[s.module]
	}
	return f
}

// Size is how many bytes are kept, about.
func (k *Kernel) Size() int {
	return cap(k.symbols)*int(unsafe.Sizeof(kernelSymbol{})) + len(k.names)
}
