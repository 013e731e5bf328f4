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
	} {
		if !strings.Contains(docs, says) {
			t.Errorf("docs/faults.md does not say: %s", says)
		}
	}
}
