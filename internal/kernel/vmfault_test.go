package kernel

import (
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

func TestFunctionsNamed(t *testing.T) {
	for _, tt := range []struct {
		name, kallsyms, changed string
		exact                   int
	}{
		{"none", "ffffffff81604780 t __handle_mm_fault\n", "", 0},
		{"static", "ffffffff81604780 t handle_pte_fault\n", "", 1},
		{"global", "ffffffff81604780 T handle_pte_fault\n", "", 1},
		{"weak", "ffffffff81604780 W handle_pte_fault\n", "", 1},
		{"addresses hidden", "0000000000000000 t handle_pte_fault\n", "", 1},
		{"padding", "ffffffff81604770 t __pfx_handle_pte_fault\n", "", 0},
		{"padded", "ffffffff81604770 t __pfx_handle_pte_fault\nffffffff81604780 t handle_pte_fault\n", "", 1},
		{"unlikely part", "ffffffff81604780 t handle_pte_fault\nffffffff82604780 t handle_pte_fault.cold\n", "handle_pte_fault.cold", 1},
		{"other arguments", "ffffffff81604780 t handle_pte_fault.isra.0\n", "handle_pte_fault.isra.0", 0},
		{"constant argument", "ffffffff81604780 t handle_pte_fault.constprop.0\n", "handle_pte_fault.constprop.0", 0},
		{"part", "ffffffff81604780 t handle_pte_fault.part.0.isra.0\n", "handle_pte_fault.part.0.isra.0", 0},
		{"twins", "ffffffff81604780 t handle_pte_fault\nffffffff81704780 t handle_pte_fault\n", "", 2},
		{"a module's", "ffffffffc0604780 t handle_pte_fault\t[patched]\n", "", 0},
		{"a BPF program", "ffffffffc0604780 t bpf_prog_6deef7357e7b4530_handle_pte_fault\t[bpf]\n", "", 0},
		{"data", "ffffffff82604780 d handle_pte_fault\nffffffff82604788 r handle_pte_fault\n", "", 0},
		{"longer names", "ffffffff81604780 t handle_pte_fault_range\nffffffff81604790 t xen_handle_pte_fault\n", "", 0},
		{"other lines", "\nhandle_pte_fault\nhandle_pte_fault handle_pte_fault\n", "", 0},
	} {
		exact, changed, err := functionsNamed(strings.NewReader(tt.kallsyms), handlePTEFault)
		if exact != tt.exact || changed != tt.changed || err != nil {
			t.Errorf("%s: %d and %q, want %d and %q; %v", tt.name, exact, changed, tt.exact, tt.changed, err)
		}
	}
}

func TestTakesVMFault(t *testing.T) {
	vmf := &btf.Pointer{Target: &btf.Struct{Name: "vm_fault"}}
	number := &btf.Int{Name: "long unsigned int", Size: 8}
	for _, tt := range []struct {
		name  string
		types []btf.Type
		want  bool
	}{
		{"stock", []btf.Type{vmf}, true},
		{"const", []btf.Type{&btf.Const{Type: &btf.Pointer{Target: &btf.Const{Type: &btf.Struct{Name: "vm_fault"}}}}}, true},
		{"before 4.10", []btf.Type{&btf.Pointer{Target: &btf.Struct{Name: "fault_env"}}}, false},
		{"by value", []btf.Type{&btf.Struct{Name: "vm_fault"}}, false},
		{"declared only", []btf.Type{&btf.Pointer{Target: &btf.Fwd{Name: "vm_fault"}}}, false},
		{"of no type", []btf.Type{&btf.Pointer{Target: &btf.Void{}}}, false},
		{"before 4.8", []btf.Type{&btf.Pointer{Target: &btf.Struct{Name: "mm_struct"}}, vmf, number}, false},
		{"one more", []btf.Type{vmf, number}, false},
		{"none", nil, false},
	} {
		var params []btf.FuncParam
		for _, typ := range tt.types {
			params = append(params, btf.FuncParam{Type: typ})
		}
		if got := takesVMFault(params); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

func TestCompareVMFault(t *testing.T) {
	const name = "handle_pte_fault"
	ours := fault.Fault{Address: 0x7f0012345123, PgOff: 0x45, EntryBefore: 0x8000000000000025, Known: fault.HasPgOff | fault.HasBefore}
	kernels := vmfaultVmFaultSeen{Address: 0x7f0012345123, Pgoff: 0x45, Entry: 0x8000000000000025, Called: true, Exact: true, Returned: true}
	for _, tt := range []struct {
		name      string
		mend      func(f *fault.Fault, s *vmfaultVmFaultSeen)
		want, err string
	}{
		{"same", func(*fault.Fault, *vmfaultVmFaultSeen) {}, "address, page offset and page-table entry as in handle_pte_fault", ""},
		{"before 5.18", func(_ *fault.Fault, s *vmfaultVmFaultSeen) { s.Address, s.Exact = 0x7f0012345000, false }, "address, page offset and page-table entry as in handle_pte_fault", ""},
		{"no page tables", func(f *fault.Fault, _ *vmfaultVmFaultSeen) { f.Known, f.EntryBefore = fault.HasPgOff, 0 }, "address and page offset as in handle_pte_fault", ""},
		{"no return", func(_ *fault.Fault, s *vmfaultVmFaultSeen) { s.Returned, s.Entry = false, 0 }, "address and page offset as in handle_pte_fault, whose return was missed", ""},
		{"no call", func(_ *fault.Fault, s *vmfaultVmFaultSeen) { *s = vmfaultVmFaultSeen{} }, "not compared with handle_pte_fault, of which no call was seen: its caller may have a copy inlined", ""},
		{"offset in the page", func(f *fault.Fault, _ *vmfaultVmFaultSeen) { f.Address++ }, "", "address 0x7f0012345124, but 0x7f0012345123 in the struct vm_fault of handle_pte_fault"},
		{"page before 5.18", func(_ *fault.Fault, s *vmfaultVmFaultSeen) { s.Address, s.Exact = 0x7f0012346000, false }, "", "address 0x7f0012345000, but 0x7f0012346000 in the struct vm_fault of handle_pte_fault"},
		{"page offset", func(f *fault.Fault, _ *vmfaultVmFaultSeen) { f.PgOff = 0 }, "", "page offset 0x0, but 0x45 in the struct vm_fault of handle_pte_fault"},
		{"entry", func(f *fault.Fault, _ *vmfaultVmFaultSeen) { f.EntryBefore = 0 }, "", "page-table entry 0x0, but 0x8000000000000025 in the struct vm_fault of handle_pte_fault"},
		{"frame", func(f *fault.Fault, _ *vmfaultVmFaultSeen) { f.EntryBefore |= 0x1000 }, "", "page-table entry 0x8000000000001025, but 0x8000000000000025 in the struct vm_fault of handle_pte_fault"},
	} {
		f, s := ours, kernels
		tt.mend(&f, &s)
		got, err := compareVMFault(&f, &s, name)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if got != tt.want || text != tt.err {
			t.Errorf("%s: %q, error %q; want %q, error %q", tt.name, got, text, tt.want, tt.err)
		}
	}
}

func TestPTEFaultPlanned(t *testing.T) {
	for _, exposed := range []bool{true, false} {
		f := fullFeatures()
		want := ""
		if f.PTEFault.OK = exposed; exposed {
			want = handlePTEFault
		}
		plans, err := f.Plans(Options{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range plans {
			if p.Hook != Perf && p.PTEFault != want {
				t.Errorf("hook %s: compared with %q, want %q", p.Hook, p.PTEFault, want)
			}
		}
	}
}

// exposed are functions that stock kernels have and hand the same struct vm_fault as
// handle_pte_fault, each with three pages of which the second makes the kernel call it.
var exposed = map[string]func(t *testing.T) []byte{
	// Fetches a page of a file, where no entry is.
	"finish_fault": func(t *testing.T) []byte {
		const pages, before = 3, 5
		fd, err := unix.MemfdCreate("vm_fault", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		page := os.Getpagesize()
		if err := unix.Ftruncate(fd, int64((before+pages)*page)); err != nil {
			t.Fatal(err)
		}
		mem, err := unix.Mmap(fd, int64(before*page), pages*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Munmap(mem) })
		return mem
	},
	// The fault of the self-test itself. Older compilers inline this one too.
	"do_anonymous_page": func(t *testing.T) []byte { return region(t, 3) },
	// Copies a page that may not be written to: here the page of zeros, which the entry shows.
	"do_wp_page": func(t *testing.T) []byte {
		mem := region(t, 3)
		if mem[os.Getpagesize()] != 0 {
			t.Fatal("fresh memory is not zero")
		}
		return mem
	},
}

// someHooks are all BPF hooks on the host. The machines of the kernel matrix are emulated:
// there each kernel has one, and all are had.
func someHooks() []Hook {
	if hook, ok := map[string]Hook{
		"5.10": Kprobe, "6.1": Fentry, "6.12": Tracepoint, "7": Tracepoint, "6.12-arm64": Fentry,
	}[os.Getenv("FAULTSNOOP_VM")]; ok {
		return []Hook{hook}
	}
	return []Hook{Fentry, Kprobe, Tracepoint}
}

// needKprobes skips where no function can be asked.
func needKprobes(t *testing.T, name string) {
	t.Helper()
	sys := ReadSystem()
	if s := probeVMFault(&sys, name); !s.OK {
		t.Skipf("%s: %s", name, s.Found)
	}
}

// needDescribed skips if a function is not there: the compiler has inlined it.
func needDescribed(t *testing.T, name string) {
	t.Helper()
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		t.Fatal(err)
	}
	if s := describedVMFault(spec, name); !s.OK {
		t.Skipf("%s: %s", name, s.Found)
	}
}

// openBeside opens a hook that leaves the kernel unasked.
func openBeside(t *testing.T, f Features, opt Options) *Live {
	t.Helper()
	opt.Filter = fault.Filter{AddrStart: 0x1000, AddrEnd: 0x2000} // nobody's faults
	f.PTEFault = Support{}
	l := openHook(t, f, opt)
	if got := l.Session().Compared; got != "" {
		t.Errorf("%q where there is nothing to compare with", got)
	}
	return l
}

// No kernel of the matrix exposes handle_pte_fault. What is read there is read here in
// functions that it calls, beside a witness that is right and one that is wrong.
func TestSelfTestBesideKernel(t *testing.T) {
	for _, hook := range someHooks() {
		t.Run(string(hook), func(t *testing.T) {
			f, opt := needHook(t, hook)
			if !f.Witness.OK {
				t.Fatalf("%+v", f.Witness)
			}
			l := openBeside(t, f, opt)
			// A kernel that cannot be asked is no reason not to use the hook.
			beside(t, l, "no_such_name", region(t, 3), "not compared with no_such_name: ")
			needKprobes(t, "finish_fault")
			beside(t, l, "finish_fault", region(t, 3), "not compared with finish_fault, of which no call was seen")
			for name, pages := range exposed {
				t.Run(name, func(t *testing.T) {
					needDescribed(t, name)
					beside(t, l, name, pages(t), "address, page offset and page-table entry as in "+name)
				})
			}
			t.Run("wrong", func(t *testing.T) {
				const name = "do_wp_page" // its entry is not as empty as others
				needDescribed(t, name)
				f.PageTables.DirectMap += 8 // in each table but the first, the entry beside the right one
				l := openBeside(t, f, opt)
				l.plan.PTEFault = name
				err := l.selfTestOn(exposed[name](t))
				if err == nil || !strings.HasPrefix(err.Error(), "page-table entry 0x") || !strings.HasSuffix(err.Error(), " in the struct vm_fault of "+name) {
					t.Errorf("%v; %q", err, l.compared)
				}
			})
		})
	}
}

// beside runs the self-test of l on pages and compares it with a function.
func beside(t *testing.T, l *Live, name string, pages []byte, want string) {
	t.Helper()
	l.plan.PTEFault = name
	if err := l.selfTestOn(pages); err != nil || !strings.HasPrefix(l.compared, want) {
		t.Errorf("%v; %q, want %q", err, l.compared, want)
	}
}
