package kernel

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPreemption(t *testing.T) {
	for _, tt := range []struct {
		version, file, want string
		undisturbed         bool
	}{
		{"#1 SMP Debian 5.10.237-1 (2025-05-19)", "", "voluntary", true},
		{"#1 SMP PREEMPT_DYNAMIC Debian 6.12.118-1 (2026-11-20)", "none (voluntary) full \n", "voluntary", true},
		{"#1 SMP PREEMPT_DYNAMIC Debian 7.2.13-1 (2026-10-28)", "full (lazy) \n", "lazy", false},
		{"#1 SMP PREEMPT_DYNAMIC", "none voluntary (full)\n", "full", false},
		{"#1 SMP PREEMPT_DYNAMIC", "", "", false},
		{"#1 SMP PREEMPT_DYNAMIC", "none voluntary full\n", "", false},
		{"#1 SMP PREEMPT_RT Debian", "", "rt", false},
		{"#1 SMP PREEMPT", "", "full", false},
	} {
		dir := ""
		if tt.file != "" {
			dir = t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "sched"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "sched/preempt"), []byte(tt.file), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got := preemption(tt.version, dir)
		if got != tt.want {
			t.Errorf("%s, %q: %q, want %q", tt.version, tt.file, got, tt.want)
		}
		if s := probeUndisturbed(&System{Preemption: got}); s.OK != tt.undisturbed || s.Found == "" {
			t.Errorf("preemption %q: %+v", got, s)
		}
	}
}

// The thread is as it was afterwards, whatever it was meanwhile.
func TestUnpreempted(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	policy := func() unix.SchedAttr {
		attr, err := unix.SchedGetAttr(0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return *attr
	}
	before := policy()
	fifo := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}
	allowed := unix.SchedSetAttr(0, &fifo, 0) == nil
	if err := unix.SchedSetAttr(0, &before, 0); err != nil {
		t.Fatal(err)
	}
	var during unix.SchedAttr
	failure := errors.New("as returned")
	if err := unpreempted(func() error { during = policy(); return failure }); !errors.Is(err, failure) {
		t.Errorf("returned %v", err)
	}
	if after := policy(); after != before {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if (during.Policy == unix.SCHED_FIFO) != allowed {
		t.Errorf("meanwhile %+v; realtime priority is allowed: %v", during, allowed)
	}
}
