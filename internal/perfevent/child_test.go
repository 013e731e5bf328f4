package perfevent

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// childEnv makes this test program behave as one of the programs below.
const childEnv = "FAULTSNOOP_TEST_CHILD"

func init() {
	if os.Getenv(childEnv) != "" {
		// Keep the main thread, which names the process, for the main goroutine.
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if job := os.Getenv(childEnv); job != "" {
		if err := runChild(job, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, job+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// report is what a child says of itself, as one line of JSON.
type report struct {
	PID, TID   int
	Start, End uint64
	Min, Maj   int64 // growth of the thread's own counts while it touched the range
}

func runChild(job string, args []string) error {
	n := func(i int) int { v, _ := strconv.Atoi(args[i]); return v }
	switch job {
	case "gate": // wait for a byte, then become another program
		if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
			return err
		}
		os.Setenv(childEnv, args[0])
		return syscall.Exec("/proc/self/exe", append([]string{"child"}, args[1:]...), os.Environ())
	case "touch": // PAGES [THREADS [NAME]]
		threads, name := 1, ""
		if len(args) > 1 {
			threads = n(1)
		}
		if len(args) > 2 {
			name = args[2]
		}
		return touchThreads(n(0), threads, name)
	case "stay": // PAGES: touch, and live until there is nothing more to read
		if err := touchThreads(n(0), 1, ""); err != nil {
			return err
		}
		_, err := io.Copy(io.Discard, os.Stdin)
		return err
	case "wait": // threads exist first, touch after a byte
		return touchWhenTold(n(0), n(1))
	case "family": // CHILDREN PAGES: each child touches
		for range n(0) {
			cmd := exec.Command("/proc/self/exe", args[1])
			cmd.Env = append(os.Environ(), childEnv+"=touch")
			cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
			if err := cmd.Run(); err != nil {
				return err
			}
		}
		return nil
	case "stall": // PAGES on every CPU, then a process "wait" that touches MORE
		if err := touchOnAllCPUs(n(0)); err != nil {
			return err
		}
		cmd := exec.Command("/proc/self/exe", args[1], "1")
		cmd.Env = append(os.Environ(), childEnv+"=wait")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		return cmd.Run()
	case "namespace": // the program "wait" as process 1 of a pid namespace
		cmd := exec.Command("/proc/self/exe", args...)
		cmd.Env = append(os.Environ(), childEnv+"=wait")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
		return cmd.Run()
	case "file": // PATH: major faults from a cold file
		return touchFile(args[0])
	case "read": // PAGES filled by the kernel
		return fillByRead(n(0))
	case "workload": // KIND FLAGS: faults after a byte, and the end after another one
		return runWorkload(args[0], args[1:])
	case "moved": // FILE, over which memory is moved after a byte
		return moveOver(args[0])
	case "bad": // N accesses to protected memory, each skipped by its handler
		return touchProtected(n(0))
	}
	return fmt.Errorf("no such child")
}

func runWorkload(name string, flags []string) error {
	for _, kind := range workload.Kinds() {
		if kind.Name != name {
			continue
		}
		fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
		c := kind.Bind(fs)
		if err := fs.Parse(append(flags, "--hold", "1ns")); err != nil {
			return err
		}
		return c.Run(context.Background(), pausing{})
	}
	return fmt.Errorf("no workload %q", name)
}

// pausing waits for a byte after each report, with all that the workload has mapped.
type pausing struct{}

func (pausing) Write(line []byte) (int, error) {
	if _, err := os.Stdout.Write(line); err != nil {
		return 0, err
	}
	_, err := os.Stdin.Read(make([]byte, 1))
	return len(line), err
}

var out sync.Mutex

func tell(r report) {
	out.Lock()
	defer out.Unlock()
	r.PID, r.TID = os.Getpid(), unix.Gettid()
	json.NewEncoder(os.Stdout).Encode(r)
}

func rusage() (minor, major int64) {
	var ru syscall.Rusage
	syscall.Getrusage(unix.RUSAGE_THREAD, &ru)
	return ru.Minflt, ru.Majflt
}

// anonymous maps pages that no huge page will fill. Memory that may be touched at once
// would be merged with a neighbour, and another thread's fault in that one could fill
// both.
func anonymous(pages int) ([]byte, error) {
	mem, err := unix.Mmap(-1, 0, pages*int(pageSize), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, err
	}
	if err := unix.Madvise(mem, unix.MADV_NOHUGEPAGE); err != nil {
		return nil, err
	}
	return mem, unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE)
}

func bounds(mem []byte) (start, end uint64) {
	start = uint64(uintptr(unsafe.Pointer(&mem[0])))
	return start, start + uint64(len(mem))
}

// touchRange keeps signals of the Go runtime off: one that comes while a fault waits for a
// lock ends it, and the page faults again (fault_signal_pending in include/linux/sched/signal.h).
func touchRange(mem []byte, write bool) report {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	unix.PthreadSigmask(unix.SIG_BLOCK, &all, &before)
	defer unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil)
	var r report
	r.Start, r.End = bounds(mem)
	min0, maj0 := rusage()
	for at := 0; at < len(mem); at += int(pageSize) {
		if write {
			mem[at] = 1
		} else {
			sink += int(mem[at])
		}
	}
	min1, maj1 := rusage()
	r.Min, r.Maj = min1-min0, maj1-maj0
	return r
}

var sink int

func touchThreads(pages, threads int, name string) error {
	var wg sync.WaitGroup
	for range threads {
		wg.Go(func() {
			runtime.LockOSThread()
			if name != "" {
				b := append([]byte(name), 0)
				unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&b[0])), 0, 0, 0)
			}
			mem, err := anonymous(pages)
			if err != nil {
				panic(err)
			}
			tell(touchRange(mem, true))
		})
	}
	wg.Wait()
	return nil
}

