package main

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// workArea is where workloads map the memory that they count faults in. Nothing else is
// there.
var workArea = fmt.Sprintf("%x-%x", uint64(workload.OwnArea), uint64(workload.OwnArea+workload.OwnAreaSize))

// statOracles are the workloads that kinds are counted of.
func statOracles() [][]string {
	var list [][]string
	for _, w := range oracles {
		switch w.args[0] {
		case "device", "image": // their faults are elsewhere
		case "touch":
			// Threads side by side count pages that the other one maps meanwhile.
			list = append(list, []string{"touch", "--pages", "257"})
		default:
			list = append(list, w.args)
		}
	}
	return list
}

// holdOracle holds a workload before its first fault, or returns why this machine
// cannot run it.
func holdOracle(t *testing.T, args []string) (*held, string) {
	t.Helper()
	cmd := exec.Command(self(t), append(append([]string{"workload"}, args...), "--hold", holdTime.String())...)
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	h := &held{cmd: cmd, reports: workload.NewDecoder(io.TeeReader(stderr, &said))}
	startKilled(t, cmd)
	if h.ready, err = h.reports.Next(); err != nil {
		if code := exitCode(t, cmd.Wait()); code != exitFailure || !needsMachine(args) {
			t.Fatalf("workload %v: %v, exit code %d: %s", args, err, code, said.String())
		}
		return nil, said.String()
	}
	h.stop(t)
	return h, ""
}

// kindCounts are numbers of faults.
type kindCounts struct{ minor, major, bytes uint64 }

// addReport adds what a workload's faults are of each kind, by the kernel's own count.
func addReport(counts map[string]kindCounts, rep *workload.Report) {
	// Of these only the permissions change: reads have mapped the pages before.
	remaps := func(kind string) bool { return kind == "reuse" || kind == "mkwrite" }
	for _, th := range rep.Threads {
		for _, r := range th.Ranges {
			kind := r.FaultKind
			switch {
			case kind != "" && len(rep.Threads) == 1 && len(th.Ranges) == 1:
				c := counts[kind]
				c.minor += uint64(rep.Minflt)
				c.major += uint64(rep.Majflt)
				if !remaps(kind) {
					c.bytes += uint64(rep.Faults) * uint64(rep.PageSize)
				}
				counts[kind] = c
			case kind != "":
				addMinor(counts, kind, r.Minor, rep.PageSize)
			case r.Faults == 2: // read, then written to
				addMinor(counts, "zero", 1, rep.PageSize)
				addMinor(counts, "cow", 1, rep.PageSize)
			default: // the same without the shared zero page
				addMinor(counts, "anon", 1, rep.PageSize)
			}
		}
	}
}

func addMinor(counts map[string]kindCounts, kind string, n int64, pageSize int) {
	c := counts[kind]
	c.minor += uint64(n)
	c.bytes += uint64(n) * uint64(pageSize)
	counts[kind] = c
}

// What stat counts of every kind, in the kernel, is what getrusage counts for workloads
// that take faults of one kind each; what trace lists at the same time is the same.
func TestWorkloadsStat(t *testing.T) {
	hooks(t, append(slices.Clone(someHooks()), "perf"), func(t *testing.T, hook string) {
		list := statOracles()
		holding := make([]*held, len(list))
		skipped := make([]string, len(list))
		var pids []string
		for i, args := range list {
			if holding[i], skipped[i] = holdOracle(t, args); holding[i] != nil {
				pids = append(pids, fmt.Sprint(holding[i].cmd.Process.Pid))
			}
		}
		of := []string{"--addr", workArea, "-p", strings.Join(pids, ",")}
		counting := startStat(t, hook, append(of, "--top", "0", "-i", "300ms", "--by", "page,mapping,cpu", "--by", "access")...)
		listing := startArmed(t, hook, of...)
		for _, h := range holding {
			if h != nil {
				h.signal(t, unix.SIGCONT) // they hold at the same time
			}
		}
		reports := make([]*workload.Report, len(list))
		for i, h := range holding {
			if h != nil {
				reports[i] = h.end(t)
				if rep := reports[i]; !rep.Exact && !takenAgain(rep) {
					t.Fatalf("the kernel counted other faults than the workload expects: %+v", rep)
				}
			}
		}
		counting.waitLines(t, 2) // the header and an interval: what is left is another one
		c, tr := counting.stopStat(t, hook), listing.stop(t, hook)

		want, unseen := map[string]kindCounts{}, uint64(0)
		for i, args := range list {
			t.Run(strings.Join(args, " "), func(t *testing.T) {
				switch {
				case skipped[i] != "":
					t.Skip(skipped[i])
				case !slices.Contains(sees[reports[i].Mode], hook):
					unseen += uint64(reports[i].Faults)
				default:
					checkPages(t, c, reports[i])
					addReport(want, reports[i])
				}
			})
		}
		checkKinds(t, c, want)
		if lost := c.whole.Lost; hook == "tracepoint" && lost < unseen || hook != "tracepoint" && lost != 0 {
			t.Errorf("%d lost, %d not seen: %s", lost, unseen, c.stderr)
		}
		if len(c.intervals) < 2 {
			t.Errorf("%d intervals", len(c.intervals))
		}
		checkListed(t, tr, c)
	})
}

