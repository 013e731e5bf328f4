/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Finding the mapping of an address in an address space: in a maple tree, before Linux 6.1
 * in a red-black tree. No lock is taken, so what is found has to be checked.
 */
#ifndef FAULTSNOOP_TREE_H
#define FAULTSNOOP_TREE_H

#include "core.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

static __always_inline bool holds(struct vm_area_struct *vma, __u64 address)
{
	return address >= BPF_CORE_READ(vma, vm_start) && address < BPF_CORE_READ(vma, vm_end);
}

/* Deeper than any tree of 2^20 mappings can be: sixteen times what vm.max_map_count allows. */
#define RB_DEPTH 40

/* Linux before 6.1. */
static __always_inline struct vm_area_struct *find_in_rb(struct mm_struct *mm, __u64 address)
{
	struct rb_node *node = BPF_CORE_READ((struct mm_struct___rb *)mm, mm_rb.rb_node);
	unsigned long at = bpf_core_field_offset(struct vm_area_struct___rb, vm_rb);

	for (int i = 0; i < RB_DEPTH && node; i++) {
		struct vm_area_struct *vma = (void *)node - at;

		if (holds(vma, address))
			return vma;
		if (address < BPF_CORE_READ(vma, vm_start))
			node = BPF_CORE_READ(node, rb_left);
		else
			node = BPF_CORE_READ(node, rb_right);
	}
	return NULL;
}

/*
 * A pointer to a maple tree node carries the node's type in bits 3 to 6; the nodes
 * are aligned to 256 bytes (lib/maple_tree.c, mte_to_node and mte_node_type). Only
 * the root says by its low bits whether it is a node at all (xa_is_node).
 */
#define MAPLE_NODE_MASK 255ULL
#define MAPLE_TYPE_SHIFT 3
#define MAPLE_TYPE_MASK 15
#define MAPLE_DEPTH 8
#define MAPLE_PIVOTS 15
#define MAPLE_ARANGE_PIVOTS 9

static __always_inline __u32 maple_type(__u64 node)
{
	return node >> MAPLE_TYPE_SHIFT & MAPLE_TYPE_MASK;
}

/* The slot of the first pivot that is not below address; a pivot of 0 ends the list. */
static __always_inline __u32 maple_slot(const __u64 *pivot, __u32 pivots, __u64 address)
{
	__u32 i;

	for (i = 0; i < pivots; i++)
		if (pivot[i] >= address || (i && !pivot[i]))
			break;
	return i;
}

#define SLOT(node, i) ((void *)__builtin_preserve_access_index(&(node)->slot) + (i) * sizeof(__u64))

/* Follows one node of the tree to the slot for address. */
static __always_inline __u64 maple_next(__u64 encoded, __u64 address)
{
	void *node = (void *)(encoded & ~MAPLE_NODE_MASK);
	__u64 pivot[MAPLE_PIVOTS] = {};
	__u64 next = 0;
	__u32 i;

	if (maple_type(encoded) == bpf_core_enum_value(enum maple_type, maple_arange_64)) {
		struct maple_arange_64 *n = node;

		if (bpf_core_read(pivot, MAPLE_ARANGE_PIVOTS * sizeof(__u64), &n->pivot))
			return 0;
		i = maple_slot(pivot, MAPLE_ARANGE_PIVOTS, address);
		bpf_probe_read_kernel(&next, sizeof(next), SLOT(n, i));
	} else {
		struct maple_range_64 *n = node;

		if (bpf_core_read(pivot, sizeof(pivot), &n->pivot))
			return 0;
		i = maple_slot(pivot, MAPLE_PIVOTS, address);
		bpf_probe_read_kernel(&next, sizeof(next), SLOT(n, i));
	}
	return next;
}

/* Linux 6.1 and newer. */
static __always_inline struct vm_area_struct *find_in_maple(struct mm_struct *mm, __u64 address)
{
	__u64 node = (__u64)BPF_CORE_READ((struct mm_struct___maple *)mm, mm_mt.ma_root);

	if ((node & 3) != 2 || node <= 4096)
		return (void *)node; /* a single mapping needs no node */
	for (int i = 0; i < MAPLE_DEPTH; i++) {
		__u64 next = maple_next(node, address);

		if (maple_type(node) == bpf_core_enum_value(enum maple_type, maple_leaf_64))
			return (void *)next;
		node = next;
	}
	return NULL;
}

#endif
