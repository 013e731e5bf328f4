package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

// hold is how long the workload waits between saying that it is ready and its
// first fault. By then every tracer is attached.
const hold = 300 * time.Millisecond

// sample is one run of the workload under one tracer, or under none.
type sample struct {
	faults  int64         // as the kernel counted them for the workload
	elapsed time.Duration // of the workload, first fault to last
	after   time.Duration // from the last fault of the workload to the end of the tracer
	start   time.Duration // CPU time of the tracer until the workload was ready
	cpu     time.Duration // CPU time of the tracer's processes after that, user and system
	peakRSS int64         // bytes, the largest of the tracer's processes
	inBPF   time.Duration // time in the tracer's BPF programs, if those were timed
	progs   []progTime
}

// progTime is what one BPF program took, in all runs by whatever process.
type progTime struct {
	name string
	runs uint64
	time time.Duration
}

// watched is a program under observation.
type watched struct {
	cmd    *exec.Cmd
	stderr io.ReadCloser
	sample sample
	// reported is when the workload has said that it has ended.
	reported time.Time
	// progs are the BPF programs that it holds; our own file descriptors keep
	// their statistics readable when it has ended.
	progs []*ebpf.Program
	// said are the last lines on stderr that are not the workload's.
	said []string
}

// execute runs argv, which contains the workload if withWorkload, and returns what
// it cost. Its standard output goes to stdout.
func execute(argv []string, stdout io.Writer, withWorkload bool) (sample, error) {
	w := watched{cmd: exec.Command(argv[0], argv[1:]...)}
	w.cmd.Stdout = stdout
	var err error
	if w.stderr, err = w.cmd.StderrPipe(); err != nil {
		return sample{}, err
	}
	if err := w.cmd.Start(); err != nil {
		return sample{}, err
	}
	defer func() {
		for _, p := range w.progs {
			p.Close()
		}
	}()
	stop := make(chan struct{})
	peak := make(chan int64)
	go func() { peak <- watchRSS(w.cmd.Process.Pid, stop) }()
	readErr := w.follow()
	close(stop)
	w.sample.peakRSS = <-peak
	waitErr := w.finish()
	switch {
	case waitErr != nil:
		return sample{}, fmt.Errorf("%w: %s", waitErr, strings.Join(w.said, " | "))
	case readErr != nil:
		return sample{}, readErr
	case withWorkload && w.sample.elapsed == 0:
		return sample{}, fmt.Errorf("the workload reported nothing: %s", strings.Join(w.said, " | "))
	}
	return w.sample, nil
}

// follow reads stderr to its end and notes when the workload begins and ends.
func (w *watched) follow() error {
	var ready time.Time
	lines := bufio.NewScanner(w.stderr)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		now := time.Now()
		var rep workload.Report
		switch {
		case !bytes.HasPrefix(lines.Bytes(), []byte("{")) || json.Unmarshal(lines.Bytes(), &rep) != nil:
			if len(w.said) < 5 {
				w.said = append(w.said, lines.Text())
			}
		case rep.Ready:
			ready = now
			var err error
			if w.sample.start, err = cpuTime(w.cmd.Process.Pid); err != nil {
				return err
			}
			w.openPrograms()
		default:
			w.sample.elapsed = now.Sub(ready) - hold
			w.reported = now
			w.sample.faults = rep.Minflt + rep.Majflt
		}
	}
	return lines.Err()
}

// openPrograms opens the BPF programs that the process holds.
func (w *watched) openPrograms() {
	infos, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", w.cmd.Process.Pid))
	var ids []ebpf.ProgramID
	for _, path := range infos {
		if id, ok := programID(path); ok && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	for _, id := range ids {
		if p, err := ebpf.NewProgramFromID(id); err == nil {
			w.progs = append(w.progs, p)
		}
	}
}

// programID reads the program's id from the file descriptor information of a BPF
// program (bpf_prog_show_fdinfo in kernel/bpf/syscall.c).
func programID(path string) (ebpf.ProgramID, bool) {
	info, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(info, []byte("\nprog_type:")) {
		return 0, false
	}
	v, ok := lineValue(info, "prog_id:")
	return ebpf.ProgramID(v), ok
}

// lineValue returns the number that follows key at the start of a line.
func lineValue(text []byte, key string) (int64, bool) {
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte(key)); ok {
			fields := bytes.Fields(rest)
			if len(fields) == 0 {
				return 0, false
			}
			v, err := strconv.ParseInt(string(fields[0]), 10, 64)
			return v, err == nil
		}
	}
	return 0, false
}

// watchRSS returns the peak resident size of a process, in bytes. It looks until
// stop is closed. The kernel keeps the maximum since the last exec, so the last
// look counts.
func watchRSS(pid int, stop <-chan struct{}) int64 {
	var peak int64
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		if status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)); err == nil {
			if kib, ok := lineValue(status, "VmHWM:"); ok {
				peak = kib << 10
			}
		}
		select {
		case <-stop:
			return peak
		case <-tick.C:
		}
	}
}

// finish waits for the end of the process and reads its CPU time while it is a
// zombie. The resource usage that wait4 returns would include the workload's.
func (w *watched) finish() error {
	pid := w.cmd.Process.Pid
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for process %d: %w", pid, err)
		}
	}
	w.sample.after = time.Since(w.reported)
	cpu, err := cpuTime(pid)
	if err != nil {
		return err
	}
	w.sample.cpu = cpu - w.sample.start
	for _, p := range w.progs {
		if err := w.readStats(p); err != nil {
			return err
		}
	}
	return w.cmd.Wait()
}

func (w *watched) readStats(p *ebpf.Program) error {
	info, err := p.Info()
	if err != nil {
		return fmt.Errorf("reading a BPF program's name: %w", err)
	}
	stats, err := p.Stats()
	if err != nil {
		return fmt.Errorf("reading run times of BPF program %s: %w", info.Name, err)
	}
	w.sample.inBPF += stats.Runtime
	w.sample.progs = append(w.sample.progs, progTime{info.Name, stats.RunCount, stats.Runtime})
	return nil
}

// clockTick is the unit of times in /proc/PID/stat, USER_HZ, the same on all
// architectures that Go supports.
const clockTick = time.Second / 100

// cpuTime returns the user and system time of all threads of a process, without
// its children's.
func cpuTime(pid int) (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// Fields are counted after the command's name, which may contain anything.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const utime, stime = 14 - 3, 15 - 3
	if len(fields) <= stime {
		return 0, fmt.Errorf("reading CPU time of process %d: malformed stat", pid)
	}
	var sum time.Duration
	for _, f := range [][]byte{fields[utime], fields[stime]} {
		ticks, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("reading CPU time of process %d: %w", pid, err)
		}
		sum += time.Duration(ticks) * clockTick
	}
	return sum, nil
}
