package main

import (
	"fmt"
	"log/slog"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"faultsnoop/internal/fault"
)

// TestBadInput: every mistake is one line that names cause and remedy, with the
// code for its kind, and nothing on stdout.
func TestBadInput(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	parent := strconv.Itoa(os.Getppid())
	for _, c := range []struct {
		line string
		code int
		want string
	}{
		{"trase", 2, `did you mean "trace"?`},
		{"trace --jsno", 2, "unknown flag: --jsno"},
		{"trace --\x1b[31m\xff\u202e", 2, `unknown flag: --\x1b[31m\xff\u202e;`},
		{"trace -x", 2, "unknown shorthand flag"},
		{"trace -n", 2, "flag needs an argument"},
		{"trace ls", 2, "write -- in front of it"},
		{"trace ls -- ls", 2, "write -- in front of it"},
		{"trace --", 2, "no command behind --"},
		{"trace -p 2147483000", 2, "no process 2147483000"},
		{"trace -p 0", 2, "write a number"},
		{"trace -p 12x", 2, "write a number"},
		{"trace -p " + self + ",x", 2, "write a number"},
		{"trace -t 2147483000", 2, "no thread 2147483000"},
		{"trace -p " + parent + " -t " + self, 2, "nothing would match"},
		{"trace -p " + self + " -- true", 2, "-p and a command contradict"},
		{"trace -t " + self + " -- true", 2, "-t and a command contradict"},
		{"trace --json --csv", 2, "--json and --csv contradict"},
		{"trace --major --minor", 2, "--major and --minor contradict"},
		{"trace --comm=", 2, "selects nothing"},
		{"trace --uid no-such-user", 2, "no such user"},
		{"trace --cgroup /no/such", 2, "no such cgroup"},
		{"trace --cgroup /tmp", 2, "not a cgroup"},
		{"workload touch --pages abc", 2, `invalid value "abc" for --pages: not a whole number`},
		{"trace --columns pid,again", 2, "column again is empty without --again: add it"},
		{"trace --columns node --again", 2, "column node is empty without --pfn: add it"},
		{"workload touch --pages 99999999999999999999", 2, "too large a number"},
		{"workload touch --hold abc", 2, "with its unit"},
		{"trace --json=x", 2, "neither true nor false"},
		{"trace --mode usr", 2, `did you mean "user"?`},
		{"trace --access x", 2, "valid are read, write, exec"},
		{"trace --hook kprobes", 2, `did you mean "kprobe"?`},
		{"trace --hook perf --access read", 2, "does not know how memory is accessed"},
		{"trace -c " + strings.Repeat("x", 70), 2, "at most 64 are compared"},
		{"trace --columns pid,adress", 2, `unknown column "adress", did you mean "address"?`},
		{"trace --columns=", 2, "valid are default"},
		{"trace --addr 10", 2, "write START-END"},
		{"trace --addr zz-10", 2, "write START-END"},
		{"trace --addr 20-10", 2, "must be greater"},
		{"trace --addr 10-10", 2, "must be greater"},
		{"trace --min-latency 5", 2, "with its unit"},
		{"trace -d -1s", 2, "with its unit"},
		{"trace -d 0s", 2, "with its unit"},
		{"trace -n 0", 2, "from 1 on"},
		{"trace --output=", 2, "write the path of a file"},
		{"trace -o /no/such/file", 125, "opening the output: open /no/such/file: no such file"},
		// They get as far as to the output, so the flags are right.
		{"stat --by function --stack-every 1 -o /no/such/file", 125, "opening the output"},
		{"flame --stack-every 1 -o /no/such/file", 125, "opening the output"},
		{"trace --stack --stack-every 1 -o /no/such/file", 125, "opening the output"},
		{"trace --stack-every 1", 2, "no stacks are taken: add --stack"},
		{"stat --stack-every 1", 2, "--by function"},
		{"flame --stack=fp --stack-every 1", 2, "only --stack=full"},
		{"trace --stack-depth 3", 2, "add --stack"},
		{"trace --stack --json --stack-depth 3", 2, "without --json"},
		{"trace --stack --stack-depth 0 -o /no/such/file", 125, "opening the output"},
		{"trace --stack fp", 2, "write --stack=fp"},
		{"trace --stack full -- true", 2, "write --stack=full"},
		{"stat --by line --stack fp", 2, "write --stack=fp"},
		{"flame --stack fp -- true", 2, "write --stack=fp"},
		{"trace --stack=fp fp", 2, "write -- in front of it"},
		{"trace --stack ls", 2, "write -- in front of it"},
		{"flame --value bytes -o x.html -- true", 2, "html shows all values: leave it out, or choose --format svg or folded"},
		{"flame --format pprof --value time some.pb.gz", 2, "pprof shows all values"},
		{"flame --format svg --value time -o /no/such/file", 125, "opening the output"},
		{"flame /etc/passwd", 125, "unrecognized profile format: give one that faultsnoop flame --format pprof has written"},
		{"trace --sample 0", 2, "from 1 on"},
		{"trace --buffer 12Q", 2, "write a size"},
		{"trace --buffer 1", 2, "write a size from"},
		{"trace --buffer 1T", 2, "to 1G"},
		{"trace -- /no/such", 127, `"/no/such" does not exist`},
		{"trace -- no-such-command", 127, "no directory of PATH"},
		{"trace -- /etc/passwd", 126, "permission denied"},
		{"trace -- /etc", 126, "is a directory"},
		{"trace", 125, "operation not permitted"},
		{"trace -- true", 125, "operation not permitted"},
	} {
		t.Run(c.line, func(t *testing.T) {
			code, stdout, stderr := runWith(fakes["broken"], strings.Fields(c.line)...)
			if code != c.code || !strings.Contains(stderr, c.want) {
				t.Errorf("code %d, want %d; %q in %s", code, c.code, c.want, stderr)
			}
			oneLineOf(t, stderr)
			if stdout != "" {
				t.Errorf("on stdout: %q", stdout)
			}
		})
	}
}

