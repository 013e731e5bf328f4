package main

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/cavaliergopher/cpio"
)

// initramfs is a file system image under construction: absolute path to contents.
// Folders come into being with the files in them.
type initramfs map[string]image

type image struct {
	mode cpio.FileMode // permission bits
	data []byte
}

// add puts data into a file.
func (fsys initramfs) add(name string, mode cpio.FileMode, data []byte) {
	fsys[path.Clean("/"+name)] = image{mode: mode, data: data}
}

// addFile copies a file of the host.
func (fsys initramfs) addFile(name, source string) error {
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	fsys.add(name, cpio.FileMode(info.Mode().Perm()), data)
	return nil
}

// addTree copies the regular files below a folder of the host. A folder that does
// not exist has none.
func (fsys initramfs) addTree(name, source string) error {
	if _, err := os.Stat(source); os.IsNotExist(err) {
		return nil
	}
	return filepath.WalkDir(source, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(source, p)
		if err != nil {
			return err
		}
		return fsys.addFile(path.Join(name, filepath.ToSlash(rel)), p)
	})
}

// write writes the image as the newc archive that the kernel unpacks. It is not
// compressed: decompression inside the emulator takes longer than reading.
func (fsys initramfs) write(w io.Writer) error {
	out := cpio.NewWriter(w)
	inode := int64(0)
	entry := func(h cpio.Header, data []byte) error {
		// The kernel takes files with equal inode numbers for one file.
		inode++
		h.Inode, h.Links, h.Size = inode, 1, int64(len(data))
		if err := out.WriteHeader(&h); err != nil {
			return fmt.Errorf("writing initramfs: %s: %w", h.Name, err)
		}
		if _, err := io.Copy(out, bytes.NewReader(data)); err != nil {
			return fmt.Errorf("writing initramfs: %s: %w", h.Name, err)
		}
		return nil
	}
	made := map[string]bool{"/": true}
	for _, name := range slices.Sorted(maps.Keys(fsys)) {
		for _, dir := range parents(name) {
			if made[dir] {
				continue
			}
			made[dir] = true
			if err := entry(cpio.Header{Name: dir[1:], Mode: cpio.TypeDir | 0o755}, nil); err != nil {
				return err
			}
		}
		f := fsys[name]
		if err := entry(cpio.Header{Name: name[1:], Mode: cpio.TypeReg | f.mode}, f.data); err != nil {
			return err
		}
	}
	return out.Close()
}

// parents returns the folders above an absolute name, the outermost first.
func parents(name string) []string {
	var all []string
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		all = append(all, dir)
	}
	slices.Reverse(all)
	return all
}
