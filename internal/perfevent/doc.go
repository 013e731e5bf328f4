// Package perfevent hears of page faults through perf_event_open(2) alone, without
// BPF and, for one's own processes, without privilege.
//
// Per CPU and traced task it opens the software events page-faults-min and -maj,
// which the kernel fires when a fault is complete (mm_account_fault in mm/memory.c),
// and page-faults, which fires when handling begins; the pair gives the latency. All
// events of one CPU write into one ring. The rings are merged by time, and the
// fork, exec, comm, mmap and exit records among them keep a picture of which thread
// has which name and which mappings.
//
// The package starts no goroutine: all work is done by the caller of [Session.Next].
package perfevent
