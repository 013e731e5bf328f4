package symbol

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// The numbers in docs/faults.md are those of the code.
func TestDocs(t *testing.T) {
	b, err := os.ReadFile("../../docs/faults.md")
	if err != nil {
		t.Fatal(err)
	}
	docs := strings.Join(strings.Fields(string(b)), " ")
	if readShare != 20 || maxSaved != 1e9 {
		t.Error("docs/faults.md says a twentieth, and a second")
	}
	for _, says := range []string{
		fmt.Sprintf("at most %d s after its last fault, %d files at a time", int(closeAfter/1e9), maxOpen),
		fmt.Sprintf("more than %d,%03d sections, one with a name of more than %d bytes, or a symbol table of more than %d MiB",
			maxSections/1000, maxSections%1000, maxSectionName, maxTable>>20),
		fmt.Sprintf("must be right (up to %d MiB)", maxChecked>>20),
		fmt.Sprintf("has %d s for at most %d MiB, and a miss is remembered for %d minutes",
			int(fetchWithin.Seconds()), maxFetched>>20, int(missesFor.Minutes())),
		fmt.Sprintf("longer than %d,%03d bytes stays mangled", 1<<maxDemangled/1000, 1<<maxDemangled%1000),
		fmt.Sprintf("Read are %d MiB, kept %d,%03d entries and %d MiB of names",
			maxMapBytes>>20, maxMapEntries/1000, maxMapEntries%1000, maxMapKept>>20),
		fmt.Sprintf("a unit of DWARF %d MiB, sections that are compressed %d MiB in all, `.gnu_debugdata` %d MiB unpacked, a symbol table %d MiB",
			maxUnit>>20, maxInflated>>20, maxUnpacked>>20, maxTable>>20),
		fmt.Sprintf("some %d MiB of units (or the one that is larger), its symbols and %d MiB of answers are kept, and %d MiB of all files",
			maxUnitBytes>>20, maxAnswers>>20, maxKept>>20),
	} {
		if !strings.Contains(docs, says) {
			t.Errorf("docs/faults.md does not say: %s", says)
		}
	}
}
