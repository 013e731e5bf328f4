package perfevent

import (
	"math"
	"testing"

	"golang.org/x/sys/unix"

	"faultsnoop/internal/fault"
)

// fillPairs writes beginnings and completions of faults until the ring is full, and
// returns the number of records.
func fillPairs(r *ring, time *uint64, tid uint32) (n int) {
	for {
		addr := 10*pageSize + *time%pageSize
		begin := framed(unix.PERF_RECORD_SAMPLE, 2, sampleBytes(entry, 100, tid, *time+1, addr))
		end := framed(unix.PERF_RECORD_SAMPLE, 2, sampleBytes(minor, 100, tid, *time+2, addr))
		if !r.write(begin) || !r.write(end) {
			return n
		}
		*time += 2
		n += 2
	}
}

// BenchmarkRecords is the cost of one record from the ring to the batch.
func BenchmarkRecords(b *testing.B) {
	for _, bench := range []struct {
		name string
		flt  fault.Filter
	}{
		{"all", fault.Filter{}},
		{"comm", fault.Filter{Comms: []string{"main", "python"}}},
		{"rejected", fault.Filter{Comms: []string{"python"}}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			s := newSession(Options{Filter: bench.flt})
			s.readProc = false
			s.tasks.readProc = false
			s.rings = []*ring{fakeRing(0), fakeRing(1)}
			for i, r := range s.rings {
				r.data = make([]byte, 1<<20)
				tid := uint32(100 + i)
				s.tasks.rename(rename(100, tid, "main", false), 0)
			}
			s.tasks.procs[100].space.Insert(lib(10, "main.so"))
			var time uint64
			b.ReportAllocs()
			b.ResetTimer()
			records, faults := 0, 0
			for records < b.N {
				b.StopTimer()
				for i, r := range s.rings {
					records += fillPairs(r, &time, uint32(100+i))
				}
				b.StartTimer()
				s.batch.Faults = s.batch.Faults[:0]
				if err := s.readRings(); err != nil {
					b.Fatal(err)
				}
				s.consume(math.MaxUint64)
				faults += len(s.batch.Faults)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(records), "ns/record")
			if faults == 0 && bench.name != "rejected" {
				b.Error("no fault was delivered")
			}
		})
	}
}