func touchWhenTold(pages, threads int) error {
	var ready, wg sync.WaitGroup
	start := make(chan bool)
	for range threads {
		ready.Add(1)
		wg.Go(func() {
			runtime.LockOSThread()
			mem, err := anonymous(pages)
			if err != nil {
				panic(err)
			}
			ready.Done()
			<-start
			tell(touchRange(mem, true))
		})
	}
	ready.Wait()
	fmt.Println("ready")
	os.Stdin.Read(make([]byte, 1))
	close(start)
	wg.Wait()
	return nil
}

// touchOnAllCPUs goes through all CPUs that this thread may run on and touches fresh
// pages on each.
func touchOnAllCPUs(pages int) error {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return err
	}
	for cpu, left := 0, allowed.Count(); left > 0; cpu++ {
		if !allowed.IsSet(cpu) {
			continue
		}
		left--
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return err
		}
		mem, err := anonymous(pages)
		if err != nil {
			return err
		}
		tell(touchRange(mem, true))
	}
	return unix.SchedSetaffinity(0, &allowed)
}

func touchFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return err
	}
	mem, err := unix.Mmap(int(f.Fd()), int64(pageSize), int(st.Size())-int(pageSize), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	if err := unix.Madvise(mem, unix.MADV_RANDOM); err != nil {
		return err
	}
	tell(touchRange(mem, false))
	return nil
}

func fillByRead(pages int) error {
	mem, err := anonymous(pages)
	if err != nil {
		return err
	}
	zero, err := os.Open("/dev/zero")
	if err != nil {
		return err
	}
	var r report
	r.Start, r.End = bounds(mem)
	min0, _ := rusage()
	if _, err := io.ReadFull(zero, mem); err != nil {
		return err
	}
	min1, _ := rusage()
	r.Min = min1 - min0
	tell(r)
	return nil
}

func touchProtected(times int) error {
	mem, err := unix.Mmap(-1, 0, int(pageSize), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	var r report
	r.Start, r.End = bounds(mem)
	for range times {
		accessFault(mem)
	}
	tell(r)
	return nil
}

func accessFault(mem []byte) {
	defer func() { recover() }()
	defer setPanicOnFault()()
	sink += int(mem[0])
}

// child starts one of the programs above, stopped before it becomes itself.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.WriteCloser
	out   *bufio.Scanner
}

func startChild(t *testing.T, gated bool, args ...string) *child {
	t.Helper()
	c := &child{t: t}
	job, rest := args[0], args[1:]
	if gated {
		job, rest = "gate", args
	}
	c.cmd = exec.Command(testProgram(t), rest...)
	c.cmd.Env = append(os.Environ(), childEnv+"="+job)
	c.cmd.Stderr = os.Stderr
	var err error
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewScanner(stdout)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.cmd.Process.Kill(); c.cmd.Wait() })
	return c
}

func testProgram(t *testing.T) string {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// line reads one line that the child prints.
func (c *child) line() string {
	c.t.Helper()
	if !c.out.Scan() {
		c.t.Fatalf("the child ended early: %v", c.cmd.Wait())
	}
	return c.out.Text()
}

func (c *child) release() {
	c.t.Helper()
	if _, err := c.stdin.Write([]byte{1}); err != nil {
		c.t.Fatal(err)
	}
}

// wait reads all reports and waits for the end.
func (c *child) wait() []report {
	c.t.Helper()
	var rs []report
	for c.out.Scan() {
		var r report
		if err := json.Unmarshal(c.out.Bytes(), &r); err != nil {
			c.t.Fatalf("%q: %v", c.out.Text(), err)
		}
		rs = append(rs, r)
	}
	if err := c.cmd.Wait(); err != nil {
		c.t.Errorf("child: %v", err)
	}
	return rs
}
