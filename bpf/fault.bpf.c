// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Page faults, one record each.
 *
 *   hook        beginning                        end
 *   fentry      fentry/handle_mm_fault           fexit/handle_mm_fault
 *   kprobe      kprobe/handle_mm_fault           kretprobe/handle_mm_fault
 *   tracepoint  tp_btf/page_fault_user, _kernel  perf_event on page-faults-min, -maj
 *
 * All of them call begin() and end(). Beside them, for every hook, tp_btf on
 * signal_generate (faults that no mapping answers), sched_wakeup_new and
 * sched_process_exit (who is traced), sched_switch and the tracepoints of reclaim and
 * compaction (what a fault waits for). Linux 5.10 and newer.
 *
 * Maps: records (ring buffer), counts (per CPU), states or states_by_task (a
 * thread's fault in flight), tracked, tids, cgroup (filters), names (file names
 * already sent), pages_seen, kind_rows, stat_rows, other_rows (counting only), and those
 * of rendezvous.h.
 *
 * Every thread's min_flt and maj_flt, which getrusage(2) reports, are compared at
 * the beginning of a fault with what was recorded before. A completion that no
 * program heard of shows there: it becomes a record without latency if its
 * beginning was seen, and is counted as unseen if not.
 */
#include "core.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "fault.h"
#include "ring.h"
#include "task.h"
#include "vma.h"
#include "filter.h"
#include "account.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Positions of the arguments of handle_mm_fault, by name from BTF. */
const volatile __u8 arg_vma, arg_address = 1, arg_flags = 2, arg_regs = 3;

/* Bits of the running kernel's enum fault_flag and enum vm_fault_reason. */
const volatile __u32 flag_write = 0x1, flag_tried = 0x20, flag_user = 0x40, flag_remote = 0x80,
		     flag_instruction = 0x100, flag_vma_lock;
const volatile __u32 ret_oom = 0x1, ret_sigbus = 0x2, ret_major = 0x4, ret_hwpoison = 0x30,
		     ret_sigsegv = 0x40, ret_retry = 0x400;

/* Bits of the x86 page-fault error code (arch/x86/include/asm/trap_pf.h). */
#define PF_WRITE 0x2
#define PF_USER 0x4
#define PF_INSTR 0x10

/* asm-generic/siginfo.h */
#define SIGBUS 7
#define SIGSEGV 11
#define SEGV_MAPERR 1
#define SEGV_ACCERR 2
#define SEGV_PKUERR 4
#define BUS_ADRERR 2
#define BUS_MCEERR_AR 4

/* include/linux/sched/prio.h: what is below runs by the rules of realtime. */
#define MAX_RT_PRIO 100

/*
 * Whether a runnable task leaves its CPU because the CPU quota of its cgroup, or of one
 * above, is used up. Its queue is throttled before sched_switch fires
 * (put_prev_task_fair, check_cfs_rq_runtime). Since 6.18 ("sched/fair: Switch to task
 * based throttle model") a task goes on until it returns to user mode, so never leaves
 * in a fault for that, though its queue counts as throttled all the while.
 */
static __always_inline bool is_throttled(struct task_struct *task)
{
	struct cfs_rq *queue = NULL;

	if (bpf_core_field_exists(((struct task_struct___throttled *)0)->sched_throttle_work) ||
	    !bpf_core_field_exists(task->se.cfs_rq) ||
	    !bpf_core_field_exists(queue->throttle_count))
		return false;
	queue = BPF_CORE_READ(task, se.cfs_rq);
	return BPF_CORE_READ(queue, throttle_count) > 0 && BPF_CORE_READ(task, prio) >= MAX_RT_PRIO;
}

static __always_inline __u8 why_off(struct task_struct *task, bool preempt, __u32 state)
{
	if (preempt || state == TASK_RUNNING)
		return is_throttled(task) ? WAIT_THROTTLED : WAIT_PREEMPTED;
	if (BPF_CORE_READ_BITFIELD_PROBED(task, in_iowait))
		return WAIT_IO;
	return state & TASK_INTERRUPTIBLE ? WAIT_SLEEP : WAIT_LOCK;
}

/* The last switch of a thread. Since 6.16 it may take faults after sched_process_exit. */
static __always_inline void depart(struct task_state *st, struct task_struct *task)
{
	settle(st, task);
	/* Task storage goes with the task. */
	if (!task_storage)
		drop_state(task);
}

/* sched_switch hands the state over, which a waker may have changed since (5.18). */
const volatile bool switch_has_state;

