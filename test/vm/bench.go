package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"sync"
	"time"

	"faultsnoop/test/vm/guest"
)

// Sizes of the guest's disks. They are sparse files on the host.
const (
	diskMiB = 256
	swapMiB = 256
)

// bench is one run over some kernels.
type bench struct {
	options
	cache cache
	work  string // folder that is removed afterwards

	tools    toolbox
	kernels  []kernelFiles // of options.kernels, in the same order
	programs map[string]programs
}

// result is what became of one kernel.
type result struct {
	kernel  kernel
	release string
	report  report
	err     error // the machine did not get to its end
	log     string
	took    time.Duration
}

// fetch gets the kernels and tools, while no other run does the same.
func (b *bench) fetch(ctx context.Context) error {
	unlock, err := b.cache.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if b.tools, err = b.cache.toolbox(ctx); err != nil {
		return err
	}
	for _, k := range b.options.kernels {
		files, err := b.cache.kernel(ctx, k)
		if err != nil {
			return err
		}
		b.kernels = append(b.kernels, files)
	}
	return nil
}

// compile compiles the guests' programs for every architecture among the kernels.
func (b *bench) compile(ctx context.Context) error {
	b.programs = map[string]programs{}
	packages := b.packages
	if b.command != "" {
		packages = nil
	}
	for _, k := range b.options.kernels {
		if _, ok := b.programs[k.arch]; ok {
			continue
		}
		p, err := compile(ctx, b.work, k.arch, packages)
		if err != nil {
			return err
		}
		b.programs[k.arch] = p
	}
	return nil
}

// runAll boots the kernels, as many at a time as asked for.
func (b *bench) runAll(ctx context.Context) []result {
	var (
		results = make([]result, len(b.kernels))
		slots   = make(chan struct{}, b.parallel)
		wait    sync.WaitGroup
	)
	for i := range b.kernels {
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			results[i] = b.runOne(ctx, i)
			if b.command == "" && ctx.Err() == nil {
				announce(os.Stdout, results[i])
			}
		})
	}
	wait.Wait()
	return results
}

func (b *bench) runOne(ctx context.Context, i int) result {
	k := b.options.kernels[i]
	r := result{kernel: k, release: b.kernels[i].Release, log: b.cache.logPath(k)}
	start := time.Now()
	// Another run may be at the same kernel: each writes a file of its own, and the
	// one that ends last leaves its file behind.
	log := filepath.Join(b.work, filepath.Base(r.log))
	r.report, r.err = b.boot(ctx, i, log)
	if err := os.Rename(log, r.log); err != nil {
		r.err = errors.Join(r.err, err)
	}
	r.took = time.Since(start)
	return r
}

// boot builds a machine, runs it to its end and writes its console to the file log.
func (b *bench) boot(ctx context.Context, i int, log string) (report, error) {
	ctx, cancel := context.WithTimeout(ctx, b.limit)
	defer cancel()
	f, err := os.Create(log)
	if err != nil {
		return report{}, err
	}
	defer f.Close()
	k := b.options.kernels[i]
	image, err := b.kernels[i].image()
	if err != nil {
		return report{}, err
	}
	m := machine{
		arch:      k.arch,
		kernel:    image,
		initrd:    filepath.Join(b.work, k.name+".cpio"),
		options:   append(k.options[:len(k.options):len(k.options)], b.append),
		disks:     []string{filepath.Join(b.work, k.name+".ext4"), filepath.Join(b.work, k.name+".swap")},
		cpus:      b.cpus,
		nodes:     b.nodes,
		memoryMiB: b.memory,
	}
	if err := errors.Join(makeDisk(ctx, b.tools, m.disks[0], diskMiB), makeBlank(m.disks[1], swapMiB)); err != nil {
		return report{}, err
	}
	nonce := rand.Text()
	if err := b.buildInitramfs(ctx, m.initrd, i, nonce); err != nil {
		return report{}, err
	}
	c := console{nonce: nonce, log: f}
	if b.verbose || b.command != "" {
		c.echo = os.Stdout
	}
	if err = bootReady(ctx, b.tools, m, &c); errors.Is(err, errNotReady) {
		fmt.Fprintf(os.Stderr, "vm: %s: %v; starting it once more\n", k.name, err)
		err = bootReady(ctx, b.tools, m, &c)
	}
	if err == nil && !c.done {
		err = errors.New("machine stopped before the last program ended")
	}
	if c.fault != "" {
		err = fmt.Errorf("setting up: %s", c.fault)
	}
	return c.report, err
}

// buildInitramfs writes the guest's whole file system.
func (b *bench) buildInitramfs(ctx context.Context, name string, i int, nonce string) error {
	k, files := b.options.kernels[i], b.kernels[i]
	fsys := initramfs{}
	fsys.add("/etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"))
	fsys.add("/etc/group", 0o644, []byte("root:x:0:\nnogroup:x:65534:\n"))
	fsys.add("/root/.keep", 0o644, nil)
	busybox, err := files.busybox()
	if err != nil {
		return err
	}
	if err := fsys.addFile("/bin/busybox", busybox); err != nil {
		return err
	}
	for _, source := range b.files {
		if err := fsys.addFile(path.Join("/bin", filepath.Base(source)), source); err != nil {
			return err
		}
	}
	dir, err := files.modules()
	if err != nil {
		return err
	}
	tree, err := openModules(dir)
	if err != nil {
		return err
	}
	modules, err := tree.load(wantedModules, func(file string) ([]byte, error) { return b.tools.readModule(ctx, file) })
	if err != nil {
		return err
	}
	for n, m := range modules {
		fsys.add(fmt.Sprintf("%s/%02d-%s.ko", guest.ModuleDir, n, m.name), 0o644, m.data)
	}
	config := guest.Config{Nonce: nonce, Kernel: k.name, Disk: "/dev/vda", Swap: "/dev/vdb"}
	if config.Programs, err = b.programs[k.arch].install(fsys, b.options); err != nil {
		return err
	}
	data, err := json.Marshal(config)
	if err != nil {
		return err
	}
	fsys.add(guest.ConfigPath, 0o644, data)

	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(fsys.write(f), f.Close())
}
