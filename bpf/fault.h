/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What crosses from the kernel to user space: records, counters and limits. The
 * Go side is generated from these types.
 */
#ifndef FAULTSNOOP_FAULT_H
#define FAULTSNOOP_FAULT_H

#define COMM_LEN 16
/* A file name component on Linux is at most 255 bytes (NAME_MAX). */
#define NAME_LEN 256
/* PATH_MAX */
#define PATH_LEN 4096
/* Patterns of -c that fit a comm, and longer ones for the executable's name. */
#define MAX_COMM_PATTERNS 16
#define MAX_EXE_PATTERNS 4
#define EXE_PATTERN_WORDS 8

enum record_type {
	RECORD_FAULT = 1,
	RECORD_NAME = 2,
	RECORD_SELFTEST = 3,
	RECORD_MAX = 4,
	RECORD_STACK = 5,
	RECORD_MAPPING = 6,
};

enum mode {
	MODE_USER,
	MODE_KERNEL,
	MODE_REMOTE,
};

enum access {
	ACCESS_READ,
	ACCESS_WRITE,
	ACCESS_EXEC,
};

/* The order is that of fault.Result in Go. */
enum result {
	RESULT_OK,
	RESULT_SIGBUS,
	RESULT_SIGSEGV,
	RESULT_OOM,
	RESULT_HWPOISON,
	RESULT_INTERRUPTED,
	RESULT_EFAULT,
	RESULT_UNKNOWN = 255,
};

/* What the kernel did. The order is that of fault.Kind in Go. */
enum kind {
	KIND_UNKNOWN,
	KIND_ANON,
	KIND_ZERO,
	KIND_THP,
	KIND_FILE,
	KIND_COW_FILE,
	KIND_COW,
	KIND_REUSE,
	KIND_MKWRITE,
	KIND_SHMEM,
	KIND_SWAP,
	KIND_HUGETLB,
	KIND_NUMA,
	KIND_UFFD,
	KIND_DEVICE,
	KIND_SPURIOUS,
	KINDS,
};

/* Where the pages of a mapping come from. */
enum backing {
	BACKING_UNKNOWN,
	BACKING_ANON,
	BACKING_FILE,  /* a page cache that can be written back */
	BACKING_SHMEM, /* tmpfs, memfd, System V, shared anonymous memory */
	BACKING_HUGETLB,
	BACKING_DEVICE, /* a driver, or the kernel itself as for [vdso] */
};

enum label {
	LABEL_UNKNOWN,
	LABEL_ANON,
	LABEL_HEAP,
	LABEL_STACK,
	LABEL_ANON_NAME, /* by prctl; named by a name record of the same hash */
	LABEL_FILE,	 /* named by a name record of the same dev, ino and hash */
	LABEL_THREAD_STACK,
};

/* Which parts of a fault_record hold knowledge. */
enum known {
	KNOWN_LATENCY = 1 << 0,
	KNOWN_MAJOR = 1 << 1,
	KNOWN_FLAGS = 1 << 2,	   /* all of FAULT_FLAG_* */
	KNOWN_SOME_FLAGS = 1 << 3, /* those that the error code implies */
	KNOWN_ATTEMPTS = 1 << 4,
	KNOWN_IP = 1 << 5,
	KNOWN_VMA = 1 << 6,
	KNOWN_ACCESS = 1 << 7,
	KNOWN_KIND = 1 << 8,
	KNOWN_BEFORE = 1 << 9, /* entry_before */
	KNOWN_AFTER = 1 << 10, /* entry_after */
	KNOWN_AGAIN = 1 << 11, /* again */
};

/* Why a thread was off its CPU. The order is that of fault.Wait in Go. */
enum wait {
	WAIT_PREEMPTED, /* it could have gone on */
	WAIT_IO,	/* io_schedule: for the disk, or a page that is locked meanwhile */
	WAIT_LOCK,	/* uninterruptible, not for I/O: locks of memory management */
	WAIT_SLEEP,	/* may be ended by a signal: userfaultfd, FUSE */
	WAIT_THROTTLED, /* its cgroup's CPU quota was used up */
	WAITS = 8,	/* a power of two */
};