// takenAgain reports whether a page of a shared file may have faulted once more: its entry
// changed while it was made writable, as by aging that clears the bit for accesses
// (finish_mkwrite_fault in mm/memory.c). What was counted must be seen all the same.
func takenAgain(rep *workload.Report) bool {
	return rep.Kind == "mkwrite" && rep.Minflt == rep.Faults+1 && rep.Majflt == 0
}

// checkPages compares a workload's own count with the rows of its pages and mappings.
func checkPages(t *testing.T, c *statRun, rep *workload.Report) {
	t.Helper()
	for by, mine := range map[string]func(*statRow) bool{
		"page":    func(r *statRow) bool { return rep.Contains(uint64(*r.Address)) },
		"mapping": func(*statRow) bool { return true }, // nothing else is counted of the process
	} {
		var n statCost
		for i := range c.whole.table(t, by).Rows {
			if r := &c.whole.table(t, by).Rows[i]; r.PID == rep.PID && mine(r) {
				n.add(&r.statCost)
			}
		}
		if n.Minor != uint64(rep.Minflt) || n.Major != uint64(rep.Majflt) || n.Faults != n.Minor+n.Major || n.Untimed != 0 {
			t.Errorf("by %s: %+v; getrusage %d minor and %d major", by, n.sums(), rep.Minflt, rep.Majflt)
		}
	}
}

