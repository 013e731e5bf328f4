/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The mapping behind an address, taken while the kernel holds it still.
 */
#ifndef FAULTSNOOP_VMA_H
#define FAULTSNOOP_VMA_H

#include "task.h"
#include "ring.h"
#include "tree.h"

/* Names already sent. Full or not, a name that is missing is sent once more. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct name_key);
	__type(value, __u8);
} names SEC(".maps");

/* Puts the type into BTF, from which the Go side is made. */
struct name_record *name_record_type __attribute__((unused));

/* Reserves the record of a name that was not sent yet; NULL if there is nothing to do. */
static __always_inline struct name_record *begin_name(const struct name_key *key)
{
	struct name_record *rec;

	if (bpf_map_lookup_elem(&names, key))
		return NULL;
	rec = bpf_ringbuf_reserve(&records, sizeof(*rec), 0);
	if (!rec)
		return NULL; /* the next fault tries again; this one's label stays unknown */
	rec->type = RECORD_NAME;
	rec->key = *key;
	rec->flags = rec->len = 0;
	return rec;
}

static __always_inline void submit_name(const struct name_key *key, struct name_record *rec)
{
	__u8 yes = 1;

	bpf_ringbuf_submit(rec, BPF_RB_NO_WAKEUP);
	/* Only now: whoever finds the name here may rely on its being in the ring. */
	bpf_map_update_elem(&names, key, &yes, BPF_ANY);
}

static __always_inline void send_name(const struct name_key *key, const void *text)
{
	struct name_record *rec = begin_name(key);
	long len;

	if (!rec)
		return;
	len = bpf_probe_read_kernel_str(rec->name, NAME_LEN, text);
	rec->len = len > 0 ? len - 1 : 0;
	submit_name(key, rec);
}

static __always_inline struct mount *mount_of(struct vfsmount *mnt)
{
	return (void *)mnt - bpf_core_field_offset(struct mount, mnt);
}

/* Names and mounts of a path. Of a deeper one the first names are missing. */
#define PATH_DEPTH 64

/*
 * Writes the names from a file up to the root of its mount namespace, as d_path does
 * (fs/d_path.c, prepend_path) but without its locks: of a file that is renamed
 * meanwhile the path may be mixed from before and after.
 */
static __always_inline void write_path(struct name_record *rec, struct dentry *dentry,
				       struct mount *mount)
{
	/*
	 * In memory, since the verifier then knows nothing of it: else it would follow every
	 * order of names and mounts by itself.
	 */
	volatile __u32 *at = &rec->len;

	rec->flags = NAME_PATH | NAME_CUT;
	if (!BPF_CORE_READ(dentry, d_hash.pprev))
		rec->flags |= NAME_DELETED;
	for (int i = 0; i < PATH_DEPTH; i++) {
		struct dentry *up = BPF_CORE_READ(dentry, d_parent);
		__u32 here;
		long len;

		if (dentry == BPF_CORE_READ(mount, mnt.mnt_root) || dentry == up) {
			struct mount *outer = BPF_CORE_READ(mount, mnt_parent);

			if (outer == mount) {
				rec->flags &= ~NAME_CUT;
				break;
			}
			dentry = BPF_CORE_READ(mount, mnt_mountpoint);
			mount = outer;
			continue;
		}
		here = *at;
		if (here > PATH_LEN)
			break;
		len = bpf_probe_read_kernel_str(&rec->name[here], NAME_LEN,
						BPF_CORE_READ(dentry, d_name.name));
		if (len <= 0)
			break;
		*at = here + len;
		dentry = up;
	}
}

/* include/uapi/linux/magic.h, stat.h; include/linux/fs.h */
#define TMPFS_MAGIC 0x01021994
#define HUGETLBFS_MAGIC 0x958458f6
#define S_IFMT 0170000
#define S_IFREG 0100000
#define S_IFBLK 0060000
#define S_DAX (1 << 13)

static __always_inline __u8 backing_of(struct inode *inode, struct super_block *sb, bool typed)
{
	unsigned long magic = READ(typed, sb, s_magic);
	__u32 kind = READ(typed, inode, i_mode) & S_IFMT;

	if (magic == HUGETLBFS_MAGIC)
		return BACKING_HUGETLB;
	if (kind == S_IFREG && READ(typed, inode, i_flags) & S_DAX)
		return BACKING_DEVICE;
	if (kind == S_IFREG && magic == TMPFS_MAGIC)
		return BACKING_SHMEM;
	return kind == S_IFREG || kind == S_IFBLK ? BACKING_FILE : BACKING_DEVICE;
}

