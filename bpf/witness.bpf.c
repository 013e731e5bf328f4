// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Programs that user space runs itself (BPF_PROG_TEST_RUN) to find out how the page
 * tables of the running kernel can be read, and to try the classification.
 *
 * All memory is mapped once more, in one piece, in the kernel's part of each address
 * space: the direct map (page_offset_base on x86-64, the linear map on arm64). Its
 * beginning is random, but mm->pgd is an address in it, and it is aligned to 1 GiB:
 * find_direct_map tries all places below mm->pgd for a value that stands at the
 * beginning of a page of the caller, whose frame /proc/self/pagemap tells.
 */
#include "core.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "fault.h"
#include "pagetable.h"
#include "classify.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define GIB (1ULL << 30)
#define TRIES 256

/* In: where the page is, what stands in it, and how many GiB were tried already. */
volatile __u64 page_physical, page_value, tried;
/* Out: 0 if it is not among the next TRIES. */
volatile __u64 found;

static __always_inline __u64 current_pgd(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return (__u64)BPF_CORE_READ(task, mm, pgd);
}

SEC("raw_tp")
int find_direct_map(void *ctx)
{
	__u64 pgd = current_pgd(), base = (pgd & ~(GIB - 1)) - tried * GIB, value;

	found = 0;
	for (int i = 0; i < TRIES; i++, base -= GIB) {
		if (base > pgd)
			break;
		if (bpf_probe_read_kernel(&value, sizeof(value), (void *)(base + page_physical)))
			continue;
		if (value == page_value) {
			found = base;
			break;
		}
	}
	return 0;
}

/* In: an address of the caller and what read_entry needs. Out: its page, or 0. */
volatile __u64 walk_address, walk_base;
volatile __u8 walk_levels;
volatile __u64 walked_to;

SEC("raw_tp")
int walk(void *ctx)
{
	struct table_entry e = read_entry(current_pgd(), walk_address, walk_base, walk_levels);

	walked_to = 0;
	if (e.known && !e.level && entry_present(e.value))
		walked_to = entry_frame(e.value);
	return 0;
}

/* In: what classify decides by. Out: its answer. */
struct evidence shown;
volatile __u8 answer;

SEC("raw_tp")
int try_classify(void *ctx)
{
	struct evidence e = shown;

	answer = classify(&e);
	return 0;
}
