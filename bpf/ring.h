/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The way out: one ring for all CPUs, so records keep their order and a CPU that
 * comes online needs nothing new; and counters, which are exact when the ring is not.
 */
#ifndef FAULTSNOOP_RING_H
#define FAULTSNOOP_RING_H

#include "core.h"
#include "fault.h"
#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 23); /* bytes; set by user space */
} records SEC(".maps");

/*
 * One for each CPU, in memory that user space maps. To read it by bpf(2) would switch
 * programs of kprobes and perf events off on a CPU for that moment (bpf_disable_instrumentation),
 * which is long if the reader is preempted in it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set by user space */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct counters);
} counts SEC(".maps");

/*
 * The reader looks by itself every few ten milliseconds; it is only woken when
 * this many bytes wait. Waking it for each record would cost more than the record.
 */
const volatile __u64 wake_bytes = 1 << 18;

static __always_inline struct counters *counters(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&counts, &cpu);
}

/* A task may be preempted inside a program, so per-CPU values need atomic adds. */
#define add_to(field, n)                                                                           \
	({                                                                                         \
		struct counters *__c = counters();                                                 \
		if (__c)                                                                           \
			__sync_fetch_and_add(&__c->field, n);                                      \
	})
#define count(field) add_to(field, 1)

static __always_inline __u64 wakeup(void)
{
	if (bpf_ringbuf_query(&records, BPF_RB_AVAIL_DATA) >= wake_bytes)
		return BPF_RB_FORCE_WAKEUP;
	return BPF_RB_NO_WAKEUP;
}

#endif
