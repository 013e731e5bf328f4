package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"faultsnoop/test/vm/guest"
)

// testPackages are the packages with tests that want a kernel to themselves.
var testPackages = []string{"./cmd/faultsnoop", "./internal/kernel", "./internal/perfevent", "./workload"}

// liveTests picks, for packages that have others too, the tests that ask the kernel
// something. The others depend on no kernel, have been run on the host, and some of
// them on a machine that is not ten times slower.
var liveTests = map[string]string{"cmd/faultsnoop": "^Test(Case|Workloads|WholeProcess)"}

// lastPackage has a test that leaves the kernel locked down, and so runs after all
// others: TestLockdown.
const lastPackage = "cmd/faultsnoop"

// Limits of one test binary: the test framework's own, which prints all stacks,
// comes before the kill.
const (
	testTimeout = 40 * time.Minute
	killTimeout = testTimeout + 20*time.Second
)

// programs is what is compiled for one architecture.
type programs struct {
	init       string
	faultsnoop string // empty if the command did not compile
	tests      []testBinary
}

type testBinary struct {
	file string
	pkg  string // folder below the module's root, with slashes
	data string // its testdata folder on the host
}

// compile builds static binaries into a folder below work. Without packages to
// test, the command may be missing.
func compile(ctx context.Context, work, arch string, packages []string) (programs, error) {
	var p programs
	gomod, err := output(exec.CommandContext(ctx, "go", "env", "GOMOD"))
	if err != nil {
		return p, err
	}
	root := filepath.Dir(strings.TrimSpace(string(gomod)))
	compile := func(name string, args ...string) (string, error) {
		file := filepath.Join(work, arch, name)
		cmd := exec.CommandContext(ctx, "go", append([]string{args[0], "-o", file}, args[1:]...)...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
		if _, err := output(cmd); err != nil {
			return "", fmt.Errorf("compiling %s for %s: %w", name, arch, err)
		}
		return file, nil
	}
	if p.init, err = compile("init", "build", "./test/vm/init"); err != nil {
		return p, err
	}
	p.faultsnoop, err = compile("faultsnoop", "build", "./cmd/faultsnoop")
	if len(packages) == 0 {
		if err != nil {
			// Most shell lines are about the kernel and do well without.
			slog.Warn("the guest has no faultsnoop", "err", err)
		}
		return p, nil
	}
	if err != nil {
		return p, err
	}
	for _, pkg := range packages {
		dir := filepath.Join(root, pkg)
		if sources, err := filepath.Glob(filepath.Join(dir, "*_test.go")); err != nil || len(sources) == 0 {
			continue
		}
		t := testBinary{pkg: path.Clean(pkg), data: filepath.Join(dir, "testdata")}
		if t.file, err = compile(strings.ReplaceAll(t.pkg, "/", "-")+".test", "test", "-c", pkg); err != nil {
			return p, err
		}
		p.tests = append(p.tests, t)
	}
	if len(p.tests) == 0 {
		return p, errors.New("compiling tests: there are none")
	}
	return p, nil
}

// install puts the programs into the image and returns the list of those to run.
func (p programs) install(fsys initramfs, o options) ([]guest.Program, error) {
	if err := fsys.addFile("/init", p.init); err != nil {
		return nil, err
	}
	if p.faultsnoop != "" {
		if err := fsys.addFile("/bin/faultsnoop", p.faultsnoop); err != nil {
			return nil, err
		}
	}
	if o.command != "" {
		return []guest.Program{{
			Name: "cmd", Args: []string{"/bin/sh", "-c", o.command}, Dir: "/root", Timeout: o.limit,
		}}, nil
	}
	var list, last []guest.Program
	for _, t := range p.tests {
		// Tests run in their package's folder, as under go test.
		dir := path.Join("/src", t.pkg)
		file := path.Join(dir, path.Base(t.pkg)+".test")
		if err := fsys.addFile(file, t.file); err != nil {
			return nil, err
		}
		if err := fsys.addTree(path.Join(dir, "testdata"), t.data); err != nil {
			return nil, err
		}
		args := []string{file, "-test.v=test2json", "-test.timeout=" + testTimeout.String()}
		if run := cmp.Or(o.run, liveTests[t.pkg]); run != "" {
			args = append(args, "-test.run="+run)
		}
		if o.short {
			args = append(args, "-test.short")
		}
		list = append(list, guest.Program{Name: t.pkg, Args: args, Dir: dir, Timeout: killTimeout})
		if t.pkg == lastPackage && o.run == "" {
			last = []guest.Program{{
				Name: t.pkg + ":lockdown", Dir: dir, Timeout: killTimeout,
				Args: append(slices.Clip(args), "-test.run=^TestLockdown$", "-lockdown"),
			}}
		}
	}
	return append(list, last...), nil
}
