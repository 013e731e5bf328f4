package kernel

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"

	"faultsnoop/internal/fault"
)

// handlePTEFault makes the decisions that bpf/classify.h makes again. Compilers inline it
// into its only caller, unless the kernel was patched or compiled otherwise.
const handlePTEFault = "handle_pte_fault"

// describedVMFault looks in BTF for a function that is handed a struct vm_fault.
func describedVMFault(spec *btf.Spec, name string) Support {
	var fn *btf.Func
	if err := spec.TypeByName(name, &fn); errors.Is(err, btf.ErrNotFound) {
		return Support{Found: "inlined into " + handleMMFault + ", as in stock kernels"}
	} else if err != nil {
		return Support{Found: fmt.Sprintf("not clear in BTF: %v", err)}
	}
	if proto, ok := fn.Type.(*btf.FuncProto); !ok || !takesVMFault(proto.Params) {
		return Support{Found: "exposed, but not with a struct vm_fault as its only argument"}
	}
	return Support{OK: true, Found: "exposed"}
}

func takesVMFault(params []btf.FuncParam) bool {
	if len(params) != 1 {
		return false
	}
	p, ok := btf.As[*btf.Pointer](params[0].Type)
	if !ok {
		return false
	}
	s, ok := btf.As[*btf.Struct](p.Target)
	return ok && s.Name == "vm_fault"
}

// probeVMFault is whether a function that BTF describes can be probed: BTF has names
// without what compilers append to them, and does not tell twins apart.
func probeVMFault(sys *System, name string) Support {
	if f, err := os.Open("/proc/kallsyms"); err == nil {
		exact, changed, err := functionsNamed(f, name)
		f.Close()
		switch {
		case err != nil:
		case exact > 1:
			return Support{Found: fmt.Sprintf("exposed, but %d functions have this name", exact)}
		case exact == 0 && changed != "":
			return Support{Found: "changed by the compiler into " + changed}
		}
	}
	w, err := watchVMFault(name, 0)
	if err != nil {
		return Support{Found: "exposed, but " + sys.kprobeRefusal("setting kprobes on it", err).Found}
	}
	if err := w.close(); err != nil {
		return Support{Found: fmt.Sprintf("exposed, but removing a kprobe from it: %v", err)}
	}
	return Support{OK: true, Found: "exposed"}
}

// functionsNamed counts the kernel's own functions of exactly this name in the text of
// /proc/kallsyms, and returns the first that a compiler has made of one: .isra, .constprop,
// .part, .cold.
func functionsNamed(kallsyms io.Reader, name string) (exact int, changed string, err error) {
	lines := bufio.NewScanner(kallsyms)
	for lines.Scan() {
		if !bytes.Contains(lines.Bytes(), []byte(name)) {
			continue
		}
		// "ffffffff8132a4f0 t handle_pte_fault"; functions of modules have a fourth field.
		w := strings.Fields(lines.Text())
		if len(w) != 3 || !strings.Contains("tTwW", w[1]) {
			continue
		}
		if w[2] == name {
			exact++
		} else if changed == "" && strings.HasPrefix(w[2], name+".") {
			changed = w[2]
		}
	}
	if err := lines.Err(); err != nil {
		return 0, "", fmt.Errorf("reading the list of symbols: %w", err)
	}
	return exact, changed, nil
}

// vmFaultWatch reads the struct vm_fault with which a function is called for one page.
type vmFaultWatch struct {
	name     string
	programs vmfaultObjects
	links    []io.Closer
}

// watchVMFault attaches to the function of this name and has faults of the calling thread
// on a page watched. The caller closes the watch.
func watchVMFault(name string, page uint64) (_ *vmFaultWatch, err error) {
	w := &vmFaultWatch{name: name}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if err := loadVmfaultObjects(&w.programs, nil); err != nil {
		return nil, fmt.Errorf("loading the programs for %s: %w", name, err)
	}
	if err := w.programs.WatchedPage.Set(page); err != nil {
		return nil, fmt.Errorf("announcing the page: %w", err)
	}
	for _, attach := range []func() (link.Link, error){
		// The return first: a call whose beginning was seen has an end.
		func() (link.Link, error) { return kretprobe(name, w.programs.ExitPteFault) },
		func() (link.Link, error) { return link.Kprobe(name, w.programs.EnterPteFault, nil) },
	} {
		l, err := attach()
		if err != nil {
			return nil, fmt.Errorf("attaching to %s: %w", name, err)
		}
		w.links = append(w.links, l)
	}
	if err := runOnce(w.programs.WatchThread); err != nil {
		return nil, fmt.Errorf("announcing the thread: %w", err)
	}
	return w, nil
}

func (w *vmFaultWatch) seen() (vmfaultVmFaultSeen, error) {
	var s vmfaultVmFaultSeen
	if err := w.programs.Seen.Get(&s); err != nil {
		return s, fmt.Errorf("reading what %s was called with: %w", w.name, err)
	}
	return s, nil
}

func (w *vmFaultWatch) close() error {
	var err error
	for _, l := range slices.Backward(w.links) {
		err = errors.Join(err, l.Close())
	}
	return errors.Join(err, w.programs.Close())
}

// compareVMFault compares a record with what the function of this name was called with for
// the same fault. It returns what is the same, in words for a user.
func compareVMFault(f *fault.Fault, s *vmfaultVmFaultSeen, name string) (string, error) {
	address := f.Address
	if !s.Exact {
		address &^= uint64(os.Getpagesize() - 1)
	}
	differs := func(what string, ours, kernels uint64) error {
		return fmt.Errorf("%s %#x, but %#x in the struct vm_fault of %s", what, ours, kernels, name)
	}
	switch {
	case !s.Called:
		return "not compared with " + name + ", of which no call was seen: its caller may have a copy inlined", nil
	case address != s.Address:
		return "", differs("address", address, s.Address)
	case f.PgOff != s.Pgoff:
		return "", differs("page offset", f.PgOff, s.Pgoff)
	case !f.Is(fault.HasBefore):
		return "address and page offset as in " + name, nil
	case !s.Returned:
		return "address and page offset as in " + name + ", whose return was missed", nil
	case f.EntryBefore != s.Entry:
		return "", differs("page-table entry", f.EntryBefore, s.Entry)
	}
	return "address, page offset and page-table entry as in " + name, nil
}
