package main

import (
	"fmt"
	"testing"

	"faultsnoop/workload"
)

// Faults are not pages: 18 faults map 36 MiB of huge pages, and few faults map the 1024
// pages of a file that is in the page cache.
// https://github.com/tsoding/arena/pull/5
func TestCaseFaultsAreNotPages(t *testing.T) {
	hooks(t, someHooks(), func(t *testing.T, hook string) {
		huge, missing := holdOracle(t, []string{"thp", "--pages", "18"})
		if huge == nil {
			t.Skip(missing)
		}
		file, missing := holdOracle(t, []string{"file", "--around", "--pages", "1024", "--dir", fileDir()})
		if file == nil {
			t.Skip(missing)
		}
		of := []string{"--addr", workArea, "-p", fmt.Sprintf("%d,%d", huge.cmd.Process.Pid, file.cmd.Process.Pid)}
		counting := startStat(t, hook, append(of, "--by", "process")...)
		listing := startArmed(t, hook, of...)
		// A page that is locked just then is left out by the kernel, and faults by itself.
		hugeRep, fileRep := huge.finish(t), file.end(t)
		c, tr := counting.stopStat(t, hook), listing.stop(t, hook)

		for kind, want := range map[string]struct {
			rep                  *workload.Report
			faults, mapped, page uint64
		}{
			"thp":  {hugeRep, 18, 36 << 20, 2 << 20},
			"file": {fileRep, uint64(fileRep.Minflt + fileRep.Majflt), 4 << 20, 4096},
		} {
			k := c.whole.kind(kind)
			if k.Faults != want.faults || k.Minor != uint64(want.rep.Minflt) || k.Major != uint64(want.rep.Majflt) || k.bytes() != want.mapped {
				t.Errorf("%s: %d faults have mapped %d bytes, want %d and %d; getrusage %d", kind, k.Faults, k.bytes(), want.faults, want.mapped, want.rep.Minflt)
			}
			for _, f := range ofProcess(tr.inRange(want.rep), want.rep.PID) {
				if words(f.Kind) != kind || f.PageSize == nil || *f.PageSize != want.page {
					t.Fatalf("kind %s with page size %v, want %s with %d", words(f.Kind), f.PageSize, kind, want.page)
				}
			}
		}
		if few := c.whole.kind("file").Faults; few < 64 || few > 80 {
			t.Errorf("%d faults for 1024 pages of a file", few)
		}
		if c.whole.Seen != tr.summary.Seen || c.whole.Total.bytes() != 40<<20 {
			t.Errorf("%d faults counted, %d listed, %d bytes mapped", c.whole.Seen, tr.summary.Seen, c.whole.Total.bytes())
		}
	})
}
