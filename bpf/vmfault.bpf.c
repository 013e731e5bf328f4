// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * What the kernel itself says of the self-test's fault, in the struct vm_fault that it
 * hands to handle_pte_fault. Stock kernels inline that function; where it is exposed
 * these programs are attached to it, for the time of the self-test only.
 */
#include "core.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define PAGE_MASK_4K (~0xfffULL)

/* The page, and the thread that will fault on it. */
volatile __u64 watched_page, watched_thread;

/* Of the last call for that page. */
struct vm_fault_seen {
	__u64 address, pgoff;
	__u64 entry; /* what was in the page table */
	bool called;
	bool exact;    /* address has its offset in the page */
	bool returned; /* entry is known */
};
volatile struct vm_fault_seen seen;

/* The call in flight. */
volatile __u64 in_flight;

/* Run by the thread itself, since only here it knows the id by which the kernel has it. */
SEC("raw_tp")
int watch_thread(void *ctx)
{
	watched_thread = bpf_get_current_pid_tgid();
	return 0;
}

SEC("kprobe/handle_pte_fault")
int enter_pte_fault(struct pt_regs *ctx)
{
	struct vm_fault *vmf = (void *)PT_REGS_PARM1_CORE(ctx);
	struct vm_fault___real *real = (void *)vmf;
	bool exact = bpf_core_field_exists(real->real_address);

	if (bpf_get_current_pid_tgid() != watched_thread)
		return 0;
	in_flight = 0;
	if ((BPF_CORE_READ(vmf, address) & PAGE_MASK_4K) != watched_page)
		return 0;
	in_flight = (__u64)vmf;
	seen.called = true;
	seen.returned = false;
	seen.pgoff = BPF_CORE_READ(vmf, pgoff);
	seen.exact = exact;
	seen.address = exact ? BPF_CORE_READ(real, real_address) : BPF_CORE_READ(vmf, address);
	return 0;
}

/*
 * handle_pte_fault reads the entry into orig_pte, and leaves it there. When it begins,
 * that may hold the entry of the table above (orig_pmd, since 5.14, commit 5db4f15c4fd7).
 */
SEC("kretprobe/handle_pte_fault")
int exit_pte_fault(struct pt_regs *ctx)
{
	struct vm_fault *vmf = (void *)in_flight;

	if (!vmf || bpf_get_current_pid_tgid() != watched_thread)
		return 0;
	in_flight = 0;
	seen.entry = BPF_CORE_READ(vmf, orig_pte.pte);
	seen.returned = true;
	return 0;
}
