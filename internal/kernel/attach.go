package kernel

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"faultsnoop/internal/process"
)

// kretprobeInstances is how many threads may be inside handle_mm_fault at once
// before a return is missed. The kernel's default of ten or so misses half of the
// exits when 60 faults sleep for I/O.
const kretprobeInstances = 4096

// apply reduces spec to what the plan needs and sets its variables.
func (p *Plan) apply(spec *ebpf.CollectionSpec) error {
	for name := range spec.Programs {
		if !slices.Contains(p.Programs, name) {
			delete(spec.Programs, name)
		}
	}
	for _, name := range p.Programs {
		if spec.Programs[name] == nil {
			return fmt.Errorf("planning hook %s: no program %q in the BPF object", p.Hook, name)
		}
	}
	for name, value := range p.Variables {
		v := spec.Variables[name]
		if v == nil {
			return fmt.Errorf("planning hook %s: no variable %q in the BPF object", p.Hook, name)
		}
		if err := v.Set(value); err != nil {
			return fmt.Errorf("setting variable %q: %w", name, err)
		}
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("planning hook %s: %w", p.Hook, err)
	}
	spec.Maps[faultMapCounts].MaxEntries = uint32(cpus)
	spec.Maps[faultMapKindRows].MaxEntries *= uint32(cpus)
	spec.Maps[faultMapOtherRows].MaxEntries *= uint32(cpus)
	spec.Maps[faultMapRecords].MaxEntries = uint32(p.RingBytes)
	spec.Maps[faultMapStatRows].MaxEntries = uint32(p.StatRows)
	spec.Maps[faultMapPagesSeen].MaxEntries = uint32(p.Pages)
	spec.Maps[faultMapStacks].InnerMap.MaxEntries = uint32(max(p.Stacks, 1))
	if !p.Unwound {
		spec.Maps[faultMapProcesses].MaxEntries = 1
	}
	if p.TaskStorage {
		spec.Maps[faultMapStatesByTask].MaxEntries = 1
		return nil
	}
	// Programs refer to the map in branches that are dead here. The kernel still
	// wants a map in its place, of a type that it knows.
	spec.Maps[faultMapStates] = &ebpf.MapSpec{
		Name: faultMapStates, Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1,
	}
	return nil
}

// identifyTool tells the BPF side who is tracing.
func identifyTool(spec *ebpf.CollectionSpec) error {
	ns, err := process.PIDNamespace()
	if err != nil {
		return err
	}
	if ns == process.InitialPIDNamespace {
		ns = 0
	}
	for name, value := range map[string]any{
		faultVarSelfTgid: uint32(os.Getpid()), faultVarObserverPidns: ns, faultVarStackSeed: rand.Uint64(),
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("setting variable %q: %w", name, err)
		}
	}
	return nil
}

// attachments are the programs' places in the kernel, in the order of attachment.
type attachments struct {
	links []io.Closer
	pages pageEvents
}

func (a *attachments) attach(plan *Plan, coll *ebpf.Collection) error {
	for _, name := range plan.Programs {
		p := coll.Programs[name]
		var l io.Closer
		var err error
		switch name {
		case faultProgTakeBaseline, faultProgSettleAll:
			continue // run, not attached
		case faultProgExitMinor:
			a.pages.minor = p
			continue
		case faultProgExitMajor:
			a.pages.major = p
			a.pages.open = map[int][2]pageEvent{}
			// Before the first event is open: an error leaves none behind.
			a.links = append(a.links, &a.pages)
			if err := a.pages.update(); err != nil {
				return fmt.Errorf("attaching program %s: %w", name, err)
			}
			continue
		case faultProgKprobeHandleMmFault:
			l, err = link.Kprobe(handleMMFault, p, nil)
		case faultProgKretprobeHandleMmFault:
			l, err = kretprobe(handleMMFault, p)
		default:
			l, err = link.AttachTracing(link.TracingOptions{Program: p})
		}
		if err != nil {
			return fmt.Errorf("attaching program %s: %w", name, err)
		}
		a.links = append(a.links, l)
	}
	return nil
}

// probePrefix begins the names of tracefs events that are ours.
const probePrefix = "faultsnoop"

// kretprobe attaches to the return of a function. It asks for many instances, for
// which the library needs tracefs, and takes the kernel's default where there is none:
// missed returns then become records without latency.
func kretprobe(symbol string, p *ebpf.Program) (link.Link, error) {
	tracefs := process.MountPoint("tracefs")
	if tracefs == "" {
		return link.Kretprobe(symbol, p, nil)
	}
	removeStaleProbes(tracefs)
	return link.Kretprobe(symbol, p, &link.KprobeOptions{
		RetprobeMaxActive: kretprobeInstances, TraceFSPrefix: probePrefix,
	})
}

// removeStaleProbes removes events that a killed faultsnoop has left in tracefs.
// The kernel refuses to remove one that a running faultsnoop uses; other failures
// leave what was there before.
func removeStaleProbes(tracefs string) {
	name := filepath.Join(tracefs, "kprobe_events")
	list, err := os.ReadFile(name)
	if err != nil {
		return
	}
	for _, event := range staleProbes(string(list)) {
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return
		}
		_, _ = f.WriteString("-:" + event + "\n")
		f.Close()
	}
}

// staleProbes picks our events from a kprobe_events file, as group/event.
func staleProbes(list string) []string {
	var events []string
	for line := range strings.Lines(list) {
		_, event, ok := strings.Cut(line, ":")
		event, _, _ = strings.Cut(event, " ")
		if ok && strings.HasPrefix(event, probePrefix+"_") {
			events = append(events, event)
		}
	}
	return events
}

// Close detaches in reverse order, so that no fault begins that will not end.
func (a *attachments) Close() error {
	var err error
	for _, l := range slices.Backward(a.links) {
		err = errors.Join(err, l.Close())
	}
	a.links = nil
	return err
}

// walkTasks runs an iter/task program over all threads.
func walkTasks(p *ebpf.Program) error {
	it, err := link.AttachIter(link.IterOptions{Program: p})
	if err != nil {
		return fmt.Errorf("attaching to the list of tasks: %w", err)
	}
	defer it.Close()
	r, err := it.Open()
	if err != nil {
		return fmt.Errorf("opening the list of tasks: %w", err)
	}
	defer r.Close()
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("reading the list of tasks: %w", err)
	}
	return nil
}
