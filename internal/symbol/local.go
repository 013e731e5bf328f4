package symbol

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"faultsnoop/internal/process"
)

// local are the types of file systems that answer by themselves. A server of one over the
// network or of FUSE may never answer, and who waits for it cannot even be killed. A type
// that is missing here costs names; one that were missing in a list of the others would
// cost the trace. What an overlay lies over is not known: whoever may mount one for us
// knows what he does.
var local = map[string]bool{
	"bcachefs": true, "btrfs": true, "cramfs": true, "devtmpfs": true, "erofs": true, "exfat": true, "ext2": true, "ext3": true,
	"ext4": true, "f2fs": true, "hfs": true, "hfsplus": true, "iso9660": true, "jffs2": true, "jfs": true, "minix": true,
	"msdos": true, "nilfs2": true, "ntfs3": true, "nullfs": true, "overlay": true, "ramfs": true, "reiserfs": true, "romfs": true,
	"rootfs": true, "squashfs": true, "tmpfs": true, "ubifs": true, "udf": true, "ufs": true, "vfat": true, "xfs": true, "zfs": true,
}

// errRemote is for what a look at would have to wait for others.
var errRemote = errors.New("not on a file system that is known to be local")

// leadsLocally reports whether a path without symbolic links stays on local file systems
// from the root folder on.
func leadsLocally(mounts []process.Mount, path string) bool {
	root := false
	for _, m := range mounts {
		below, ok := strings.CutPrefix(path, strings.TrimSuffix(m.Point, "/"))
		switch {
		case !ok || below != "" && below[0] != '/':
		case !local[m.Type]: // be it covered by another one
			return false
		case m.Point == "/":
			root = true
		}
	}
	return root // not in a folder of a mount that is not listed
}

// typeOf is the type of the file system with a device number, empty if it is not mounted.
func typeOf(mounts []process.Mount, dev uint32) string {
	for _, m := range mounts {
		if m.Dev == dev {
			return m.Type
		}
	}
	return ""
}

// sharesUsers reports whether a process is in our user namespace. One that is not may
// mount in its own, an overlay over FUSE for example, and at any moment.
func sharesUsers(pid uint32) bool {
	ours, err := os.Readlink("/proc/self/ns/user")
	if errors.Is(err, fs.ErrNotExist) {
		return true // CONFIG_USER_NS is off
	}
	its, itsErr := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", pid))
	return err == nil && itsErr == nil && its == ours
}
