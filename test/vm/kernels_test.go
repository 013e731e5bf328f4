package main

import (
	"os/exec"
	"reflect"
	"strings"
	"testing"
)

const packagesOutput = `Package: linux-image-6.1.0-9-cloud-amd64
Source: linux-signed-amd64 (6.1.27+1)
Version: 6.1.27-1
Description: Linux 6.1 for x86-64 cloud (signed)
 Version: this line belongs to the description.

Package: linux-image-6.1.0-57-cloud-amd64
Version: 6.1.192-3

Package: linux-image-6.1.0-0.deb11.52-cloud-amd64
Version: 6.1.192-3~deb11u1

Package: linux-image-6.1.0-57-amd64
Version: 6.1.192-3

Package: linux-image-6.12.118+deb13-cloud-amd64
Version: 6.12.118-1

Package: linux-image-6.12.118+deb13-cloud-amd64-unsigned
Version: 6.12.118-1

Package: linux-image-6.12.118+deb13-cloud-arm64
Version: 6.12.118-1

Package: linux-image-6.12-cloud-amd64
Version: 6.12.118-1

Package: linux-image-7.2.13+deb14-cloud-amd64
Version: 7.2.13-1

Package: linux-binary-7.2.13+deb14-cloud-amd64
Version: 7.2.13-1

Package: linux-binary-unsigned-7.2.13+deb14-cloud-amd64
Version: 7.2.13-1

Package: linux-modules-7.2.13+deb14-cloud-amd64
Version: 7.2.13-1

Package: linux-base-7.2.13+deb14-cloud-amd64
Version: 7.2.13-1

Package: linux-base
Version: 4.17`

func TestNewestKernel(t *testing.T) {
	if _, err := exec.LookPath("dpkg"); err != nil {
		t.Skip("no dpkg to compare versions with")
	}
	all := parsePackages([]byte(packagesOutput))
	tests := []struct {
		series, arch string
		release      string
		parts        []string
	}{
		{"6.1", "amd64", "6.1.0-57-cloud-amd64", []string{"linux-image-6.1.0-57-cloud-amd64"}},
		{"6.12", "amd64", "6.12.118+deb13-cloud-amd64", []string{"linux-image-6.12.118+deb13-cloud-amd64"}},
		{"6.12", "arm64", "6.12.118+deb13-cloud-arm64", []string{"linux-image-6.12.118+deb13-cloud-arm64"}},
		{"7", "amd64", "7.2.13+deb14-cloud-amd64", []string{
			"linux-image-7.2.13+deb14-cloud-amd64",
			"linux-binary-7.2.13+deb14-cloud-amd64",
			"linux-modules-7.2.13+deb14-cloud-amd64",
			"linux-base-7.2.13+deb14-cloud-amd64",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.series+" "+tt.arch, func(t *testing.T) {
			release, parts, err := newestKernel(all, tt.series, tt.arch, debianLess)
			if err != nil {
				t.Fatal(err)
			}
			if release != tt.release {
				t.Errorf("release %s, want %s", release, tt.release)
			}
			var names []string
			for _, p := range parts {
				names = append(names, p.name)
			}
			if !reflect.DeepEqual(names, tt.parts) {
				t.Errorf("packages %q, want %q", names, tt.parts)
			}
		})
	}
	if release, _, err := newestKernel(all, "5.10", "amd64", debianLess); err == nil {
		t.Errorf("found %q for a series without packages", release)
	}
}

func TestParsePackages(t *testing.T) {
	all := parsePackages([]byte(packagesOutput))
	if len(all) != 14 {
		t.Errorf("%d packages, want 14", len(all))
	}
	if want := (pkg{"linux-image-6.1.0-9-cloud-amd64", "6.1.27-1"}); all[0] != want {
		t.Errorf("first package %v, want %v", all[0], want)
	}
	if got := parsePackages(nil); got != nil {
		t.Errorf("packages of nothing: %v", got)
	}
}

func TestParseMirror(t *testing.T) {
	tests := []struct {
		name, targets string
		want          mirror
	}{
		{
			"third parties first",
			"https://apt.example.org/tools/ nodistro\n" +
				"http://mirror.example.org/debian-security/ bookworm-security\n" +
				"http://mirror.example.org/debian/ bookworm\n" +
				"http://other.example.org/debian/ bookworm-updates\n",
			mirror{"http://mirror.example.org/debian/", "http://mirror.example.org/debian-security/"},
		},
		{"one suite", "http://m.example.org/d/ stable\n", mirror{archive: "http://m.example.org/d/"}},
		{"not Debian", "http://m.example.org/ubuntu/ noble\nhttp://m.example.org/x/ noble-security\n", mirror{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseMirror([]byte(tt.targets))
			if got != tt.want || (err != nil) != (tt.want.archive == "") {
				t.Errorf("got %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
}

func TestSelectKernels(t *testing.T) {
	got, err := selectKernels("6.12-arm64,5.10")
	if err != nil || len(got) != 2 || got[0].arch != "arm64" || got[1].series != "5.10" {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := selectKernels(""); err != nil || len(got) != len(matrix) {
		t.Errorf("default is %v, %v", got, err)
	}
	if _, err := selectKernels("6.2"); err == nil || !strings.Contains(err.Error(), "6.12-arm64") {
		t.Errorf("error %v does not name the choices", err)
	}
}

func TestQEMUMajor(t *testing.T) {
	for version, want := range map[string]int{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright": 7,
		"QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\n":                  10,
		"qemu-system-x86_64: error while loading shared libraries":               0,
		"": 0,
	} {
		if got := qemuMajor([]byte(version)); got != want {
			t.Errorf("%q: got %d, want %d", version, got, want)
		}
	}
}

func TestCodename(t *testing.T) {
	if got := codename([]byte("NAME=\"Debian\"\nVERSION_CODENAME=bookworm\nID=debian\n")); got != "bookworm" {
		t.Errorf("got %q", got)
	}
	if got := codename([]byte("ID=debian\n")); got != "" {
		t.Errorf("got %q out of nothing", got)
	}
}
