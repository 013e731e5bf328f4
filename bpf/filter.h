/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Which faults are wanted. Conditions on the process come first, since they spare
 * all other work; conditions on the beginning of the fault next; those that only
 * the end can answer last. The rules are those of fault.Filter in Go.
 */
#ifndef FAULTSNOOP_FILTER_H
#define FAULTSNOOP_FILTER_H

#include "ring.h"
#include "task.h"

/* Nothing is traced before user space sets this, after all is attached. */
volatile bool armed;

/* Thread group of the tool itself, as the observer, that is the tool, sees it. */
const volatile __u32 self_tgid;
const volatile bool trace_self;

/* The page of the tool that proves the hook, [start, end). */
volatile __u64 selftest_start, selftest_end;

const volatile bool filter_pid;	     /* only members of tracked */
const volatile bool filter_tid;	     /* only members of tids */
const volatile bool follow_children; /* forks of a wanted process are wanted */
const volatile bool filter_uid;
const volatile __u32 wanted_uid;
const volatile bool filter_cgroup;
const volatile __u32 comm_patterns; /* how many of the list are set */
const volatile __u32 exe_patterns;
const volatile struct comm_pattern comm_pattern_list[MAX_COMM_PATTERNS];
const volatile struct exe_pattern exe_pattern_list[MAX_EXE_PATTERNS];

const volatile bool filter_mode;
const volatile __u8 wanted_mode;
const volatile bool filter_access;
const volatile __u8 wanted_access;
const volatile __u64 addr_start, addr_end; /* addr_end 0: all */
const volatile bool filter_major;
const volatile bool wanted_major;
const volatile __u64 min_latency_ns;
const volatile __u32 wanted_kinds; /* a bit for each enum kind, 0: all */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, __u32);  /* thread group id, the observer's */
	__type(value, __u8); /* enum tracked */
} tracked SEC(".maps");

/* How often the process TRACKED_PRE_EXEC had called exec when all was armed. */
volatile __u64 pre_exec_id;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32); /* thread id, the observer's */
	__type(value, __u8);
} tids SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} cgroup SEC(".maps");

static __always_inline void track(__u32 tgid)
{
	__u8 value = TRACKED;

	if (bpf_map_update_elem(&tracked, &tgid, &value, BPF_ANY))
		count(lost_children);
}

/* Whether a thread is one of the tool's. */
static __always_inline bool is_self(struct task_struct *task)
{
	if (observer_pidns)
		return observed_nr((__u64)BPF_CORE_READ(task, group_leader, thread_pid)) ==
		       self_tgid;
	return READ_TASK(task, tgid) == self_tgid;
}

static __always_inline bool is_selftest(struct task_struct *task, __u64 address)
{
	return address >= selftest_start && address < selftest_end && is_self(task);
}

/*
 * Compares a pattern at every offset of a 16-byte name by shifting the name, which
 * the verifier takes as straight arithmetic.
 */
static __always_inline bool comm_contains(__u64 lo, __u64 hi, const volatile struct comm_pattern *p)
{
	__u64 plo = p->lo, phi = p->hi, mlo = p->lo_mask, mhi = p->hi_mask;

	for (int i = 0; i < COMM_LEN; i++) {
		if ((lo & mlo) == plo && (hi & mhi) == phi)
			return true;
		lo = lo >> 8 | hi << 56;
		hi >>= 8;
	}
	return false;
}

static __noinline int any_comm(__u64 lo, __u64 hi)
{
	for (__u32 i = 0; i < MAX_COMM_PATTERNS; i++) {
		if (i >= comm_patterns)
			break;
		if (comm_contains(lo, hi, &comm_pattern_list[i]))
			return 1;
	}
	return 0;
}

/*
 * Whether any long pattern stands in the file name of the executable. The name is
 * read anew at each offset: it is done once per exec, and needs no buffer that a
 * preempting thread could overwrite.
 */
static __noinline int any_exe(const unsigned char *text)
{
	__u64 part[EXE_PATTERN_WORDS] = {};
	__u64 found = 0;

	for (__u32 at = 0; at < NAME_LEN; at++) {
		if (bpf_probe_read_kernel_str(part, sizeof(part), text + at) <= 1)
			break;
		for (__u32 i = 0; i < MAX_EXE_PATTERNS; i++) {
			__u64 differs = 0;

			if (i >= exe_patterns)
				break;
			for (__u32 w = 0; w < EXE_PATTERN_WORDS; w++)
				differs |= (part[w] & exe_pattern_list[i].mask[w]) ^
					   exe_pattern_list[i].text[w];
			/* Without a branch, of which the verifier would try both arms each time. */
			found |= ~(differs | -differs) >> 63;
		}
	}
	return found;
}

