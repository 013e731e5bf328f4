// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which page faults get a stack from the unwinder of another library: a perf_event
 * program on its own page-fault events, which ends in a tail call of the library's entry
 * or does nothing. What it leaves out costs a map look-up or two.
 */
#include "core.h"
#include "rendezvous.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

/* include/uapi/linux/bpf.h */
#define BPF_MAP_TYPE_PROG_ARRAY 3

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct mm_struct___code {
	unsigned long exec_vm, data_vm;
};

struct task_struct___code {
	struct mm_struct___code *mm;
};

#pragma clang attribute pop

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* How often a process may ask anew to be looked at, in ns: at first, and then. */
#define FIRST_LOOKS 32
#define LOOK_SOON 1000000
#define LOOK_LATER 100000000

struct counts {
	__u64 taken;
	__u64 failed;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct counts);
} tally SEC(".maps");

/* The library's native_tracer_entry. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} entry SEC(".maps");

/* The library's map of processes that it has lately asked user space to look at. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u64);
} reported_pids SEC(".maps");

/*
 * The library asks user space to look at a process when it meets code that it does not
 * know, but soon only every 25 s. A program that has just begun maps its libraries
 * within milliseconds: when there is more executable memory, forget that it has asked. Code that
 * is compiled at run time may be in writable memory, which counts as data.
 */
static __always_inline void see_new_code(struct process *p, struct task_struct___code *task,
					 __u32 tgid, __u64 now)
{
	__u64 exec_vm = BPF_CORE_READ(task, mm, exec_vm);
	__u64 data_vm = BPF_CORE_READ(task, mm, data_vm);
	__u64 gap = LOOK_LATER;

	if (exec_vm == p->exec_vm && data_vm == p->data_vm)
		return;
	if (exec_vm != p->exec_vm && p->looks < FIRST_LOOKS)
		gap = LOOK_SOON;
	if (now - p->looked < gap)
		return;
	p->exec_vm = exec_vm;
	p->data_vm = data_vm;
	p->looked = now;
	p->looks++;
	bpf_map_delete_elem(&reported_pids, &tgid);
}

/* Whether this fault is one whose stack is to be taken. */
static __always_inline bool wanted(struct bpf_perf_event_data *ctx, __u32 tgid)
{
	__u64 now, weight;

	if (unwinding != UNWIND_AT_BEGIN)
		return meet(ctx->addr) != NULL;
	leave_place();
	if (!bpf_map_lookup_elem(&processes, &tgid))
		return false;
	now = bpf_ktime_get_ns();
	weight = choose(now);
	if (!weight)
		return false;
	wait_there(now, ctx->addr, weight);
	return true;
}

SEC("perf_event")
int take_stack(struct bpf_perf_event_data *ctx)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32, zero = 0;
	struct process *p;
	struct counts *c;

	if (!wanted(ctx, tgid))
		return 0;
	p = add_process(tgid);
	c = bpf_map_lookup_elem(&tally, &zero);
	if (!p || !c)
		return 0;
	see_new_code(p, (void *)bpf_get_current_task(), tgid, bpf_ktime_get_ns());
	c->taken++;
	bpf_tail_call(ctx, &entry, 0);
	c->failed++;
	return 0;
}
