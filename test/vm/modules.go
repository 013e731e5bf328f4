package main

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// wantedModules are loaded in every guest: disks, swap in memory, and the file
// systems that tests mount. What a kernel has built in is left out.
var wantedModules = []string{"virtio_pci", "virtio_mmio", "virtio_blk", "zram", "loop", "overlay"}

// module is a kernel module, uncompressed.
type module struct {
	name string
	data []byte
}

// moduleTree is the folder of one kernel's modules, as packages ship it: without
// the tables of depmod, which is run when a package is installed.
type moduleTree struct {
	files   map[string]string // module name to file
	builtin map[string]bool
}

func openModules(dir string) (moduleTree, error) {
	t := moduleTree{files: map[string]string{}, builtin: map[string]bool{}}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return t, fmt.Errorf("listing modules: %w", err)
	}
	for line := range strings.Lines(string(list)) {
		t.builtin[moduleName(strings.TrimSpace(line))] = true
	}
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			t.files[moduleName(p)] = p
		}
		return err
	})
	if err != nil {
		return t, fmt.Errorf("listing modules: %w", err)
	}
	return t, nil
}

// moduleName returns the name by which the kernel knows a module file.
func moduleName(file string) string {
	base, _, _ := strings.Cut(filepath.Base(file), ".ko")
	return strings.ReplaceAll(base, "-", "_")
}

// load reads the wanted modules and all that they depend on, in an order in which
// the kernel accepts them.
func (t moduleTree) load(wanted []string, read func(file string) ([]byte, error)) ([]module, error) {
	var (
		order []module
		seen  = map[string]bool{}
		visit func(name string) error
	)
	visit = func(name string) error {
		if seen[name] || t.builtin[name] {
			return nil
		}
		seen[name] = true
		file, ok := t.files[name]
		if !ok {
			return fmt.Errorf("finding module %s: neither a file nor built in", name)
		}
		data, err := read(file)
		if err != nil {
			return fmt.Errorf("reading module %s: %w", name, err)
		}
		needs, err := moduleDepends(data)
		if err != nil {
			return fmt.Errorf("reading module %s: %w", name, err)
		}
		for _, n := range needs {
			if err := visit(n); err != nil {
				return err
			}
		}
		order = append(order, module{name: name, data: data})
		return nil
	}
	for _, name := range wanted {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// moduleDepends returns the names in the depends= entry of a module's .modinfo
// section, which modpost wrote.
func moduleDepends(data []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for entry := range bytes.SplitSeq(info, []byte{0}) {
		if list, ok := bytes.CutPrefix(entry, []byte("depends=")); ok && len(list) > 0 {
			return strings.Split(strings.ReplaceAll(string(list), "-", "_"), ","), nil
		}
	}
	return nil, nil
}

// readModule returns a module file's contents. Since trixie they are compressed.
func (t toolbox) readModule(ctx context.Context, file string) ([]byte, error) {
	if strings.HasSuffix(file, ".xz") {
		return output(t.command(ctx, "xz", "-dc", file))
	}
	return os.ReadFile(file)
}