/* What identifies a mapped file and its present name. */
struct name_key {
	__u64 ino;
	__u64 hash; /* qstr.hash and .len; for a special mapping the name's address */
	__u32 dev;
	__u32 mount; /* mnt_id: the same file may have other paths elsewhere */
};

enum name_flag {
	NAME_PATH = 1,	  /* the components of a path, the last one first, each with its NUL */
	NAME_DELETED = 2, /* by now it has no name in its folder any more */
	NAME_CUT = 4,	  /* the first components are missing */
};

struct fault_record {
	__u32 type; /* enum record_type */
	__u32 cpu;
	__u64 start_ns; /* CLOCK_MONOTONIC, first entry */
	__u64 end_ns;	/* last exit */
	__u64 address;
	__u64 ip;
	__u64 vma_start, vma_end;
	__u64 vma_pgoff; /* pages */
	__u64 vma_flags;
	struct name_key file;
	__u32 host_pid, host_tid;
	__u32 pid, tid; /* in the observer's pid namespace */
	__u32 inner_pid, inner_tid;
	__u32 flags;
	__u16 attempts;
	__u16 known;
	__u8 mode, access, result, major;
	__u8 label, backing;
	__u8 kind;
	__u8 uffd;			 /* the mapping is registered with a userfaultfd */
	__u64 entry_before, entry_after; /* of the page table, as the hardware defines them */
	__u8 level_before, level_after;	 /* 0: a page, 1: 2 MiB, 2: 1 GiB */
	/* Pages that were mapped by it, within 64 KiB around the address. */
	__u16 pages;
	__u16 folio;   /* of these, from one large folio of anonymous memory */
	__u16 present; /* which of these were mapped before */
	__u64 offcpu_ns;
	/* Spent in direct reclaim and compaction, on or off the CPU. */
	__u64 reclaim_ns, compaction_ns;
	__u8 wait;  /* enum wait that took most of it */
	__u8 cause; /* si_code of the SIGSEGV that it ended with, 0 for none */
	__u8 again; /* the page has faulted before in this run */
	__u8 pad;
	__u32 image; /* tells the programs of a process apart, and processes with one id */
	char comm[COMM_LEN];
	char process[COMM_LEN];
	__u64 stack; /* id of its stack_record, 0 if it has none */
	/*
	 * When another library's unwinder was asked for its stack, 0 if it was not, and for how
	 * many faults that stands.
	 */
	__u64 sampled_ns;
	__u64 sampled_weight;
};

/* Frames of one kind, and of a whole stack: a power of two. */
#define MAX_FRAMES 127
#define MAX_STACK 256

/* The order is that of fault.StackEnd in Go. */
enum stack_end {
	STACK_WHOLE,
	STACK_TRUNCATED,
	STACK_UNREADABLE,
	STACK_INCOMPLETE,
	STACK_NONE,
};

/* A stack, sent once before the first record that has it. */
struct stack_record {
	__u32 type;
	__u32 pid, host_pid; /* as in a fault_record */
	__u32 image;
	__u64 id, check;
	__u64 time_ns; /* of its first fault */
	char process[COMM_LEN];
	__u16 kernel, user; /* frames; those of the kernel come first */
	__u32 end;	    /* enum stack_end */
	__u64 frames[MAX_STACK];
};

struct name_record {
	__u32 type;
	__u32 len;
	struct name_key key;
	__u32 flags; /* enum name_flag */
	__u32 pad;
	char name[PATH_LEN + NAME_LEN];
};

/* A page of a process between two execs. */
struct page_key {
	__u32 tgid, exec_id;
	__u64 born; /* the process, as its id may be another one's later */
	__u64 page;
};