// optionsOf returns what the command line asks a source for.
func optionsOf(t *testing.T, args ...string) sourceOptions {
	t.Helper()
	var got sourceOptions
	var open opener = func(o sourceOptions, _ *slog.Logger) (source, error) {
		got = o
		return &fakeSource{session: fakeSession(), mu: new(sync.Mutex)}, nil
	}
	if code, _, stderr := runWith(open, append([]string{"trace", "-d", "1ms"}, args...)...); code != 0 {
		t.Fatalf("%v: exit code %d: %s", args, code, stderr)
	}
	return got
}

func TestFilterFlags(t *testing.T) {
	pid, tid := uint32(os.Getpid()), uint32(os.Getpid())
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	o := optionsOf(t, "-p", fmt.Sprintf("%d, %d", pid, os.Getppid()), "--pid", fmt.Sprint(pid), "-t", fmt.Sprint(tid), "-c", "python", "-c", "a,b",
		"--uid", me.Username, "--minor", "--mode", "kernel", "--access", "exec", "--addr", "0x7f00-7fFF", "--min-latency", "100us", "--self",
		"--sample", "10", "--hook", "kprobe", "--buffer", "1M")
	f := o.Filter
	if !slices.Equal(f.PIDs, []uint32{pid, uint32(os.Getppid()), pid}) || !slices.Equal(f.TIDs, []uint32{tid}) {
		t.Errorf("pids %v, tids %v", f.PIDs, f.TIDs)
	}
	if !slices.Equal(f.Comms, []string{"python", "a,b"}) {
		t.Errorf("comms %q", f.Comms)
	}
	if f.UID == nil || fmt.Sprint(*f.UID) != me.Uid || f.Major == nil || *f.Major || f.Mode == nil || *f.Mode != fault.Kernel || f.Access == nil || *f.Access != fault.Exec {
		t.Errorf("filter %+v", f)
	}
	if f.AddrStart != 0x7f00 || f.AddrEnd != 0x7fff || f.MinLatency != 100*time.Microsecond || !f.Self {
		t.Errorf("filter %+v", f)
	}
	if o.Sample != 10 || o.Hook != "kprobe" || o.Buffer != 1<<20 {
		t.Errorf("options %+v", o)
	}
}

func TestChildrenDefault(t *testing.T) {
	pid := strconv.Itoa(os.Getpid())
	for _, c := range []struct {
		args []string
		want bool
	}{
		{nil, false},
		{[]string{"-p", pid}, true},
		{[]string{"-t", pid}, false},
		{[]string{"-c", "x"}, false},
		{[]string{"-c", "x", "--children"}, true},
		{[]string{"-p", pid, "--children=false"}, false},
		{[]string{"--", "true"}, true},
		{[]string{"--children=false", "--", "true"}, false},
	} {
		if got := optionsOf(t, c.args...).Filter.Children; got != c.want {
			t.Errorf("%q: children %v, want %v", c.args, got, c.want)
		}
	}
}

func TestUnsetFiltersSelectAll(t *testing.T) {
	o := optionsOf(t)
	f := o.Filter
	if f.Major != nil || f.Mode != nil || f.Access != nil || f.UID != nil || f.AddrEnd != 0 || f.Self || o.Sample != 1 || o.Hook != "" || o.CommandPID != 0 {
		t.Errorf("options %+v", o)
	}
}

func TestThreadIsNoProcess(t *testing.T) {
	tids, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	other := ""
	for _, e := range tids {
		if e.Name() != strconv.Itoa(os.Getpid()) {
			other = e.Name()
		}
	}
	if other == "" {
		t.Fatal("the Go runtime has one thread only")
	}
	code, _, stderr := runWith(fakes["broken"], "trace", "-p", other)
	if code != exitUsage || !strings.Contains(stderr, "write -t "+other) {
		t.Errorf("code %d: %s", code, stderr)
	}
	if got := optionsOf(t, "-t", other).Filter.TIDs; !slices.Equal(got, []uint32{mustID(t, other)}) {
		t.Errorf("tids %v", got)
	}
}

func mustID(t *testing.T, text string) uint32 {
	t.Helper()
	id, err := parseID(text)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestCgroup(t *testing.T) {
	root := cgroupRoot()
	if root == "" {
		t.Skip("cgroup v2 is not mounted")
	}
	if got := optionsOf(t, "--cgroup", root).Filter.Cgroup; got != root {
		t.Errorf("cgroup %q", got)
	}
	if _, err := parseCgroup(root + "/cgroup.procs"); err == nil {
		t.Error("a file is taken for a cgroup")
	}
}

func TestVersionAndCompletion(t *testing.T) {
	if code, out, _ := runWith(fakes["few"], "--version"); code != 0 || !strings.HasPrefix(out, "faultsnoop version ") {
		t.Errorf("code %d: %q", code, out)
	}
	_, out, _ := runWith(fakes["few"], "__complete", "trace", "--mode", "")
	if !strings.HasPrefix(out, "user\nkernel\nremote\n") {
		t.Errorf("completion of --mode: %q", out)
	}
	_, out, _ = runWith(fakes["few"], "__complete", "trace", "--columns", "")
	if !strings.Contains(out, "pte\n") || !strings.Contains(out, "address\n") {
		t.Errorf("completion of --columns: %q", out)
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"a", "", 1}, {"kitten", "sitting", 3}, {"adress", "address", 1}, {"ab", "ba", 2}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("%q to %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
