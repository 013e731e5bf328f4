/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Stacks of faults. Each different one is sent once, and records and rows name it by an id.
 *
 * The user part is walked by frame pointers here and not by bpf_get_stack, which does not
 * say why it ends: at the outermost frame, at memory that is not resident (nothing is
 * faulted in for it, and a tracer of faults meets such memory more than others), or where
 * code keeps no frame pointers.
 */
#ifndef FAULTSNOOP_STACK_H
#define FAULTSNOOP_STACK_H

#include "core.h"
#include "ring.h"
#include "task.h"
#include "rendezvous.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

const volatile bool take_stacks;

/* Linux 5.15: bpf_task_pt_regs */
const volatile bool has_task_pt_regs;

/*
 * A different number in each run, so that no process can make stacks whose ids meet. Both
 * halves of an id are mixed with it.
 */
const volatile __u64 stack_seed;

/* Puts the types into BTF, from which the Go side is made. */
struct stack_record *stack_record_type __attribute__((unused));
struct mapping_record *mapping_record_type __attribute__((unused));

/*
 * The stacks that were sent: id to a second hash of the same frames. Whoever finds another
 * one at his id takes the next.
 */
struct sent_stacks {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* set by user space */
	__type(key, __u64);
	__type(value, __u64);
};

/*
 * A long trace sees more stacks than there is room for. Before that happens user space
 * begins a generation, which has a map of its own: each stack is sent again when it is next
 * seen. The generation is the upper part of an id, so that of no stack is given to another.
 * There are maps of the one before, for programs that have begun with it, and of the next.
 */
#define GENERATIONS 4
#define GENERATION_SHIFT 48

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, GENERATIONS);
	__type(key, __u32);
	__array(values, struct sent_stacks);
} stacks SEC(".maps");

volatile __u16 stack_generation;

/* The generation whose map is full, plus one: then nothing is sent in vain. */
volatile __u32 full_generation;

/*
 * Where a stack is put together: one place for each kind of program, since one on a
 * tracepoint may be preempted (Linux 7.0), and run by another task only after that.
 */
enum stack_place {
	PLACE_NONE,
	PLACE_FAULT,  /* perf events, kprobes, and fentry on kernels that do not preempt it */
	PLACE_SIGNAL, /* refuse */
	PLACE_CALL,   /* note_mapping */
	PLACES,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PLACES);
	__type(key, __u32);
	__type(value, struct stack_record);
} stack_scratch SEC(".maps");

struct user_regs {
	__u64 ip, sp, fp;
	bool compat; /* words have 4 bytes */
};

/* The stack of a task in the kernel, of machines with pages of 4 KiB. */
#define THREAD_SIZE (16 << 10)
#define USER32_CS 0x23

/* The registers with which the thread has left user mode. */
static __always_inline bool read_user_regs(struct task_struct *task, struct user_regs *to)
{
	struct pt_regs *regs;

	if (has_task_pt_regs)
		regs = (void *)bpf_task_pt_regs(task);
	else
		regs = READ_TASK(task, stack) + THREAD_SIZE - bpf_core_type_size(struct pt_regs);
#if defined(__TARGET_ARCH_x86)
	__u64 cs = BPF_CORE_READ(regs, cs);

	to->ip = BPF_CORE_READ(regs, ip);
	to->sp = BPF_CORE_READ(regs, sp);
	to->fp = BPF_CORE_READ(regs, bp);
	to->compat = cs == USER32_CS;
	return (cs & 3) == 3;
#else
	__u64 pstate = BPF_CORE_READ(regs, pstate);

	to->ip = BPF_CORE_READ(regs, pc);
	to->sp = BPF_CORE_READ(regs, sp);
	to->fp = BPF_CORE_READ(regs, regs[29]);
	/* PSR_MODE32_BIT, whose frames are of several kinds. */
	to->compat = pstate & 0x10;
	return !(pstate & 0xf) && !to->compat;
#endif
}

