package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/kernel"
)

// TestChecksPromiseNothing: no remedy that would not help, nothing unknown that is ok.
func TestChecksPromiseNothing(t *testing.T) {
	yes, no := kernel.Support{OK: true}, kernel.Support{Remedy: "do something"}
	find := func(f *kernel.Features, name string) check {
		for _, c := range checks(f, &kernel.System{Tracefs: "/sys/kernel/tracing"}, nil) {
			if c.Name == name {
				return c
			}
		}
		t.Fatalf("no check %q", name)
		return check{}
	}
	f := kernel.Features{BPF: yes, SafeFexit: yes, Trampolines: yes, Undisturbed: no}
	if c := find(&f, "preemption"); c.Remedy == "" {
		t.Errorf("the only thing that hook fentry lacks has no remedy: %+v", c)
	}
	f.Trampolines = kernel.Support{}
	if c := find(&f, "preemption"); c.Remedy != "" {
		t.Errorf("a remedy that would not help: %+v", c)
	}
	if c := find(&f, "lockdown"); c.OK {
		t.Errorf("unknown and ok: %+v", c)
	}
	f.PTEFault = kernel.Support{Found: "inlined"}
	if c := find(&f, "handle_pte_fault"); c.OK || c.Remedy != "" || c.Follows != "page tables are read instead" {
		t.Errorf("a stock kernel: %+v", c)
	}
	f.PTEFault.OK = true
	if c := find(&f, "handle_pte_fault"); !c.OK || !strings.HasPrefix(c.Follows, "the self-test checks") {
		t.Errorf("an exposed handle_pte_fault: %+v", c)
	}
	if c := find(&f, "tracefs"); c.Follows != "matters to hook kprobe only, which cannot work" {
		t.Errorf("without kprobes: %+v", c)
	}
}

func TestDoctorTellsWhatTheKernelConfirms(t *testing.T) {
	d := diagnosis{Hooks: []hookReport{{Hook: "kprobe", OK: true, SelfTest: "passed", Compared: "all as in handle_pte_fault"}}, Use: "kprobe"}
	var text, object strings.Builder
	if err := errors.Join(d.print(&text, false), d.print(&object, true)); err != nil {
		t.Fatal(err)
	}
	if want := "self-test passed\n                 all as in handle_pte_fault\n"; !strings.Contains(text.String(), want) {
		t.Errorf("no %q in\n%s", want, &text)
	}
	if want := `"compared":"all as in handle_pte_fault"`; !strings.Contains(object.String(), want) {
		t.Errorf("no %s in %s", want, &object)
	}
}

// TestDoctorStacks: which stacks are taken is the verdict on what they need.
func TestDoctorStacks(t *testing.T) {
	bpf := kernel.Features{BPF: kernel.Support{OK: true}}
	memlock := fmt.Errorf("raising RLIMIT_MEMLOCK: %w: needs CAP_SYS_RESOURCE", unix.EPERM)
	for _, c := range []struct {
		f               kernel.Features
		full            error
		memlock, stacks bool
		follows         string
	}{
		{bpf, nil, true, true, "of any language"},
		{bpf, memlock, false, false, "RLIMIT_MEMLOCK: operation not permitted: needs CAP_SYS_RESOURCE"},
		{bpf, errors.New("needs root"), true, false, "needs root"},
		{kernel.Features{}, nil, true, false, "needs BPF"},
	} {
		found := map[string]check{}
		for _, one := range checks(&c.f, &kernel.System{}, c.full) {
			found[one.Name] = one
		}
		m, s := found["memlock"], found["stacks"]
		if m.OK != c.memlock || m.OK == (m.Remedy != "") || s.OK != c.stacks || !strings.Contains(s.Follows, c.follows) || !strings.Contains(s.Found, "--stack=fp") {
			t.Errorf("%v: %+v\n%+v", c.full, m, s)
		}
	}
}
