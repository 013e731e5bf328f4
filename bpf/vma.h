/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The mapping behind an address, taken while the kernel holds it still.
 */
#ifndef FAULTSNOOP_VMA_H
#define FAULTSNOOP_VMA_H

#include "task.h"
#include "ring.h"

/* Names already sent. Full or not, a name that is missing is sent once more. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct name_key);
	__type(value, __u8);
} names SEC(".maps");

/* Puts the type into BTF, from which the Go side is made. */
struct name_record *name_record_type __attribute__((unused));

static __always_inline void send_name(const struct name_key *key, const void *text)
{
	struct name_record *rec;
	__u8 yes = 1;
	long len;

	if (bpf_map_lookup_elem(&names, key))
		return;
	rec = bpf_ringbuf_reserve(&records, sizeof(*rec), 0);
	if (!rec) {
		count(name_lost);
		return;
	}
	rec->type = RECORD_NAME;
	rec->key = *key;
	len = bpf_probe_read_kernel_str(rec->name, NAME_LEN, text);
	rec->len = len > 0 ? len - 1 : 0;
	bpf_ringbuf_submit(rec, BPF_RB_NO_WAKEUP);
	/* Only now: whoever finds the name here may rely on its being in the ring. */
	bpf_map_update_elem(&names, key, &yes, BPF_ANY);
}

static __always_inline void describe_file(struct fault_record *rec, struct file *file, bool typed)
{
	struct inode *inode = READ(typed, file, f_inode);
	struct dentry *dentry = READ(typed, file, f_path.dentry);
	struct super_block *sb = READ(typed, inode, i_sb);
	struct name_key key = {
		.ino = READ(typed, inode, i_ino),
		.hash = READ(typed, dentry, d_name.hash) |
			(__u64)READ(typed, dentry, d_name.len) << 32,
		.dev = READ(typed, sb, s_dev),
	};

	rec->file = key;
	rec->label = LABEL_FILE;
	send_name(&key, READ(typed, dentry, d_name.name));
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

/* typed: the verifier knows vma to be a struct vm_area_struct. */
static __always_inline void describe_vma(struct fault_record *rec, struct vm_area_struct *vma,
					 bool typed)
{
	struct file *file = READ(typed, vma, vm_file);
	struct mm_struct *mm;

	rec->vma_start = READ(typed, vma, vm_start);
	rec->vma_end = READ(typed, vma, vm_end);
	rec->vma_pgoff = READ(typed, vma, vm_pgoff);
	rec->vma_flags = READ(typed, vma, vm_flags);
	rec->known |= KNOWN_VMA;
	if (file) {
		describe_file(rec, file, typed);
		return;
	}
	if (describe_special(rec, vma, typed))
		return;
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

struct vma_search {
	struct fault_record *rec;
};

static long describe_found(struct task_struct *task, struct vm_area_struct *vma,
			   struct vma_search *search)
{
	describe_vma(search->rec, vma, true);
	return 0;
}

/*
 * For kernels with bpf_find_vma (5.17). It gives up when a writer holds or waits
 * for mmap_lock; the mapping is unknown then.
 */
static __always_inline void find_vma(struct task_struct *task, struct fault_record *rec)
{
	struct vma_search search = { .rec = rec };

	bpf_find_vma(task, rec->address, describe_found, &search, 0);
}

/* Deeper than any tree of 2^31 mappings can be. */
#define RB_DEPTH 64

/*
 * For older kernels: the fault handler holds mmap_lock while the fault is counted
 * (mm_account_fault is called by handle_mm_fault), so the tree stands still.
 */
static __always_inline void find_vma_rb(struct task_struct *task, struct fault_record *rec)
{
	struct mm_struct___rb *mm = (void *)BPF_CORE_READ(task, mm);
	struct rb_node *node = BPF_CORE_READ(mm, mm_rb.rb_node);
	unsigned long at = bpf_core_field_offset(struct vm_area_struct___rb, vm_rb);

	for (int i = 0; i < RB_DEPTH && node; i++) {
		struct vm_area_struct *vma = (void *)node - at;

		if (rec->address < BPF_CORE_READ(vma, vm_start)) {
			node = BPF_CORE_READ(node, rb_left);
		} else if (rec->address >= BPF_CORE_READ(vma, vm_end)) {
			node = BPF_CORE_READ(node, rb_right);
		} else {
			describe_vma(rec, vma, false);
			return;
		}
	}
}

#endif
