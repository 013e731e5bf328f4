package aggregate

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// The numbers in docs/faults.md are those of the code.
func TestDocs(t *testing.T) {
	b, err := os.ReadFile("../../docs/faults.md")
	if err != nil {
		t.Fatal(err)
	}
	docs := strings.Join(strings.Fields(string(b)), " ")
	for _, says := range []string{
		fmt.Sprintf("a bucket for each nanosecond below %d, and %d to each power of two above, up to %d minutes",
			subBuckets, subBuckets, Bound(Buckets-2)/time.Minute),
		fmt.Sprintf("at most 1/%d (%g %%) too large", subBuckets, 100./subBuckets),
	} {
		if !strings.Contains(docs, says) {
			t.Errorf("docs/faults.md does not say: %s", says)
		}
	}
}
