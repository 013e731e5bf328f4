"""Compares a trace with the kernel's own counts.

demo_counts.py run USAGE COMMAND...      runs a command and writes its getrusage counts to USAGE
demo_counts.py compare TRACE TALK USAGE  counts the records of TRACE (faultsnoop trace --json);
                                         TALK holds the report of workload/alloc.py

Exit status of compare: 0 when all counts are equal, 1 when they differ.
"""

import json
import os
import sys


def run(usage_path, command):
    pid = os.fork()
    if pid == 0:
        os.execvp(command[0], command)
    _, status, usage = os.wait4(pid, 0)
    with open(usage_path, "w") as f:
        json.dump({"pid": pid, "minor": usage.ru_minflt, "major": usage.ru_majflt}, f)
    return os.waitstatus_to_exitcode(status)


def compare(trace_path, talk_path, usage_path):
    with open(talk_path, errors="replace") as f:
        reports = [r for r in map(json.loads, (line for line in f if line[0] == "{")) if r["type"] == "workload"]
    if not reports:
        sys.exit(f"{talk_path}: the program reported nothing")
    report = reports[-1]
    with open(usage_path) as f:
        usage = json.load(f)
    ranges = [(int(r["start"], 16), int(r["end"], 16)) for t in report["threads"] for r in t["ranges"]]

    inside, whole, header, summary = {"minor": 0, "major": 0}, {"minor": 0, "major": 0}, {}, {}
    with open(trace_path, errors="replace") as f:
        for record in map(json.loads, f):
            if record["type"] == "header":
                header = record
            elif record["type"] == "summary":
                summary = record
            elif record["type"] == "fault" and record["pid"] == report["pid"] and record["result"] == "ok":
                kind = "major" if record["major"] else "minor"
                whole[kind] += 1
                address = int(record["address"], 16)
                if any(start <= address < end for start, end in ranges):
                    inside[kind] += 1

    if not summary:
        sys.exit(f"{trace_path}: the trace ends without a summary")

    lost = summary["lost"]
    print(f"{'':24}{'faultsnoop':>21}{'getrusage':>21}\n{'':24}{'minor':>12}{'major':>9}{'minor':>12}{'major':>9}")
    equal = True
    for name, ours, kernel, missing in (
        ("in the program's blocks", inside, {"minor": report["minflt"], "major": report["majflt"]}, 0),
        ("in its whole life", whole, usage, lost),
    ):
        short = kernel["minor"] - ours["minor"]
        if name == "in its whole life" and "kernel" not in header["covers"]:
            verdict = "more, as this hook may not see faults in kernel mode here"
        elif ours["major"] != kernel["major"] or not 0 <= short <= missing:
            # A loss that the tool reports explains that many faults and no more.
            verdict, equal = "DIFFERS", False
        else:
            verdict = f"equal with {short} of {lost} lost" if short else "equal"
        print(f"{name:24}{ours['minor']:12,}{ours['major']:9,}{kernel['minor']:12,}{kernel['major']:9,}  {verdict}")
    print(f"hook {header['hook']}; lost {lost:,}")
    if lost:
        print("Lost means that the hook knows how many faults happened, but not their addresses. With hook tracepoint\n"
              "that is the page into which execve(2) copies a program's arguments.")
    return 0 if equal else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"] and len(sys.argv) > 3:
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    if sys.argv[1:2] == ["compare"] and len(sys.argv) == 5:
        sys.exit(compare(*sys.argv[2:]))
    sys.exit(__doc__)
