package main

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"faultsnoop/internal/fault"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestGolden runs the command lines that are the names of the files in testdata,
// with + between words, on the same faults.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.golden")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d golden files, %v", len(files), err)
	}
	duration := regexp.MustCompile(`"duration_ns":\d+|\d+\.\d s by|in \d+ms by|\d+\.\d% of the run time|"time":"[^"]*","total"`)
	for _, file := range files {
		args := strings.Split(strings.TrimSuffix(filepath.Base(file), ".golden"), "+")
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			batches := []fault.Batch{{Faults: sampleFaults()}, {Lost: []fault.Loss{{Where: "ring buffer full", Count: 7}}}}
			line := args
			if args[len(args)-1] != "--help" {
				line = append(args[:len(args):len(args)], "--duration", "200ms")
			}
			code, stdout, stderr := runWith(script(fakeSource{batches: batches, counters: fault.Counters{Filtered: 3}}), line...)
			if code != 0 {
				t.Fatalf("exit code %d: %s", code, stderr)
			}
			got := duration.ReplaceAllString(stdout+"--- stderr\n"+stderr, "DURATION")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}
