/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a fault finds in the page table, what it leaves there, and whether its page has
 * faulted before.
 */
#ifndef FAULTSNOOP_LOOK_H
#define FAULTSNOOP_LOOK_H

#include "ring.h"
#include "task.h"
#include "vma.h"
#include "pagetable.h"
#include "classify.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#define PAGE_MASK_4K (~0xfffULL)

/* The kernel may balance NUMA nodes. */
const volatile bool numa_hints;

/*
 * The table of level 1 for the address of the fault. It stays the same for a GiB as long
 * as nobody has had the right to change mappings: only unmapping frees it, and not while
 * a mapping that it serves is there. That holds for the thread's own address space; of
 * another one nobody here hears when it ends and its place is taken.
 */
static __always_inline __u64 find_table(struct task_state *st, struct table_entry *found)
{
	struct mm_struct *mm = (void *)st->fault_mm;
	__u64 gib = st->rec.address >> (PAGE_SHIFT + 2 * TABLE_SHIFT);
	__u32 seq = 0;
	bool keeps = read_seq(mm, &seq, false) && st->rec.mode != MODE_REMOTE;

	if (keeps && st->table && st->table_mm == st->fault_mm && st->table_gib == gib &&
	    st->table_seq == seq)
		return st->table;
	st->table = middle_table((__u64)BPF_CORE_READ(mm, pgd), st->rec.address, direct_map,
				 table_levels, found);
	st->table_mm = keeps ? st->fault_mm : 0;
	st->table_gib = gib;
	st->table_seq = seq;
	return st->table;
}

/* Reads the entry for the address of the fault, and those around it. */
static __always_inline struct table_entry look(struct task_state *st, __u64 entries[AROUND])
{
	struct table_entry found = {};
	__u64 table = find_table(st, &found);

	if (table)
		table = next_table(table, st->rec.address, 1, direct_map, &found);
	if (table)
		read_around(table, st->rec.address, &found, entries);
	return found;
}

/*
 * Reads the page table as the fault finds it. Not inline, nor is its counterpart, since
 * the entries take a quarter of a stack.
 */
static __noinline int look_before(struct task_state *st)
{
	struct fault_record *rec = &st->rec;
	__u64 entries[AROUND];
	struct table_entry e;

	if (!direct_map || !st->fault_mm)
		return 0;
	e = look(st, entries);
	if (!e.known)
		return 0;
	rec->entry_before = e.value;
	rec->level_before = e.level;
	rec->present = e.present;
	rec->known |= KNOWN_BEFORE;
	return 0;
}

/*
 * How many pages the fault has mapped, and how many of these from one folio: none if the
 * page was mapped already and only its permissions have changed.
 */
static __always_inline void count_mapped(struct fault_record *rec, const struct evidence *e,
					 const __u64 entries[AROUND])
{
	const struct table_entry *after = &e->after;
	__u64 before = rec->entry_before;
	bool was_mapped = entry_present(before) || entry_protnone(before);
	/* A huge page that was split was mapped already. */
	__u16 new = rec->level_before &&was_mapped ? 0 : after->present & ~rec->present, n = 0;

	rec->folio = 1;
	rec->pages = entry_present(before) ? frame_changed(e) : !was_mapped;
	if (!(new &(new - 1)))
		return;
	for (int i = 0; i < AROUND; i++)
		n += new >> i & 1;
	rec->pages = n;
	rec->folio = run_around(entries, rec->address, new);
}

/* Reads the page table as the fault leaves it, and says what was done. */
static __noinline int look_after(struct task_state *st, __u8 result, bool major)
{
	struct fault_record *rec = &st->rec;
	bool known = rec->known & KNOWN_BEFORE;
	__u64 entries[AROUND];
	struct evidence *e = &st->evidence;

	/* Nothing was done for a fault that failed. */
	if (result != RESULT_OK)
		return 0;

	e->before.value = rec->entry_before;
	e->before.level = rec->level_before;
	e->before.known = known;
	e->after = (struct table_entry){};
	e->address = rec->address;
	e->vma_flags = rec->vma_flags;
	e->backing = rec->backing;
	e->access = rec->access;
	e->attempts = rec->attempts > 1 ? 2 : rec->attempts;
	e->major = major;
	e->uffd = rec->uffd;
	e->numa = numa_hints;
	if (known) {
		e->after = look(st, entries);
		rec->entry_after = e->after.value;
		rec->level_after = e->after.level;
		count_mapped(rec, e, entries);
		rec->known |= e->after.known ? KNOWN_AFTER : 0;
	}
	if (!(rec->known & KNOWN_VMA) || !(rec->known & KNOWN_ACCESS))
		return 0;
	rec->kind = classify(e);
	rec->known |= rec->kind != KIND_UNKNOWN ? KNOWN_KIND : 0;
	/* Tables of hugetlbfs are shared, and may be unshared without a change of mappings. */
	if (rec->vma_flags & VM_HUGETLB)
		st->table_mm = 0;
	return 0;
}

const volatile bool remember_pages;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* set by user space */
	__type(key, struct page_key);
	__type(value, __u8);
} pages_seen SEC(".maps");

/*
 * Whether the page has faulted before. Of other address spaces than the thread's own
 * nothing is remembered. Not inline, since the key would not fit beside what look_after needs.
 */
static __noinline int remember(struct task_state *st)
{
	struct task_struct *task = current_task();
	struct fault_record *rec = &st->rec;
	struct page_key key = {
		.tgid = READ_TASK(task, tgid),
		.exec_id = BPF_CORE_READ(task, self_exec_id),
		.born = BPF_CORE_READ(task, group_leader, start_time),
		.page = rec->address & PAGE_MASK_4K,
	};
	__u8 yes = 1;

	if (rec->mode == MODE_REMOTE || rec->type == RECORD_SELFTEST)
		return 0;
	rec->known |= KNOWN_AGAIN;
	rec->again = bpf_map_lookup_elem(&pages_seen, &key) != NULL;
	if (!rec->again && bpf_map_update_elem(&pages_seen, &key, &yes, BPF_ANY)) {
		rec->known &= ~KNOWN_AGAIN;
		count(unremembered);
	}
	return 0;
}

#endif
