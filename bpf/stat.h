/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Faults counted where they happen, instead of sent one by one: for each kind with a
 * histogram of latencies, and in tables by whatever was asked for. What finds no room
 * in a table is counted in that table's row "other".
 */
#ifndef FAULTSNOOP_STAT_H
#define FAULTSNOOP_STAT_H

#include "ring.h"
#include "stack.h"
#include "task.h"
#include <bpf/bpf_core_read.h>

/* Count, and send no records but those whose stack another library takes. */
const volatile bool count_only;

/* What the tables are by: enum by, and how many there are. */
const volatile __u8 tables_by[MAX_STAT_TABLES];
const volatile __u8 stat_tables;

/* One for each enum kind on each CPU; mapped, as counts are. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, KINDS); /* for one CPU; set by user space */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct kind_row);
} kind_rows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* set by user space */
	__type(key, struct stat_key);
	__type(value, struct cost);
} stat_rows SEC(".maps");

/* The rows of each table, on each CPU, for what found no room. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_STAT_TABLES); /* for one CPU; set by user space */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cost);
} other_rows SEC(".maps");

/* Puts the type into BTF, from which the Go side is made. */
struct max_record *max_record_type __attribute__((unused));

static __always_inline bool is_timed(const struct fault_record *rec)
{
	return rec->known & KNOWN_LATENCY && rec->end_ns >= rec->start_ns;
}

/* 0 if the latency is not known. */
static __always_inline __u64 latency_of(const struct fault_record *rec)
{
	return is_timed(rec) ? rec->end_ns - rec->start_ns : 0;
}

static __always_inline enum outcome outcome_of(const struct fault_record *rec)
{
	if (rec->result == RESULT_UNKNOWN)
		return OUTCOME_UNKNOWN;
	if (rec->result != RESULT_OK)
		return OUTCOME_FAILED;
	return rec->major ? OUTCOME_MAJOR : OUTCOME_MINOR;
}

static __always_inline __u64 bytes_of(const struct fault_record *rec)
{
	if (!(rec->known & KNOWN_AFTER) || rec->result != RESULT_OK)
		return 0;
	return rec->level_after && rec->pages ? 4096ULL << 9 * (rec->level_after & 3) :
						4096ULL * rec->pages;
}

/* Adds a fault to a row, but for the longest latency. */
static __always_inline void add_share(struct cost *c, const struct share *s)
{
	__sync_fetch_and_add(&c->tally.faults[s->outcome & (OUTCOMES - 1)], 1);
	if (s->bytes)
		__sync_fetch_and_add(&c->bytes, s->bytes);
	if (!s->timed)
		__sync_fetch_and_add(&c->untimed, 1);
	if (s->ns)
		__sync_fetch_and_add(&c->ns, s->ns);
	if (s->offcpu_ns)
		__sync_fetch_and_add(&c->offcpu_ns, s->offcpu_ns);
}

/*
 * Raises the longest latency of a row, which is named by its key or else by table and id.
 * 5.10 has no atomic maximum: of two at once the smaller one may be stored last. So each is
 * sent as well, and user space takes the longest. What the row has tells what need not be
 * sent: it is never more than what was sent, or stood in the row when it was made. Without
 * room in the ring the row alone has it.
 */
static __always_inline void raise_max(struct cost *c, __u64 ns, const struct stat_key *key,
				      __u32 table, __u32 id)
{
	struct max_record *max;

	if (ns <= c->max_ns)
		return;
	max = bpf_ringbuf_reserve(&records, sizeof(*max), 0);
	if (max) {
		if (key)
			__builtin_memcpy(&max->key, key, sizeof(max->key));
		else
			__builtin_memset(&max->key, 0, sizeof(max->key));
		max->key.table = table;
		if (!key)
			max->key.id = id;
		max->type = RECORD_MAX;
		max->pad = 0;
		max->ns = ns;
		bpf_ringbuf_submit(max, BPF_RB_NO_WAKEUP);
	}
	/* Only now: what is found here has been sent. */
	c->max_ns = ns;
}

/* The position of the highest bit that is set; v must not be 0. */
static __always_inline __u32 log2_of(__u64 v)
{
	__u32 n = 0;

	for (int step = 32; step; step >>= 1) {
		if (v >> step) {
			v >>= step;
			n += step;
		}
	}
	return n;
}

/*
 * Buckets as of aggregate.Histogram in Go: one for each value below 32, then 32 for
 * each power of two.
 */
static __always_inline __u32 bucket_of(__u64 ns)
{
	__u32 shift, bucket;

	if (ns < HIST_SUB)
		return ns;
	shift = log2_of(ns) - HIST_SUB_BITS;
	bucket = shift * HIST_SUB + (ns >> shift);
	return bucket < HIST_BUCKETS ? bucket : HIST_BUCKETS - 1;
}

static __always_inline void count_kind(const struct fault_record *rec, const struct share *s)
{
	__u32 kind = rec->known & KNOWN_KIND ? rec->kind : KIND_UNKNOWN;
	__u32 at = bpf_get_smp_processor_id() * KINDS + kind, bucket;
	struct kind_row *row = bpf_map_lookup_elem(&kind_rows, &at);

	if (!row)
		return;
	add_share(&row->cost, s);
	if (!s->timed)
		return;
	bucket = bucket_of(s->ns);
	if (bucket < HIST_BUCKETS)
		__sync_fetch_and_add(&row->buckets[bucket], 1);
	raise_max(&row->cost, s->ns, NULL, TABLE_KINDS, kind);
}

