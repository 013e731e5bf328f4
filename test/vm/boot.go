package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// machine is a virtual machine to boot.
type machine struct {
	arch        string
	kernel      string   // kernel image
	initrd      string   // initramfs
	options     []string // kernel parameters
	disks       []string // raw images, in the order /dev/vda, /dev/vdb
	cpus, nodes int
	memoryMiB   int
}

// args returns QEMU's command line. There is never hardware virtualisation: the
// same emulated CPU everywhere makes failures repeatable.
func (m machine) args() []string {
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-serial", "stdio",
		"-no-reboot", "-net", "none",
		"-smp", fmt.Sprint(m.cpus), "-m", fmt.Sprintf("%dM", m.memoryMiB),
		"-kernel", m.kernel, "-initrd", m.initrd,
		"-append", strings.Join(m.parameters(), " "),
	}
	if m.arch == "arm64" {
		// The architected pointer authentication algorithm costs TCG half its speed.
		args = append(args, "-machine", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on")
	} else {
		args = append(args, "-machine", "pc", "-cpu", "max")
	}
	for i, disk := range m.disks {
		args = append(args,
			"-drive", fmt.Sprintf("file=%s,format=raw,if=none,id=disk%d,cache=unsafe", disk, i),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=disk%d", i))
	}
	for i := range m.nodes {
		per := m.cpus / m.nodes
		args = append(args,
			"-object", fmt.Sprintf("memory-backend-ram,id=node%d,size=%dM", i, m.memoryMiB/m.nodes),
			"-numa", fmt.Sprintf("node,nodeid=%d,memdev=node%d,cpus=%d-%d", i, i, i*per, (i+1)*per-1))
	}
	return args
}

func (m machine) parameters() []string {
	console := "ttyS0,115200"
	if m.arch == "arm64" {
		console = "ttyAMA0"
	}
	return append([]string{
		"console=" + console,
		// A panic ends the machine at once (with -no-reboot) instead of hanging it.
		"panic=-1", "oops=panic",
		// Warnings and worse: enough to see trouble, little enough to read the tests.
		"loglevel=5",
		// Messages of programs are not rate limited, and no bootloader's leftovers count.
		"printk.devkmsg=on", "random.trust_cpu=on",
	}, m.options...)
}

// readyLimit is how long a machine may take until /init has set it up. A slow one takes
// half a minute.
const readyLimit = 3 * time.Minute

// errNotReady: one boot in hundreds hangs before any test, an emulated CPU waiting for
// an interrupt of its timer that does not come ("timer wakeup didn't happen").
var errNotReady = fmt.Errorf("machine was not ready in %s", readyLimit)

// bootReady is boot, ended with errNotReady if the guest does not tell that it is ready.
func bootReady(ctx context.Context, tools toolbox, m machine, c *console) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(readyLimit, func() { cancel(errNotReady) })
	defer timer.Stop()
	c.onReady = func() { timer.Stop() }
	return boot(ctx, tools, m, c)
}

// boot runs the machine until it powers itself off and copies its serial console to w.
func boot(ctx context.Context, tools toolbox, m machine, w io.Writer) error {
	// The emulator dies with the thread that started it if this program is killed.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd := tools.command(ctx, emulator(m.arch), append(tools.firmware(), m.args()...)...)
	var complaints strings.Builder
	cmd.Stdout, cmd.Stderr = w, &complaints
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return errors.New("machine did not power off in time")
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("running QEMU: %w: %s", err, complaints.String())
	}
	return nil
}

// makeDisk creates an ext4 image of the given size.
func makeDisk(ctx context.Context, tools toolbox, name string, mib int64) error {
	if err := makeBlank(name, mib); err != nil {
		return err
	}
	if _, err := output(tools.command(ctx, "mke2fs", "-q", "-F", "-t", "ext4", name)); err != nil {
		return fmt.Errorf("making disk: %w", err)
	}
	return nil
}

// makeBlank creates a sparse file.
func makeBlank(name string, mib int64) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(mib<<20), f.Close())
}
