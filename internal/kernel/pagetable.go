package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// PageTables is how the kernel's page tables can be read. The zero value is that
// they cannot.
type PageTables struct {
	// DirectMap is the kernel's address of physical address 0.
	DirectMap uint64
	Levels    uint8
}

const (
	// candidates is how many GiB of memory are tried: what 46 bits can address.
	candidates = 1 << 16
	// triedAtOnce is TRIES of bpf/witness.bpf.c.
	triedAtOnce = 256
	// witnessPages is how many pages must be found where the kernel says they are.
	witnessPages    = 3
	witnessAttempts = 3
)

// tableLevels are the depths that a page table may have, deepest first: with 5 levels
// a table of 4 is not mistaken for one, since its first table holds one entry less.
var tableLevels = map[string][]uint8{"amd64": {5, 4}, "arm64": {5, 4, 3}}

// probePageTables finds the direct map by pages of our own, whose frames
// /proc/self/pagemap tells to those who may know.
func probePageTables() (PageTables, Support) {
	tables, err := findPageTables()
	for range witnessAttempts {
		if err == nil {
			break
		}
		// NUMA balancing or compaction may have moved a page meanwhile.
		tables, err = findPageTables()
	}
	if err != nil {
		return PageTables{}, Support{Found: err.Error()}
	}
	return tables, Support{OK: true, Found: fmt.Sprintf("read through the direct map at %#x, %d levels", tables.DirectMap, tables.Levels)}
}

func findPageTables() (PageTables, error) {
	if os.Getpagesize() != 4096 {
		return PageTables{}, fmt.Errorf("reading page tables: pages of %d bytes, only tables for 4096 are understood", os.Getpagesize())
	}
	pages, err := newWitnessPages()
	if err != nil {
		return PageTables{}, err
	}
	defer pages.close()
	spec, err := loadWitness()
	if err != nil {
		return PageTables{}, fmt.Errorf("reading the BPF object: %w", err)
	}
	var w tableReaders
	if err := spec.LoadAndAssign(&w, nil); err != nil {
		sys := ReadSystem()
		return PageTables{}, errors.New(sys.refusal("loading the programs that read page tables", err).Found)
	}
	defer w.close()
	// The programs look at the thread that runs them.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	base, err := pages.findDirectMap(&w)
	if err != nil {
		return PageTables{}, err
	}
	for _, levels := range tableLevels[runtime.GOARCH] {
		ok, err := pages.verify(&w, base, levels)
		if err != nil {
			return PageTables{}, err
		}
		if ok {
			return PageTables{DirectMap: base, Levels: levels}, nil
		}
	}
	return PageTables{}, errors.New("reading page tables: a walk does not end in the frames of /proc/self/pagemap " +
		"(memory encryption, or a hypervisor that keeps its own tables)")
}

// tableReaders are the programs that look for the direct map and prove it.
type tableReaders struct {
	FindDirectMap *ebpf.Program `ebpf:"find_direct_map"`
	Walk          *ebpf.Program `ebpf:"walk"`
	witnessVariables
}

func (r *tableReaders) close() {
	r.FindDirectMap.Close()
	r.Walk.Close()
}

// ownPages are pages whose frames are known.
type ownPages struct {
	memory [][]byte
	frames []uint64
}

// newWitnessPages maps pages apart from each other, so that they do not share tables.
func newWitnessPages() (_ *ownPages, err error) {
	pages := &ownPages{}
	defer func() {
		if err != nil {
			pages.close()
		}
	}()
	for range witnessPages {
		mem, err := unix.Mmap(-1, 0, 4<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return nil, fmt.Errorf("mapping a page: %w", err)
		}
		pages.memory = append(pages.memory, mem)
		_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE) // a kernel without huge pages refuses
		binary.NativeEndian.PutUint64(mem, rand.Uint64()|1)
		// A page that cannot be locked may move, which the verification would show.
		_ = unix.Mlock(mem[:1])
		frame, err := frameOf(addressOf(mem))
		if err != nil {
			return nil, err
		}
		pages.frames = append(pages.frames, frame)
	}
	return pages, nil
}

func (p *ownPages) close() {
	for _, mem := range p.memory {
		_ = unix.Munmap(mem)
	}
}

// frameOf asks the kernel for the physical address of a page
// (Documentation/admin-guide/mm/pagemap.rst).
func frameOf(address uint64) (uint64, error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return 0, fmt.Errorf("reading page tables: %w", err)
	}
	defer f.Close()
	var b [8]byte
	if _, err := f.ReadAt(b[:], int64(address/4096*8)); err != nil {
		return 0, fmt.Errorf("reading page tables: reading /proc/self/pagemap: %w", err)
	}
	const present, frameMask = 1 << 63, 1<<55 - 1
	entry := binary.NativeEndian.Uint64(b[:])
	switch {
	case entry&present == 0:
		return 0, errors.New("reading page tables: a page just touched is not there")
	case entry&frameMask == 0:
		return 0, errors.New("reading page tables: /proc/self/pagemap hides frames (needs CAP_SYS_ADMIN)")
	}
	return entry & frameMask * 4096, nil
}

func (p *ownPages) findDirectMap(w *tableReaders) (uint64, error) {
	err := errors.Join(
		w.PagePhysical.Set(p.frames[0]),
		w.PageValue.Set(binary.NativeEndian.Uint64(p.memory[0])))
	for tried := uint64(0); err == nil && tried < candidates; tried += triedAtOnce {
		if err = w.Tried.Set(tried); err != nil {
			break
		}
		if err = runOnce(w.FindDirectMap); err != nil {
			break
		}
		var found uint64
		if err = w.Found.Get(&found); err == nil && found != 0 {
			return found, nil
		}
	}
	if err != nil {
		return 0, fmt.Errorf("reading page tables: looking for the direct map: %w", err)
	}
	return 0, errors.New("reading page tables: no direct map of memory below mm->pgd")
}

// verify walks to all pages.
func (p *ownPages) verify(w *tableReaders, base uint64, levels uint8) (bool, error) {
	for i, mem := range p.memory {
		// The read gives it the permissions back that NUMA balancing may have taken.
		if binary.NativeEndian.Uint64(mem) == 0 {
			return false, nil
		}
		err := errors.Join(w.WalkAddress.Set(addressOf(mem)), w.WalkBase.Set(base), w.WalkLevels.Set(levels))
		if err == nil {
			err = runOnce(w.Walk)
		}
		var page uint64
		if err == nil {
			err = w.WalkedTo.Get(&page)
		}
		if err != nil {
			return false, fmt.Errorf("reading page tables: walking to a page: %w", err)
		}
		if page != p.frames[i] {
			return false, nil
		}
	}
	return true, nil
}

// runOnce runs a program on the calling thread.
func runOnce(p *ebpf.Program) error {
	_, err := p.Run(&ebpf.RunOptions{})
	return err
}
