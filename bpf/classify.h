/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the kernel did for a fault, from the page-table entry before and after it, the
 * mapping and the access: the decisions of handle_mm_fault and handle_pte_fault
 * (mm/memory.c) made again from what they left.
 */
#ifndef FAULTSNOOP_CLASSIFY_H
#define FAULTSNOOP_CLASSIFY_H

#include "fault.h"
#include "pagetable.h"

/* include/linux/mm.h; these bits have not moved since 5.10. */
#define VM_READ 0x1ULL
#define VM_WRITE 0x2ULL
#define VM_EXEC 0x4ULL
#define VM_SHARED 0x8ULL
#define VM_UFFD_MISSING 0x200ULL
#define VM_PFNMAP 0x400ULL
#define VM_UFFD_WP 0x1000ULL
#define VM_HUGETLB 0x400000ULL
#define VM_MIXEDMAP 0x10000000ULL

/*
 * Swap types from here on may be markers of migration, bad memory or devices
 * (MAX_SWAPFILES in include/linux/swap.h: 32 less at most nine of them).
 */
#define SURELY_SWAP 23

/* Of a part of the decision: something else has to decide. */
#define KIND_NONE KINDS

/* What a fault is classified by. */
struct evidence {
	struct table_entry before, after; /* after: unknown if the fault was not resolved */
	__u64 address;
	__u64 vma_flags;
	__u8 backing; /* enum backing */
	__u8 access;
	__u8 attempts; /* 0: not known */
	bool major;
	bool uffd; /* the mapping is registered with a userfaultfd */
	bool numa; /* the kernel may take permissions away to hear of a page's use */
};

/* The frame of the page itself, of which an entry of a huge page holds the first. */
static __always_inline __u64 page_frame(const struct table_entry *e, __u64 address)
{
	__u64 size = 1ULL << (PAGE_SHIFT + TABLE_SHIFT * (e->level & 3));

	return (entry_frame(e->value) & ~(size - 1)) | (address & (size - 1) & ENTRY_FRAME);
}

static __always_inline bool frame_changed(const struct evidence *e)
{
	return page_frame(&e->before, e->address) != page_frame(&e->after, e->address);
}

/*
 * Whether a fault in memory that is registered with a userfaultfd went to its server
 * (handle_userfault): KIND_UFFD or KIND_NONE, KIND_UNKNOWN in doubt.
 */
static __always_inline __u8 to_userfaultfd(const struct evidence *e)
{
	__u64 before = e->before.value;

	if (before)
		return e->vma_flags & VM_UFFD_WP && e->access == ACCESS_WRITE &&
				       entry_present(before) && !entry_writable(before) &&
				       before & ENTRY_UFFD_WP ?
			       KIND_UFFD :
			       KIND_NONE;
	if (e->backing == BACKING_ANON)
		return e->vma_flags & VM_UFFD_MISSING ? KIND_UFFD : KIND_NONE;
	if (e->vma_flags & VM_UFFD_WP && !(e->vma_flags & VM_UFFD_MISSING))
		return KIND_NONE;
	/*
	 * Of what has a page cache the server is asked for pages that are not in it, or, in
	 * minor mode, for those that are. Either way the fault is tried again afterwards, which
	 * makes it major, but not if it began under the mapping's lock (6.7). Shared memory that
	 * is read back from swap is major too.
	 */
	if (e->major)
		return e->vma_flags & VM_HUGETLB ? KIND_UFFD : KIND_UNKNOWN;
	return e->attempts == 1 ? KIND_NONE : KIND_UNKNOWN;
}

static __always_inline bool is_device(const struct evidence *e)
{
	return e->backing == BACKING_DEVICE || e->vma_flags & (VM_PFNMAP | VM_MIXEDMAP);
}

/*
 * Anonymous memory. The zero page is marked special; the huge one need not be, but
 * nothing else is mapped for reading alone where writing is allowed.
 */
