/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Kernel types, trimmed to the fields that are read. Offsets come from the
 * running kernel's BTF (CO-RE), so the order here means nothing.
 */
#ifndef FAULTSNOOP_CORE_H
#define FAULTSNOOP_CORE_H

typedef signed char __s8;
typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;

typedef _Bool bool;
#define offsetof(type, member) __builtin_offsetof(type, member)
#define true 1
#define false 0

/* include/uapi/linux/bpf.h */
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_CGROUP_ARRAY = 8,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};
enum { BPF_F_NO_PREALLOC = 1, BPF_F_MMAPABLE = 1 << 10 };
enum { BPF_ANY = 0, BPF_NOEXIST = 1 };
enum { BPF_LOCAL_STORAGE_GET_F_CREATE = 1 };
enum { BPF_RB_NO_WAKEUP = 1, BPF_RB_FORCE_WAKEUP = 2, BPF_RB_AVAIL_DATA = 0 };

/* The values are the running kernel's. */
enum maple_type {
	maple_leaf_64 = 1,
	maple_arange_64 = 3,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long di, si, dx, cx, r8, r9, ax, bp, ip, sp, cs, orig_ax;
};
struct bpf_perf_event_data {
	struct pt_regs regs;
	__u64 sample_period;
	__u64 addr;
};
#elif defined(__TARGET_ARCH_arm64)
struct user_pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
};
struct pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
	__s32 syscallno;
};
struct bpf_perf_event_data {
	struct user_pt_regs regs;
	__u64 sample_period;
	__u64 addr;
};
#else
#error "unsupported architecture"
#endif

struct ns_common {
	unsigned int inum;
};

struct pid_namespace {
	struct ns_common ns;
};

struct upid {
	int nr;
	struct pid_namespace *ns;
};

struct pid {
	unsigned int level;
	struct upid numbers[1];
};

typedef struct {
	unsigned int val;
} kuid_t;

struct cred {
	kuid_t uid;
};

struct qstr {
	__u32 hash, len;
	const unsigned char *name;
};

struct hlist_bl_node {
	struct hlist_bl_node **pprev;
};

struct dentry {
	struct hlist_bl_node d_hash;
	struct dentry *d_parent;
	struct qstr d_name;
	struct inode *d_inode;
};

struct vfsmount {
	struct dentry *mnt_root;
	struct super_block *mnt_sb;
};

struct mount {
	struct mnt_namespace *mnt_ns;
	struct mount *mnt_parent;
	struct dentry *mnt_mountpoint;
	struct vfsmount mnt;
	int mnt_id;
};

struct path {
	struct vfsmount *mnt;
	struct dentry *dentry;
};

struct super_block {
	unsigned int s_dev;
	unsigned long s_magic;
};

struct inode {
	unsigned short i_mode;
	unsigned int i_flags;
	unsigned long i_ino;
	struct super_block *i_sb;
};

struct file {
	struct path f_path;
	struct inode *f_inode;
};

/* fs/file_table.c, since 6.5 */
struct backing_file {
	struct file file;
	struct path user_path;
};

struct rb_node {
	struct rb_node *rb_right;
	struct rb_node *rb_left;
};

/* Linux before 6.1 kept the mappings in a red-black tree. */
struct rb_root {
	struct rb_node *rb_node;
};

struct mm_struct___rb {
	struct rb_root mm_rb;
};

/* Since 6.1 they are in a maple tree. */
struct maple_tree {
	void *ma_root;
};

struct mm_struct___maple {
	struct maple_tree mm_mt;
};

struct mm_struct___seq {
	int mm_lock_seq;
};

typedef struct {
	unsigned int sequence;
} seqcount_t;

struct mm_struct___seqcount {
	seqcount_t mm_lock_seq;
};

struct maple_range_64 {
	unsigned long pivot[15];
	void *slot[16];
};

struct maple_arange_64 {
	unsigned long pivot[9];
	void *slot[10];
};

struct vm_special_mapping {
	const char *name;
};

struct mm_struct {
	unsigned long start_brk, brk, start_stack;
	struct file *exe_file;
	void *pgd;
};

struct vm_userfaultfd_ctx {
	void *ctx;
};

struct vm_area_struct {
	unsigned long vm_start, vm_end;
	struct mm_struct *vm_mm;
	unsigned long vm_flags;
	const void *vm_ops;
	unsigned long vm_pgoff;
	struct file *vm_file;
	void *vm_private_data;
	struct vm_userfaultfd_ctx vm_userfaultfd_ctx;
};

typedef struct {
	unsigned long pte;
} pte_t;

struct vm_fault {
	unsigned long pgoff;
	unsigned long address; /* rounded down to a page */
	pte_t orig_pte;
};

/* Since 5.18 (commit 824ddc601adc) the address is there with its offset in the page too. */
struct vm_fault___real {
	unsigned long real_address;
};

/* Since 5.17, if built with CONFIG_ANON_VMA_NAME. */
struct anon_vma_name {
	char name[1];
};

struct vm_area_struct___named {
	struct anon_vma_name *anon_name;
};

struct vm_area_struct___rb {
	struct rb_node vm_rb;
};

struct signal_struct {
	struct {
		int counter;
	} live;
};

struct thread_struct {
#if defined(__TARGET_ARCH_x86)
	unsigned long error_code;
	unsigned long fsbase;
#else
	unsigned long fault_code;
	struct {
		unsigned long tp_value;
	} uw;
#endif
};

/* throttle_count: with CONFIG_CFS_BANDWIDTH. */
struct cfs_rq {
	int throttle_count;
};

/* cfs_rq: with CONFIG_FAIR_GROUP_SCHED. */
struct sched_entity {
	struct cfs_rq *cfs_rq;
};

struct task_struct {
	void *stack;
	int pid, tgid;
	int prio;
	struct sched_entity se;
	char comm[16];
	struct mm_struct *mm;
	struct task_struct *group_leader;
	struct signal_struct *signal;
	struct pid *thread_pid;
	const struct cred *cred;
	unsigned long min_flt, maj_flt;
	int pagefault_disabled;
	__u64 start_time;
	unsigned in_iowait : 1;
	__u64 self_exec_id;
	struct thread_struct thread;
};

struct task_struct___state {
	unsigned int __state;
};

/* Linux before 5.14. */
struct task_struct___old_state {
	long state;
};

struct callback_head {
	void *func;
};

/* Since 6.18, with CONFIG_CFS_BANDWIDTH. */
struct task_struct___throttled {
	struct callback_head sched_throttle_work;
};

/* The context of iter/task programs (kernel/bpf/task_iter.c). */
struct bpf_iter__task {
	struct task_struct *task;
};

/* include/uapi/asm-generic/siginfo.h: only the arm for SIGSEGV and SIGBUS. */
union __sifields {
	struct {
		void *_addr;
	} _sigfault;
};

struct kernel_siginfo {
	int si_signo;
	int si_code;
	union __sifields _sifields;
};

#pragma clang attribute pop

#endif
