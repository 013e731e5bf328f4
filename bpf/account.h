/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The life of a record: begin() starts it, end() completes it, settle() takes up what no
 * program heard the end of, emit() sends or counts it. All of them keep a thread's
 * min_flt and maj_flt in step with what was recorded.
 */
#ifndef FAULTSNOOP_ACCOUNT_H
#define FAULTSNOOP_ACCOUNT_H

#include "ring.h"
#include "task.h"
#include "filter.h"
#include "look.h"
#include "rendezvous.h"
#include "stack.h"
#include "stat.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

/*
 * Keep every Nth record; 0 and 1 keep all. The sequence is read after it was
 * raised, since 5.10 has no atomic that does both: two CPUs at once may shift the
 * choice by one record, never the counts.
 */
const volatile __u64 sample;
volatile __u64 sample_seq;

/*
 * CLOCK_MONOTONIC soon after armed was set, 0 before: all faults of a thread that is
 * born later should be heard of.
 */
volatile __u64 watching_since_ns;

static __always_inline void tally(struct tally *t, const struct fault_record *rec)
{
	__sync_fetch_and_add(&t->faults[outcome_of(rec)], 1);
}

/* Sends the fault in st->rec, or counts why not. It has a stack if the thread is still there. */
static __always_inline void emit(struct task_state *st, bool there)
{
	struct fault_record *rec = &st->rec;
	struct counters *c = counters();

	st->phase = IDLE;
	if (!c)
		return;
	rec->cpu = bpf_get_smp_processor_id();
	if (rec->type == RECORD_SELFTEST) {
		bpf_ringbuf_output(&records, rec, sizeof(*rec), BPF_RB_FORCE_WAKEUP);
		return;
	}
	if (st->ignored || !end_matches(rec)) {
		__sync_fetch_and_add(&c->filtered, 1);
		return;
	}
	tally(&c->matched, rec);
	rec->stack = 0;
	if (take_stacks && there && st->place)
		take_stack(st);
	if (count_only) {
		count_fault(st, current_task());
	} else if (sample > 1) {
		__sync_fetch_and_add(&sample_seq, 1);
		if (sample_seq % sample != 1)
			return;
	}
	if (unwinding == UNWIND_AT_END && there && st->place == PLACE_FAULT) {
		rec->sampled_weight = choose(rec->end_ns);
		rec->sampled_ns = rec->sampled_weight ? rec->end_ns : 0;
	}
	if (rec->sampled_ns)
		__sync_fetch_and_add(&c->asked, 1);
	else if (count_only)
		return;
	if (bpf_ringbuf_output(&records, rec, sizeof(*rec), wakeup())) {
		/* What is counted is not lost, and has no stack then. */
		if (!count_only)
			tally(&c->lost_ring, rec);
	} else if (unwinding == UNWIND_AT_END && rec->sampled_ns) {
		wait_there(rec->sampled_ns, rec->address, 0);
	}
}

/* By how much the kernel's counts of a thread have grown. */
struct growth {
	__u64 minor, major;
};

/* Takes the growth since the last call; st then accounts for it. */
static __always_inline struct growth take_growth(struct task_state *st, struct task_struct *task)
{
	__u64 min_flt = READ_TASK(task, min_flt), maj_flt = READ_TASK(task, maj_flt);
	struct growth g = { min_flt - st->min_flt, maj_flt - st->maj_flt };

	st->min_flt = min_flt;
	st->maj_flt = maj_flt;
	return g;
}

static __always_inline void count_unseen(struct task_state *st, struct growth g)
{
	if (!st->wanted)
		return;
	if (g.minor)
		add_to(unseen.faults[OUTCOME_MINOR], g.minor);
	if (g.major)
		add_to(unseen.faults[OUTCOME_MAJOR], g.major);
}

/*
 * Sends a fault that was begun and whose completion nobody heard of: the growth
 * of the counts tells whether and how it was completed. Returns the rest of it.
 */
