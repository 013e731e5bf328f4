package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// keyring holds the keys of every Debian release of the matrix. It belongs to
// debian-archive-keyring, on which apt depends.
const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// mirror is where this machine gets Debian from.
type mirror struct {
	archive  string // of every suite but the security ones
	security string // empty if this machine does not use it
}

// machineMirror asks this machine's own apt for its mirror.
func machineMirror(ctx context.Context) (mirror, error) {
	out, err := output(exec.CommandContext(ctx, "apt-get", "indextargets",
		"--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"))
	if err != nil {
		return mirror{}, fmt.Errorf("reading apt configuration: %w", err)
	}
	return parseMirror(out)
}

// parseMirror picks the Debian archive out of lines of repository and release.
// Releases are told by their names, because a machine that never ran apt-get
// update knows neither their origins nor their labels.
func parseMirror(indexTargets []byte) (mirror, error) {
	var m mirror
	lines := bufio.NewScanner(bytes.NewReader(indexTargets))
	for lines.Scan() {
		uri, release, ok := strings.Cut(lines.Text(), " ")
		if !ok {
			continue
		}
		base, pocket, _ := strings.Cut(release, "-")
		if !slices.Contains([]string{
			"bullseye", "bookworm", "trixie", "forky", "duke", "sid",
			"oldoldstable", "oldstable", "stable", "testing", "unstable",
		}, base) {
			continue
		}
		switch {
		case pocket == "security" && m.security == "":
			m.security = uri
		case pocket != "security" && m.archive == "":
			m.archive = uri
		}
	}
	if m.archive == "" {
		return m, errors.New("finding a Debian mirror: this machine's apt sources name no Debian release")
	}
	return m, lines.Err()
}

// aptRoot is an apt with its own sources, lists and downloads. Nothing of it
// touches this machine's packages.
type aptRoot struct {
	dir     string
	sources []string // lines of a sources.list
	arch    string   // Debian's name of the architecture
	// status is the dpkg status file that says what is installed already.
	// /dev/null means that nothing is.
	status string
	// target is apt's target release, if dependencies must come from one.
	target string
}

// sourceLine returns the line of one suite in a sources.list.
func sourceLine(uri, suite, arch string) string {
	return fmt.Sprintf("deb [signed-by=%s arch=%s] %s %s main", keyring, arch, uri, suite)
}

func (r aptRoot) command(ctx context.Context, program string, args ...string) *exec.Cmd {
	options := []string{
		"Dir::Etc::SourceList=" + filepath.Join(r.dir, "sources.list"),
		"Dir::Etc::SourceParts=/dev/null",
		"Dir::Etc::Preferences=/dev/null",
		"Dir::Etc::PreferencesParts=/dev/null",
		"Dir::State::Lists=" + filepath.Join(r.dir, "lists"),
		"Dir::State::Status=" + r.status,
		"Dir::Cache=" + filepath.Join(r.dir, "cache"),
		"Dir::Log=/dev/null",
		"APT::Architecture=" + r.arch,
		"APT::Architectures=" + r.arch,
		"Acquire::Languages=none",
		"Acquire::Retries=3",
		// Metadata for graphical software centres and the like.
		"Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
		"Acquire::IndexTargets::deb::CNF::DefaultEnabled=false",
		// The user _apt may not read a cache folder below /root.
		"APT::Sandbox::User=root",
		// dpkg's lock is not needed, and is not to be had by an ordinary user.
		"Debug::NoLocking=1",
	}
	if r.target != "" {
		options = append(options, "APT::Default-Release="+r.target)
	}
	var all []string
	for _, o := range options {
		all = append(all, "-o", o)
	}
	cmd := exec.CommandContext(ctx, program, append(all, args...)...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	return cmd
}

// update fetches the package lists of the sources.
func (r aptRoot) update(ctx context.Context) error {
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(r.dir, d), 0o755); err != nil {
			return err
		}
	}
	list := strings.Join(r.sources, "\n") + "\n"
	if err := os.WriteFile(filepath.Join(r.dir, "sources.list"), []byte(list), 0o644); err != nil {
		return err
	}
	if _, err := output(r.command(ctx, "apt-get", "-q", "update", "--error-on=any")); err != nil {
		return fmt.Errorf("fetching package lists: %w", err)
	}
	return nil
}

// show returns every known version of every package whose name begins with prefix.
func (r aptRoot) show(ctx context.Context, prefix string) ([]pkg, error) {
	names, err := output(r.command(ctx, "apt-cache", "pkgnames", prefix))
	if err != nil {
		return nil, fmt.Errorf("listing packages: %w", err)
	}
	fields := strings.Fields(string(names))
	if len(fields) == 0 {
		return nil, nil
	}
	out, err := output(r.command(ctx, "apt-cache", append([]string{"show"}, fields...)...))
	if err != nil {
		return nil, fmt.Errorf("listing packages: %w", err)
	}
	return parsePackages(out), nil
}

// download puts package files into dir. apt checks their hashes against the signed lists.
func (r aptRoot) download(ctx context.Context, dir string, packages ...string) error {
	cmd := r.command(ctx, "apt-get", append([]string{"-q", "download"}, packages...)...)
	cmd.Dir = dir
	if _, err := output(cmd); err != nil {
		return fmt.Errorf("downloading %s: %w", strings.Join(packages, " "), err)
	}
	return nil
}

// downloadMissing puts the files of packages into dir, and those of every
// dependency that r.status does not hold.
func (r aptRoot) downloadMissing(ctx context.Context, dir string, packages ...string) error {
	args := []string{
		"-q", "-y", "--no-install-recommends", "--download-only",
		"-o", "Dir::Cache::Archives=" + dir, "install",
	}
	if err := os.MkdirAll(filepath.Join(dir, "partial"), 0o755); err != nil {
		return err
	}
	if _, err := output(r.command(ctx, "apt-get", append(args, packages...)...)); err != nil {
		return fmt.Errorf("downloading %s: %w", strings.Join(packages, " "), err)
	}
	return nil
}

// unpack unpacks every package file of dir into root.
func unpack(ctx context.Context, dir, root string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return err
	}
	for _, f := range files {
		if _, err := output(exec.CommandContext(ctx, "dpkg", "-x", f, root)); err != nil {
			return fmt.Errorf("unpacking %s: %w", filepath.Base(f), err)
		}
	}
	return nil
}

// output runs cmd and returns its standard output. The error holds what it wrote
// to standard error.
func output(cmd *exec.Cmd) ([]byte, error) {
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return out, fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, bytes.TrimSpace(exit.Stderr))
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w", filepath.Base(cmd.Path), err)
	}
	return out, nil
}