/* A frame pointer leads to the caller's and to the address to return to. */
struct link {
	__u64 fp, ip;
};

static __always_inline long read_link(const struct user_regs *regs, struct link *link)
{
	__u32 words[2];
	long err;

	if (!regs->compat)
		return bpf_probe_read_user(link, sizeof(*link), (void *)regs->fp);
	err = bpf_probe_read_user(words, sizeof(words), (void *)regs->fp);
	link->fp = words[0];
	link->ip = words[1];
	return err;
}

/* Where the innermost link may be below the stack pointer: so Go has it on arm64. */
#if defined(__TARGET_ARCH_x86)
#define BELOW_SP 0
#else
#define BELOW_SP 8
#endif

/* What a stack may be at most from one frame to the next. */
#define MAX_FRAME (64ULL << 20)

static __always_inline void add_frame(struct stack_record *rec, __u64 ip)
{
	__u32 n = rec->kernel + rec->user;

	rec->frames[n & (MAX_STACK - 1)] = ip;
	rec->user++;
	rec->id = (rec->id ^ ip) * 0x9e3779b97f4a7c15ULL;
	rec->check = (rec->check + ip) * 0xd6e8feb86659fd93ULL;
	rec->id ^= rec->id >> 29;
	rec->check ^= rec->check >> 32;
}

/* The frames of user mode, and how they end. */
static __always_inline void walk_user(struct stack_record *rec, struct user_regs *regs)
{
	__u64 last = regs->sp - BELOW_SP;
	struct link link;

	add_frame(rec, regs->ip);
	/* Of as many as fit the last one is asked too whether there is one more. */
	for (int i = 1; i <= MAX_FRAMES; i++) {
		rec->end = STACK_WHOLE;
		if (!regs->fp)
			return;
		rec->end = STACK_INCOMPLETE;
		if (regs->fp < last || regs->fp - last > MAX_FRAME || regs->fp & 3)
			return;
		rec->end = STACK_UNREADABLE;
		if (read_link(regs, &link))
			return;
		rec->end = STACK_WHOLE;
		if (!link.ip)
			return;
		rec->end = STACK_TRUNCATED;
		if (i == MAX_FRAMES)
			return;
		add_frame(rec, link.ip);
		last = regs->fp + 1;
		regs->fp = link.fp;
	}
}

/* Keeps the frames of the kernel in a place. */
static __noinline int keep_kernel_frames(void *ctx, __u32 place)
{
	struct stack_record *rec = bpf_map_lookup_elem(&stack_scratch, &place);
	long size;

	if (!rec)
		return 0;
	size = bpf_get_stack(ctx, rec->frames, MAX_FRAMES * sizeof(__u64), 0);
	rec->kernel = size > 0 ? size / sizeof(__u64) : 0;
	return 0;
}

/*
 * Begins with the stack of the fault that ctx, the context of a program, is about, when the
 * fault is over. Where it was in the kernel only the context tells; it is not kept until the
 * record is complete, since together with it that takes the verifier of 5.10 more
 * instructions than it looks at.
 */
static __always_inline void prepare_stack(struct task_state *st, void *ctx, __u32 place)
{
	if (st->ignored || (!take_stacks && unwinding != UNWIND_AT_END))
		return;
	st->rec.end_ns = bpf_ktime_get_ns();
	st->place = place;
	if (take_stacks && st->rec.mode != MODE_USER)
		keep_kernel_frames(ctx, place);
}

/* Puts the frames of the kernel that were kept before those of user mode. */
static __always_inline void add_kernel_frames(struct stack_record *rec)
{
	__u32 frames = rec->kernel;

	rec->kernel = 0;
	for (int i = 0; i < MAX_FRAMES; i++) {
		if (i >= frames)
			break;
		add_frame(rec, rec->frames[i]);
	}
	rec->kernel = rec->user;
	rec->user = 0;
}

#define STACK_PROBES 4
#define E2BIG 7

/* In place of an id: the stack is new, and there was no room in the ring. */
#define UNSENT (~0ULL)

