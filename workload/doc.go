// Package workload takes page faults whose number, kind and addresses are known
// beforehand, and reports them next to the kernel's own count. It is the oracle of
// the live tests and the demonstration of `faultsnoop workload`.
//
// A [Kind] lays its work out as jobs, one for each thread. Each thread reads
// getrusage(RUSAGE_THREAD) right before and right after its loop, so the
// difference is the loop's own faults and nothing of the Go runtime: memory comes
// from mmap(2), the loop and the reading ran once on resident memory, signals are
// blocked, and no garbage is collected meanwhile. The kernel's side of the count is
// mm_account_fault in mm/memory.c (since Linux 5.9): a resolved fault counts once
// for the task that took it, however often it was retried and whosever memory it was.
//
// [Command.Run] takes over the process: it changes GOMAXPROCS and the collector's
// settings while it runs, forks, and kind segv does not return. Run it in a process
// of its own and read its report with [Decode].
package workload
