package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/view"
)

// TestLastReport: what a file has is dropped for what is written in its place, and not before.
func TestLastReport(t *testing.T) {
	dir := t.TempDir()
	profile := filepath.Join(dir, "empty.pb.gz")
	b, err := view.AppendPprof(nil, &fault.Profile{Session: &fault.Session{}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(profile, b, 0o600); err != nil {
		t.Fatal(err)
	}
	const last = "the last report\n"
	for name, test := range map[string]struct {
		fake string
		args []string
		code int
		keep bool
		want string // a part
	}{
		"trace fails":    {"broken", []string{"trace"}, exitFailure, true, last},
		"stat fails":     {"broken", []string{"stat"}, exitFailure, true, last},
		"flame fails":    {"broken", []string{"flame", "--stack=fp"}, exitFailure, true, last},
		"no command":     {"few", []string{"trace"}, exitNotFound, true, last},
		"trace":          {"few", []string{"trace", "-n", "1"}, 0, false, "ADDRESS"},
		"stat":           {"few", []string{"stat", "-d", "1ms"}, 0, false, "KIND"},
		"nothing folded": {"few", []string{"flame", "--format", "folded"}, 0, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			file, link := filepath.Join(t.TempDir(), "report"), filepath.Join(t.TempDir(), "link")
			if err := os.WriteFile(file, []byte(last), 0o640); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(file, link); err != nil {
				t.Fatal(err)
			}
			args := append(test.args, "-o", link)
			switch {
			case test.code == exitNotFound:
				args = append(args, "--", "no-such-program")
			case test.args[0] == "flame" && test.fake != "broken":
				args = append(args, profile)
			}
			code, _, stderr := runWith(fakes[test.fake], args...)
			got, err := os.ReadFile(file)
			if err != nil || code != test.code || (string(got) == last) != test.keep || !strings.Contains(string(got), test.want) || !test.keep && strings.Contains(string(got), last) {
				t.Errorf("code %d, %v: %q; %s", code, err, got, stderr)
			}
			if st, err := os.Lstat(link); err != nil || st.Mode()&os.ModeSymlink == 0 {
				t.Errorf("the link is gone: %v", err)
			}
			if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o640 {
				t.Errorf("%v, mode %v", err, st.Mode())
			}
		})
	}
}
