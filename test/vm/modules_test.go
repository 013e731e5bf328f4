package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeModule returns the least ELF file that has a .modinfo section.
func fakeModule(t *testing.T, modinfo string) []byte {
	t.Helper()
	const names = "\x00.modinfo\x00.shstrtab\x00"
	const headerSize, sectionSize = 64, 64
	infoAt := uint64(headerSize)
	namesAt := infoAt + uint64(len(modinfo))
	sectionsAt := namesAt + uint64(len(names))
	header := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Shoff: sectionsAt, Ehsize: headerSize, Shentsize: sectionSize, Shnum: 3, Shstrndx: 2,
	}
	sections := [3]elf.Section64{
		1: {Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: infoAt, Size: uint64(len(modinfo))},
		2: {Name: 10, Type: uint32(elf.SHT_STRTAB), Off: namesAt, Size: uint64(len(names))},
	}
	var b bytes.Buffer
	for _, part := range []any{header, []byte(modinfo), []byte(names), sections} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func TestLoadModules(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, data []byte) {
		t.Helper()
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("modules.builtin", []byte("kernel/crypto/lzo.ko\nkernel/fs/ext4/ext4.ko\n"))
	for name, depends := range map[string]string{
		"virtio-blk": "virtio_ring,virtio", "virtio_ring": "virtio", "virtio": "", "zram": "zsmalloc,lzo", "zsmalloc": "",
	} {
		write("kernel/drivers/"+name+".ko", fakeModule(t, "license=GPL\x00depends="+depends+"\x00retpoline=Y\x00"))
	}
	tree, err := openModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	modules, err := tree.load([]string{"ext4", "virtio_blk", "zram", "virtio"}, os.ReadFile)
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, m := range modules {
		order = append(order, m.name)
	}
	if got, want := fmt.Sprint(order), "[virtio virtio_ring virtio_blk zsmalloc zram]"; got != want {
		t.Errorf("order %s, want %s", got, want)
	}
	if _, err := tree.load([]string{"btrfs"}, os.ReadFile); err == nil || !strings.Contains(err.Error(), "btrfs") {
		t.Errorf("a module that does not exist: %v", err)
	}
}
