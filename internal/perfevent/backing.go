package perfevent

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/process"
)

// backings tells what stands behind mappings. A path does not: files of tmpfs have
// ordinary ones. The number of the device does, by the file system that has it.
type backings struct {
	mounts *process.Mounts // nil if they cannot be read
	// internal are the file systems that only the kernel has mounted: of memfds, shared
	// anonymous and System V memory, with and without huge pages.
	internal map[uint32]backing
	// known is what files are by their device, until mounts change.
	known map[uint32]backing
}

// pageCached are types of file systems whose files are mapped by the page cache, but
// for DAX. Not among them are those that hand mappings on to files of others, as
// overlay and fuse do.
var pageCached = map[string]bool{
	"9p": true, "bcachefs": true, "btrfs": true, "ceph": true, "cifs": true, "erofs": true, "exfat": true, "ext2": true,
	"ext3": true, "ext4": true, "f2fs": true, "gfs2": true, "iso9660": true, "jfs": true, "msdos": true, "nfs": true,
	"nfs4": true, "nilfs2": true, "ntfs3": true, "ocfs2": true, "smb3": true, "squashfs": true, "udf": true, "vfat": true,
	"xfs": true,
}

// newBackings asks the kernel. What it does not tell is unknown later.
func newBackings() *backings {
	b := &backings{internal: map[uint32]backing{}, known: map[uint32]backing{}}
	if m, err := process.OpenMounts(); err == nil {
		b.mounts = m
	}
	b.learn(shmem, 0)
	sizes, _ := filepath.Glob("/sys/kernel/mm/hugepages/hugepages-*kB")
	for _, name := range sizes {
		_, size, _ := strings.Cut(strings.TrimSuffix(name, "kB"), "hugepages-")
		if kib, err := strconv.ParseUint(size, 10, 64); err == nil && kib > 0 {
			b.learn(hugetlb, unix.MFD_HUGETLB|(bits.Len64(kib<<10)-1)<<unix.MFD_HUGE_SHIFT)
		}
	}
	return b
}

// learn notes the device of files that memfd_create makes.
func (b *backings) learn(is backing, flags int) {
	fd, err := unix.MemfdCreate("faultsnoop", flags|unix.MFD_CLOEXEC)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil {
		b.internal[deviceOf(&st)] = is
	}
}

func deviceOf(st *unix.Stat_t) uint32 {
	return process.Dev(unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev)))
}

// refresh follows changes of the mounts.
func (b *backings) refresh() {
	if b.mounts == nil {
		return
	}
	if changed, _ := b.mounts.Refresh(); changed {
		clear(b.known)
	}
}

func (b *backings) close() error {
	if b.mounts == nil {
		return nil
	}
	return b.mounts.Close()
}

func (b *backings) of(m *process.Mapping) backing {
	if m.Inode == 0 && m.Dev == 0 {
		return bracketed(m.Label)
	}
	if is, ok := b.internal[m.Dev]; ok {
		return is
	}
	is, ok := b.known[m.Dev]
	if !ok {
		is = b.ofDevice(m.Dev)
		b.known[m.Dev] = is
	}
	switch {
	case is == device:
		return ofNode(m)
	case is != hugetlb && strings.HasPrefix(m.Path, "/dev/") && !strings.HasPrefix(m.Path, "/dev/shm/"):
		return unknownBacking // in a container device nodes are on tmpfs
	}
	return is
}

func bracketed(label string) backing {
	switch label {
	case "[anon]", "[heap]", "[stack]":
		return anon
	case "[vdso]", "[vvar]", "[vvar_vclock]":
		return device
	}
	return unknownBacking
}

// ofDevice is what the files of a file system are; device if it holds nodes.
func (b *backings) ofDevice(dev uint32) backing {
	if b.mounts == nil {
		return unknownBacking
	}
	switch typ := b.mounts.Type(dev); {
	case typ == "tmpfs":
		return shmem
	case typ == "hugetlbfs":
		return hugetlb
	case typ == "devtmpfs":
		return device
	case pageCached[typ] && !mayBeDAX(dev):
		return file
	}
	return unknownBacking
}

// mayBeDAX reports whether files on a device may be mapped as the device's own memory.
func mayBeDAX(dev uint32) bool {
	major, minor := dev>>20, dev&(1<<20-1)
	if major == 0 {
		return false // no block device
	}
	var err error
	for _, of := range []string{"", "/.."} { // a partition has the queue of its disk
		var text []byte
		text, err = os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d%s/queue/dax", major, minor, of))
		if err == nil {
			return strings.TrimSpace(string(text)) != "0"
		}
		if !errors.Is(err, os.ErrNotExist) {
			return true
		}
	}
	return true
}

// ofNode is what stands behind a node in /dev that still has its name. The way to it has no
// links and is on one file system: what else a process has put there may lead to one that
// never answers.
func ofNode(m *process.Mapping) backing {
	const memory = 1 // major number of /dev/zero and its like, which need not map memory of their own
	name, ok := strings.CutPrefix(m.Path, "/dev/")
	if !ok {
		return unknownBacking
	}
	dev, err := unix.Open("/dev", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return unknownBacking
	}
	defer unix.Close(dev)
	node, err := unix.Openat2(dev, name, &unix.OpenHow{ // since Linux 5.6
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return unknownBacking
	}
	defer unix.Close(node)
	var st unix.Stat_t
	if unix.Fstat(node, &st) != nil || st.Ino != m.Inode || deviceOf(&st) != m.Dev ||
		st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(uint64(st.Rdev)) == memory {
		return unknownBacking
	}
	return device
}

// hasUserfaultfd reports whether this kernel may have userfaultfd. No one is opened:
// the flags do not exist.
func hasUserfaultfd() bool {
	_, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, ^uintptr(0), 0, 0)
	return errno != unix.ENOSYS
}
