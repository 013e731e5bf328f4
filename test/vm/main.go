// Vm runs faultsnoop's live tests on the stock kernels of Debian, each in a virtual
// machine of its own, without hardware virtualisation and without privilege.
//
//	go run ./test/vm                                  # every kernel, every test
//	go run ./test/vm -kernel 6.12,6.12-arm64 -run Hook
//	go run ./test/vm -kernel 5.10 -cmd 'uname -a; faultsnoop doctor'
//
// Kernels, QEMU and what else is missing come from the Debian mirror that this
// machine's own apt uses. Signatures are checked, nothing is installed: packages
// are unpacked into faultsnoop-vm in the user's cache folder. A guest is a stock
// kernel and an initramfs of static programs: /init, busybox, faultsnoop and the
// test binaries of [testPackages].
//
// It needs a Debian with dpkg and apt, and QEMU 9 or newer, which it fetches if
// this machine has none or the 7.2 of Debian 12: see minQEMU.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// options is the command line.
type options struct {
	kernels  []kernel
	run      string
	packages []string
	short    bool
	command  string
	files    []string
	verbose  bool
	parallel int
	limit    time.Duration
	cpus     int
	nodes    int
	memory   int
	append   string
}

func main() {
	o, err := parseOptions(os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	status, err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
	os.Exit(status)
}

func parseOptions(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("vm", flag.ContinueOnError)
	names := flags.String("kernel", "", "comma-separated `list` of kernels (default all)")
	packages := flags.String("pkg", strings.Join(testPackages, ","), "comma-separated `list` of packages to test")
	flags.StringVar(&o.run, "run", "", "run only tests that match `regexp`")
	flags.BoolVar(&o.short, "short", false, "run tests in short mode")
	flags.StringVar(&o.command, "cmd", "", "run a shell `line` instead of the tests and print what it prints")
	flags.Func("add", "put a `file` into the guest's /bin (repeatable)", func(name string) error {
		o.files = append(o.files, name)
		return nil
	})
	flags.BoolVar(&o.verbose, "v", false, "print what the tests print")
	// A guest keeps one CPU busy, and takes the memory of four.
	flags.IntVar(&o.parallel, "j", min(runtime.NumCPU(), 2), "`number` of kernels to run at a time")
	flags.DurationVar(&o.limit, "limit", 60*time.Minute, "time `limit` of one kernel")
	flags.IntVar(&o.cpus, "cpus", 4, "`number` of CPUs")
	flags.IntVar(&o.nodes, "nodes", 2, "`number` of NUMA nodes, a divisor of the number of CPUs")
	flags.IntVar(&o.memory, "memory", 1536, "memory in `MiB`")
	flags.StringVar(&o.append, "append", "", "further kernel `parameters`")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if o.cpus < 1 || o.parallel < 1 || o.nodes < 0 || o.nodes > 0 && o.cpus%o.nodes != 0 {
		return o, errors.New("-cpus and -j must be positive, -nodes a divisor of -cpus")
	}
	o.packages = strings.Split(*packages, ",")
	var err error
	o.kernels, err = selectKernels(*names)
	return o, err
}

// run boots every chosen kernel and returns the exit status.
func run(ctx context.Context, o options) (int, error) {
	c, err := openCache()
	if err != nil {
		return 0, err
	}
	work, err := c.workFolder()
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(work)

	b := bench{options: o, cache: c, work: work}
	if err := b.fetch(ctx); err != nil {
		return 0, err
	}
	if err := b.compile(ctx); err != nil {
		return 0, err
	}
	results := b.runAll(ctx)
	if err := ctx.Err(); err != nil {
		return 0, errors.New("interrupted")
	}
	if o.command != "" {
		return commandStatus(results), nil
	}
	if ok := summarize(os.Stdout, results); !ok {
		return 1, nil
	}
	return 0, nil
}
