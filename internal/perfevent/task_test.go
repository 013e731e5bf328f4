package perfevent

import (
	"testing"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/process"
)

func fork(pid, tid, ppid, ptid uint32) *record {
	return &record{kind: forked, pid: pid, tid: tid, side: &side{parentPID: ppid, parentTID: ptid}}
}

func rename(pid, tid uint32, name string, exec bool) *record {
	return &record{kind: renamed, pid: pid, tid: tid, side: &side{comm: fault.MakeComm(name), exec: exec}}
}

func lib(start uint64, label string) process.Mapping {
	return process.Mapping{Start: start * pageSize, End: (start + 10) * pageSize, Label: label}
}

// TestTasks plays the life of a small family of processes.
func TestTasks(t *testing.T) {
	ts := newTasks(false, map[uint32]bool{100: true}, true)
	name := func(tid uint32) (thread, proc string) {
		th := ts.threads[tid]
		if th == nil {
			return "", ""
		}
		return th.comm.String(), th.proc.comm.String()
	}
	label := func(pid uint32, page uint64) string {
		if m := ts.procs[pid].space.Find(page * pageSize); m != nil {
			return m.Label
		}
		return ""
	}

	leader := ts.get(100, 100)
	ts.rename(rename(100, 100, "main", true), 0)
	leader.proc.space.Insert(lib(10, "main.so"))
	ts.fork(fork(100, 101, 100, 100)) // a thread
	ts.rename(rename(100, 101, "worker", false), 0)
	if th, p := name(101); th != "worker" || p != "main" {
		t.Errorf("thread %q of %q", th, p)
	}
	ts.fork(fork(200, 200, 100, 101)) // a process, started by the thread
	if th, p := name(200); th != "worker" || p != "worker" {
		t.Errorf("child %q of %q before its exec", th, p)
	}
	if !ts.procs[200].listed {
		t.Error("a child of a listed process is not listed")
	}
	if got := label(200, 15); got != "main.so" {
		t.Errorf("the child inherited %q", got)
	}
	ts.rename(rename(200, 200, "sh", true), 0)
	if got := label(200, 15); got != "" {
		t.Errorf("%q survived exec", got)
	}
	ts.procs[200].space.Insert(lib(12, "sh.so"))
	if a, b := label(100, 15), label(200, 15); a != "main.so" || b != "sh.so" {
		t.Errorf("parent sees %q, child %q", a, b)
	}

	ts.end(100) // the leader ends first; its process lives on
	if th, p := name(101); th != "worker" || p != "main" {
		t.Errorf("after the leader's end: %q of %q", th, p)
	}
	ts.end(101)
	ts.end(200)
	ts.end(200)
	if len(ts.threads) != 0 || len(ts.procs) != 0 {
		t.Errorf("%d threads and %d processes are left", len(ts.threads), len(ts.procs))
	}
}

func TestTasksReusedIDs(t *testing.T) {
	ts := newTasks(false, nil, false)
	ts.get(1, 1)
	ts.fork(fork(50, 50, 1, 1))
	ts.procs[50].space.Insert(lib(10, "old"))
	ts.fork(fork(50, 50, 1, 1)) // the end of the first was lost
	if p := ts.procs[50]; p.threads != 1 || p.space.Len() != 0 {
		t.Errorf("the new process 50 has %d threads and %d mappings", p.threads, p.space.Len())
	}
	ts.fork(fork(60, 61, 1, 1))
	if th := ts.get(50, 61); th.proc.pid != 50 { // 61 now belongs to 50
		t.Errorf("thread 61 is in process %d", th.proc.pid)
	}
	if ts.procs[60] != nil {
		t.Error("process 60 has no threads and is still there")
	}
}

func TestTasksBounded(t *testing.T) {
	ts := newTasks(false, nil, false)
	for i := range uint32(3 * minSweep) {
		ts.get(1<<23+i, 1<<23+i) // above the largest pid, so not alive
	}
	if n := len(ts.procs); n > minSweep {
		t.Errorf("%d processes remembered", n)
	}
	if n := len(ts.threads); n > minSweep+1 {
		t.Errorf("%d threads remembered", n)
	}
}

func TestTasksNobody(t *testing.T) {
	ts := newTasks(true, nil, false)
	a := ts.get(0, 0)
	a.flight.up = true
	if b := ts.get(0, 0); b.flight.up {
		t.Error("two threads without an id were taken for one")
	}
	if len(ts.threads) != 0 || len(ts.procs) != 0 {
		t.Error("a thread without an id is remembered")
	}
}

// TestForkUnheard: the record of a child's fork is lost, its faults are not filtered out.
func TestForkUnheard(t *testing.T) {
	const parent, child = 1<<23 + 1, 1<<23 + 2 // above the largest pid, so of nobody
	for _, test := range []struct {
		flt  fault.Filter
		pid  uint32
		want bool
	}{
		{fault.Filter{PIDs: []uint32{parent}, Children: true}, child, true},
		{fault.Filter{PIDs: []uint32{parent}, Children: true}, 0, true}, // it has no id here
		{fault.Filter{PIDs: []uint32{parent}}, parent, true},
		{fault.Filter{PIDs: []uint32{parent}}, child, false},
		{fault.Filter{PIDs: []uint32{parent}, TIDs: []uint32{parent}, Children: true}, child, false},
	} {
		s := newSession(Options{Filter: test.flt})
		s.sample(&record{kind: minor, pid: test.pid, tid: test.pid, time: 1})
		if got := s.tally.Seen == 1 && s.tally.Filtered == 0; got != test.want {
			t.Errorf("a fault of process %d with filter %+v: matches %v, counted %+v", test.pid, test.flt, got, s.tally)
		}
	}
}