/*
 * What does not move of a mapping: a stack grows at its start, and new memory joins the
 * mapping above it.
 */
static __always_inline __u64 anchor_of(const struct fault_record *rec)
{
	return rec->label == LABEL_STACK || rec->label == LABEL_THREAD_STACK ? rec->vma_end :
									       rec->vma_start;
}

/* Fills the key of a fault in a table by one of enum by. */
static __always_inline void key_of(struct stat_key *key, __u8 by, const struct fault_record *rec,
				   struct task_struct *task)
{
	switch (by) {
	case BY_PROCESS:
		key->id = rec->pid;
		__builtin_memcpy(key->name, rec->process, COMM_LEN);
		break;
	case BY_THREAD:
		key->id = rec->tid;
		key->value = rec->pid;
		__builtin_memcpy(key->name, rec->comm, COMM_LEN);
		break;
	case BY_KIND:
		key->id = rec->known & KNOWN_KIND ? rec->kind : KIND_UNKNOWN;
		break;
	case BY_MAPPING:
		key->id = rec->pid;
		if (rec->known & KNOWN_VMA) {
			key->value = anchor_of(rec);
			/* Its name is the thread's id. */
			if (rec->label == LABEL_THREAD_STACK)
				key->file.ino = rec->tid;
		}
		/* fall through */
	case BY_FILE:
		key->label = rec->known & KNOWN_VMA ? rec->label : LABEL_UNKNOWN;
		if (key->label == LABEL_FILE || key->label == LABEL_ANON_NAME)
			key->file = rec->file;
		break;
	case BY_PAGE:
		key->id = rec->pid;
		key->value = rec->address & ~0xfffULL;
		break;
	case BY_CGROUP:
		key->value = bpf_get_current_cgroup_id();
		break;
	case BY_UID:
		key->id = BPF_CORE_READ(task, cred, uid.val);
		break;
	case BY_CPU:
		key->id = rec->cpu;
		break;
	case BY_ACCESS:
		key->id = rec->known & KNOWN_ACCESS ? rec->access : 255;
		break;
	case BY_MODE:
		key->id = rec->mode;
		break;
	case BY_RESULT:
		key->id = rec->result;
		break;
	case BY_SAMPLE:
		key->id = rec->tid;
		key->file.ino = rec->pid;
		key->file.dev = rec->known & KNOWN_KIND ? rec->kind : KIND_UNKNOWN;
		key->file.mount = rec->known & KNOWN_MAJOR && rec->major;
		__builtin_memcpy(key->name, rec->comm, COMM_LEN);
		/* fall through */
	case BY_STACK:
		key->value = rec->stack;
		/* User space empties the rows of a generation that has ended: all of them. */
		if (take_stacks && !rec->stack)
			key->value = (__u64)stack_generation << GENERATION_SHIFT;
		break;
	}
}

static __always_inline void count_in_table(__u32 table, const struct fault_record *rec,
					   const struct share *s, struct task_struct *task)
{
	struct stat_key key = { .table = table };
	/* Nobody asks for the longest latency with a stack. */
	bool stacked = tables_by[table] >= BY_STACK;
	struct cost *row;
	__u32 at;

	key_of(&key, tables_by[table], rec, task);
	row = bpf_map_lookup_elem(&stat_rows, &key);
	if (!row) {
		struct cost blank = { .max_ns = s->ns };

		/* Another CPU may make it at the same time. */
		if (!bpf_map_update_elem(&stat_rows, &key, &blank, BPF_NOEXIST) && stacked)
			count(stack_rows);
		row = bpf_map_lookup_elem(&stat_rows, &key);
	}
	if (row) {
		add_share(row, s);
		if (!stacked)
			raise_max(row, s->ns, &key, table, 0);
		return;
	}
	at = bpf_get_smp_processor_id() * MAX_STAT_TABLES + table;
	row = bpf_map_lookup_elem(&other_rows, &at);
	if (!row)
		return;
	add_share(row, s);
	if (!stacked)
		raise_max(row, s->ns, NULL, TABLE_OTHERS, table);
}

static __always_inline void fill_share(struct share *s, const struct fault_record *rec)
{
	s->ns = latency_of(rec);
	s->timed = is_timed(rec);
	s->offcpu_ns = s->timed ? rec->offcpu_ns : 0;
	s->bytes = bytes_of(rec);
	s->outcome = outcome_of(rec);
}

/* Not inline, since it is long and called from wherever a fault may end. */
static __noinline int count_fault(struct task_state *st, struct task_struct *task)
{
	const struct fault_record *rec = &st->rec;
	const struct share *s = &st->share;

	fill_share(&st->share, rec);
	count_kind(rec, s);
	for (__u32 i = 0; i < MAX_STAT_TABLES; i++) {
		if (i >= stat_tables)
			break;
		count_in_table(i, rec, s, task);
	}
	return 0;
}

#endif
