package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// minQEMU is the oldest major version of QEMU that is used. The 7.2 of Debian 12
// must not be: its emulation of cmpxchg16b sends a 6.12 kernel into a double fault
// while booting. 10 is what the matrix was tried with.
const minQEMU = 9

// toolPackages are needed on the host: the emulators, xz for compressed modules and
// mke2fs for the disk.
var toolPackages = []string{"qemu-system-x86", "qemu-system-arm", "xz-utils", "e2fsprogs"}

// toolbox finds programs: in packages unpacked below Root, else on this machine.
type toolbox struct {
	Root string
}

// toolbox returns one with a usable QEMU. This machine's own is taken if it is
// recent enough; otherwise Debian's is fetched with the libraries it needs and
// this machine lacks, and unpacked into the cache.
func (c cache) toolbox(ctx context.Context) (toolbox, error) {
	own := toolbox{}
	if own.valid(ctx) {
		return own, nil
	}
	return cached(filepath.Join(c.dir, "tools"), func(dir string) (toolbox, error) {
		t, err := fetchTools(ctx, dir)
		if err != nil {
			return t, fmt.Errorf("fetching QEMU: %w", err)
		}
		if !t.valid(ctx) {
			return t, fmt.Errorf("fetching QEMU: what came is not %d or newer, or does not run", minQEMU)
		}
		return t, nil
	}, func(t toolbox) bool { return t.Root != "" && t.valid(ctx) })
}

func fetchTools(ctx context.Context, dir string) (toolbox, error) {
	m, err := machineMirror(ctx)
	if err != nil {
		return toolbox{}, err
	}
	host, err := output(exec.CommandContext(ctx, "dpkg", "--print-architecture"))
	if err != nil {
		return toolbox{}, err
	}
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return toolbox{}, err
	}
	codename, arch := codename(release), strings.TrimSpace(string(host))
	if codename == "" {
		return toolbox{}, fmt.Errorf("reading /etc/os-release: no VERSION_CODENAME")
	}
	root := suiteRoot(filepath.Join(dir, "apt"), m, codename, arch)
	// With this machine's own status apt downloads only what is missing here.
	root.status = "/var/lib/dpkg/status"
	if codename == "bookworm" {
		root.target = codename + "-backports"
		root.sources = append(root.sources,
			sourceLine(m.archive, codename+"-updates", arch), sourceLine(m.archive, root.target, arch))
	}
	if err := root.update(ctx); err != nil {
		return toolbox{}, err
	}
	t := toolbox{Root: filepath.Join(dir, "root-qemu")}
	return t, replaceRoot(ctx, dir, t.Root, func(debs string) error {
		return root.downloadMissing(ctx, debs, toolPackages...)
	})
}

func codename(osRelease []byte) string {
	for line := range strings.Lines(string(osRelease)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			return strings.Trim(value, `"`)
		}
	}
	return ""
}

// valid reports whether every tool is there and QEMU is recent enough.
func (t toolbox) valid(ctx context.Context) bool {
	for _, arch := range []string{"amd64", "arm64"} {
		out, err := t.command(ctx, emulator(arch), "--version").Output()
		if err != nil || qemuMajor(out) < minQEMU {
			return false
		}
	}
	for _, name := range []string{"xz", "mke2fs"} {
		if err := t.command(ctx, name, "-V").Run(); err != nil {
			return false
		}
	}
	return true
}

var qemuVersion = regexp.MustCompile(`^QEMU emulator version (\d+)\.`)

// qemuMajor returns the major version that qemu --version prints, or 0.
func qemuMajor(version []byte) int {
	m := qemuVersion.FindSubmatch(version)
	if m == nil {
		return 0
	}
	n, err := strconv.Atoi(string(m[1]))
	if err != nil {
		return 0
	}
	return n
}

// emulator returns the name of the emulator of an architecture.
func emulator(arch string) string {
	if arch == "arm64" {
		return "qemu-system-aarch64"
	}
	return "qemu-system-x86_64"
}

// command prepares a call of a tool.
func (t toolbox) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	for _, dir := range []string{"usr/bin", "usr/sbin", "bin", "sbin"} {
		path := filepath.Join(t.Root, dir, name)
		if _, err := os.Stat(path); t.Root != "" && err == nil {
			cmd := exec.CommandContext(ctx, path, args...)
			cmd.Env = append(os.Environ(),
				"LD_LIBRARY_PATH="+strings.Join(t.libraries(), ":"),
				"QEMU_MODULE_DIR="+filepath.Join(t.libraries()[0], "qemu"))
			return cmd
		}
	}
	if path := filepath.Join("/usr/sbin", name); !onPath(name) && isFile(path) {
		name = path // mke2fs, for a user without /usr/sbin in PATH
	}
	return exec.CommandContext(ctx, name, args...)
}

func onPath(name string) bool { _, err := exec.LookPath(name); return err == nil }
func isFile(name string) bool { _, err := os.Stat(name); return err == nil }

// libraries returns the unpacked library folders.
func (t toolbox) libraries() []string {
	dirs, err := filepath.Glob(filepath.Join(t.Root, "usr/lib/*-linux-gnu"))
	more, err2 := filepath.Glob(filepath.Join(t.Root, "lib/*-linux-gnu"))
	if err != nil || err2 != nil || len(dirs) == 0 {
		return append([]string{filepath.Join(t.Root, "usr/lib")}, more...)
	}
	return append(dirs, more...)
}

// firmware returns the options that tell QEMU where its unpacked firmware is.
func (t toolbox) firmware() []string {
	if t.Root == "" {
		return nil
	}
	return []string{
		"-L", filepath.Join(t.Root, "usr/share/qemu"),
		"-L", filepath.Join(t.Root, "usr/share/seabios"),
	}
}
