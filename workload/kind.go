package workload

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"

	"faultsnoop/internal/fault"
)

// Kind is one way of taking page faults.
type Kind struct {
	// Name is what the command line calls it.
	Name string
	// Short is one line of help and Long the rest of it.
	Short, Long string

	// flags declares the kind's flags and returns the program that they set.
	flags func(*pflag.FlagSet) program
}

// program is a kind with its flags.
type program interface {
	// validate returns an error if the flags make no sense on any machine.
	validate() error
	// lay prepares the work and adds it to p. What it has to undo it gives to
	// p.onClose at once, so that an error half way leaves nothing behind.
	lay(p *plan) error
}

// Kinds are all kinds, in the order in which help shows them.
func Kinds() []Kind {
	return []Kind{
		{
			"alloc", "allocate --size bytes in blocks of --block bytes and write to every page",
			"Anonymous private memory without huge pages: one minor fault for each page.", allocFlags,
		},
		{
			"touch", "write to fresh anonymous pages, in one or several threads",
			"Each thread maps memory of its own. --stride N touches every Nth page.", touchFlags,
		},
		{
			"file", "read pages from the middle of a mapped file, warm or cold",
			"Warm pages are in the page cache and take minor faults, cold ones are read from the disk and take\n" +
				"major faults. The kernel maps neighbouring warm pages along with the one that faulted (fault-around);\n" +
				"these are unmapped again before they are touched, unless --around is given.", fileFlags,
		},
		{
			"cow", "fork, then write to the shared pages: each is copied",
			"The parent writes; the child only exists until the parent is done.", cowFlags,
		},
		{
			"reuse", "fork, let the child end, then write: the pages are made writable again, not copied", "", reuseFlags,
		},
		{
			"zero", "read fresh anonymous pages: the kernel's page of zeros is mapped",
			"Where the kernel does without that page (CONFIG_ZERO_PAGE or a boot parameter), each read gets a page\n" +
				"of its own, and the kind of fault is anon.", zeroFlags,
		},
		{
			"cow-file", "write to a private file mapping: each page is copied", "", cowFileFlags,
		},
		{
			"mkwrite", "write to pages of a shared file mapping that were read before",
			"The file system wants to know which pages become dirty, so the first write to each faults.", mkwriteFlags,
		},
		{
			"numa", "read memory until NUMA balancing has made each page fault once",
			"Needs a machine with several nodes and kernel.numa_balancing=1. The kernel scans a process a second\n" +
				"after its start at the earliest.", numaFlags,
		},
		{
			"device", "read a page of [vdso] again and again: the kernel's own handler maps it",
			"Done by a forked child, which drops the page each time.", deviceFlags,
		},
		{"kernel", "let read(2) from /dev/zero fill fresh memory: the faults are taken in kernel mode", "", kernelFlags},
		{
			"remote", "write to fresh memory of a child by process_vm_writev(2)",
			"The faults are counted for the writer, the addresses are the child's.", remoteFlags,
		},
		{
			"uffd", "touch pages that a userfaultfd server provides after --delay",
			"The kernel enters its fault handler twice for each. Whether it counts them as minor or major depends\n" +
				"on its version.", uffdFlags,
		},
		{"thp", "touch memory that is backed by transparent huge pages: one fault each", "", thpFlags},
		{
			"hugetlb", "touch memory from the pool of huge pages: one fault each",
			"As root, enlarges the pool (vm.nr_hugepages) while it runs if it is too small.", hugetlbFlags,
		},
		{"shmem", "write to fresh shared memory: anonymous, of a memfd or of System V", "", shmemFlags},
		{
			"stack", "grow the stack of a thread page by page, and write elsewhere in its mapping in between",
			"The thread has its stack and its TLS in one mapping, as those of pthread_create.", stackFlags,
		},
		{"swap", "write pages out to swap and read them back", "Needs swap space that is on.", swapFlags},
		{
			"segv", "touch some pages, then a bad address: the process dies of the signal",
			"--how maperr reads address 0x10, accerr a page without permission, both end with SIGSEGV; sigbus reads\n" +
				"beyond the end of a mapped file. The report is written before.", segvFlags,
		},
		{
			"storm", "take as many faults a second as possible on all CPUs",
			"One pinned thread for each CPU touches and drops 512 pages again and again, for --duration or until\n" +
				"each has touched --pages pages.", stormFlags,
		},
		{
			"image", "touch pages of the program's own .noptrdata, .noptrbss and .rodata",
			"These are what the Go linker calls .data and .bss without pointers. The report has the symbols.", imageFlags,
		},
		{
			"where", "read, write, overwrite and execute at fixed addresses",
			fmt.Sprintf("Reads %#x, writes %#x, writes %#x and calls %#x. The third\n",
				uint64(WhereData+atRead), uint64(WhereData+atWrite), uint64(WhereData+atOver), uint64(WhereCode+atCall)) +
				"faults only where the kernel has mapped its shared zero page for the read.", whereFlags,
		},
	}
}

// Command is a kind bound to the flags of a command line.
type Command struct {
	kind    Kind
	program program
	hold    time.Duration
	name    string
}

// Bind declares the flags of k in fs. The values are read when Validate and Run
// are called.
func (k Kind) Bind(fs *pflag.FlagSet) *Command {
	c := &Command{kind: k, program: k.flags(fs)}
	fs.DurationVar(&c.hold, "hold", 0, "say on stderr when all is prepared, and wait this long before the first fault")
	fs.StringVar(&c.name, "name", "", "name of the threads that take the faults, at most 15 bytes")
	return c
}

// Validate returns an error if the flags make no sense.
func (c *Command) Validate() error {
	switch {
	case c.hold < 0:
		return fmt.Errorf("--hold %v: must not be negative", c.hold)
	case len(c.name) > fault.MaxComm:
		return fmt.Errorf("--name %q: the kernel keeps %d bytes of a name, this has %d", c.name, fault.MaxComm, len(c.name))
	case strings.ContainsRune(c.name, 0):
		return errors.New("--name: must not contain a zero byte")
	}
	return c.program.validate()
}

// maxPages bounds what one flag can ask for, so that sizes in bytes cannot
// overflow: 2^35 pages of 4 KiB are the 128 TiB of an x86-64 address space.
const maxPages = 1 << 35

func checkCount(flag string, n, most int) error {
	if n < 1 || n > most {
		return fmt.Errorf("--%s %d: must be between 1 and %d", flag, n, most)
	}
	return nil
}

// byteSize is a flag like 10MB, in powers of 1024 as memory is measured.
type byteSize int64

func (s *byteSize) String() string {
	const mega, giga = units.MiB, units.GiB
	switch n := int64(*s); {
	case n >= giga && n%giga == 0:
		return fmt.Sprintf("%dGB", n/giga)
	case n >= mega && n%mega == 0:
		return fmt.Sprintf("%dMB", n/mega)
	default:
		return fmt.Sprint(n)
	}
}

func (s *byteSize) Set(text string) error {
	n, err := units.RAMInBytes(text)
	if err != nil {
		return fmt.Errorf("%w (write for example 4k, 10MB or 1GB)", err)
	}
	// The library refuses a minus sign, so this is what an overflow became.
	if n < 0 || n == math.MaxInt64 {
		return errors.New("too large")
	}
	*s = byteSize(n)
	return nil
}

func (s *byteSize) Type() string { return "bytes" }
