/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Reads page tables: x86-64 with 4 or 5 levels, arm64 with pages of 4 KiB and 3 to
 * 5 levels. Entries hold physical addresses, which the kernel can read through its
 * direct map of all memory; where that begins, user space finds out (witness.bpf.c).
 *
 * No lock is taken. A table that another thread frees meanwhile gives a wrong
 * answer, never a crash: bpf_probe_read_kernel survives any address.
 */
#ifndef FAULTSNOOP_PAGETABLE_H
#define FAULTSNOOP_PAGETABLE_H

#include "core.h"
#include "fault.h"
#include <bpf/bpf_helpers.h>

#define PAGE_SHIFT 12
#define TABLE_SHIFT 9
#define TABLE_MASK ((1 << TABLE_SHIFT) - 1)
#define MAX_TABLE_LEVELS 5

#if defined(__TARGET_ARCH_x86)

/* arch/x86/include/asm/pgtable_types.h */
#define ENTRY_PRESENT (1ULL << 0)
#define ENTRY_RW (1ULL << 1)
#define ENTRY_DIRTY (1ULL << 6)
#define ENTRY_PSE (1ULL << 7)
#define ENTRY_PROTNONE (1ULL << 8)
#define ENTRY_SPECIAL (1ULL << 9)
#define ENTRY_UFFD_WP (1ULL << 10)
#define ENTRY_SAVED_DIRTY (1ULL << 58) /* since 6.6 */
#define ENTRY_FRAME 0x000ffffffffff000ULL

static __always_inline bool entry_present(__u64 e)
{
	return e & ENTRY_PRESENT;
}

static __always_inline bool entry_is_table(__u64 e)
{
	return (e & (ENTRY_PRESENT | ENTRY_PSE)) == ENTRY_PRESENT;
}

static __always_inline bool entry_writable(__u64 e)
{
	return e & ENTRY_RW;
}

static __always_inline bool entry_dirty(__u64 e)
{
	return e & (ENTRY_DIRTY | ENTRY_SAVED_DIRTY);
}

static __always_inline bool entry_protnone(__u64 e)
{
	return (e & (ENTRY_PRESENT | ENTRY_PROTNONE)) == ENTRY_PROTNONE;
}

/* The frame of an entry without access stands inverted (pgtable-invert.h). */
static __always_inline __u64 entry_frame(__u64 e)
{
	return (entry_protnone(e) ? ~e : e) & ENTRY_FRAME;
}

/* swp_type: the five top bits (pgtable_64.h). */
static __always_inline __u32 entry_swap_type(__u64 e)
{
	return e >> 59;
}

#else

/*
 * arch/arm64/include/asm/pgtable-hwdef.h and pgtable-prot.h. Without access is bit 58
 * before 6.10 and bit 11 since; user space says which.
 */
#define ENTRY_PRESENT (1ULL << 0)
#define ENTRY_TABLE (1ULL << 1)
#define ENTRY_READ_ONLY (1ULL << 7)
#define ENTRY_WRITE (1ULL << 51)
#define ENTRY_DIRTY (1ULL << 55)
#define ENTRY_SPECIAL (1ULL << 56)
#define ENTRY_UFFD_WP (1ULL << 58)
#define ENTRY_FRAME 0x0003fffffffff000ULL

const volatile __u64 entry_protnone_bit = 1ULL << 11;

static __always_inline bool entry_present(__u64 e)
{
	return e & ENTRY_PRESENT;
}

static __always_inline bool entry_is_table(__u64 e)
{
	return (e & (ENTRY_PRESENT | ENTRY_TABLE)) == (ENTRY_PRESENT | ENTRY_TABLE);
}

static __always_inline bool entry_writable(__u64 e)
{
	return e & ENTRY_WRITE;
}

static __always_inline bool entry_dirty(__u64 e)
{
	return e & ENTRY_DIRTY || (e & (ENTRY_WRITE | ENTRY_READ_ONLY)) == ENTRY_WRITE;
}

