package symbol

import (
	"bufio"
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
)

// Bounds of what is kept of the kernel's symbols.
const (
	maxKernelSymbols = 4 << 20
	maxKernelLine    = 1 << 10 // bytes
)

// ErrHiddenAddresses: the kernel shows its symbols without their addresses, as it does to
// those without privilege (kptr_restrict, perf_event_paranoid).
var ErrHiddenAddresses = errors.New("the kernel hides the addresses of its symbols (sysctl kernel.kptr_restrict)")

// Kernel is the functions of the running kernel and of its modules. It does not change.
type Kernel struct {
	symbols []kernelSymbol
	names   string
	modules []string
}

type kernelSymbol struct {
	addr   uint64
	name   uint32 // place in names
	length uint16
	module uint16
	code   bool
}

// OpenKernel reads /proc/kallsyms. The error wraps [ErrHiddenAddresses] if that has no
// addresses.
func OpenKernel() (*Kernel, error) {
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's symbols: %w", err)
	}
	defer f.Close()
	return ReadKernel(f)
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
// brackets; all is empty where there is none: the address is below all symbols, or behind
// the last, whose end nobody tells. Offset is the address. Of an address to return to the
// caller passes the byte before.
func (k *Kernel) At(addr uint64) fault.Frame {
	f := fault.Frame{Addr: addr, Offset: addr, Lang: fault.LangKernel, Module: "[kernel]"}
	i := sort.Search(len(k.symbols), func(i int) bool { return k.symbols[i].addr > addr }) - 1
	if i < 0 || i == len(k.symbols)-1 || !k.symbols[i].code {
		return f
	}
	s := &k.symbols[i]
	// Modules, and the kernel, are apart: what is between them is nobody's.
	if next := &k.symbols[i+1]; next.module != s.module && addr-s.addr >= maxKernelFunction {
		return f
	}
	f.Func, f.Module = k.names[s.name:s.name+uint32(s.length)], k.modules[s.module]
	return f
}

// maxKernelFunction is how far the last function of a module goes at most, in bytes.
const maxKernelFunction = 64 << 10

// Size is how many bytes are kept, about.
func (k *Kernel) Size() int {
	return cap(k.symbols)*int(unsafe.Sizeof(kernelSymbol{})) + len(k.names)
}