/* The part of an id that is the stack's. 0 is none. */
#define ID_MASK ((1ULL << GENERATION_SHIFT) - 1)

/*
 * Finds the id of a stack and sends the stack if it is new. Returns 0 if there is no room
 * for one more, or UNSENT.
 */
static __always_inline __u64 intern(struct stack_record *rec)
{
	__u32 size = (rec->kernel + rec->user) & (MAX_STACK - 1);
	__u64 generation = stack_generation, hash = rec->id;
	__u32 slot = generation % GENERATIONS;
	void *sent = bpf_map_lookup_elem(&stacks, &slot);

	if (!sent)
		return 0;
	for (int i = 0; i < STACK_PROBES; i++) {
		__u64 id = ((hash + i) & ID_MASK) | generation << GENERATION_SHIFT;
		__u64 *check;
		long err;

		if (!(id & ID_MASK) || id == UNSENT)
			continue;
		check = bpf_map_lookup_elem(sent, &id);
		if (check && *check == rec->check)
			return id;
		if (check)
			continue;
		if (full_generation == generation + 1)
			return 0;
		/* Another CPU may be about to send it too, which does no harm. */
		rec->id = id;
		if (bpf_ringbuf_output(&records, rec,
				       offsetof(struct stack_record, frames) + size * sizeof(__u64),
				       wakeup()))
			return UNSENT;
		err = bpf_map_update_elem(sent, &id, &rec->check, BPF_NOEXIST);
		if (err) {
			if (err == -E2BIG)
				full_generation = generation + 1;
			check = bpf_map_lookup_elem(sent, &id);
			if (!check)
				return 0;
			if (*check != rec->check)
				continue;
		}
		return id;
	}
	return 0;
}

/* Begins a stack of the current thread. NULL cannot happen, but the verifier wants to hear it. */
static __always_inline struct stack_record *begin_stack(struct task_struct *task, __u32 place)
{
	struct stack_record *rec = bpf_map_lookup_elem(&stack_scratch, &place);
	struct ids ids = observed_ids(task);

	if (!rec)
		return NULL;
	rec->type = RECORD_STACK;
	rec->pid = ids.pid;
	rec->host_pid = READ_TASK(task, tgid);
	rec->image = image_of(task);
	rec->time_ns = bpf_ktime_get_ns();
	BPF_CORE_READ_INTO(&rec->process, task, group_leader, comm);
	rec->user = 0;
	rec->id = stack_seed ^ ids.pid;
	rec->check = stack_seed ^ (__u64)rec->image << 32;
	rec->end = STACK_NONE;
	return rec;
}

static __always_inline __u64 finish_stack(struct stack_record *rec, struct task_struct *task)
{
	struct user_regs regs = {};

	if (read_user_regs(task, &regs))
		walk_user(rec, &regs);
	/* How it ends and where its parts meet are of it too. */
	rec->id ^= rec->end ^ rec->kernel << 8;
	return intern(rec);
}

/* Takes the stack of a fault, in the place that was prepared. */
static __noinline int take_stack(struct task_state *st)
{
	struct task_struct *task = current_task();
	struct stack_record *rec = begin_stack(task, st->place);

	if (!rec)
		return 0;
	if (st->rec.mode == MODE_USER)
		rec->kernel = 0;
	else
		add_kernel_frames(rec);
	st->rec.stack = finish_stack(rec, task);
	if (!st->rec.stack)
		count(stackless);
	if (st->rec.stack == UNSENT) {
		count(stacks_unsent);
		st->rec.stack = 0;
	}
	return 0;
}

/* Takes the stack of a thread that is about to return from a system call. */
static __noinline __u64 take_caller(struct task_struct *task)
{
	struct stack_record *rec = begin_stack(task, PLACE_CALL);
	__u64 id;

	if (!rec)
		return 0;
	rec->kernel = 0;
	id = finish_stack(rec, task);
	return id == UNSENT ? 0 : id;
}

#endif
