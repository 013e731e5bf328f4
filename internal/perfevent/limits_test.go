package perfevent

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

func TestRingOrder(t *testing.T) {
	if pageSize != 4096 {
		t.Skip("the numbers are for pages of 4 KiB")
	}
	for _, test := range []struct {
		name      string
		cpus, kb  int
		memlock   uint64
		unlimited bool
		want      int
	}{
		{"root", 2, 516, 8 << 20, true, 11},
		{"root, many CPUs", 128, 516, 8 << 20, true, 8},
		{"8 MiB memlock on 2 CPUs", 2, 516, 8 << 20, false, 9},
		{"64 KiB memlock", 2, 516, 64 << 10, false, 6},
		{"nothing but mlock_kb", 64, 516, 0, false, 5},
		{"mlock_kb 0", 2, 0, 64 << 10, false, 1},
		{"nothing at all", 2, 0, 0, false, 0},
		{"unlimited memlock", 2, 516, 1 << 40, false, 11},
	} {
		if got := ringOrder(test.cpus, test.kb, test.memlock, test.unlimited); got != test.want {
			t.Errorf("%s: 1 << %d pages, want 1 << %d", test.name, got, test.want)
		}
	}
}

func TestExplain(t *testing.T) {
	for _, test := range []struct {
		err      error
		scope    scope
		paranoid int
		want     string
	}{
		{unix.EACCES, taskScope, 3, "perf_event_paranoid is 3 and needs to be 2 or less"},
		{unix.EPERM, systemScope, 2, "perf_event_paranoid is 2 and watching all processes needs 0 or less"},
		{unix.EACCES, taskScope, 2, "thread 42 belongs to another user"},
		{unix.EPERM, taskScope, 2, "seccomp"},
		{unix.ESRCH, taskScope, 2, "no thread 42"},
		{unix.EMFILE, taskScope, 2, "ulimit -n"},
		{unix.ENOSYS, taskScope, -1, "CONFIG_PERF_EVENTS"},
	} {
		got := explainOpen(fmt.Errorf("perf_event_open: %w", test.err), test.scope, 42, test.paranoid)
		if !errors.Is(got, test.err) || !strings.Contains(got.Error(), test.want) {
			t.Errorf("%v: %q does not say %q", test.err, got, test.want)
		}
		if s := strings.ToLower(got.Error()); strings.Contains(s, "memlock") || strings.Contains(s, "\n") {
			t.Errorf("%v: %q blames memory or has more than one line", test.err, got)
		}
	}
	if got := explainMap(unix.EPERM, 1, 64); !strings.Contains(got.Error(), "perf_event_mlock_kb") {
		t.Errorf("a refused ring is explained by %q", got)
	}
	if got := explainMap(unix.ENOMEM, 1, 64); strings.Contains(got.Error(), "mlock") {
		t.Errorf("missing memory is explained by %q", got)
	}
}

func TestValidate(t *testing.T) {
	write, remote, user := fault.Write, fault.Remote, fault.User
	for _, test := range []struct {
		opt  Options
		want string
	}{
		{Options{}, ""},
		{Options{Filter: fault.Filter{Mode: &user, MinLatency: time.Second}}, ""},
		{Options{Filter: fault.Filter{Access: &write}}, "as root"},
		{Options{Filter: fault.Filter{Mode: &remote}}, "as root"},
		{Options{Filter: fault.Filter{Kinds: []fault.Kind{fault.Cow, fault.File}}}, ""},
		{Options{Filter: fault.Filter{Kinds: []fault.Kind{fault.Cow}}}, "as root"},
		{Options{Filter: fault.Filter{MinLatency: time.Second}, NoEntries: true}, "latency"},
		{Options{BufferPages: 3}, "power of two"},
		{Options{BufferPages: -1}, "power of two"},
	} {
		err := test.opt.validate()
		if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.opt, err, test.want)
		}
	}
}