static __always_inline bool entry_protnone(__u64 e)
{
	return !(e & ENTRY_PRESENT) && e & entry_protnone_bit;
}

static __always_inline __u64 entry_frame(__u64 e)
{
	return e & ENTRY_FRAME;
}

/* __swp_type: bits 6 to 10 since 6.10, 3 to 7 before. */
static __always_inline __u32 entry_swap_type(__u64 e)
{
	return (entry_protnone_bit == 1ULL << 11 ? e >> 6 : e >> 3) & 31;
}

#endif

/* The direct map's address of physical address 0, 0 where tables cannot be read. */
const volatile __u64 direct_map;
const volatile __u8 table_levels;

/* What the page table holds for an address. */
struct table_entry {
	__u64 value;
	__u8 level; /* 0: a page, 1: 2 MiB, 2: 1 GiB; of an empty entry, where it is missing */
	bool known;
	/* Of a page: which of the 16 around it, aligned, are mapped. */
	__u16 present;
};

#define AROUND 16 /* entries: 64 KiB, as much as the kernel maps around a fault */

static __always_inline __u64 index_of(__u64 address, int level)
{
	return address >> (PAGE_SHIFT + TABLE_SHIFT * level) & TABLE_MASK;
}

/* Reads the entry of the last level, and those around it into entries. */
static __always_inline void read_around(__u64 table, __u64 address, struct table_entry *found,
					__u64 entries[AROUND])
{
	__u64 index = index_of(address, 0);

	if (bpf_probe_read_kernel(entries, AROUND * sizeof(__u64),
				  (void *)(table + (index & ~(AROUND - 1ULL)) * 8)))
		return;
	for (int i = 0; i < AROUND; i++)
		found->present |= entry_present(entries[i]) << i;
	found->value = entries[index & (AROUND - 1)];
	found->level = 0;
	found->known = true;
}

/* Of the pages in a mask, how many have frames that continue that of address. */
static __always_inline __u16 run_around(const __u64 entries[AROUND], __u64 address, __u16 mask)
{
	__u64 at = index_of(address, 0) & (AROUND - 1);
	__u64 first = (entries[at] & ENTRY_FRAME) - (at << PAGE_SHIFT);
	__u16 n = 0;

	for (int i = 0; i < AROUND; i++)
		if (mask >> i & 1 && (entries[i] & ENTRY_FRAME) == first + (i << PAGE_SHIFT))
			n++;
	return n;
}

/*
 * Follows one table. Returns the next one, or 0 when there is none: then found says
 * why, if it could be read.
 */
static __always_inline __u64 next_table(__u64 table, __u64 address, int level, __u64 base,
					struct table_entry *found)
{
	__u64 value;

	if (bpf_probe_read_kernel(&value, sizeof(value),
				  (void *)(table + index_of(address, level) * 8)))
		return 0;
	if (entry_is_table(value))
		return base + (value & ENTRY_FRAME);
	found->value = value;
	found->level = level;
	found->known = true;
	return 0;
}

/* Finds the table of level 1 for an address; as next_table if there is none. */
static __always_inline __u64 middle_table(__u64 pgd, __u64 address, __u64 base, __u8 levels,
					  struct table_entry *found)
{
	__u64 table = pgd;

	for (int level = MAX_TABLE_LEVELS - 1; level > 1 && table; level--)
		if (level < levels)
			table = next_table(table, address, level, base, found);
	return table;
}

static __always_inline struct table_entry read_entry(__u64 pgd, __u64 address, __u64 base,
						     __u8 levels)
{
	struct table_entry found = {};
	__u64 entries[AROUND], table = middle_table(pgd, address, base, levels, &found);

	if (table)
		table = next_table(table, address, 1, base, &found);
	if (table)
		read_around(table, address, &found, entries);
	return found;
}

#endif