/* fs/mount.h: of a mount that is in no namespace, ERR_PTR(-EINVAL). */
#define MNT_NS_INTERNAL (-22L)

/* include/uapi/linux/magic.h: file systems that have others do the work (backing_file_mmap). */
#define OVERLAYFS_SUPER_MAGIC 0x794c7630
#define FUSE_SUPER_MAGIC 0x65735546

/*
 * What is mapped from a stacked file system is a file of the layer below, by a mount of its
 * own. The path that the process has opened stands behind it since 6.8, and before in its
 * place. The mark of such files, FMODE_BACKING, is not the same bit in all kernels, so
 * what stands there is looked at instead.
 */
static __always_inline bool is_backing(struct file *file, struct vfsmount *mnt)
{
	struct backing_file *backing = (void *)file;
	unsigned long magic;

	if (!bpf_core_field_exists(backing->user_path) ||
	    (long)BPF_CORE_READ(mount_of(mnt), mnt_ns) != MNT_NS_INTERNAL)
		return false;
	magic = BPF_CORE_READ(backing, user_path.mnt, mnt_sb, s_magic);
	return magic == OVERLAYFS_SUPER_MAGIC || magic == FUSE_SUPER_MAGIC;
}

static __always_inline void describe_file(struct fault_record *rec, struct file *file, bool typed,
					  bool send)
{
	struct backing_file *backing = (void *)file;
	struct inode *real = READ(typed, file, f_inode), *inode;
	struct dentry *dentry = BPF_CORE_READ(file, f_path.dentry);
	struct vfsmount *mnt = BPF_CORE_READ(file, f_path.mnt);
	struct name_record *name;

	if (is_backing(file, mnt)) {
		dentry = BPF_CORE_READ(backing, user_path.dentry);
		mnt = BPF_CORE_READ(backing, user_path.mnt);
	}
	inode = BPF_CORE_READ(dentry, d_inode);

	struct name_key key = {
		.ino = BPF_CORE_READ(inode, i_ino),
		.hash = BPF_CORE_READ(dentry, d_name.hash) |
			(__u64)BPF_CORE_READ(dentry, d_name.len) << 32,
		.dev = BPF_CORE_READ(inode, i_sb, s_dev),
		.mount = BPF_CORE_READ(mount_of(mnt), mnt_id),
	};

	rec->label = LABEL_FILE;
	rec->backing = backing_of(real, READ(typed, real, i_sb), typed);
	if (!send && !bpf_map_lookup_elem(&names, &key)) {
		/* Known by another key, since the path is still to be sent. */
		key.mount = 0;
		send_name(&key, BPF_CORE_READ(dentry, d_name.name));
	}
	rec->file = key;
	name = send ? begin_name(&key) : NULL;
	if (!name)
		return;
	/* What is in no folder, such as a memfd, has just a name. */
	if (BPF_CORE_READ(dentry, d_parent) == dentry) {
		long len = bpf_probe_read_kernel_str(name->name, NAME_LEN,
						     BPF_CORE_READ(dentry, d_name.name));

		name->len = len > 0 ? len - 1 : 0;
	} else {
		write_path(name, dentry, mount_of(mnt));
	}
	submit_name(&key, name);
}

/*
 * A mapping without a file that has operations is a special mapping ([vdso] and
 * its like, mm/mmap.c special_mapping_vmops); its name stands behind
 * vm_private_data.
 */
static __always_inline bool describe_special(struct fault_record *rec, struct vm_area_struct *vma,
					     bool typed)
{
	struct vm_special_mapping *special = READ(typed, vma, vm_private_data);
	const char *name = NULL;
	char first = 0;

	if (!READ(typed, vma, vm_ops) || !special)
		return false;
	name = BPF_CORE_READ(special, name);
	if (!name || bpf_probe_read_kernel(&first, 1, name) || first != '[')
		return false;

	struct name_key key = { .hash = (__u64)name };

	rec->file = key;
	rec->label = LABEL_FILE;
	send_name(&key, name);
	return true;
}

/* ANON_VMA_NAME_MAX_LEN */
#define ANON_NAME_WORDS 10

/*
 * A name that the process has given to anonymous memory (PR_SET_VMA_ANON_NAME). It is
 * known by its text, since its place is soon another name's.
 */
