/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What is remembered of a thread between the beginning and the end of its fault,
 * and who the thread is.
 *
 * Task storage needs bpf_task_storage_get in tracing programs and
 * bpf_get_current_task_btf (Linux 5.13, commit a10787e6d58c). Older kernels use a
 * hash keyed by the task's address, whose entries the exit program removes.
 */
#ifndef FAULTSNOOP_TASK_H
#define FAULTSNOOP_TASK_H

#include "core.h"
#include "fault.h"
#include "classify.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

/* Set by user space after it has probed for both. */
const volatile bool task_storage;

/* inum of the observer's pid namespace; 0 when that is the initial one. */
const volatile __u32 observer_pidns;

enum phase {
	IDLE,
	TRAPPED,  /* the exception was taken, handle_mm_fault not yet entered */
	HANDLING, /* entered, not returned */
	RETRY,	  /* returned VM_FAULT_RETRY; another attempt should follow */
};

/*
 * What a fault adds to each row that it is in. It is kept in a map, of whose values the
 * verifier knows nothing: on the stack it would follow each of them through each row.
 */
struct share {
	__u64 ns, offcpu_ns, bytes;
	__u32 outcome;
	__u32 timed;
};

struct task_state {
	struct fault_record rec;  /* the fault in flight */
	struct share share;	  /* when it is counted */
	struct evidence evidence; /* of what it was */
	__u64 host_pid_tgid;	  /* whose ids rec holds; they change on exec */
	/* min_flt and maj_flt as far as records or counters account for them. */
	__u64 min_flt, maj_flt;
	__u64 off_since; /* when it left its CPU, 0 if it is on one */
	__u64 off_ns[WAITS];
	__u64 task_since; /* when reclaim or compaction began, 0 outside of them */
	__u64 reclaim_ns, compaction_ns;
	__u64 fault_mm; /* the address space that the fault in flight is on */
	__u64 user_sp;	/* stack pointer of a fault in user mode, 0 if it is not known */
	__u64 table;	/* its page table of level 1 for the address, 0 if there is none */
	__u64 table_mm; /* that, the GiB and the state of mappings for which table holds */
	__u64 table_gib;
	__u32 table_seq;
	__u64 comm_key[4]; /* comm and process comm of the last verdict */
	__u64 exec_id;	   /* how often the thread's program was exchanged by exec */
	__u64 vma_mm;	   /* address space of the mapping in rec, 0 if it is no longer sure */
	__u32 vma_seq;	   /* and the state of its mappings */
	__u32 last_flags;  /* FAULT_FLAG_* of the latest attempt */
	__u8 phase;
	__u8 wanted;	 /* the thread matches all conditions on processes */
	__u8 ignored;	 /* the fault in flight does not match */
	__u8 raised;	 /* its error has been reported, the signal is to come */
	__u8 comm_match; /* verdict for comm_key: 0 none yet, 1 no, 2 yes */
	__u8 exe_match;	 /* the same for the executable */
	__u8 off_why;	 /* enum wait, since off_since */
	__u8 place;	 /* enum stack_place, where its stack has been begun */
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task_state);
} states SEC(".maps");

/*
 * Preallocated like all hashes here: kernels before 6.1 warn of hashes that
 * tracing programs make grow, and refuse them for perf events.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768);
	__type(key, __u64);
	__type(value, struct task_state);
} states_by_task SEC(".maps");

/*
 * New states are copied from here, since they are larger than the BPF stack likes:
 * the first is blank, the second is what take_baseline prepares.
 */
enum template { BLANK, BASELINE, TEMPLATES };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TEMPLATES);
	__type(key, __u32);
	__type(value, struct task_state);
} templates SEC(".maps");

/*
 * READ follows one pointer: as a plain load where the verifier knows the type of
 * base (typed), else through bpf_probe_read_kernel. typed must be constant to
 * either the compiler or the verifier.
 */
#define READ(typed, base, field)                                                                   \
	({                                                                                         \
		typeof((base)->field) __value;                                                     \
		if (typed)                                                                         \
			__value = (base)->field;                                                   \
		else                                                                               \
			__value = BPF_CORE_READ(base, field);                                      \
		__value;                                                                           \
	})

#define READ_TASK(task, field) READ(task_storage, task, field)

static __always_inline struct task_struct *current_task(void)
{
	if (task_storage)
		return bpf_get_current_task_btf();
	return (void *)bpf_get_current_task();
}