static __always_inline __u8 kind_of_fresh(const struct evidence *e)
{
	__u64 after = e->after.value;
	bool huge = e->after.level;

	if (!e->after.known || !entry_present(after))
		return KIND_UNKNOWN;
	if (e->access != ACCESS_WRITE &&
	    (after & ENTRY_SPECIAL || (huge && e->vma_flags & VM_WRITE && !entry_writable(after))))
		return KIND_ZERO;
	return huge ? KIND_THP : KIND_ANON;
}

/* There was no entry: do_anonymous_page, do_huge_pmd_anonymous_page or do_fault. */
static __always_inline __u8 kind_of_missing(const struct evidence *e)
{
	switch (e->backing) {
	case BACKING_ANON:
		return kind_of_fresh(e);
	case BACKING_SHMEM:
		if (e->access == ACCESS_WRITE && !(e->vma_flags & VM_SHARED))
			return KIND_COW_FILE;
		return KIND_SHMEM;
	case BACKING_FILE:
		if (e->access != ACCESS_WRITE)
			return KIND_FILE;
		return e->vma_flags & VM_SHARED ? KIND_MKWRITE : KIND_COW_FILE;
	}
	return KIND_UNKNOWN;
}

/* The entry was there and forbade writing: do_wp_page. */
static __always_inline __u8 kind_of_protected(const struct evidence *e)
{
	if (e->vma_flags & VM_SHARED)
		return e->backing == BACKING_SHMEM ? KIND_SHMEM : KIND_MKWRITE;
	if (!e->after.known || !entry_present(e->after.value))
		return KIND_UNKNOWN;
	if (!frame_changed(e))
		return KIND_REUSE;
	if (e->backing == BACKING_ANON)
		return KIND_COW;
	/*
	 * A page of a private file mapping is the file's, and clean, until it is first
	 * written to. What was written, and is shared since a fork, stays dirty.
	 */
	return entry_dirty(e->before.value) ? KIND_COW : KIND_COW_FILE;
}

/*
 * Without the page table: what the mapping and the access leave no doubt of. An entry that
 * is not present may also be a page in swap, or one taken away for NUMA balancing, and a
 * page of a private mapping that was ever writable need not be the file's any more.
 */
static __always_inline __u8 infer(const struct evidence *e)
{
	bool shared = e->vma_flags & VM_SHARED, write = e->access == ACCESS_WRITE;

	if (e->uffd)
		return KIND_UNKNOWN;
	if (e->vma_flags & VM_HUGETLB)
		return KIND_HUGETLB;
	if (is_device(e))
		return KIND_DEVICE;
	if (e->backing == BACKING_ANON)
		return e->major ? KIND_SWAP : KIND_UNKNOWN;
	/* task_numa_work in kernel/sched/fair.c leaves out what of files can only be read. */
	if (e->numa && (!(e->vma_flags & VM_READ) || e->vma_flags & VM_WRITE))
		return KIND_UNKNOWN;
	if (!shared && (write || e->vma_flags & VM_WRITE || !(e->vma_flags & VM_EXEC)))
		return KIND_UNKNOWN;
	if (e->backing == BACKING_SHMEM)
		return KIND_SHMEM;
	if (e->backing == BACKING_FILE)
		return write ? KIND_MKWRITE : KIND_FILE;
	return KIND_UNKNOWN;
}

static __always_inline __u8 classify(const struct evidence *e)
{
	__u64 before = e->before.value;

	if (!e->before.known)
		return infer(e);
	if (e->uffd) {
		__u8 kind = to_userfaultfd(e);

		if (kind != KIND_NONE)
			return kind;
	}
	if (e->vma_flags & VM_HUGETLB)
		return KIND_HUGETLB;
	if (is_device(e))
		return KIND_DEVICE;
	if (!before)
		return kind_of_missing(e);
	if (entry_protnone(before))
		return e->vma_flags & (VM_READ | VM_WRITE | VM_EXEC) ? KIND_NUMA : KIND_UNKNOWN;
	if (!entry_present(before))
		return entry_swap_type(before) < SURELY_SWAP ? KIND_SWAP : KIND_UNKNOWN;
	if (e->access == ACCESS_WRITE && !entry_writable(before))
		return kind_of_protected(e);
	return KIND_SPURIOUS;
}

#endif