/* A system call that has mapped memory. */
struct mapping_record {
	__u32 type;
	__u32 pid, image; /* as in a fault_record */
	__u32 brk;	  /* it has moved the end of the heap there */
	__u64 time_ns;
	__u64 start, end;
	__u64 stack; /* id of its stack_record, 0 if it has none */
	/* Of a fork, which has nothing else: the process whose mappings it has. */
	__u32 parent, parent_image;
};

enum outcome { OUTCOME_MINOR, OUTCOME_MAJOR, OUTCOME_FAILED, OUTCOME_UNKNOWN, OUTCOMES };

/* Faults by how they ended. */
struct tally {
	__u64 faults[OUTCOMES]; /* by enum outcome */
};

/* Per CPU; user space adds them up. */
struct counters {
	struct tally matched;	/* lost ones included, sampled-out ones too */
	struct tally lost_ring; /* no room in the ring buffer */
	struct tally unseen;	/* in min_flt or maj_flt, but without a record */
	__u64 lost_children;	/* processes that could not be followed */
	__u64 filtered;
	__u64 untimed;	     /* records of completions that were not heard of */
	__u64 unremembered;  /* pages for which there was no room in pages_seen */
	__u64 stackless;     /* faults for whose stack there was no room */
	__u64 stacks_unsent; /* faults whose stack found no room in the ring buffer */
	__u64 stack_rows;    /* that were made in tables by stack */
	__u64 mappings_lost; /* calls that have mapped memory, without room for their record */
	__u64 asked;  /* faults with sampled_ns, whether there was room for their record or not */
	__u64 pad[3]; /* to whole cache lines */
};

/* How often, and what it cost. */
struct cost {
	struct tally tally;
	__u64 ns; /* of all but the untimed ones */
	__u64 max_ns;
	__u64 untimed;
	__u64 bytes; /* mapped, as far as page tables can be read */
	__u64 offcpu_ns;
};

/* Latency histograms: 32 buckets to each power of two, up to 2^41 ns. */
#define HIST_SUB_BITS 5
#define HIST_SUB 32
#define HIST_BUCKETS (HIST_SUB * 37)

struct kind_row {
	struct cost cost;
	__u64 buckets[HIST_BUCKETS];
};

/* What a table has a row for each of. The order is that of aggregate.By in Go. */
enum by {
	BY_PROCESS,
	BY_THREAD,
	BY_KIND,
	BY_FILE,
	BY_MAPPING,
	BY_PAGE,
	BY_CGROUP,
	BY_UID,
	BY_CPU,
	BY_ACCESS,
	BY_MODE,
	BY_RESULT,
	BY_STACK,
	BY_SAMPLE,
};

#define MAX_STAT_TABLES 4

/* One row of one table; what the table is not by is zero. */
struct stat_key {
	__u32 table;
	__u32 id;    /* pid, tid, uid, CPU or the value of an enum */
	__u64 value; /* pid of a thread, address of a page or a mapping (a stack's end), id of a
			cgroup or a stack */
	struct name_key file; /* of a sample: ino is the pid, dev the kind, mount whether major */
	char name[COMM_LEN];
	__u8 label;
	__u8 pad[7];
};

/* In place of a table's number: rows that are in no table of their own. */
#define TABLE_KINDS 254	 /* id is the kind */
#define TABLE_OTHERS 255 /* id is the table */

/* A latency that was longer than any in its row. */
struct max_record {
	__u32 type;
	__u32 pad;
	__u64 ns;
	struct stat_key key;
};

/* A comm pattern, compared at each of 16 offsets of the 16-byte name. */
struct comm_pattern {
	__u64 lo, hi;
	__u64 lo_mask, hi_mask;
};

/* A pattern and which of its bytes count, as words. */
struct exe_pattern {
	__u64 text[EXE_PATTERN_WORDS];
	__u64 mask[EXE_PATTERN_WORDS];
};

/* State of a traced thread group. */
enum tracked {
	TRACKED = 1,
	/* Our own child before its exec: its present image is ours. */
	TRACKED_PRE_EXEC = 2,
};

#endif
