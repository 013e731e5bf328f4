package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// kernel is one column of the matrix: the newest stock Debian kernel of a series.
type kernel struct {
	name   string // as given to -kernel
	suite  string // Debian release that carries the series
	series string // beginning of the release, followed by a dot
	arch   string // GOARCH, and Debian's name too: both are the same for amd64 and arm64
	// options are kernel parameters that make this column differ from the others.
	options []string
}

// matrix is every kernel that faultsnoop promises to work on. The emulated x86 CPU
// has five levels of page tables and 6.1 is told not to use the fifth, so that the
// page-table walk is tried with both.
var matrix = []kernel{
	{name: "5.10", suite: "bullseye", series: "5.10", arch: "amd64"},
	{name: "6.1", suite: "bookworm", series: "6.1", arch: "amd64", options: []string{"no5lvl"}},
	{name: "6.12", suite: "trixie", series: "6.12", arch: "amd64"},
	{name: "7", suite: "sid", series: "7", arch: "amd64"},
	{name: "6.12-arm64", suite: "trixie", series: "6.12", arch: "arm64"},
}

// selectKernels returns the kernels of a comma-separated list of names, or all.
func selectKernels(list string) ([]kernel, error) {
	if list == "" || list == "all" {
		return matrix, nil
	}
	var chosen []kernel
	for name := range strings.SplitSeq(list, ",") {
		i := slices.IndexFunc(matrix, func(k kernel) bool { return k.name == name })
		if i < 0 {
			var names []string
			for _, k := range matrix {
				names = append(names, k.name)
			}
			return nil, fmt.Errorf("unknown kernel %q: choose from %s", name, strings.Join(names, ", "))
		}
		chosen = append(chosen, matrix[i])
	}
	return chosen, nil
}

// kernelFiles is a kernel unpacked.
type kernelFiles struct {
	Release string // as uname -r prints it
	Root    string // folder with the packages' contents
}

// image returns the kernel image. The packages of 7.x have it among the modules.
func (f kernelFiles) image() (string, error) {
	return f.find("boot/vmlinuz-"+f.Release, "usr/lib/modules/"+f.Release+"/vmlinuz")
}

// modules returns the folder of the modules, which since trixie is below /usr.
func (f kernelFiles) modules() (string, error) {
	return f.find("usr/lib/modules/"+f.Release, "lib/modules/"+f.Release)
}

// busybox returns the static busybox of the kernel's own suite and architecture.
func (f kernelFiles) busybox() (string, error) {
	return f.find("usr/bin/busybox", "bin/busybox")
}

// find returns the first of the names that exists.
func (f kernelFiles) find(names ...string) (string, error) {
	for _, name := range names {
		path := filepath.Join(f.Root, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("looking into the packages of kernel %s: no %s", f.Release, strings.Join(names, " and no "))
}

// pkg is one version of one package.
type pkg struct {
	name, version string
}

// parsePackages reads the stanzas that apt-cache show prints.
func parsePackages(data []byte) []pkg {
	var (
		all     []pkg
		current pkg
	)
	for line := range strings.Lines(string(data)) {
		line = strings.TrimRight(line, "\n")
		key, value, _ := strings.Cut(line, ": ")
		switch key {
		case "Package":
			current = pkg{name: value}
		case "Version":
			current.version = value
		case "":
			if current.name != "" {
				all = append(all, current)
			}
			current = pkg{}
		}
	}
	if current.name != "" {
		all = append(all, current)
	}
	return all
}

// newestKernel picks the newest kernel of a series out of the packages of a suite,
// and returns its release and the packages that make it up. Up to 6.12 that is
// linux-image alone; in 7.x image, modules and module lists are three packages
// and linux-image only depends on them.
func newestKernel(all []pkg, series, arch string, less func(a, b string) (bool, error)) (string, []pkg, error) {
	image := regexp.MustCompile(`^linux-(?:image|binary)-(` + regexp.QuoteMeta(series) + `\.[0-9].*-cloud-` + arch + `)$`)
	byRelease := map[string]string{} // release to its package version
	for _, p := range all {
		if m := image.FindStringSubmatch(p.name); m != nil {
			byRelease[m[1]] = p.version
		}
	}
	var best string
	for _, release := range slices.Sorted(maps.Keys(byRelease)) {
		if best != "" {
			newer, err := less(byRelease[best], byRelease[release])
			if err != nil {
				return "", nil, err
			}
			if !newer {
				continue
			}
		}
		best = release
	}
	if best == "" {
		return "", nil, fmt.Errorf("finding kernel %s for %s: no such package", series, arch)
	}
	var parts []pkg
	for _, p := range all {
		switch strings.TrimSuffix(p.name, "-"+best) {
		case "linux-image", "linux-binary", "linux-modules", "linux-base":
			if p.version == byRelease[best] {
				parts = append(parts, p)
			}
		}
	}
	return best, parts, nil
}

// debianLess compares versions by Debian's rules.
func debianLess(a, b string) (bool, error) {
	err := exec.Command("dpkg", "--compare-versions", a, "lt", b).Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return false, nil
	}
	return err == nil, err
}

// suiteRoot returns the apt root of one suite with its security updates.
func suiteRoot(dir string, m mirror, suite, arch string) aptRoot {
	r := aptRoot{dir: dir, arch: arch, status: "/dev/null"}
	r.sources = []string{sourceLine(m.archive, suite, arch)}
	if m.security != "" && suite != "sid" {
		r.sources = append(r.sources, sourceLine(m.security, suite+"-security", arch))
	}
	return r
}

// fetchKernel finds, downloads and unpacks the newest kernel of a series into dir.
// A release that is there already is not fetched again; older ones are removed.
func fetchKernel(ctx context.Context, dir string, k kernel) (kernelFiles, error) {
	m, err := machineMirror(ctx)
	if err != nil {
		return kernelFiles{}, err
	}
	root := suiteRoot(filepath.Join(dir, "apt"), m, k.suite, k.arch)
	if err := root.update(ctx); err != nil {
		return kernelFiles{}, err
	}
	all, err := root.show(ctx, "linux-")
	if err != nil {
		return kernelFiles{}, err
	}
	release, parts, err := newestKernel(all, k.series, k.arch, debianLess)
	if err != nil {
		return kernelFiles{}, err
	}
	files := kernelFiles{Release: release, Root: filepath.Join(dir, "root-"+release)}
	if _, err := os.Stat(files.Root); err == nil {
		return files, nil
	}
	want := []string{"busybox-static"}
	for _, p := range parts {
		want = append(want, p.name+"="+p.version)
	}
	return files, replaceRoot(ctx, dir, files.Root, func(debs string) error {
		return root.download(ctx, debs, want...)
	})
}

// replaceRoot downloads packages, unpacks them and only then gives the result its
// name, so that an interrupted download is never taken for a complete one. Other
// roots of the same folder are removed.
func replaceRoot(ctx context.Context, dir, root string, download func(debs string) error) error {
	work, err := os.MkdirTemp(dir, "fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	debs, contents := filepath.Join(work, "debs"), filepath.Join(work, "root")
	for _, d := range []string{debs, contents} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := download(debs); err != nil {
		return err
	}
	if err := unpack(ctx, debs, contents); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(dir, "root-*"))
	if err != nil {
		return err
	}
	for _, o := range old {
		if err := os.RemoveAll(o); err != nil {
			return err
		}
	}
	return os.Rename(contents, root)
}