static __always_inline struct growth finish_unheard(struct task_state *st, struct growth g)
{
	struct fault_record *rec = &st->rec;
	/*
	 * Without handle_mm_fault's flags it was the exception that began it. A kernel
	 * access may then have failed, and the growth be of get_user_pages after it.
	 */
	bool sure = rec->known & KNOWN_FLAGS || rec->mode != MODE_KERNEL;
	bool completed = g.minor || g.major;

	if (st->phase != RETRY || completed) {
		rec->end_ns = rec->start_ns;
		rec->known &= ~KNOWN_LATENCY;
	}
	rec->known &= ~KNOWN_MAJOR;
	rec->major = 0;
	rec->offcpu_ns = 0;
	if (completed && !sure) {
		rec->result = RESULT_UNKNOWN;
	} else if (completed) {
		rec->known |= KNOWN_MAJOR;
		rec->result = RESULT_OK;
		if (g.major) {
			g.major--;
			rec->major = 1;
		} else {
			g.minor--;
		}
		if (!st->ignored)
			count(untimed);
	} else if (rec->mode == MODE_USER && (__s64)rec->address < 0) {
		/* The vsyscall page: emulated, neither mapped nor refused. */
		rec->result = RESULT_UNKNOWN;
	} else if (rec->mode == MODE_KERNEL && st->phase != RETRY) {
		rec->result = RESULT_EFAULT;
	} else {
		rec->result = RESULT_INTERRUPTED;
	}
	emit(st, false);
	return g;
}

/* Brings st up to what the kernel has counted for the thread. */
static __always_inline void settle(struct task_state *st, struct task_struct *task)
{
	struct growth g = take_growth(st, task);

	if (st->phase != IDLE)
		g = finish_unheard(st, g);
	count_unseen(st, g);
}

/*
 * Whether all faults of a thread should have been heard of: it was born after all
 * was in place, and has not come under the filters in the middle of its life.
 */
static __always_inline bool watched_from_birth(struct task_struct *task)
{
	return !filter_uid && !filter_cgroup && watching_since_ns &&
	       READ_TASK(task, start_time) >= watching_since_ns;
}

/*
 * Makes the state of a thread that is first heard of. What the kernel has counted
 * for it before is not ours, unless it has been watched from birth: then these are
 * faults that should have been heard of. NULL without memory; once there is some,
 * or at the thread's end, the faults until then are counted as unseen.
 */
static __always_inline struct task_state *new_state(struct task_struct *task)
{
	__u32 blank = BLANK;
	struct task_state *template = bpf_map_lookup_elem(&templates, &blank), *st;

	if (!template)
		return NULL;
	st = make_state(task, template);
	if (st && !watched_from_birth(task))
		take_growth(st, task);
	return st;
}

struct beginning {
	__u64 address, ip;
	__u32 flags;
	__u16 known;
	__u64 mm;
	__u64 sampled_ns, sampled_weight;
	__u8 mode, access;
	bool foreign_mm;
};

/* Stops accounting for a thread until it is wanted again. */
static __always_inline void forget(struct task_state *st)
{
	if (!st)
		return;
	st->wanted = false;
	st->phase = IDLE;
}

/*
 * Drops what was known of the program before an exec: its address space may be freed,
 * and a later one stand in its place.
 */
static __always_inline void forget_image(struct task_state *st, struct task_struct *task)
{
	__u64 exec_id = READ_TASK(task, self_exec_id);

	if (st->exec_id == exec_id && st->rec.image)
		return;
	st->exec_id = exec_id;
	st->rec.image = image_of(task);
	st->vma_mm = st->table_mm = st->exe_match = 0;
}

/*
 * Starts a record. st is the thread's state, NULL if it has none yet. Returns the
 * state, or NULL if the process is not wanted.
 */
