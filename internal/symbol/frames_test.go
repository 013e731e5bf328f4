package symbol

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

// sleeper starts a program that does nothing.
func sleeper(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// mappingOf is where a process has mapped the code of a file.
func mappingOf(t *testing.T, pid int, path string) *fault.VMA {
	t.Helper()
	for range 100 { // until it has done its exec
		maps, err := process.ReadMaps(pid)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range maps {
			if m.Path == path && strings.Contains((&fault.VMA{Flags: m.Flags}).Perm(), "x") {
				return &fault.VMA{
					Start: m.Start, End: m.End, PgOff: m.PgOff, Flags: m.Flags, Inode: m.Inode, Dev: m.Dev, Label: m.Label, Path: path,
				}
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatalf("process %d does not map the code of %s", pid, path)
	return nil
}

const waitSource = `
#include <unistd.h>
__attribute__((noinline)) void wait_here(void) {
	pause(); // wait
}
int main(void) {
	wait_here();
	return 0;
}
`

func buildWait(t *testing.T, flags ...string) string {
	t.Helper()
	need(t, "gcc")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "wait.c"), []byte(waitSource), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, dir, "gcc", append(flags, "-g", "-o", "wait", "wait.c")...)
	settle()
	return filepath.Join(dir, "wait")
}

// instruction is the beginning of a function, where it is mapped.
func instruction(t *testing.T, pid uint32, v *fault.VMA, truth, name string) *Instruction {
	t.Helper()
	s := symbolNamed(t, truth, name)
	f, err := os.Open(truth)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	o, err := readObject(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range o.f.Progs {
		if s.Value >= p.Vaddr && s.Value-p.Vaddr < p.Filesz {
			return &Instruction{Addr: v.Start + (s.Value - p.Vaddr + p.Off) - v.PgOff*page, VMA: v, PID: pid, Time: process.Now()}
		}
	}
	t.Fatal("no segment holds the function")
	return nil
}

func frames(t *testing.T, r *Resolver, in *Instruction) []fault.Frame {
	t.Helper()
	for range 1000 {
		r.Begin()
		f, done := r.Frames(in)
		if len(f) == 0 {
			t.Fatal("there is no frame")
		}
		if done {
			return f
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("there is never time")
	return nil
}

func TestFrames(t *testing.T) {
	for _, flags := range [][]string{nil, {"-no-pie"}, {"-static-pie"}, {"-Wl,-z,noseparate-code"}} {
		bin := buildWait(t, flags...)
		cmd := sleeper(t, bin)
		pid := uint32(cmd.Process.Pid)
		v := mappingOf(t, cmd.Process.Pid, bin)
		r := newResolver(t)
		in := instruction(t, pid, v, bin, "wait_here")
		f := frames(t, r, in)
		s := symbolNamed(t, bin, "wait_here")
		if len(f) != 1 || f[0].Func != "wait_here" || f[0].Addr != in.Addr || f[0].Module != bin || f[0].Offset != s.Value || f[0].BuildID == "" || f[0].Line == 0 {
			t.Fatalf("%v: %+v", flags, f)
		}
		// Behind the last instruction, as if a call there did not come back.
		in.Addr += s.Size
		in.Caller = true
		if f := frames(t, r, in); f[0].Func != "wait_here" || f[0].Offset != s.Value+s.Size || f[0].Addr != in.Addr {
			t.Errorf("%v: the caller is %+v", flags, f)
		}
		in.Caller = false
		if f := frames(t, r, in); f[0].Func == "wait_here" {
			t.Errorf("%v: %+v", flags, f)
		}
		in.Addr = v.End
		if f := frames(t, r, in); f[0].Func != "" {
			t.Errorf("%v: outside of the mapping is %+v", flags, f)
		}
	}
}

// TestFramesOfDead: what has ended is known as long as its file is open.
func TestFramesOfDead(t *testing.T) {
	bin := buildWait(t)
	cmd := sleeper(t, bin)
	v := mappingOf(t, cmd.Process.Pid, bin)
	r := newResolver(t)
	in := instruction(t, uint32(cmd.Process.Pid), v, bin, "wait_here")
	first := frames(t, r, in)
	if err := os.Remove(bin); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	clear(r.files[fileID{v.Dev, v.Inode}].code.answers)
	if again := frames(t, r, in); !slices.Equal(again, first) {
		t.Errorf("%+v, before it was %+v", again, first)
	}
}

// TestFramesOfReplaced: what is there now is not what runs.
func TestFramesOfReplaced(t *testing.T) {
	bin := buildWait(t)
	other := buildWait(t, "-O2")
	cmd := sleeper(t, bin)
	v := mappingOf(t, cmd.Process.Pid, bin)
	in := instruction(t, uint32(cmd.Process.Pid), v, bin, "wait_here")
	unnamed := func(what string, f []fault.Frame) {
		t.Helper()
		if len(f) != 1 || f[0].Func != "" || f[0].File != "" || f[0].Module != bin || f[0].Offset != in.Addr-v.Start+v.PgOff*page {
			t.Errorf("%s: %+v", what, f)
		}
	}

	if err := os.Rename(other, bin); err != nil {
		t.Fatal(err)
	}
	in.PID = 0
	unnamed("the process is gone", frames(t, newResolver(t), in))
	in.PID = uint32(cmd.Process.Pid)
	// The mapping itself still has the file, for those who may ask.
	if f := frames(t, newResolver(t), in); f[0].Func != "wait_here" && f[0].Func != "" {
		t.Errorf("while the process lives: %+v", f)
	}

	// The same file with other content, after the stack was taken.
	changed := buildWait(t)
	v.Path = changed
	var st unix.Stat_t
	if err := unix.Stat(changed, &st); err != nil {
		t.Fatal(err)
	}
	v.Inode, v.Dev = st.Ino, process.Dev(unix.Major(st.Dev), unix.Minor(st.Dev))
	in.PID, in.Time, bin = 0, process.Now(), changed
	r := newResolver(t)
	if f := frames(t, r, in); f[0].Func != "wait_here" {
		t.Fatalf("before the change: %+v", f)
	}
	b, err := os.ReadFile(changed)
	if err != nil {
		t.Fatal(err)
	}
	settle()
	write(t, changed, bytes.ReplaceAll(b, []byte("wait_here"), []byte("else_here")))
	unnamed("after the change", frames(t, r, in))
	in.Time = process.Now()
	if f := frames(t, r, in); f[0].Func != "else_here" {
		t.Errorf("a later stack: %+v", f)
	}
}

// TestShared: equal files are read once, and others that say so are not.
func TestShared(t *testing.T) {
	bin := buildWait(t)
	b, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	copied, forged := filepath.Join(dir, "copy"), filepath.Join(dir, "forged")
	write(t, copied, b)
	write(t, forged, bytes.ReplaceAll(b, []byte("wait_here"), []byte("else_here")))
	r := newResolver(t)
	at := func(path, want string) *file {
		t.Helper()
		cmd := sleeper(t, path)
		v := mappingOf(t, cmd.Process.Pid, path)
		if f := frames(t, r, instruction(t, uint32(cmd.Process.Pid), v, bin, "wait_here")); f[0].Func != want {
			t.Errorf("%s: %+v", path, f)
		}
		return r.files[fileID{v.Dev, v.Inode}]
	}
	first, second, third := at(bin, "wait_here"), at(copied, "wait_here"), at(forged, "else_here")
	if first.code != second.code {
		t.Error("equal files are read twice")
	}
	if first.code == third.code {
		t.Error("another file with the same build-id is taken for the same")
	}
	kept := first.image.size() + second.image.size() + third.image.size() + first.code.Size() + third.code.Size()
	if r.kept != kept {
		t.Errorf("%d bytes are counted, %d are kept", r.kept, kept)
	}
	for id := range r.files {
		r.forget(id)
	}
	if r.kept != 0 || len(r.codes) != 0 {
		t.Errorf("%d bytes of %d files stay", r.kept, len(r.codes))
	}
}

// TestVDSO: the kernel's code in each process has names too.
func TestVDSO(t *testing.T) {
	c, err := readVDSO()
	if err != nil {
		t.Skip(err) // a kernel without one
	}
	maps, err := process.ReadMaps(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	i := slices.IndexFunc(maps, func(m process.Mapping) bool { return m.Label == "[vdso]" })
	v := &fault.VMA{Start: maps[i].Start, End: maps[i].End, Label: "[vdso]"}
	r := newResolver(t)
	for addr := v.Start; addr < v.End; addr += 4 {
		f := frames(t, r, &Instruction{Addr: addr, VMA: v, PID: 1})
		if f[0].Func != "" {
			names = append(names, f[0].Func)
			if f[0].Module != "[vdso]" || f[0].BuildID != c.BuildID {
				t.Fatalf("%+v", f)
			}
		}
	}
	if names = slices.Compact(names); !slices.ContainsFunc(names, func(s string) bool { return strings.HasSuffix(s, "clock_gettime") }) {
		t.Errorf("the functions of the vdso are %q", names)
	}
	low := &fault.VMA{Start: 0xf7f00000, End: 0xf7f02000, Label: "[vdso]"}
	if f := frames(t, r, &Instruction{Addr: low.Start + 0x800, VMA: low, PID: 1}); f[0].Func != "" {
		t.Errorf("a process of 32 bits has %+v", f)
	}
}

func TestKernel(t *testing.T) {
	const text = `0000000000000000 A fixed_percpu_data
ffffffff81000000 T startup_64
ffffffff81000000 T _stext
ffffffff81000040 t handle.constprop.0
ffffffff81000080 D some_data
ffffffff81000100 T after
ffffffff82000000 B _end
nonsense
ffffffffc0001000 t hook	[nf_tables]
ffffffffc0001080 d table	[nf_tables]
ffffffffc0009000 t first	[zram]
ffffffffc0009100 t last	[zram]
`
	k, err := ReadKernel(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[uint64]string{
		0xffffffff80ffffff: "[kernel]", 0xffffffff81000000: "[kernel] startup_64", 0xffffffff8100003f: "[kernel] startup_64",
		0xffffffff81000041: "[kernel] handle.constprop.0", 0xffffffff81000090: "[kernel]", 0xffffffff81000fff: "[kernel] after",
		0xffffffff82000001: "[kernel]", 0xffffffffc0001008: "[nf_tables] hook", 0xffffffffc0001088: "[kernel]",
		0xffffffffc00090ff: "[zram] first", 0xffffffffc0009101: "[kernel]", 0: "[kernel]",
	} {
		f := k.At(addr)
		same(t, fmt.Sprintf("%#x", addr), strings.TrimSpace(f.Module+" "+f.Func), want)
		if f.Lang != fault.LangKernel || f.Addr != addr {
			t.Errorf("%+v", f)
		}
	}
	_, err = ReadKernel(strings.NewReader("0000000000000000 T _text\n0000000000000000 t f\t[m]\n"))
	if !errors.Is(err, ErrHiddenAddresses) {
		t.Errorf("without addresses: %v", err)
	}
	if _, err = ReadKernel(strings.NewReader("")); err == nil || errors.Is(err, ErrHiddenAddresses) {
		t.Errorf("without symbols: %v", err)
	}
	live, err := OpenKernel()
	if errors.Is(err, ErrHiddenAddresses) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(live.symbols, func(s kernelSymbol) bool {
		return live.names[s.name:s.name+uint32(s.length)] == "schedule"
	})
	if f := live.At(live.symbols[i].addr + 1); f.Func != "schedule" || f.Module != "[kernel]" {
		t.Errorf("%+v", f)
	}
}

// TestKernelModules: no function is behind the end of its module, and modules that come, go
// and take another's place have no names of others.
func TestKernelModules(t *testing.T) {
	const kernel = "ffffffff81000000 T _text\nffffffff82000000 B _end\n"
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("kallsyms", kernel+"ffffffffc0001000 t hook\t[nf_tables]\nffffffffc0009000 t io\t[zram]\nffffffffc0030000 t bpf_prog_1\t[bpf]\n")
	write("modules", "zram 32768 0 - Live 0xffffffffc0009000\nnf_tables 8192 2 nft_compat,nft_x, Live 0xffffffffc0001000 (OE)\nnonsense\n")
	k, err := openKernel(dir)
	if err != nil {
		t.Fatal(err)
	}
	check := func(when string, of map[uint64]string) {
		t.Helper()
		for addr, want := range of {
			f := k.At(addr)
			same(t, fmt.Sprintf("%s: %#x", when, addr), strings.TrimSpace(f.Module+" "+f.Func), want)
		}
	}
	check("at first", map[uint64]string{
		0xffffffffc0001010: "[nf_tables] hook", 0xffffffffc0002fff: "[nf_tables] hook", 0xffffffffc0003000: "[kernel]",
		0xffffffffc0009000: "[zram] io", 0xffffffffc0011000: "[kernel]", 0xffffffff81000010: "[kernel] _text",
	})

	// A module comes behind one, and another one to the place of one that has gone.
	write("modules", "nf_tables 8192 0 - Live 0xffffffffc0001000\nlate 4096 0 - Live 0xffffffffc0004000\nother 32768 0 - Live 0xffffffffc0009000\n")
	write("kallsyms", kernel+"ffffffffc0001000 t hook\t[nf_tables]\nffffffffc0004000 t lately\t[late]\nffffffffc0009000 t open\t[other]\n")
	k.looked, k.rereadAt = 0, 1<<63
	check("before symbols may be read again", map[uint64]string{
		0xffffffffc0001010: "[nf_tables] hook", 0xffffffffc0004010: "[late]", 0xffffffffc0009010: "[other]",
	})
	k.looked, k.rereadAt = 0, 0
	check("then", map[uint64]string{
		0xffffffffc0001010: "[nf_tables] hook", 0xffffffffc0004010: "[late] lately", 0xffffffffc0009010: "[other] open", 0xffffffffc0005010: "[kernel]",
	})
}

func TestPerfMapNames(t *testing.T) {
	for name, want := range map[string]string{
		"py::leaf:/home/a b/t.py":              "python py::leaf /home/a b/t.py:0",
		"py::<module>:<string>":                "python py::<module> <string>:0",
		"LazyCompile:*grow /srv/app.js:17:9":   "node grow /srv/app.js:17",
		"JS:^grow file:///srv/app.mjs:17:9":    "node grow file:///srv/app.mjs:17",
		"LazyCompile:~ /srv/app.js:1:2":        "node (anonymous) /srv/app.js:1",
		"Builtin:ArrayPush":                    "node Builtin:ArrayPush :0",
		"Lorg/acme/Main;::run":                 "unknown Lorg/acme/Main;::run :0",
		"_ZN3jit4codeEv":                       "c++ jit::code :0",
		"RegExp:a b:1:2":                       "node a b:1",
		"<script>alert(1)</script>":            "unknown <script>alert(1)</script> :0",
		"py::f:relative.py":                    "python py::f relative.py:0",
		"Function:name with spaces /x.js:10:3": "node name with spaces /x.js:10",
	} {
		function, file, line, lang := compiledName(name)
		same(t, name, fmt.Sprintf("%v %s %s:%d", lang, function, file, line), want)
	}
}

// TestPerfMap: a map grows, is cut, and is replaced.
func TestPerfMap(t *testing.T) {
	cmd := sleeper(t, "sleep", "1000")
	pid := uint32(cmd.Process.Pid)
	path := fmt.Sprintf("/tmp/perf-%d.map", pid)
	t.Cleanup(func() { os.Remove(path) })
	v := &fault.VMA{Start: 0x7f0000000000, End: 0x7f0000100000, Label: "[anon]"}
	r := newResolver(t)
	at := func(addr uint64, image uint32) string {
		t.Helper()
		r.saved = maxSaved
		for _, c := range r.maps {
			c.looked = 0
		}
		f := frames(t, r, &Instruction{Addr: addr, VMA: v, PID: pid, Image: image})
		if len(f) != 1 || f[0].Module != "[anon]" || f[0].Offset != addr-v.Start {
			t.Errorf("%+v", f)
		}
		return f[0].Func
	}
	add := func(text string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	same(t, "no map", at(0x7f0000000010, 0), "")
	add("7f0000000000 20 py::leaf:/t.py\ngarbage\n7f0000000")
	same(t, "a map", at(0x7f000000001f, 0), "py::leaf")
	same(t, "behind", at(0x7f0000000020, 0), "")
	if n := r.maps[pid].Skipped; n != 1 {
		t.Errorf("%d lines are skipped", n)
	}
	add("040 20 py::more:/t.py\n")
	same(t, "one that has grown", at(0x7f0000000041, 0), "py::more")
	add("7f0000000010 40 py::newer:/t.py\n")
	same(t, "used again", at(0x7f0000000041, 0), "py::newer")
	same(t, "what is left", at(0x7f000000000f, 0), "py::leaf")
	if err := os.WriteFile(path, []byte("7f0000000000 20 py::cut:/t.py\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	same(t, "cut", at(0x7f0000000001, 0), "py::cut")
	same(t, "cut", at(0x7f0000000041, 0), "")
	os.Remove(path)
	same(t, "removed", at(0x7f0000000001, 0), "py::cut")
	add("7f0000000000 20 py::other:/t.py\n")
	same(t, "replaced", at(0x7f0000000001, 0), "py::other")
	os.Remove(path)
	same(t, "after an exec", at(0x7f0000000001, 1), "")

	// What is no file of his own is not read, and is not waited for.
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenPerfMap(pid); !errors.Is(err, errOther) {
		t.Errorf("a pipe: %v", err)
	}
	os.Remove(path)
	if _, err := OpenPerfMap(pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing: %v", err)
	}
	if err := os.Symlink("/etc/passwd", path); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenPerfMap(pid); err == nil {
		t.Error("a symbolic link is followed")
	}
	os.Remove(path)
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	add("7f0000000000 20 py::foreign:/t.py\n")
	if err := os.Chown(path, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenPerfMap(pid); !errors.Is(err, errMapOwner) {
		t.Errorf("somebody else's: %v", err)
	}
}

// TestPerfMapInside: of a process with its own /tmp and its own number.
func TestPerfMapInside(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may make namespaces")
	}
	need(t, "unshare")
	cmd := exec.Command("unshare", "-pfm", "--mount-proc", "sh", "-c",
		`mount -t tmpfs none /tmp && echo "1000 20 py::inner:/t.py" >/tmp/perf-1.map && echo ready && exec cat`)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		stdin.Close()
		_ = cmd.Wait()
	}()
	ready := make([]byte, 6)
	if _, err := io.ReadFull(out, ready); err != nil {
		t.Fatal(err)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	var pid uint32
	if _, err := fmt.Sscan(string(children), &pid); err != nil {
		t.Fatal(err)
	}
	m, err := OpenPerfMap(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.Refresh(); err != nil {
		t.Fatal(err)
	}
	same(t, "in a namespace", m.At(0x1001).Func, "py::inner")
}

// TestDebuginfod: asked only if the environment names a server, and believed only if the
// build-id is right.
func TestDebuginfod(t *testing.T) {
	need(t, "objcopy", "strip")
	bin := buildC(t, builtC{flags: []string{"-O2", "-g"}})
	dir := filepath.Dir(bin)
	run(t, dir, "objcopy", "--only-keep-debug", "touch", "touch.dbg")
	run(t, dir, "strip", "-o", "bare", "touch")
	good, err := os.ReadFile(filepath.Join(dir, "touch.dbg"))
	if err != nil {
		t.Fatal(err)
	}
	bare, err := os.Open(filepath.Join(dir, "bare"))
	if err != nil {
		t.Fatal(err)
	}
	defer bare.Close()
	o, err := readObject(bare)
	if err != nil {
		t.Fatal(err)
	}
	var asked int
	answer := good
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		asked++
		if q.URL.Path != "/buildid/"+o.buildID+"/debuginfo" || answer == nil {
			http.NotFound(w, q)
			return
		}
		_, _ = w.Write(answer)
	}))
	defer server.Close()

	t.Setenv("DEBUGINFOD_URLS", "")
	if newDebuginfod(time.Minute) != nil {
		t.Error("it is used without being asked for")
	}
	t.Setenv("DEBUGINFOD_URLS", server.URL)
	t.Setenv("DEBUGINFOD_CACHE_PATH", "")
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	d := newDebuginfod(time.Minute)
	find := func(d *debuginfod, found bool, times int) {
		t.Helper()
		asked = 0
		f, o, _ := d.find(o.buildID)
		if f != nil {
			f.Close()
		}
		if (o != nil) != found || asked != times {
			t.Errorf("found: %t, asked %d times; want %t, %d", o != nil, asked, found, times)
		}
	}
	find(d, true, 1)
	find(newDebuginfod(time.Minute), true, 0)
	kept, err := os.ReadFile(filepath.Join(cache, "debuginfod_client", o.buildID, "debuginfo"))
	if err != nil || !bytes.Equal(kept, good) {
		t.Errorf("the cache has not what was fetched: %v", err)
	}
	c, err := newCode(bare, func(buildID, _ string, _ uint32, _ bool) *object {
		f, o, _ := d.find(buildID)
		t.Cleanup(func() { f.Close() })
		return o
	})
	if err != nil {
		t.Fatal(err)
	}
	checkC(t, c, bin, true, true)

	for what, b := range map[string][]byte{"another file": mustRead(t, buildC(t, builtC{flags: []string{"-O1"}})), "nothing": nil, "text": []byte("<html>")} {
		t.Setenv("XDG_CACHE_HOME", t.TempDir())
		answer = b
		t.Log(what)
		find(newDebuginfod(time.Minute), false, 1)
		find(newDebuginfod(time.Minute), false, 0) // a miss is remembered
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	server.Close()
	find(newDebuginfod(time.Minute), false, 0)
}

// TestDebuginfodHangs: a server that takes its time is waited for once, what it sends is used
// when it is there, and one that does not answer is not asked again.
func TestDebuginfodHangs(t *testing.T) {
	need(t, "objcopy", "strip")
	bin := buildWait(t)
	dir := filepath.Dir(bin)
	run(t, dir, "objcopy", "--only-keep-debug", "wait", "wait.dbg")
	run(t, dir, "strip", "-o", "bare", "wait")
	settle()
	good := mustRead(t, filepath.Join(dir, "wait.dbg"))
	release := make(chan struct{})
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		asked.Add(1)
		select {
		case <-release:
			_, _ = w.Write(good)
		case <-q.Context().Done():
		}
	}))
	defer server.Close()
	t.Setenv("DEBUGINFOD_URLS", server.URL)
	t.Setenv("DEBUGINFOD_CACHE_PATH", t.TempDir())

	r := NewResolver(Options{PageSize: 4096, Patient: true, Fetch: 50 * time.Millisecond})
	defer r.Close()
	bare := filepath.Join(dir, "bare")
	pid := sleeper(t, bare).Process.Pid
	in := instruction(t, uint32(pid), mappingOf(t, pid, bare), bin, "wait_here")
	name := func() string { return frames(t, r, in)[0].Func }
	same(t, "while the server hangs", name(), "")
	// Nothing else is waited for meanwhile; a wait would never end.
	r.debuginfod.wait = time.Hour
	if f, _, later := r.debuginfod.find("00"); f != nil || later == nil {
		t.Error("another file is there, or not fetched")
	}
	fetching := r.debuginfod.slow
	close(release)
	<-fetching.done
	for range 3 {
		same(t, "when the file has come", name(), "wait_here")
	}
	r.Close()
	if n := asked.Load(); n > 2 {
		t.Errorf("the server was asked %d times, want once for each of two files", n)
	}

	var silent atomic.Int32
	mute := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		silent.Add(1)
		<-q.Context().Done()
	}))
	defer mute.Close()
	t.Setenv("DEBUGINFOD_URLS", mute.URL)
	d := newDebuginfod(time.Hour)
	defer d.close()
	d.within = 50 * time.Millisecond
	for _, id := range []string{"01", "02", "01"} {
		if f, _, later := d.find(id); f != nil || later != nil {
			t.Errorf("%s: a server that does not answer has a file, or is waited for", id)
		}
	}
	if n := silent.Load(); n > 1 {
		t.Errorf("a server that does not answer was asked %d times", n)
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// benchmarkCode: an address that is asked for the first time, and again.
func benchmarkCode(b *testing.B, path string) {
	f, err := os.Open(path)
	if err != nil {
		b.Skip(err)
	}
	defer f.Close()
	var addrs []uint64
	c := openCode(b, path)
	for _, s := range c.object.f.Sections {
		if s.Name == ".text" {
			for i := range uint64(1000) {
				addrs = append(addrs, s.Addr+i*(s.Size/1000))
			}
		}
	}
	b.Run("open", func(b *testing.B) {
		for b.Loop() {
			if _, err := NewCode(f); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("first", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var debug *debugFile
			c, err := newCode(f, func(buildID, link string, crc uint32, hasLink bool) (o *object) {
				debug, o = findDebugFile(0, path, buildID, link, crc, hasLink)
				return o
			})
			if err != nil {
				b.Fatal(err)
			}
			c.At(addrs[500])
			if debug != nil {
				debug.Close()
			}
		}
	})
	b.Run("cold", func(b *testing.B) {
		i := 0
		for b.Loop() {
			if i%len(addrs) == 0 {
				clear(c.answers)
			}
			c.At(addrs[i%len(addrs)])
			i++
		}
		b.ReportMetric(float64(c.Size()), "B-kept")
	})
	b.Run("warm", func(b *testing.B) {
		for b.Loop() {
			c.At(addrs[500])
		}
	})
}

func BenchmarkLibc(b *testing.B) {
	maps, err := exec.Command("ldd", "/bin/true").Output()
	if err != nil {
		b.Skip("ldd is not there")
	}
	for _, field := range strings.Fields(string(maps)) {
		if strings.Contains(field, "/libc.so") {
			benchmarkCode(b, field)
		}
	}
}

func BenchmarkGo(b *testing.B) { benchmarkCode(b, "/proc/self/exe") }

// TestPerfMapLive: what interpreters write about themselves.
func TestPerfMapLive(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"leaf.py": "import sys\ndef leaf():\n    return 1\nleaf()\nprint('ready', flush=True)\nsys.stdin.read()\n",
		"leaf.js": "function leaf(a) { let s = 0; for (let i = 0; i < a; i++) s += i % 7; return s; }\n" +
			"for (let i = 0; i < 3000; i++) leaf(1000);\nconsole.log('ready');\nprocess.stdin.resume();\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name string
		args []string
		want fault.Frame
	}{
		{"python3", []string{"-X", "perf", "leaf.py"}, fault.Frame{Func: "py::leaf", File: filepath.Join(dir, "leaf.py"), Lang: fault.LangPython}},
		{"node", []string{"--perf-basic-prof", "leaf.js"}, fault.Frame{Func: "leaf", File: filepath.Join(dir, "leaf.js"), Line: 1, Lang: fault.LangNode}},
	} {
		t.Run(c.name, func(t *testing.T) {
			need(t, c.name)
			name, args := c.name, c.args
			if c.name == "python3" {
				interpreters := []string{"python3"}
				if home, err := os.UserHomeDir(); err == nil {
					more, _ := filepath.Glob(filepath.Join(home, ".pyenv/versions/3.*/bin/python3"))
					interpreters = append(interpreters, more...)
				}
				i := slices.IndexFunc(interpreters, func(p string) bool {
					return exec.Command(p, "-c", "import sys; sys.exit(sys.version_info < (3, 12))").Run() == nil
				})
				if i < 0 {
					t.Skip("no Python is 3.12 or newer and lists functions")
				}
				name, args = interpreters[i], append(slices.Clone(args[:2]), filepath.Join(dir, args[2]))
			}
			cmd := exec.Command(name, args...)
			cmd.Dir = dir
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			pid := uint32(cmd.Process.Pid)
			defer os.Remove(fmt.Sprintf("/tmp/perf-%d.map", pid))
			defer func() {
				stdin.Close()
				_ = cmd.Wait()
			}()
			if _, err := io.ReadFull(out, make([]byte, len("ready"))); err != nil {
				t.Fatal(err)
			}
			m, err := OpenPerfMap(pid)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			found := false
			for wait := 0; !found && wait < 100; wait++ { // until it has written all
				for more := true; more; {
					if more, err = m.Refresh(); err != nil {
						t.Fatal(err)
					}
				}
				for _, e := range m.entries {
					f := m.At(e.start)
					f.Addr = 0
					found = found || f == c.want
				}
				time.Sleep(20 * time.Millisecond)
			}
			if !found {
				t.Errorf("%d functions, none is %+v", len(m.entries), c.want)
			}
			if m.Skipped > 0 {
				t.Errorf("%d lines are skipped", m.Skipped)
			}
		})
	}
}
