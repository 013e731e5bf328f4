package main

import (
	"testing"

	"faultsnoop/internal/kernel"
)

// TestChecksPromiseNothing: no remedy that would not help, nothing unknown that is ok.
func TestChecksPromiseNothing(t *testing.T) {
	yes, no := kernel.Support{OK: true}, kernel.Support{Remedy: "do something"}
	find := func(f *kernel.Features, name string) check {
		for _, c := range checks(f, &kernel.System{Tracefs: "/sys/kernel/tracing"}) {
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
	if c := find(&f, "tracefs"); c.Follows != "matters to hook kprobe only, which cannot work" {
		t.Errorf("without kprobes: %+v", c)
	}
}