// checkKinds compares the rows of the kinds.
func checkKinds(t *testing.T, c *statRun, want map[string]kindCounts) {
	t.Helper()
	if c.whole.Hook == "perf" {
		checkInferredKinds(t, c, want)
		return
	}
	got := map[string]kindCounts{}
	for i := range c.whole.Kinds {
		k := &c.whole.Kinds[i]
		n := kindCounts{k.Minor, k.Major, k.bytes()}
		switch name := words(k.Kind); name {
		case "file", "swap":
			// The kernel maps neighbours along, as many as it likes.
			if least := want[name].bytes; n.bytes < least || n.bytes > 16*least {
				t.Errorf("%s: %d bytes mapped, want at least %d", name, n.bytes, least)
			}
			n.bytes = want[name].bytes
			fallthrough
		default:
			got[name] = n
		}
		if k.Failed != 0 || k.Untimed != 0 {
			t.Errorf("%s: %d failed, %d without time", words(k.Kind), k.Failed, k.Untimed)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("kinds %+v, getrusage %+v", got, want)
	}
}

// checkInferredKinds checks that the sums are right and that no fault is in the row of
// another kind than its own. How many are in it depends on when mappings were looked at.
func checkInferredKinds(t *testing.T, c *statRun, want map[string]kindCounts) {
	t.Helper()
	var got, all kindCounts
	for _, n := range want {
		all.minor += n.minor
		all.major += n.major
	}
	for i := range c.whole.Kinds {
		k := &c.whole.Kinds[i]
		got.minor += k.Minor
		got.major += k.Major
		name := words(k.Kind)
		if most := want[name]; k.Kind != nil && (!slices.Contains(inferable, name) || k.Minor > most.minor || k.Major > most.major) {
			t.Errorf("%s: %d minor and %d major, want at most %+v", name, k.Minor, k.Major, most)
		}
		if k.Failed != 0 || k.Untimed != 0 {
			t.Errorf("%s: %d failed, %d without time", name, k.Failed, k.Untimed)
		}
	}
	if got != all {
		t.Errorf("%+v in all, getrusage %+v", got, all)
	}
}

// checkListed compares all tables with the records of the same faults.
func checkListed(t *testing.T, tr *traced, c *statRun) {
	t.Helper()
	keys := map[string]struct {
		ofFault func(*liveFault) string
		ofRow   func(*statRow) string
	}{
		"page": {
			func(f *liveFault) string { return fmt.Sprintf("%d %#x", f.PID, f.Address&^0xfff) },
			func(r *statRow) string { return fmt.Sprintf("%d %#x", r.PID, *r.Address) },
		},
		"mapping": {
			func(f *liveFault) string {
				if f.VMA == nil {
					return fmt.Sprint(f.PID, " ", hexOf(nil))
				}
				if strings.HasPrefix(words(f.VMA.Label), "[stack") { // its start moves
					return fmt.Sprint(f.PID, " -", hexOf(f.VMA.End), *f.VMA.Label)
				}
				return fmt.Sprint(f.PID, " ", hexOf(f.VMA.Start))
			},
			func(r *statRow) string {
				if r.End != nil {
					return fmt.Sprint(r.PID, " -", hexOf(r.End), words(r.Label))
				}
				return fmt.Sprint(r.PID, " ", hexOf(r.Start))
			},
		},
		"cpu": {
			func(f *liveFault) string { return fmt.Sprint(f.CPU) },
			func(r *statRow) string { return fmt.Sprint(*r.CPU) },
		},
		"access": {
			func(f *liveFault) string { return words(f.Access) },
			func(r *statRow) string { return words(r.Access) },
		},
	}
	count := func(key func(*liveFault) string) map[string]uint64 {
		n := map[string]uint64{}
		for i := range tr.faults {
			n[key(&tr.faults[i])]++
		}
		return n
	}
	got := map[string]uint64{}
	for i := range c.whole.Kinds {
		got[words(c.whole.Kinds[i].Kind)] = c.whole.Kinds[i].Faults
	}
	want := count(func(f *liveFault) string { return words(f.Kind) })
	if tr.hook == "perf" {
		want = got // as with mappings below
	}
	if !maps.Equal(got, want) || c.whole.Seen != tr.summary.Seen {
		t.Errorf("%d faults counted by kind %v; %d listed, %v", c.whole.Seen, got, tr.summary.Seen, want)
	}
	for by, key := range keys {
		if by == "mapping" && tr.hook == "perf" {
			continue // what it knows of mappings depends on when it reads them
		}
		got := map[string]uint64{}
		rows := c.whole.table(t, by).Rows
		for i := range rows {
			got[key.ofRow(&rows[i])] += rows[i].Faults
		}
		want := count(key.ofFault)
		if maps.Equal(got, want) {
			continue
		}
		t.Errorf("table by %s: %d rows, records give %d", by, len(got), len(want))
		for k := range want {
			if got[k] != want[k] {
				t.Errorf("%s: counted %d, listed %d", k, got[k], want[k])
				break
			}
		}
	}
}

func hexOf(h *hexNumber) string {
	if h == nil {
		return "null"
	}
	return fmt.Sprintf("%#x", uint64(*h))
}

// checkOwners checks the tables by what records do not tell: all is one user's, in one
// cgroup.
func checkOwners(t *testing.T, c *statRun) {
	t.Helper()
	users, cgroups := c.whole.table(t, "uid").Rows, c.whole.table(t, "cgroup").Rows
	if len(users) != 1 || len(cgroups) != 1 {
		t.Fatalf("users %+v, cgroups %+v; want one of each", users, cgroups)
	}
	if users[0].UID == nil || int(*users[0].UID) != os.Getuid() {
		t.Errorf("user %v, want %d", users[0].UID, os.Getuid())
	}
	if cgroups[0].CgroupID == nil || *cgroups[0].CgroupID == 0 {
		t.Errorf("cgroup without id: %+v", cgroups[0])
	}
}

// A whole process from fork to exit: what is counted is the kernel's own count.
func TestWorkloadsStatProcess(t *testing.T) {
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		code, stdout, stderr := outcome(t, program("stat", "--json", "--hook", hook, "--by", "process,mode,uid,cgroup", "--top", "0", "--",
			"env", mainEnv+"=spawn", self(t), self(t), "workload", "touch", "--pages", "3000", "--threads", "4"))
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		c, child := parseStat(t, stdout, stderr), decodeSpawned(t, stderr)
		checkOwners(t, c)
		var n statCost
		for i := range c.whole.table(t, "process").Rows {
			if r := &c.whole.table(t, "process").Rows[i]; r.PID == child.PID {
				n.add(&r.statCost) // it has several names: before and after exec
			}
		}
		missing := child.Minflt + child.Majflt - int64(n.Minor+n.Major)
		if hook == "tracepoint" { // get_user_pages is invisible to it, but counted
			if missing < 0 || missing > int64(c.whole.Lost) {
				t.Errorf("getrusage %+v, counted %+v, lost %d", child, n, c.whole.Lost)
			}
			return
		}
		if n.Minor != uint64(child.Minflt) || n.Major != uint64(child.Majflt) || c.whole.Lost != 0 {
			t.Errorf("getrusage %+v, counted %+v, lost %d", child, n, c.whole.Lost)
		}
	})
}