/*
 * The verdict is kept with the thread until one of the names or, by exec, the program
 * changes, so a storm of faults compares two words each.
 */
static __always_inline bool name_matches(struct task_struct *task, struct task_state *st)
{
	__u64 name[2] = {}, leader[2] = {};

	bpf_get_current_comm(name, COMM_LEN);
	/* How much is read is the size of what the first argument points to. */
	BPF_CORE_READ_INTO(&leader, task, group_leader, comm);
	if (!st->comm_match || st->comm_key[0] != name[0] || st->comm_key[1] != name[1] ||
	    st->comm_key[2] != leader[0] || st->comm_key[3] != leader[1]) {
		st->comm_match =
			any_comm(name[0], name[1]) || any_comm(leader[0], leader[1]) ? 2 : 1;
		__builtin_memcpy(&st->comm_key[0], name, COMM_LEN);
		__builtin_memcpy(&st->comm_key[2], leader, COMM_LEN);
	}
	if (st->comm_match == 2)
		return true;
	if (!exe_patterns)
		return false;
	if (!st->exe_match) {
		const unsigned char *exe =
			BPF_CORE_READ(task, mm, exe_file, f_path.dentry, d_name.name);

		st->exe_match = any_exe(exe) ? 2 : 1;
	}
	return st->exe_match == 2;
}

/*
 * The tool's child is traced from its exec on. exec is noticed by its number and not
 * by a tracepoint, since a program on one may be skipped (see follow_fork).
 */
static __always_inline void note_pre_exec(struct task_struct *task)
{
	struct ids ids;
	__u8 *value;

	if (!filter_pid)
		return;
	ids = observed_ids(task);
	value = bpf_map_lookup_elem(&tracked, &ids.pid);
	if (value && *value == TRACKED_PRE_EXEC)
		pre_exec_id = READ_TASK(task, self_exec_id);
}

/* Whether a thread is one of the processes or threads that were named. */
static __always_inline bool is_named(struct task_struct *task, struct task_state *st,
				     bool foreign_mm)
{
	struct ids ids;

	if (!filter_pid && !filter_tid)
		return true;
	ids = observed_ids(task);
	if (filter_pid) {
		__u8 *value = bpf_map_lookup_elem(&tracked, &ids.pid);

		/* Its last thread has begun to exit, and the others still take faults. */
		if (!value && !(st && st->wanted))
			return false;
		if (value && *value == TRACKED_PRE_EXEC && !foreign_mm) {
			if (READ_TASK(task, self_exec_id) == pre_exec_id)
				return false;
			*value = TRACKED;
		}
	}
	return !filter_tid || bpf_map_lookup_elem(&tids, &ids.tid);
}

/*
 * Whether the current thread belongs to what is traced. foreign_mm says that the
 * fault is not on the thread's present address space, as with the arguments of an
 * exec that is under way.
 */
static __always_inline bool process_matches(struct task_struct *task, struct task_state *st,
					    bool foreign_mm)
{
	if (!trace_self && is_self(task))
		return false;
	if (!is_named(task, st, foreign_mm))
		return false;
	if (filter_uid && BPF_CORE_READ(task, cred, uid.val) != wanted_uid)
		return false;
	if (filter_cgroup && bpf_current_task_under_cgroup(&cgroup, 0) != 1)
		return false;
	return true;
}

/* As above, for conditions that need the thread's state. */
static __always_inline bool names_match(struct task_struct *task, struct task_state *st)
{
	if (!comm_patterns && !exe_patterns)
		return true;

	struct ids ids = {};

	/* Without pids to follow, tracked holds the children of matching processes. */
	if (follow_children && !filter_pid) {
		ids = observed_ids(task);
		if (bpf_map_lookup_elem(&tracked, &ids.pid))
			return true;
	}
	if (!name_matches(task, st))
		return false;
	if (follow_children && !filter_pid)
		track(ids.pid);
	return true;
}

static __always_inline bool begin_matches(const struct fault_record *rec)
{
	if (filter_mode && rec->mode != wanted_mode)
		return false;
	if (filter_access && (!(rec->known & KNOWN_ACCESS) || rec->access != wanted_access))
		return false;
	if (addr_end && (rec->address < addr_start || rec->address >= addr_end))
		return false;
	return true;
}

static __always_inline bool end_matches(const struct fault_record *rec)
{
	if (filter_major && (!(rec->known & KNOWN_MAJOR) || rec->major != wanted_major))
		return false;
	if (wanted_kinds && (!(rec->known & KNOWN_KIND) || !(wanted_kinds & 1U << rec->kind)))
		return false;
	if (min_latency_ns &&
	    (!(rec->known & KNOWN_LATENCY) || rec->end_ns - rec->start_ns < min_latency_ns))
		return false;
	return true;
}

#endif
