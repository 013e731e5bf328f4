#!/usr/bin/env python3
"""Allocate --size bytes in blocks of --block bytes and touch every page.

What it says is what it does: private anonymous memory without huge pages, one
minor page fault for each page. One human line goes to stdout, and to stderr one
line of JSON in the format of `faultsnoop workload`: process, address ranges, the
faults expected there and the kernel's own count (getrusage).
Python 3.8 or later, Linux, standard library only.
"""

import argparse
import ctypes
import errno
import gc
import json
import mmap
import os
import re
import resource
import sys
import threading


def size(text):
    """Bytes of a text like 4k, 10MB or 1GB; units are powers of 1024."""
    m = re.fullmatch(r"([0-9]+)\s*([kmgt]?)(?:i?b)?", text, re.IGNORECASE | re.ASCII)
    n = int(m[1]) << 10 * " kmgt".index(m[2].lower() or " ") if m else 0
    if not 0 < n < 1 << 47 or n % mmap.PAGESIZE:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a multiple of the page size, {mmap.PAGESIZE} bytes, above 0 and below 128TB")
    return n


def new_block(length):
    """Fresh private memory and its address. A bytearray would share pages with
    its neighbours and mmap's default is shared memory."""
    block = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        block.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError as e:
        if e.errno != errno.EINVAL:  # a kernel without huge pages
            raise
    return block, ctypes.addressof(ctypes.c_char.from_buffer(block))


def touch_pages(block, ones):
    """Write one byte of ones to each page of block; return how many minor and major
    faults that took. One statement, so that the interpreter allocates nothing in
    the middle and takes no fault of its own."""
    before = resource.getrusage(resource.RUSAGE_THREAD)
    block[::mmap.PAGESIZE] = ones
    after = resource.getrusage(resource.RUSAGE_THREAD)
    return after.ru_minflt - before.ru_minflt, after.ru_majflt - before.ru_majflt


def joined(ranges):
    """The ranges with those that follow each other in memory made one."""
    result = []
    for start, end in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1][1] = end
        else:
            result.append([start, end])
    return result


def expectation(length):
    """What the report says of length bytes."""
    n = length // mmap.PAGESIZE
    return {"pages": n, "faults": n, "minor": n, "major": 0, "either": 0, "failed": 0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", type=size, default="1GB", help="bytes to allocate in all (default %(default)s)")
    parser.add_argument("--block", type=size, default="10MB", help="bytes to allocate at a time (default %(default)s)")
    args = parser.parse_args()

    gc.disable()  # no collection between two readings
    rehearsal, _ = new_block(2 * mmap.PAGESIZE)
    touch_pages(rehearsal, b"\1\1")

    blocks, ranges, minflt, majflt = [], [], 0, 0
    for left in range(args.size, 0, -args.block):
        try:
            block, address = new_block(min(left, args.block))
        except OSError as e:
            sys.exit(f"alloc.py: mapping {min(left, args.block)} bytes: {e.strerror}")
        minor, major = touch_pages(block, b"\1" * (len(block) // mmap.PAGESIZE))
        blocks.append(block)
        ranges.append((address, address + len(block)))
        minflt += minor
        majflt += major

    total = expectation(sum(len(b) for b in blocks))
    counted = {"minflt": minflt, "majflt": majflt}
    with open("/proc/thread-self/comm", errors="replace") as f:
        comm = f.read().rstrip("\n")
    report = {
        "type": "workload", "kind": "alloc", "pid": os.getpid(), "page_size": mmap.PAGESIZE, "mode": "user",
        **total, **counted, "exact": (minflt, majflt) == (total["minor"], total["major"]),
        "threads": [{
            "tid": threading.get_native_id(), "comm": comm,
            "ranges": [{"start": hex(a), "end": hex(b), **expectation(b - a), "access": "write"}
                       for a, b in joined(ranges)],
            **counted,
        }],
    }
    print(f"allocated {total['pages'] * mmap.PAGESIZE} bytes in {len(blocks)} blocks and touched {total['pages']} pages: "
          f"{minflt} minor and {majflt} major faults", flush=True)
    print(json.dumps(report), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