static __always_inline struct task_state *begin(struct task_struct *task, struct task_state *st,
						const struct beginning *b)
{
	bool selftest = is_selftest(task, b->address), fresh = !st, wanted;
	struct fault_record *rec;

	if (!selftest && !armed) {
		/* Tracing has ended: what went unheard until here still counts. */
		if (st && st->wanted)
			settle(st, task);
		forget(st);
		return NULL;
	}
	if (!selftest && !process_matches(task, st, b->foreign_mm)) {
		forget(st);
		return NULL;
	}
	if (fresh)
		st = new_state(task);
	if (!st)
		return NULL;
	forget_image(st, task);
	wanted = !selftest && names_match(task, st);
	if (fresh)
		st->wanted = wanted;
	/* What went unheard since the last fault falls under the verdict of then. */
	settle(st, task);
	st->wanted = wanted;

	rec = &st->rec;
	identify(st, task);
	rec->type = selftest ? RECORD_SELFTEST : RECORD_FAULT;
	rec->start_ns = bpf_ktime_get_ns();
	rec->sampled_ns = b->sampled_ns;
	rec->sampled_weight = b->sampled_weight;
	rec->address = b->address;
	rec->ip = b->ip;
	rec->flags = b->flags;
	rec->known = b->known;
	rec->mode = b->mode;
	rec->access = b->access;
	rec->major = 0;
	rec->attempts = 0;
	st->place = PLACE_NONE;
	rec->cause = 0;
	rec->reclaim_ns = rec->compaction_ns = 0;
	rec->offcpu_ns = 0;
	st->raised = 0;
	st->ignored = !selftest && (!st->wanted || !begin_matches(rec));
	st->fault_mm = b->mm;
	st->user_sp = 0;
	st->off_since = 0;
	for (int i = 0; i < WAITS; i++)
		st->off_ns[i] = 0;
	st->task_since = st->reclaim_ns = st->compaction_ns = 0;
	if (!st->ignored)
		look_before(st);
	return st;
}

/* Sums up where the thread was while it was in the fault. */
static __always_inline void sum_waits(struct task_state *st)
{
	__u64 most = 0;

	st->rec.reclaim_ns = st->reclaim_ns;
	st->rec.compaction_ns = st->compaction_ns;
	st->rec.offcpu_ns = 0;
	for (int i = 0; i < WAITS; i++) {
		st->rec.offcpu_ns += st->off_ns[i];
		if (st->off_ns[i] > most) {
			most = st->off_ns[i];
			st->rec.wait = i;
		}
	}
}

static __always_inline void name_task(struct fault_record *rec, struct task_struct *task)
{
	bpf_get_current_comm(rec->comm, COMM_LEN);
	if (rec->host_pid == rec->host_tid)
		__builtin_memcpy(rec->process, rec->comm, COMM_LEN);
	else
		BPF_CORE_READ_INTO(&rec->process, task, group_leader, comm);
}

/*
 * Completes the fault in flight. Of a completed one the kernel's count must have
 * grown; if not, settle_all has just counted it as unseen.
 */
static __always_inline void end(struct task_state *st, struct task_struct *task, __u8 result,
				bool major)
{
	struct growth g = take_growth(st, task);
	struct fault_record *rec = &st->rec;

	if (!st->place)
		rec->end_ns = bpf_ktime_get_ns();
	rec->result = result;
	rec->major = major;
	rec->known |= KNOWN_LATENCY | KNOWN_MAJOR;
	if (result != RESULT_OK) {
		rec->known &= ~KNOWN_MAJOR;
	} else if (rec->type != RECORD_SELFTEST) {
		if (major ? !g.major : !g.minor) {
			st->phase = IDLE;
			return;
		}
		g.major -= major;
		g.minor -= !major;
	}
	count_unseen(st, g);
	if (!st->ignored) {
		sum_waits(st);
		look_after(st, result, major);
		if (remember_pages && result == RESULT_OK)
			remember(st);
	}
	emit(st, true);
}
#endif
