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
	/* Of a page: which of the 16 around it, aligned, are mapped, */
	__u16 present;
	/* and which of them to frames that continue its own. */
	__u16 run;
};

#define AROUND 16 /* entries: 64 KiB, as much as the kernel maps around a fault */

/* Reads the entries around one of the last level. */
static __always_inline void read_around(__u64 table, __u64 index, struct table_entry *found)
{
	__u64 entries[AROUND], first;

	if (bpf_probe_read_kernel(entries, sizeof(entries),
				  (void *)(table + (index & ~(AROUND - 1ULL)) * 8)))
		return;
	for (int i = 0; i < AROUND; i++)
		found->present |= entry_present(entries[i]) << i;
	found->value = entries[index & (AROUND - 1)];
	first = entry_frame(found->value) - ((index & (AROUND - 1)) << PAGE_SHIFT);
	for (int i = 0; i < AROUND; i++)
		found->run |= (entry_frame(entries[i]) == first + (i << PAGE_SHIFT)) << i;
	found->known = true;
}

static __always_inline struct table_entry read_entry(__u64 pgd, __u64 address, __u64 base,
						     __u8 levels)
{
	struct table_entry found = {};
	__u64 table = pgd;

	for (int level = MAX_TABLE_LEVELS - 1; level >= 0; level--) {
		__u64 index = address >> (PAGE_SHIFT + TABLE_SHIFT * level) & TABLE_MASK, value;

		if (level >= levels)
			continue;
		if (!level) {
			read_around(table, index, &found);
			return found;
		}
		if (bpf_probe_read_kernel(&value, sizeof(value), (void *)(table + index * 8)))
			return found;
		if (!entry_is_table(value)) {
			found.value = value;
			found.level = level;
			found.known = true;
			return found;
		}
		table = base + (value & ENTRY_FRAME);
	}
	return found;
}

#endif
