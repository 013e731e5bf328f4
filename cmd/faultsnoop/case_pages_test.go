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

		const hugePage = 2 << 20
		hugeOfFile := uint64(0)
		for kind, want := range map[string]struct {
			rep                  *workload.Report
			faults, mapped, page uint64
		}{
			"thp":  {hugeRep, 18, 36 << 20, hugePage},
			"file": {fileRep, uint64(fileRep.Minflt + fileRep.Majflt), 4 << 20, 4096},
		} {
			k := c.whole.kind(kind)
			if k.Faults != want.faults || k.Minor != uint64(want.rep.Minflt) || k.Major != uint64(want.rep.Majflt) || k.bytes() != want.mapped {
				t.Errorf("%s: %d faults have mapped %d bytes, want %d and %d; getrusage %d", kind, k.Faults, k.bytes(), want.faults, want.mapped, want.rep.Minflt)
			}
			for _, f := range ofProcess(tr.inRange(want.rep), want.rep.PID) {
				if words(f.Kind) != kind || f.PageSize == nil {
					t.Fatalf("kind %s, page size known: %v; want %s", words(f.Kind), f.PageSize != nil, kind)
				}
				// A folio of the page cache as large as a huge page is mapped as one (filemap_map_pmd).
				if kind == "file" && *f.PageSize == hugePage {
					hugeOfFile++
				} else if *f.PageSize != want.page {
					t.Fatalf("%s: page size %d, want %d", kind, *f.PageSize, want.page)
				}
			}
		}
		// Each huge page stands for the windows of 64 KiB that it is in place of.
		few := c.whole.kind("file").Faults
		if windows := few + hugeOfFile*(hugePage/(64<<10)-1); windows < 64 || windows > 80 {
			t.Errorf("%d faults, %d of them for huge pages, for 1024 pages of a file", few, hugeOfFile)
		}
		if c.whole.Seen != tr.summary.Seen || c.whole.Total.bytes() != 40<<20 {
			t.Errorf("%d faults counted, %d listed, %d bytes mapped", c.whole.Seen, tr.summary.Seen, c.whole.Total.bytes())
		}
	})
}
