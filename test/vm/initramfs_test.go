package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/cavaliergopher/cpio"
)

func TestInitramfs(t *testing.T) {
	source := t.TempDir()
	for name, mode := range map[string]os.FileMode{"run": 0o755, "sub/data": 0o640} {
		name = filepath.Join(source, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(filepath.Base(name)), mode); err != nil {
			t.Fatal(err)
		}
	}
	fsys := initramfs{}
	fsys.add("/vm.json", 0o644, []byte("{}"))
	if err := fsys.addTree("/src/pkg", source); err != nil {
		t.Fatal(err)
	}
	if err := fsys.addTree("/src/none", filepath.Join(source, "none")); err != nil {
		t.Errorf("a folder that does not exist: %v", err)
	}
	var image bytes.Buffer
	if err := fsys.write(&image); err != nil {
		t.Fatal(err)
	}

	want := []struct {
		name, data string
		mode       cpio.FileMode
	}{
		{"src", "", cpio.TypeDir | 0o755},
		{"src/pkg", "", cpio.TypeDir | 0o755},
		{"src/pkg/run", "run", cpio.TypeReg | 0o755},
		{"src/pkg/sub", "", cpio.TypeDir | 0o755},
		{"src/pkg/sub/data", "data", cpio.TypeReg | 0o640},
		{"vm.json", "{}", cpio.TypeReg | 0o644},
	}
	in := cpio.NewReader(&image)
	inodes := map[int64]bool{}
	for _, w := range want {
		h, err := in.Next()
		if err != nil {
			t.Fatalf("%s: %v", w.name, err)
		}
		data, err := io.ReadAll(in)
		if err != nil {
			t.Fatalf("%s: %v", w.name, err)
		}
		if h.Name != w.name || h.Mode != w.mode || string(data) != w.data {
			t.Errorf("got %s %o %q, want %s %o %q", h.Name, h.Mode, data, w.name, w.mode, w.data)
		}
		if inodes[h.Inode] {
			t.Errorf("%s: inode number %d used twice", h.Name, h.Inode)
		}
		inodes[h.Inode] = true
	}
	if h, err := in.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last file: %v, %v", h, err)
	}
}