static __always_inline struct task_state *find_state(struct task_struct *task)
{
	__u64 key = (__u64)task;

	if (task_storage)
		return bpf_task_storage_get(&states, task, NULL, 0);
	return bpf_map_lookup_elem(&states_by_task, &key);
}

/* Returns the task's state, a copy of template if it had none; NULL without memory. */
static __always_inline struct task_state *make_state(struct task_struct *task,
						     struct task_state *template)
{
	__u64 key = (__u64)task;

	if (task_storage)
		return bpf_task_storage_get(&states, task, template,
					    BPF_LOCAL_STORAGE_GET_F_CREATE);
	bpf_map_update_elem(&states_by_task, &key, template, BPF_NOEXIST);
	return bpf_map_lookup_elem(&states_by_task, &key);
}

/* Forgets a task, on kernels that do not do so by themselves. */
static __always_inline void drop_state(struct task_struct *task)
{
	__u64 key = (__u64)task;

	bpf_map_delete_elem(&states_by_task, &key);
}

/* MAX_PID_NS_LEVEL in include/linux/pid_namespace.h */
#define PIDNS_LEVELS 32

/*
 * The id of a struct pid in the observer's namespace, 0 if it has none there. Not
 * static, so that the verifier looks at the loop once and not at every call.
 */
__noinline __u32 observed_nr(__u64 address)
{
	struct pid *pid = (void *)address;
	unsigned int level = BPF_CORE_READ(pid, level);

	for (unsigned int i = 0; i < PIDNS_LEVELS; i++) {
		struct upid upid;

		/*
		 * Compared anew each time. Else clang counts down from the smaller bound to
		 * zero, and Linux 5.10 does not learn from "not zero" that this ends.
		 */
		barrier_var(level);
		if (i > level)
			break;
		if (bpf_core_read(&upid, sizeof(upid), &pid->numbers[i]))
			return 0;
		if (BPF_CORE_READ(upid.ns, ns.inum) == observer_pidns)
			return upid.nr;
	}
	return 0;
}

/* The id of pid in its own namespace if that is not the initial one. */
static __always_inline __u32 inner_nr(struct pid *pid)
{
	unsigned int level = BPF_CORE_READ(pid, level);
	struct upid upid;

	if (!level || level >= PIDNS_LEVELS)
		return 0;
	if (bpf_core_read(&upid, sizeof(upid), &pid->numbers[level]))
		return 0;
	return upid.nr;
}

struct ids {
	__u32 pid, tid;
};

/* A thread's ids as the observer sees them. */
static __always_inline struct ids observed_ids(struct task_struct *task)
{
	struct ids ids = {};

	if (observer_pidns) {
		ids.pid = observed_nr((__u64)BPF_CORE_READ(task, group_leader, thread_pid));
		ids.tid = observed_nr((__u64)BPF_CORE_READ(task, thread_pid));
	} else {
		ids.pid = READ_TASK(task, tgid);
		ids.tid = READ_TASK(task, pid);
	}
	return ids;
}

/* A number that changes with each exec, and is another one for a later process of this id. */
static __always_inline __u32 image_of(struct task_struct *task)
{
	__u64 born = BPF_CORE_READ(task, group_leader, start_time);

	return (__u32)(READ_TASK(task, self_exec_id) << 24 ^ born >> 10) | 1;
}

/* The bits of a task's state (include/linux/sched.h). */
#define TASK_RUNNING 0
#define TASK_INTERRUPTIBLE 0x1
#define TASK_DEAD 0x80

static __always_inline __u32 state_of(struct task_struct *task)
{
	struct task_struct___state *new = (void *)task;
	struct task_struct___old_state *old = (void *)task;

	if (bpf_core_field_exists(new->__state))
		return BPF_CORE_READ(new, __state);
	return BPF_CORE_READ(old, state);
}

/* Fills the ids of st->rec, which stay until the thread changes its own by exec. */
static __always_inline void identify(struct task_state *st, struct task_struct *task)
{
	__u64 id = bpf_get_current_pid_tgid();

	if (st->host_pid_tgid == id)
		return;

	struct ids ids = observed_ids(task);

	st->host_pid_tgid = id;
	st->rec.host_pid = id >> 32;
	st->rec.host_tid = id;
	st->rec.pid = ids.pid;
	st->rec.tid = ids.tid;
	st->rec.inner_pid = inner_nr(BPF_CORE_READ(task, group_leader, thread_pid));
	st->rec.inner_tid = inner_nr(BPF_CORE_READ(task, thread_pid));
}

#endif
