package kernel

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
)

// The numbers in docs/faults.md are those of the code.
func TestDocs(t *testing.T) {
	b, err := os.ReadFile("../../docs/faults.md")
	if err != nil {
		t.Skip("guests of the kernel matrix have no docs: ", err)
	}
	docs := strings.Join(strings.Fields(string(b)), " ")
	rows := func(by fault.By) string {
		n := strconv.Itoa(statRows([]fault.By{by}) - 1)
		return n[:len(n)-3] + "," + n[len(n)-3:]
	}
	for _, says := range []string{
		fmt.Sprintf("%s rows if one is by page, %s for each by process, thread, file or mapping, %s for each other",
			rows(fault.ByPage), rows(fault.ByFile), rows(fault.ByUID)),
		fmt.Sprintf("faultsnoop asks for %d where tracefs is mounted", kretprobeInstances),
		fmt.Sprintf("above the stack pointer and by %d MiB at most", defined(t, "STACK_MAX")>>20),
		fmt.Sprintf("or less than %d KiB off", defined(t, "STACK_SLACK")>>10),
		fmt.Sprintf("with more than %d names and mounts the first are missing", defined(t, "PATH_DEPTH")),
	} {
		if !strings.Contains(docs, says) {
			t.Errorf("docs/faults.md does not say: %s", says)
		}
	}
}

// defined is a number that the BPF side defines.
func defined(t *testing.T, name string) uint64 {
	t.Helper()
	b, err := os.ReadFile("../../bpf/vma.h")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`#define ` + name + ` \(?(\d+)(?:ULL << (\d+)\))?`).FindStringSubmatch(string(b))
	if m == nil {
		t.Fatalf("bpf/vma.h does not define %s", name)
	}
	n, _ := strconv.ParseUint(m[1], 10, 64)
	shift, _ := strconv.Atoi(m[2])
	return n << shift
}