static __always_inline bool describe_named(struct fault_record *rec, struct vm_area_struct *vma)
{
	struct vm_area_struct___named *named = (void *)vma;
	__u64 text[ANON_NAME_WORDS] = {}, hash = 0;
	struct anon_vma_name *name;

	if (!bpf_core_field_exists(named->anon_name))
		return false;
	name = BPF_CORE_READ(named, anon_name);
	if (!name || bpf_probe_read_kernel_str(text, sizeof(text),
					       __builtin_preserve_access_index(&name->name)) <= 0)
		return false;
	for (int i = 0; i < ANON_NAME_WORDS; i++)
		hash = (hash ^ text[i]) * 0x9e3779b97f4a7c15ULL;

	struct name_key key = { .hash = hash };

	rec->file = key;
	rec->label = LABEL_ANON_NAME;
	send_name(&key, __builtin_preserve_access_index(&name->name));
	return true;
}

/*
 * typed: the verifier knows vma to be a struct vm_area_struct. send: also the path of a
 * file that is new; without, it has just a name if its path was not sent before.
 */
static __always_inline void describe_vma(struct fault_record *rec, struct vm_area_struct *vma,
					 bool typed, bool send)
{
	struct file *file = READ(typed, vma, vm_file);
	struct mm_struct *mm;

	rec->vma_start = READ(typed, vma, vm_start);
	rec->vma_end = READ(typed, vma, vm_end);
	rec->vma_pgoff = READ(typed, vma, vm_pgoff);
	rec->vma_flags = READ(typed, vma, vm_flags);
	rec->uffd = bpf_core_field_exists(vma->vm_userfaultfd_ctx.ctx) &&
		    READ(typed, vma, vm_userfaultfd_ctx.ctx);
	rec->known |= KNOWN_VMA;
	if (file) {
		describe_file(rec, file, typed, send);
		/* A private mapping of /dev/zero is anonymous memory (mmap_zero). */
		if (!READ(typed, vma, vm_ops))
			rec->backing = BACKING_ANON;
		return;
	}
	/* What has operations is not anonymous (vma_is_anonymous). */
	rec->backing = READ(typed, vma, vm_ops) ? BACKING_DEVICE : BACKING_ANON;
	if (describe_special(rec, vma, typed))
		return;
	if (describe_named(rec, vma))
		return;
	rec->file.ino = rec->file.hash = rec->file.dev = rec->file.mount = 0;
	/* The rules of fs/proc/task_mmu.c, vma_is_initial_heap and _stack. */
	mm = READ(typed, vma, vm_mm);
	if (rec->vma_start <= READ(typed, mm, brk) && rec->vma_end >= READ(typed, mm, start_brk))
		rec->label = LABEL_HEAP;
	else if (rec->vma_start <= READ(typed, mm, start_stack) &&
		 rec->vma_end >= READ(typed, mm, start_stack))
		rec->label = LABEL_STACK;
	else
		rec->label = LABEL_ANON;
}

/* How far from the stack pointer and the TLS base a thread's own memory may be. */
#define STACK_SLACK (16ULL << 10)
#define STACK_MAX (64ULL << 20)

/*
 * Whether a fault in a plain anonymous mapping is on the stack of its thread. To the
 * kernel the stack of a thread other than the first is a mapping like any other, which
 * is known by two things. The thread's stack pointer is in it; and the TLS base, which
 * clone(CLONE_SETTLS) has set, is above that, since implementations of pthreads put
 * the thread's descriptor at the upper end of its stack. Since the kernel joins
 * mappings that touch, as stacks do which have their guard inside (glibc 2.42), only
 * what is between the two is the stack, with what a function may touch below the
 * stack pointer, and the descriptor.
 *
 * A runtime that has both in a heap of its own has no such stack. Go without cgo may
 * have them in this order in one mapping; but by the x86-64 psABI the word at the TLS
 * base is its own address, which Go's is not. On arm64 Go sets no TLS base.
 */
