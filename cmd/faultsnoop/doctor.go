package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"
	"time"
	"unsafe"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/kernel"
	"faultsnoop/internal/unwind"
)

// diagnosis is what doctor has found, in the shape of its JSON.
type diagnosis struct {
	Kernel string       `json:"kernel"`
	Arch   string       `json:"arch"`
	Checks []check      `json:"checks"`
	Hooks  []hookReport `json:"hooks"`
	// Use is the hook that a trace would choose, empty if none works.
	Use    string `json:"use"`
	Reason string `json:"reason"`
}

// check is one prerequisite: what was found and what follows from it.
type check struct {
	Name    string `json:"name"`
	OK      bool   `json:"ok"`
	Found   string `json:"found"`
	Follows string `json:"follows"`
	Remedy  string `json:"remedy,omitempty"`
}

// hookReport is whether a hook works, proven by a fault of the tool's own.
type hookReport struct {
	Hook string `json:"hook"`
	OK   bool   `json:"ok"`
	// SelfTest is "passed", "not run" or what differed.
	SelfTest string `json:"self_test"`
	// Compared is [fault.Session.Compared].
	Compared string   `json:"compared,omitempty"`
	Why      string   `json:"why"`
	Remedy   string   `json:"remedy,omitempty"`
	Covers   []string `json:"covers,omitempty"`
	Blind    []string `json:"blind,omitempty"`
}

func newDoctorCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what works here, what does not, and the remedy",
		Long: `Looks at everything that tracing needs: kernel, BTF, hooks, privileges, limits.
Then each hook that could work is proven by a page fault of the tool's own.
Exits with 0 when some hook works.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d := diagnose(cmd.Context())
			if err := d.print(cmd.OutOrStdout(), asJSON); err != nil {
				return err
			}
			if d.Use == "" {
				return errors.New("examining this machine: no hook works here; the remedies are above")
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func diagnose(ctx context.Context) diagnosis {
	f, sys := kernel.Probe()
	d := diagnosis{Kernel: sys.Release, Arch: sys.Arch, Checks: checks(&f, &sys, unwind.Supported())}
	for _, v := range f.Verdicts() {
		h := hookReport{Hook: string(v.Hook), SelfTest: "not run", Why: v.Found, Remedy: v.Remedy}
		if v.OK {
			proveHook(ctx, &h)
		}
		if h.OK && d.Use == "" {
			d.Use = h.Hook
		}
		d.Hooks = append(d.Hooks, h)
	}
	d.Reason = whyUsed(&d)
	return d
}

// proveHook opens the hook for a page of the tool's own, takes a fault on it and
// wants to see its record.
func proveHook(ctx context.Context, h *hookReport) {
	page, err := kernel.FreshPages(1)
	if err != nil {
		h.SelfTest = err.Error()
		return
	}
	defer unix.Munmap(page)
	address := uint64(uintptr(unsafe.Pointer(&page[0])))
	o := sourceOptions{Hook: h.Hook, Buffer: 1 << 16, Filter: fault.Filter{
		PIDs: []uint32{uint32(os.Getpid())}, Self: true,
		AddrStart: address, AddrEnd: address + uint64(len(page)),
	}}
	src, err := openSource(o, slog.New(slog.DiscardHandler))
	if err != nil {
		h.SelfTest = err.Error()
		return
	}
	defer src.Close()
	h.Covers, h.Blind, h.Compared = src.Session().Covers, src.Session().Blind, src.Session().Compared
	page[proofOffset] = 1
	if err := awaitFault(ctx, src, address+proofOffset); err != nil {
		h.SelfTest = err.Error()
		return
	}
	h.OK, h.SelfTest = true, "passed"
}

const (
	proofOffset  = 0x234
	proofTimeout = 2 * time.Second
)

// awaitFault waits for the record of a write to address.
func awaitFault(ctx context.Context, src source, address uint64) error {
	ctx, cancel := context.WithTimeout(ctx, proofTimeout)
	defer cancel()
	for {
		batch, err := src.Next(ctx)
		if err != nil {
			return fmt.Errorf("waiting for the record of a fault of the tool's own: %w", err)
		}
		for i := range batch.Faults {
			f := &batch.Faults[i]
			if f.Address != address || !f.OK() || f.Major {
				return fmt.Errorf("a write to %#x was seen as a fault on %#x, result %v", address, f.Address, f.Result)
			}
			return nil
		}
	}
}

func whyUsed(d *diagnosis) string {
	for _, h := range d.Hooks {
		if h.Hook != d.Use {
			continue
		}
		if h.Hook == d.Hooks[0].Hook {
			return "the best hook works"
		}
		return "the best hook that works"
	}
	return "no hook works"
}

// checks lists the prerequisites in the order in which a reader would ask. full is why stacks
// of any language cannot be taken, nil if nothing speaks against it.
func checks(f *kernel.Features, sys *kernel.System, full error) []check {
	from := func(name string, s kernel.Support, with, without string) check {
		c := check{Name: name, OK: s.OK, Found: s.Found, Follows: with, Remedy: s.Remedy}
		if !s.OK {
			c.Follows = without
		}
		return c
	}
	list := []check{
		kernelCheck(sys),
		from("bpf", f.BPF, "programs can be loaded", "only hook perf can work"),
		from("btf", f.BTF, "kernel types are known", "only hook perf can work"),
		{Name: "arguments", OK: f.ArgsFrom == "BTF", Found: "handle_mm_fault: positions from " + f.ArgsFrom, Follows: "the self-test proves them"},
		{Name: "fault flags", OK: f.FlagsFrom == "BTF", Found: fmt.Sprintf("%d names from %s", len(f.FaultFlags), f.FlagsFrom), Follows: "unknown bits are shown as hex"},
	}
	if f.BPF.OK {
		list = append(list,
			from("ring buffer", f.RingBuffer, "records keep their order", "only hook perf can work"),
			from("safe fexit", f.SafeFexit, noObstacle, "hook fentry is not used"),
			preemptionCheck(from("preemption", f.Undisturbed, noObstacle, "hook fentry is not used"), f),
			from("trampolines", f.Trampolines, "hook fentry can work", "hook fentry cannot work"),
			from("kprobes", f.Kprobes, "hook kprobe can work", "hook kprobe cannot work"),
			from("tracepoints", f.Tracepoints, "hook tracepoint can work", "hook tracepoint cannot work"),
			from("perf programs", f.PerfBPF, "hook tracepoint hears of completions", "hook tracepoint cannot work"),
			from("page tables", f.Witness, "kinds are exact", "kinds are inferred from the mapping and the access, or unknown"),
			from("handle_pte_fault", f.PTEFault, "the self-test checks the reading of page tables against it", "page tables are read instead"),
			from("reclaim tracepoints", f.Reclaim, "time in direct reclaim and compaction is told", "time in direct reclaim and compaction is unknown"),
			yesNo("task storage", f.TaskStorage, "a fault in flight is kept with its thread", "a fault in flight is kept in a hash, bounded to 32,768 threads"),
		)
	}
	return append(list,
		from("perf events, own", f.PerfOwn, "hook perf works for own processes", "hook perf cannot work"),
		from("perf events, all", f.PerfAll, "hook perf works for all processes", "hook perf works for own processes only"),
		paranoidCheck(sys), lockdownCheck(sys), capsCheck(sys), memlockCheck(sys, full), tracefsCheck(f, sys), placeCheck(sys),
		stacksCheck(f, full),
	)
}

// noObstacle is what follows when one of several things that hook fentry needs is there.
const noObstacle = "does not speak against hook fentry"

// preemptionCheck leaves the remedy out where it would not make hook fentry work.
func preemptionCheck(c check, f *kernel.Features) check {
	if !f.Trampolines.OK || !f.SafeFexit.OK {
		c.Remedy = ""
	}
	return c
}

func yesNo(name string, ok bool, with, without string) check {
	if ok {
		return check{Name: name, OK: true, Found: "yes", Follows: with}
	}
	return check{Name: name, Found: "no", Follows: without}
}

func (d *diagnosis) print(w io.Writer, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetEscapeHTML(false)
		return e.Encode(d)
	}
	fmt.Fprintf(w, "kernel %s, %s\n\n", d.Kernel, d.Arch)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range d.Checks {
		fmt.Fprintf(t, "%s\t%s\t%s\n", mark(c.OK), c.Name, c.Found)
		fmt.Fprintf(t, "\t\t-> %s\n", c.Follows)
		if c.Remedy != "" && !c.OK {
			fmt.Fprintf(t, "\t\tremedy: %s\n", c.Remedy)
		}
	}
	fmt.Fprintln(t)
	for _, h := range d.Hooks {
		if h.OK {
			fmt.Fprintf(t, "%s\thook %s\tself-test passed\n", mark(true), h.Hook)
			if h.Compared != "" {
				fmt.Fprintf(t, "\t\t%s\n", h.Compared)
			}
			continue
		}
		fmt.Fprintf(t, "%s\thook %s\t%s\n", mark(false), h.Hook, h.Why)
		if h.SelfTest != "not run" {
			fmt.Fprintf(t, "\t\tself-test: %s\n", h.SelfTest)
		}
		if h.Remedy != "" {
			fmt.Fprintf(t, "\t\tremedy: %s\n", h.Remedy)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if d.Use == "" {
		fmt.Fprintf(w, "\nno hook works here\n")
		return nil
	}
	_, err := fmt.Fprintf(w, "\ntrace would use hook %s: %s\n", d.Use, d.Reason)
	return err
}

func mark(ok bool) string {
	if ok {
		return "ok"
	}
	return "--"
}
