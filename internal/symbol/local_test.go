package symbol

import (
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

func TestLeadsLocally(t *testing.T) {
	mounts := []process.Mount{
		{Point: "/", Type: "rootfs"},
		{Point: "/", Type: "ext4"},
		{Point: "/proc", Type: "proc"},
		{Point: "/home", Type: "nfs4"},
		{Point: "/home/fast", Type: "xfs"},
		{Point: "/net", Type: "autofs"},
		{Point: "/media/stick", Type: "fuseblk"},
		{Point: "/run/user/1/doc", Type: "fuse.portal"},
		{Point: "/run", Type: "tmpfs"},
		{Point: "/new", Type: "what-comes-next"},
		{Point: "/merged", Type: "overlay"},
	}
	for path, want := range map[string]bool{
		"/usr/lib/libc.so.6":   true,
		"/":                    true,
		"/home/x":              false,
		"/home":                false,
		"/homes/x":             true,
		"/home/fast/x":         false, // the way there is not
		"/net/host/x":          false,
		"/media/x":             true,
		"/media/stick/x":       false,
		"/run/user/1/x":        true,
		"/run/user/1/doc/x":    false,
		"/new/x":               false,
		"/merged/usr/bin/true": true,
		"/proc/1/exe":          false,
	} {
		if got := leadsLocally(mounts, path); got != want {
			t.Errorf("%s: %v", path, got)
		}
	}
	if leadsLocally(mounts[2:], "/usr/lib/libc.so.6") {
		t.Error("the root folder is in no mount, and believed")
	}
}

// deadMount is a FUSE file system whose server never answers.
func deadMount(t *testing.T, dir string) (dev uint32, abort func()) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no FUSE here: opening /dev/fuse: %v", err)
	}
	server := os.NewFile(uintptr(fd), "fuse")
	t.Cleanup(func() { server.Close() })
	err = unix.Mount("dead", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other", fd, os.Geteuid(), os.Getegid()))
	if err != nil {
		t.Skipf("no FUSE here: mounting: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	mounts, err := process.ReadMounts(0)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		if m.Point == dir {
			return m.Dev, func() { server.Close() }
		}
	}
	t.Fatalf("%s is in no mount", dir)
	return 0, nil
}

// TestDeadMount: what a traced process has mapped, or put where that was, keeps nobody
// waiting.
func TestDeadMount(t *testing.T) {
	dir := t.TempDir()
	above, moved := filepath.Join(dir, "above"), filepath.Join(dir, "moved")
	dead, link, folder := filepath.Join(above, "dead"), filepath.Join(dir, "link"), filepath.Join(dir, "folder")
	if err := os.MkdirAll(dead, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dead, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	program := program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64)
	path := filepath.Join(folder, "program")
	write(t, path, program)
	good := faultOn(t, path, dataMapping, loadedAt+0x2900)
	good.PID = uint32(os.Getpid())
	dev, abort := deadMount(t, dead)

	at := func(path string, dev uint32) fault.Fault {
		f := good
		f.VMA.Path, f.VMA.Dev = path, dev
		return f
	}
	r := newResolver(t)
	refused := func(name string, f fault.Fault) {
		t.Helper()
		done := make(chan string, 1)
		go func() { done <- resolve(r, f) }()
		select {
		case got := <-done:
			same(t, name, got, "")
		case <-time.After(20 * time.Second):
			t.Errorf("%s: the resolver waits", name)
			abort()
			<-done
		}
		r.Close()
	}
	refused("mapped there", at(filepath.Join(dead, "program"), dev))
	refused("it is something else's place now", at(filepath.Join(dead, "program"), good.VMA.Dev))
	refused("a link on the way", at(filepath.Join(link, "program"), good.VMA.Dev))
	refused("its root", at(dead, dev))
	refused("without a path", at("", dev))
	same(t, "beside it", resolve(r, good), ".data table+0xf0")
	r.Close()
	// It moves with the folder above it, which nobody is told.
	if err := os.Rename(above, moved); err != nil {
		t.Fatal(err)
	}
	defer os.Rename(moved, above)
	refused("moved", at(filepath.Join(moved, "dead", "program"), good.VMA.Dev))
}

// TestInRoot finds a file below the root folder of a process: of one in our user
// namespace only, since others mount what they like.
func TestInRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may make mount namespaces")
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "program")
	for _, test := range []struct {
		name string
		attr syscall.SysProcAttr
		want string
	}{
		{"a mount namespace", syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}, ".data table+0xf0"},
		{"a user namespace", syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWNS | unix.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{HostID: 0, Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: 0, Size: 1}},
		}, ""},
	} {
		// The file is on a tmpfs that only the process has, and read back by it.
		source := filepath.Join(t.TempDir(), "program")
		write(t, source, program(elf.ET_DYN, 0).bytes(elf.ELFCLASS64))
		cmd := exec.Command("sh", "-c", `mount -t tmpfs none "$1" && cp "$2" "$1/program" && echo ready && read x`, "sh", dir, source)
		cmd.SysProcAttr = &test.attr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Logf("%s: %v: left out", test.name, err)
			continue
		}
		if n, _ := out.Read(make([]byte, 16)); n > 0 {
			settle()
			pid := uint32(cmd.Process.Pid)
			f := faultOn(t, fmt.Sprintf("/proc/%d/root%s", pid, path), dataMapping, loadedAt+0x2900)
			f.PID, f.VMA.Path = pid, path
			same(t, test.name, resolve(newResolver(t), f), test.want)
		} else {
			t.Logf("%s: mounting failed: left out", test.name)
		}
		in.Close()
		_ = cmd.Wait() // read fails at the end of its input
	}
}