static __always_inline bool on_thread_stack(const struct task_state *st, struct task_struct *task)
{
	const struct fault_record *rec = &st->rec;
	__u64 sp = st->user_sp, tls;

	if (sp < rec->vma_start || sp >= rec->vma_end || rec->address + STACK_SLACK < sp)
		return false;
#if defined(__TARGET_ARCH_x86)
	tls = READ_TASK(task, thread.fsbase);
#else
	tls = READ_TASK(task, thread.uw.tp_value);
#endif
	if (tls < sp || tls >= rec->vma_end || tls - sp > STACK_MAX ||
	    rec->address >= tls + STACK_SLACK)
		return false;
#if defined(__TARGET_ARCH_x86)
	__u64 self = 0;

	if (bpf_probe_read_user(&self, sizeof(self), (void *)tls) || self != tls)
		return false;
#endif
	return true;
}

/* The label of a mapping is for all of its addresses, that of a thread's stack for one. */
static __always_inline void label_stack(struct task_state *st, struct task_struct *task)
{
	struct fault_record *rec = &st->rec;

	if (rec->label == LABEL_THREAD_STACK)
		rec->label = LABEL_ANON;
	if (rec->label == LABEL_ANON && rec->backing == BACKING_ANON && on_thread_stack(st, task))
		rec->label = LABEL_THREAD_STACK;
}

/*
 * How often mm's mappings have been open to change (since 6.4, with per-VMA locks; a
 * seqcount since 6.13). False where the kernel has no such number.
 */
static __always_inline bool read_seq(struct mm_struct *mm, __u32 *seq, bool typed)
{
	struct mm_struct___seqcount *counted = (void *)mm;
	struct mm_struct___seq *plain = (void *)mm;

	if (bpf_core_field_exists(counted->mm_lock_seq.sequence))
		*seq = READ(typed, counted, mm_lock_seq.sequence);
	else if (bpf_core_field_exists(plain->mm_lock_seq))
		*seq = READ(typed, plain, mm_lock_seq);
	else
		return false;
	return true;
}

static __always_inline bool read_mm_seq(struct mm_struct *mm, __u32 *seq)
{
	return read_seq(mm, seq, task_storage);
}

/*
 * Finds the mapping of a fault of the current task while the kernel handles it. It
 * takes no lock, so it does not give up where bpf_find_vma does, when a writer
 * holds or waits for mmap_lock. The handler holds the mapping itself, by its own
 * lock or by mmap_lock, until the fault is counted (mm_account_fault is called by
 * handle_mm_fault); nodes of the tree that a writer replaces meanwhile stay
 * readable, since programs run inside an RCU read section. What is found is checked.
 *
 * The mapping of the thread's previous fault still stands in st->rec. It is taken
 * again if nobody has had the right to change mappings since: a writer that changes
 * this one keeps it locked until it raises the number, so the present fault
 * would have waited for that. The name is that of the first such fault.
 */
static __always_inline void find_vma(struct task_state *st, struct task_struct *task, bool send)
{
	struct fault_record *rec = &st->rec;
	struct mm_struct *mm = READ_TASK(task, mm);
	struct vm_area_struct *vma;
	__u32 seq = 0;
	bool has_seq;

	if (!mm)
		return;
	has_seq = read_mm_seq(mm, &seq);
	if (has_seq && st->vma_mm == (__u64)mm && st->vma_seq == seq &&
	    rec->address >= rec->vma_start && rec->address < rec->vma_end) {
		rec->known |= KNOWN_VMA;
		label_stack(st, task);
		return;
	}
	if (bpf_core_field_exists(((struct mm_struct___maple *)0)->mm_mt))
		vma = find_in_maple(mm, rec->address);
	else
		vma = find_in_rb(mm, rec->address);
	if (vma && BPF_CORE_READ(vma, vm_mm) == mm && holds(vma, rec->address)) {
		describe_vma(rec, vma, false, send);
		label_stack(st, task);
		st->vma_mm = has_seq && send ? (__u64)mm : 0;
		st->vma_seq = seq;
	}
}

/*
 * The same where the kernel holds the mapping no longer, as for a signal. What another
 * thread changes meanwhile gives no answer; what it is just about to change, one from
 * before.
 */
static __always_inline void find_vma_unlocked(struct task_state *st, struct task_struct *task)
{
	struct mm_struct *mm = READ_TASK(task, mm);
	__u32 before = 0, after = 0;

	if (!mm)
		return;
	read_mm_seq(mm, &before);
	/* Paths are long to verify, and what fails has mostly been touched before. */
	find_vma(st, task, false);
	read_mm_seq(mm, &after);
	if (before == after)
		return;
	st->rec.known &= ~KNOWN_VMA;
	st->vma_mm = 0;
}

#endif
