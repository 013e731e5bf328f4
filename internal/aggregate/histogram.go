// Package aggregate does all arithmetic on faults. It imports the vocabulary only and
// starts no goroutine: what counts live, in the kernel, and what is counted here from
// records is the same.
package aggregate

import (
	"math"
	"math/bits"
	"time"
)

// A histogram of latencies has one bucket for each nanosecond below subBuckets and
// that many for each power of two above, so that a bucket is at most 1/32 wider than its lower
// bound: 3.1 %. The layout is that of bucket_of in bpf/stat.h and known as log-linear
// (HdrHistogram).
const (
	subBits    = 5
	subBuckets = 1 << subBits
	// Buckets is their number; the last one takes all above 2^41 ns, 37 minutes.
	Buckets = subBuckets * 37
)

// Bucket is the index of the bucket that counts a latency.
func Bucket(latency time.Duration) int {
	ns := uint64(max(latency, 0))
	if ns < subBuckets {
		return int(ns)
	}
	shift := bits.Len64(ns) - 1 - subBits
	return min(shift*subBuckets+int(ns>>shift), Buckets-1)
}

// Bound is the longest latency that bucket i counts.
func Bound(i int) time.Duration {
	switch {
	case i < subBuckets:
		return time.Duration(i)
	case i >= Buckets-1:
		return math.MaxInt64
	}
	shift := i/subBuckets - 1
	return time.Duration((uint64(i%subBuckets+subBuckets)+1)<<shift - 1)
}

// Quantile is the latency that a share q of those counted do not exceed: the bound of
// the bucket in which that one is. It is 0 if nothing was counted.
func Quantile(buckets []uint64, q float64) time.Duration {
	var total uint64
	for _, n := range buckets {
		total += n
	}
	if total == 0 {
		return 0
	}
	rank := max(uint64(math.Ceil(q*float64(total))), 1)
	var sum uint64
	for i, n := range buckets {
		if sum += n; sum >= rank {
			return Bound(i)
		}
	}
	return Bound(len(buckets) - 1)
}
