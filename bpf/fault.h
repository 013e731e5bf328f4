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
/* Patterns of -c that fit a comm, and longer ones for the executable's name. */
#define MAX_COMM_PATTERNS 16
#define MAX_EXE_PATTERNS 4
#define EXE_PATTERN_WORDS 8

enum record_type {
	RECORD_FAULT = 1,
	RECORD_NAME = 2,
	RECORD_SELFTEST = 3,
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

enum label {
	LABEL_UNKNOWN,
	LABEL_ANON,
	LABEL_HEAP,
	LABEL_STACK,
	LABEL_FILE, /* named by a name record of the same dev, ino and hash */
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
};

/* What identifies a mapped file and its present name. */
struct name_key {
	__u64 ino;
	__u64 hash; /* qstr.hash and .len; for a special mapping the name's address */
	__u32 dev;
	__u32 zero;
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
	__u8 label;
	__u8 pad[3];
	char comm[COMM_LEN];
	char process[COMM_LEN];
};

struct name_record {
	__u32 type;
	__u32 len;
	struct name_key key;
	char name[NAME_LEN];
};

/* Faults by how they ended. */
struct tally {
	__u64 minor, major, failed;
	__u64 unknown; /* result unknown */
};

/* Per CPU; user space adds them up. */
struct counters {
	struct tally matched;	/* lost ones included, sampled-out ones too */
	struct tally lost_ring; /* no room in the ring buffer */
	struct tally unseen;	/* in min_flt or maj_flt, but without a record */
	__u64 lost_children;	/* processes that could not be followed */
	__u64 filtered;
	__u64 untimed; /* records of completions that were not heard of */
	__u64 pad;     /* to whole cache lines */
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
