/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Where the programs that record faults meet the one that has stacks taken of them by
 * another library's unwinder. The maps here belong to the latter; without it they are
 * empty, and nothing is read or written.
 *
 *   hook tracepoint   emit() chooses a fault that matches, sends its record and leaves the
 *                     thread here; the unwinder's event, next on the same CPU, finds it.
 *   fentry, kprobe    The unwinder's event comes before handle_mm_fault, chooses, and leaves
 *                     the thread here; the beginning of the record finds it.
 *
 * So a record says whether and when a stack was asked for, and a stack is of one fault.
 */
#ifndef FAULTSNOOP_RENDEZVOUS_H
#define FAULTSNOOP_RENDEZVOUS_H

#include "core.h"
#include <bpf/bpf_helpers.h>

enum unwinding { UNWIND_NOTHING, UNWIND_AT_END, UNWIND_AT_BEGIN };
const volatile __u8 unwinding;

struct meeting {
	__u32 tid; /* 0 if nobody waits */
	__u32 pad;
	__u64 time; /* CLOCK_MONOTONIC */
	__u64 address;
	__u64 weight; /* for how many faults this one stands; only where it waits before its record
		       */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct meeting);
} rendezvous SEC(".maps");

/*
 * How often a fault is chosen. The window of an adaptive rate is of all CPUs together: when
 * it began, how many were chosen, for how many faults they stand, and at how many the rate
 * is halved. Two CPUs that begin a window at once make one rate wrong, for one window: that
 * is cheaper than a lock.
 */
struct pace {
	__u64 every;  /* one fault in so many; 0: as many as budget allows in window */
	__u64 window; /* ns */
	__u64 budget;
	__u64 begun, taken, weight, limit;
	__u64 rate;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pace);
} pacing SEC(".maps");

/* What was executable and data of a process when it was last looked at, and how often it was. */
struct process {
	__u64 exec_vm;
	__u64 data_vm;
	__u64 looked;
	__u64 looks;
};

/* Processes whose stacks are taken, by their id in the initial namespace. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct process);
} processes SEC(".maps");

static __always_inline struct meeting *meeting_place(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&rendezvous, &zero);
}

/* Leaves the current thread where the other program looks, in place of whoever was there. */
static __always_inline void wait_there(__u64 time, __u64 address, __u64 weight)
{
	struct meeting *m = meeting_place();

	if (!m)
		return;
	m->time = time;
	m->address = address;
	m->weight = weight;
	m->tid = (__u32)bpf_get_current_pid_tgid();
}

static __always_inline void leave_place(void)
{
	struct meeting *m = meeting_place();

	if (m)
		m->tid = 0;
}

/* What the current thread left there for a fault on the page of address, NULL if it did not. */
static __always_inline struct meeting *meet(__u64 address)
{
	struct meeting *m = meeting_place();
	bool found;

	if (!m)
		return NULL;
	found = m->tid && m->tid == (__u32)bpf_get_current_pid_tgid() &&
		!((m->address ^ address) >> 12);
	m->tid = 0;
	return found ? m : NULL;
}

static __always_inline struct process *add_process(__u32 tgid)
{
	struct process *p = bpf_map_lookup_elem(&processes, &tgid), fresh = {};

	if (p)
		return p;
	bpf_map_update_elem(&processes, &tgid, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&processes, &tgid);
}

static __always_inline void begin_window(struct pace *p, __u64 now)
{
	__u64 windows = (now - p->begun) / p->window, r;

	if (!windows || (__s64)(now - p->begun) < 0)
		return;
	r = (p->weight + p->budget * windows - 1) / (p->budget * windows);
	p->begun = now;
	p->taken = 0;
	p->weight = 0;
	p->limit = p->budget;
	p->rate = r ? r : 1;
}

/*
 * For how many faults the chosen one stands, 0 for one that is not chosen. By chance, not by
 * count, so that no rhythm of the program's hides a line of it.
 */
static __always_inline __u64 choose(__u64 now)
{
	__u32 zero = 0;
	struct pace *p = bpf_map_lookup_elem(&pacing, &zero);
	__u64 n;

	if (!p)
		return 0;
	n = p->every;
	if (!n) {
		begin_window(p, now);
		n = p->rate;
	}
	if (n > 1 && (__u64)bpf_get_prandom_u32() * n >> 32)
		return 0;
	if (p->every)
		return n;
	__sync_fetch_and_add(&p->taken, 1);
	__sync_fetch_and_add(&p->weight, n);
	if (p->taken >= p->limit) {
		p->limit += p->budget / 2;
		p->rate = 2 * n;
	}
	return n;
}

#endif