/* What a thread waits for while it is in a fault. */
SEC("tp_btf/sched_switch")
int leave_cpu(__u64 *ctx)
{
	struct task_struct *prev = (void *)ctx[1], *next = (void *)ctx[2];
	struct task_state *st = find_state(prev);
	__u32 state = switch_has_state ? ctx[3] : state_of(prev);

	if (st && state & TASK_DEAD) {
		depart(st, prev);
	} else if (st && armed && st->phase != IDLE && !st->ignored) {
		st->off_why = why_off(prev, ctx[0] & 1, state);
		st->off_since = bpf_ktime_get_ns();
	}
	st = find_state(next);
	if (st && st->off_since) {
		if (st->phase != IDLE)
			st->off_ns[st->off_why & (WAITS - 1)] += bpf_ktime_get_ns() - st->off_since;
		st->off_since = 0;
	}
	return 0;
}

/* Work on memory that a fault has to do for itself before it gets a page. */
static __always_inline int begin_work(void)
{
	struct task_state *st = find_state(current_task());

	if (st && st->phase != IDLE && !st->ignored)
		st->task_since = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int end_work(bool compaction)
{
	struct task_state *st = find_state(current_task());
	__u64 ns;

	if (!st || !st->task_since)
		return 0;
	ns = bpf_ktime_get_ns() - st->task_since;
	st->task_since = 0;
	if (compaction)
		st->compaction_ns += ns;
	else
		st->reclaim_ns += ns;
	return 0;
}

SEC("tp_btf/mm_vmscan_direct_reclaim_begin")
int begin_reclaim(void *ctx)
{
	return begin_work();
}

SEC("tp_btf/mm_vmscan_direct_reclaim_end")
int end_reclaim(void *ctx)
{
	return end_work(false);
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_begin")
int begin_cgroup_reclaim(void *ctx)
{
	return begin_work();
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_end")
int end_cgroup_reclaim(void *ctx)
{
	return end_work(false);
}

SEC("tp_btf/mm_compaction_begin")
int begin_compaction(void *ctx)
{
	return begin_work();
}

SEC("tp_btf/mm_compaction_end")
int end_compaction(void *ctx)
{
	return end_work(true);
}

static __always_inline bool is_retry_of(const struct task_state *st, __u64 address, __u32 flags)
{
	if (st->phase != RETRY || ((st->rec.address ^ address) & PAGE_MASK_4K))
		return false;
	/*
	 * Since per-VMA locks (6.4) the second attempt comes without TRIED: a fault
	 * that could not be handled under the VMA's lock starts over under mmap_lock.
	 */
	return flags & flag_tried || (st->last_flags & flag_vma_lock && !(flags & flag_vma_lock));
}

/* The unwinder's event has come before. */
static __always_inline void see_sampled(struct beginning *b)
{
	struct meeting *m = meet(b->address);

	if (!m)
		return;
	b->sampled_ns = m->time;
	b->sampled_weight = m->weight;
}

static __always_inline void enter_mm_fault(struct vm_area_struct *vma, __u64 address, __u32 flags,
					   struct pt_regs *regs, bool typed)
{
	struct task_struct *task = current_task();
	struct task_state *st = find_state(task);
	struct beginning b = { .address = address, .flags = flags };

	if (st && is_retry_of(st, address, flags)) {
		st->phase = HANDLING;
		st->last_flags = flags;
		st->rec.attempts++;
		return;
	}
	/* Without registers no exception has brought it here, and no event came before. */
	if (unwinding == UNWIND_AT_BEGIN && regs)
		see_sampled(&b);
	b.known = KNOWN_FLAGS | KNOWN_ACCESS | KNOWN_ATTEMPTS;
	b.mode = flags & flag_user ? MODE_USER : flags & flag_remote ? MODE_REMOTE : MODE_KERNEL;
	b.access = flags & flag_instruction ? ACCESS_EXEC :
		   flags & flag_write	    ? ACCESS_WRITE :
					      ACCESS_READ;
	if (regs) {
#if defined(__TARGET_ARCH_x86)
		b.ip = READ(typed, regs, ip);
#else
		b.ip = READ(typed, regs, pc);
#endif
		b.known |= KNOWN_IP;
	}
	if (b.mode == MODE_REMOTE)
		b.foreign_mm = READ(typed, vma, vm_mm) != READ_TASK(task, mm);
	if (direct_map)
		b.mm = (__u64)READ(typed, vma, vm_mm);
	/* The exception announced by page_fault_kernel has found its mapping. */
	if (st && st->phase == TRAPPED && st->rec.address == address)
		st->phase = IDLE;
	st = begin(task, st, &b);
	if (!st)
		return;
	st->phase = HANDLING;
	st->last_flags = flags;
	st->rec.attempts = 1;
	if (st->ignored)
		return;
	/* The self-test is our own fault, and no reason to take stacks of others of ours. */
	if (unwinding == UNWIND_AT_BEGIN && st->rec.type == RECORD_FAULT)
		add_process(st->rec.host_pid);
	if (regs && st->rec.mode == MODE_USER)
		st->user_sp = READ(typed, regs, sp);
	name_task(&st->rec, task);
	describe_vma(&st->rec, vma, typed, true);
	label_stack(st, task);
}

static __always_inline void exit_mm_fault(void *ctx, __u32 ret)
{
	struct task_struct *task = current_task();
	struct task_state *st = find_state(task);
	__u8 result = RESULT_OK;

	if (!st || st->phase != HANDLING) {
		if (armed && !(ret & ret_retry))
			count(filtered);
		return;
	}
	if (ret & ret_retry) {
		st->phase = RETRY;
		st->rec.end_ns = bpf_ktime_get_ns();
		st->rec.known |= KNOWN_LATENCY;
		return;
	}
	prepare_stack(st, ctx, PLACE_FAULT);
	if (ret & ret_oom)
		result = RESULT_OOM;
	else if (ret & ret_hwpoison)
		result = RESULT_HWPOISON;
	else if (ret & ret_sigbus)
		result = RESULT_SIGBUS;
	else if (ret & ret_sigsegv)
		result = RESULT_SIGSEGV;
	/* A signal follows, which must not become a second record. */
	st->raised = st->rec.mode == MODE_USER && result != RESULT_OK && result != RESULT_OOM;
	/* mm_account_fault: what had to be tried again is major. */
	end(st, task, result, ret & ret_major || st->last_flags & flag_tried);
}

/*
 * An argument of a traced function by its position. A plain ctx[position] would
 * be compiled to a variable offset, which the verifier refuses.
 */
#define FUNC_ARG(ctx, n)                                                                           \
	({                                                                                         \
		__u64 __arg;                                                                       \
		asm volatile("%0 = *(u64 *)(%1 + " #n " * 8)" : "=r"(__arg) : "r"(ctx));           \
		__arg;                                                                             \
	})

static __always_inline __u64 func_arg(const void *ctx, __u8 position)
{
	switch (position) {
	case 0:
		return FUNC_ARG(ctx, 0);
	case 1:
		return FUNC_ARG(ctx, 1);
	case 2:
		return FUNC_ARG(ctx, 2);
	case 3:
		return FUNC_ARG(ctx, 3);
	default:
		return FUNC_ARG(ctx, 4);
	}
}

SEC("fentry/handle_mm_fault")
int fentry_handle_mm_fault(__u64 *ctx)
{
	enter_mm_fault((void *)func_arg(ctx, arg_vma), func_arg(ctx, arg_address),
		       func_arg(ctx, arg_flags), (void *)func_arg(ctx, arg_regs), true);
	return 0;
}

/* The return value stands behind the arguments. */
const volatile __u8 arg_count = 4;

SEC("fexit/handle_mm_fault")
int fexit_handle_mm_fault(__u64 *ctx)
{
	exit_mm_fault(ctx, func_arg(ctx, arg_count));
	return 0;
}

static __always_inline __u64 probe_arg(struct pt_regs *ctx, __u8 position)
{
	switch (position) {
	case 0:
		return PT_REGS_PARM1_CORE(ctx);
	case 1:
		return PT_REGS_PARM2_CORE(ctx);
	case 2:
		return PT_REGS_PARM3_CORE(ctx);
	case 3:
		return PT_REGS_PARM4_CORE(ctx);
	default:
		return PT_REGS_PARM5_CORE(ctx);
	}
}

SEC("kprobe/handle_mm_fault")
int kprobe_handle_mm_fault(struct pt_regs *ctx)
{
	enter_mm_fault((void *)probe_arg(ctx, arg_vma), probe_arg(ctx, arg_address),
		       probe_arg(ctx, arg_flags), (void *)probe_arg(ctx, arg_regs), false);
	return 0;
}

SEC("kretprobe/handle_mm_fault")
int kretprobe_handle_mm_fault(struct pt_regs *ctx)
{
	exit_mm_fault(ctx, PT_REGS_RC_CORE(ctx));
	return 0;
}

#if defined(__TARGET_ARCH_x86)

static __always_inline struct task_state *trap(__u64 *ctx, bool user, struct task_struct *task)
{
	struct beginning b = { .address = ctx[0], .mode = user ? MODE_USER : MODE_KERNEL };
	struct pt_regs *regs = (void *)ctx[1];
	__u64 error_code = ctx[2];
	struct task_state *st;

	if (direct_map)
		b.mm = (__u64)READ_TASK(task, mm);
	b.ip = regs->ip;
	b.known = KNOWN_IP | KNOWN_ACCESS | KNOWN_SOME_FLAGS;
	b.access = error_code & PF_INSTR ? ACCESS_EXEC :
		   error_code & PF_WRITE ? ACCESS_WRITE :
					   ACCESS_READ;
	b.flags = (error_code & PF_WRITE ? flag_write : 0) |
		  (error_code & PF_INSTR ? flag_instruction : 0) | (user ? flag_user : 0);
	st = begin(task, find_state(task), &b);
	if (st && user)
		st->user_sp = regs->sp;
	return st;
}

/*
 * A fault of the kernel that counts: on a user address and not inside
 * pagefault_disable(), where the kernel only looks and never resolves. Reading the
 * task through bpf_probe_read_kernel disables page faults itself, for one more.
 */
static __always_inline bool kernel_fault_counts(__u64 address, struct task_struct *task)
{
	return (__s64)address >= 0 && READ_TASK(task, pagefault_disabled) <= (task_storage ? 0 : 1);
}

static __always_inline void enter_trap(__u64 *ctx, bool user)
{
	struct task_struct *task = current_task();
	struct task_state *st;

	if (!user && !kernel_fault_counts(ctx[0], task))
		return;
	st = trap(ctx, user, task);
	if (!st)
		return;
	st->phase = HANDLING;
	if (!st->ignored)
		name_task(&st->rec, task);
}

SEC("tp_btf/page_fault_user")
int enter_page_fault_user(__u64 *ctx)
{
	enter_trap(ctx, true);
	return 0;
}

SEC("tp_btf/page_fault_kernel")
int enter_page_fault_kernel(__u64 *ctx)
{
	enter_trap(ctx, false);
	return 0;
}

/*
 * For the hooks on handle_mm_fault: a kernel access that no mapping answers never
 * gets there and raises no signal.
 */
SEC("tp_btf/page_fault_kernel")
int announce_page_fault_kernel(__u64 *ctx)
{
	struct task_struct *task = current_task();
	struct task_state *st;

	if (!kernel_fault_counts(ctx[0], task))
		return 0;
	st = trap(ctx, false, task);
	if (!st)
		return 0;
	st->phase = TRAPPED;
	if (!st->ignored)
		name_task(&st->rec, task);
	return 0;
}

#endif

/* Completion as perf counts it: the event carries the address of the exception. */
static __always_inline struct task_state *completed(struct bpf_perf_event_data *ctx,
						    struct task_struct *task)
{
	struct task_state *st = find_state(task);

	if (st && st->phase == HANDLING && st->rec.address == ctx->addr)
		return st;
	if (armed)
		count(filtered);
	return NULL;
}

static __always_inline void exit_page_fault(struct bpf_perf_event_data *ctx, bool major)
{
	struct task_struct *task = current_task();
	struct task_state *st = completed(ctx, task);

	if (unwinding)
		leave_place();
	if (!st)
		return;
	prepare_stack(st, ctx, PLACE_FAULT);
	if (!st->ignored)
		find_vma(st, task, true);
	end(st, task, RESULT_OK, major);
}

SEC("perf_event")
int exit_minor(struct bpf_perf_event_data *ctx)
{
	exit_page_fault(ctx, false);
	return 0;
}

SEC("perf_event")
int exit_major(struct bpf_perf_event_data *ctx)
{
	exit_page_fault(ctx, true);
	return 0;
}

/* Which result a signal stands for, RESULT_UNKNOWN if no page fault raised it. */
static __always_inline __u8 signal_result(int sig, int code)
{
	if (sig == SIGSEGV && (code == SEGV_MAPERR || code == SEGV_ACCERR || code == SEGV_PKUERR))
		return RESULT_SIGSEGV;
	if (sig == SIGBUS && code == BUS_ADRERR)
		return RESULT_SIGBUS;
	if (sig == SIGBUS && code == BUS_MCEERR_AR)
		return RESULT_HWPOISON;
	return RESULT_UNKNOWN;
}

/* A user access that handle_mm_fault never heard of. */
static __always_inline struct task_state *begin_refused(struct task_struct *task,
							struct task_state *st, __u64 address)
{
	struct beginning b = { .address = address, .mode = MODE_USER };

	if (unwinding == UNWIND_AT_BEGIN)
		see_sampled(&b);
#if defined(__TARGET_ARCH_x86)
	__u64 error_code = READ_TASK(task, thread.error_code);

	b.access = error_code & PF_INSTR ? ACCESS_EXEC :
		   error_code & PF_WRITE ? ACCESS_WRITE :
					   ACCESS_READ;
	b.known = KNOWN_ACCESS;
#else
	/*
	 * ESR_ELx: exception class 0x20 or 0x21 is a fetch; bit 6 of a data abort is a
	 * write, unless bit 8 says cache maintenance.
	 */
	__u64 esr = READ_TASK(task, thread.fault_code);

	b.access = (esr >> 26 & 0x3e) == 0x20	       ? ACCESS_EXEC :
		   (esr & (1 << 6 | 1 << 8)) == 1 << 6 ? ACCESS_WRITE :
							 ACCESS_READ;
	b.known = KNOWN_ACCESS;
#endif
	st = begin(task, st, &b);
	if (st && !st->ignored)
		name_task(&st->rec, task);
	return st;
}

SEC("tp_btf/signal_generate")
int refuse(__u64 *ctx)
{
	struct task_struct *task = current_task();
	int sig = ctx[0];
	struct kernel_siginfo *info = (void *)ctx[1];
	struct task_state *st;
	__u64 address;
	__u8 result;
	int code;

	if ((sig != SIGSEGV && sig != SIGBUS) || (void *)ctx[2] != (void *)task)
		return 0;
	/* SEND_SIG_NOINFO and SEND_SIG_PRIV are small numbers, not pointers. */
	if ((__u64)info < 4096)
		return 0;
	code = BPF_CORE_READ(info, si_code);
	result = signal_result(sig, code);
	if (result == RESULT_UNKNOWN)
		return 0;
	address = (__u64)BPF_CORE_READ(info, _sifields._sigfault._addr);
	st = find_state(task);
	if (st && st->raised) {
		st->raised = 0;
		return 0;
	}
	if (!st || st->phase != HANDLING || (st->rec.address ^ address) & PAGE_MASK_4K)
		st = begin_refused(task, st, address);
	if (!st)
		return 0;
	st->rec.cause = sig == SIGSEGV ? code : 0;
	if (!st->ignored && !(st->rec.known & KNOWN_VMA))
		find_vma_unlocked(st, task);
	prepare_stack(st, ctx, PLACE_SIGNAL);
	/* What begin_refused begins is in no phase; a variable would make the verifier go twice. */
	if (st->phase == HANDLING) {
		end(st, task, result, false);
		return 0;
	}
	st->rec.end_ns = st->rec.start_ns;
	st->rec.result = result;
	emit(st, true);
	return 0;
}

/*
 * From Linux 7.0 on a task may be preempted inside a program on a tracepoint where
 * the kernel is preemptible, and the program is then skipped for other tasks. The
 * scheduler's own tracepoints fire with interrupts off, which excludes that: so forks
 * are followed by the child's first wake-up, and an exit is taken up again by the
 * dead task's last switch.
 */
SEC("tp_btf/sched_wakeup_new")
int follow_fork(__u64 *ctx)
{
	struct task_struct *parent = current_task(), *child = (void *)ctx[0];
	__u32 from = READ_TASK(parent, tgid), to = child->tgid;
	__u8 *value;

	if (from == to)
		return 0;
	if (observer_pidns) {
		from = observed_nr((__u64)BPF_CORE_READ(parent, group_leader, thread_pid));
		to = observed_nr((__u64)BPF_CORE_READ(child, thread_pid));
	}
	value = bpf_map_lookup_elem(&tracked, &from);
	/* The child may have the id of a process that ended without our noticing. */
	if (!value || !follow_children)
		bpf_map_delete_elem(&tracked, &to);
	else
		track(to);
	return 0;
}

/* Sends a fault in flight while the address space is still there to describe it. */
SEC("tp_btf/sched_process_exit")
int leave(__u64 *ctx)
{
	struct task_struct *task = current_task();
	struct task_state *st = find_state(task);
	struct ids ids = observed_ids(task);

	if (st)
		settle(st, task);
	else if (armed && !comm_patterns && !exe_patterns && watched_from_birth(task) &&
		 process_matches(task, NULL, false)) {
		add_to(unseen.faults[OUTCOME_MINOR], READ_TASK(task, min_flt));
		add_to(unseen.faults[OUTCOME_MAJOR], READ_TASK(task, maj_flt));
	}
	if (!BPF_CORE_READ(task, signal, live.counter))
		bpf_map_delete_elem(&tracked, &ids.pid);
	return 0;
}

/*
 * Run once when all is armed: notes the counts of every thread that is traced from
 * now on, so that those which never take a fault that is heard of add up too.
 */
SEC("iter/task")
int take_baseline(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	__u32 baseline = BASELINE;
	struct task_state *template = bpf_map_lookup_elem(&templates, &baseline);

	if (!task || !template || !READ_TASK(task, mm))
		return 0;
	note_pre_exec(task);
	/* Names, users and cgroups are judged when a fault is heard of. */
	if (comm_patterns || exe_patterns || filter_uid || filter_cgroup)
		return 0;
	if ((!trace_self && is_self(task)) || !is_named(task, NULL, false))
		return 0;
	template->min_flt = READ_TASK(task, min_flt);
	template->maj_flt = READ_TASK(task, maj_flt);
	template->wanted = true;
	make_state(task, template);
	return 0;
}

/*
 * Run once after armed was cleared: counts what has not been heard of. A fault in
 * flight has not been counted by the kernel either.
 */
SEC("iter/task")
int settle_all(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct task_state *st;

	if (!task)
		return 0;
	st = find_state(task);
	if (st)
		count_unseen(st, take_growth(st, task));
	return 0;
}

/* The numbers of the system calls that map memory where they say. */
#if defined(__TARGET_ARCH_x86)
enum { SYS_MMAP = 9, SYS_BRK = 12, SYS_MREMAP = 25 };
#else
enum { SYS_BRK = 214, SYS_MREMAP = 216, SYS_MMAP = 222 };
#endif

/* Memory is mapped by pages, whatever its size was said to be. */
static __always_inline __u64 page_end(__u64 address)
{
	return (address + (1 << PAGE_SHIFT) - 1) >> PAGE_SHIFT << PAGE_SHIFT;
}

/* Who has mapped memory: the stacks of the calls that did. */
SEC("tp_btf/sys_exit")
int note_mapping(__u64 *ctx)
{
	struct pt_regs *regs = (void *)ctx[0];
	struct mapping_record rec = { .type = RECORD_MAPPING };
	__u64 ret = ctx[1], size;
	struct task_struct *task;
	long nr;

#if defined(__TARGET_ARCH_x86)
	if (regs->cs == USER32_CS)
		return 0;
	nr = regs->orig_ax;
	size = nr == SYS_MREMAP ? regs->dx : regs->si;
#else
	nr = regs->syscallno;
	size = nr == SYS_MREMAP ? regs->regs[2] : regs->regs[1];
#endif
	if ((nr != SYS_MMAP && nr != SYS_MREMAP && nr != SYS_BRK) || (__s64)ret < 0 || !armed)
		return 0;
	task = current_task();
	if (!process_matches(task, NULL, false))
		return 0;
	rec.pid = observed_ids(task).pid;
	rec.image = image_of(task);
	rec.time_ns = bpf_ktime_get_ns();
	rec.start = ret;
	rec.end = page_end(ret + size);
	if (nr == SYS_BRK) {
		rec.brk = true;
		rec.start = page_end(BPF_CORE_READ(task, mm, start_brk));
		rec.end = page_end(ret);
	}
	rec.stack = take_caller(task);
	if (bpf_ringbuf_output(&records, &rec, sizeof(rec), wakeup()))
		count(mappings_lost);
	return 0;
}

/* A process has the mappings of its parent when it begins. */
SEC("tp_btf/sched_wakeup_new")
int note_fork(__u64 *ctx)
{
	struct task_struct *parent = current_task(), *child = (void *)ctx[0];
	struct mapping_record rec = { .type = RECORD_MAPPING };

	if (READ_TASK(parent, tgid) == child->tgid || !armed ||
	    !process_matches(parent, NULL, false))
		return 0;
	rec.pid = observed_ids(child).pid;
	rec.image = image_of(child);
	rec.time_ns = bpf_ktime_get_ns();
	rec.parent = observed_ids(parent).pid;
	rec.parent_image = image_of(parent);
	if (bpf_ringbuf_output(&records, &rec, sizeof(rec), wakeup()))
		count(mappings_lost);
	return 0;
}
