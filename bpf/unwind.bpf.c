// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Which page faults get a stack from the unwinder of another library: a perf_event
 * program on its own page-fault events, which ends in a tail call of the library's entry
 * or does nothing. What it leaves out costs a map look-up and a random number.
 */
#include "core.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

/* include/uapi/linux/bpf.h */
#define BPF_MAP_TYPE_PROG_ARRAY 3

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct mm_struct___code {
	unsigned long exec_vm, data_vm;
};

struct task_struct___family {
	int tgid;
	struct mm_struct___code *mm;
	struct task_struct___family *real_parent, *group_leader;
};

#pragma clang attribute pop

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Take the stacks of all processes, not only of those in `processes`. */
const volatile bool everyone;
/* Take one fault in so many; 0: as many as `budget` stacks in `window` ns allow. */
const volatile __u32 every;
const volatile __u64 budget = 1000;
const volatile __u64 window = 500000000;

/* How often a process may ask anew to be looked at, in ns: at first, and then. */
#define FIRST_LOOKS 32
#define LOOK_SOON 1000000
#define LOOK_LATER 100000000

/*
 * The present window of an adaptive rate, of all CPUs together: when it began, how many
 * stacks were taken, for how many faults they stand, and at how many the rate is halved.
 * Two CPUs that begin a window at once make one rate wrong, for one window: that is
 * cheaper than a lock.
 */
volatile __u64 window_start, window_taken, window_weight, window_limit;
volatile __u64 rate = 1;

struct process {
	__u64 exec_vm;
	__u64 data_vm;
	__u64 looked;
	__u32 looks;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct process);
} processes SEC(".maps");

struct counts {
	__u64 seen;
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

/* A child of a wanted process is wanted: it is told by its first fault. */
static __always_inline struct process *find_process(struct task_struct___family *task, __u32 tgid)
{
	struct process *p = bpf_map_lookup_elem(&processes, &tgid);
	struct process fresh = {};
	__u32 parent;

	if (p)
		return p;
	if (!everyone) {
		parent = BPF_CORE_READ(task, group_leader, real_parent, tgid);
		if (!bpf_map_lookup_elem(&processes, &parent))
			return NULL;
	}
	bpf_map_update_elem(&processes, &tgid, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&processes, &tgid);
}

/*
 * The library asks user space to look at a process when it meets code that it does not
 * know, but soon only every 25 s. A program that has just begun maps its libraries
 * within milliseconds: when there is more executable memory, forget that it has asked. Code that
 * is compiled at run time may be in writable memory, which counts as data.
 */
static __always_inline void see_new_code(struct process *p, struct task_struct___family *task,
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

static __always_inline void begin_window(__u64 now)
{
	__u64 windows = (now - window_start) / window, r;

	if (!windows)
		return;
	r = (window_weight + budget * windows - 1) / (budget * windows);
	window_start = now;
	window_taken = 0;
	window_weight = 0;
	window_limit = budget;
	rate = r ? r : 1;
}

/* By chance, not by count, so that no rhythm of the program's hides a line of it. */
static __always_inline bool chosen(__u64 now)
{
	__u64 n = every;

	if (!n) {
		begin_window(now);
		n = rate;
	}
	if (n > 1 && (__u64)bpf_get_prandom_u32() * n >> 32)
		return false;
	if (every)
		return true;
	__sync_fetch_and_add(&window_taken, 1);
	__sync_fetch_and_add(&window_weight, n);
	if (window_taken >= window_limit) {
		window_limit += budget / 2;
		rate = 2 * n;
	}
	return true;
}

SEC("perf_event")
int take_stack(struct bpf_perf_event_data *ctx)
{
	struct task_struct___family *task = (void *)bpf_get_current_task();
	__u32 tgid = bpf_get_current_pid_tgid() >> 32, zero = 0;
	struct process *p;
	struct counts *c;
	__u64 now;

	if (!tgid)
		return 0;
	p = find_process(task, tgid);
	c = bpf_map_lookup_elem(&tally, &zero);
	if (!p || !c)
		return 0;
	c->seen++;
	now = bpf_ktime_get_ns();
	see_new_code(p, task, tgid, now);
	if (!chosen(now))
		return 0;
	c->taken++;
	bpf_tail_call(ctx, &entry, 0);
	c->failed++;
	return 0;
}