// Threads come and go: by file their stacks are one row, by mapping each has its own.
func TestWorkloadsStatStacks(t *testing.T) {
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		a, b := hold(t, self(t), "stack", "--pages", "7"), hold(t, self(t), "stack", "--pages", "9")
		run := startStat(t, hook, "-p", fmt.Sprintf("%d,%d", a.cmd.Process.Pid, b.cmd.Process.Pid), "--addr", workArea, "--by", "file,mapping")
		reports := []*workload.Report{a.finish(t), b.finish(t)}
		c := run.stopStat(t, hook)
		count := func(by, label string) (faults uint64, rows []*statRow) {
			table := c.whole.table(t, by)
			for i := range table.Rows {
				if r := &table.Rows[i]; words(r.Label) == label {
					faults += r.Faults
					rows = append(rows, r)
				}
			}
			return faults, rows
		}
		if n, rows := count("file", "[thread stacks]"); n != 7+9 || len(rows) != 1 {
			t.Errorf("%d faults on stacks in %d rows by file, want %d in one: %+v", n, len(rows), 7+9, c.whole.table(t, "file").Rows)
		}
		for _, rep := range reports {
			stack := &rep.Threads[0].Ranges[0]
			n, rows := count("mapping", stack.Label)
			if n != uint64(stack.Faults) || len(rows) != 1 || rows[0].PID != rep.PID || rows[0].Start != nil || rows[0].End == nil || uint64(*rows[0].End) < uint64(stack.End) {
				t.Errorf("%d faults on %s in %d rows by mapping, want %d: %+v", n, stack.Label, len(rows), stack.Faults, c.whole.table(t, "mapping").Rows)
			}
		}
	})
}

// More pages than a table has rows: the sum stays exact. Reading fresh memory takes no
// memory where the page of zeros is mapped for it, elsewhere 1 GiB.
func TestWorkloadsStatManyPages(t *testing.T) {
	anyKernel(t)
	hook := bestHook(t)
	for _, test := range []struct {
		pages    uint64
		overflow bool
	}{{150_000, false}, {270_000, true}} {
		t.Run(fmt.Sprint(test.pages), func(t *testing.T) {
			h := hold(t, self(t), "zero", "--pages", fmt.Sprint(test.pages))
			run := startStat(t, hook, "-p", fmt.Sprint(h.cmd.Process.Pid), "--addr", workArea, "--by", "page,access", "--top", "5")
			rep := h.finish(t)
			c := run.stopStat(t, hook) // which adds up the rows
			kind := c.whole.kind(rep.Threads[0].Ranges[0].FaultKind)
			if kind.Minor != test.pages || kind.Faults != test.pages || c.whole.Seen != test.pages || c.whole.Lost != 0 {
				t.Errorf("%+v, %d seen and %d lost of %d faults", kind.statCost, c.whole.Seen, c.whole.Lost, test.pages)
			}
			if kind.bytes() != test.pages*4096 {
				t.Errorf("%d bytes mapped by %d faults", kind.bytes(), test.pages)
			}
			table := c.whole.table(t, "page")
			if len(table.Rows) != 5 || table.More == nil || (table.Other.Faults > 0) != test.overflow {
				t.Errorf("%d rows, %+v more, %+v without a row", len(table.Rows), table.More, *table.Other)
			}
		})
	}
}
