package aggregate

import (
	"math"
	"testing"
	"time"
)

// Buckets follow each other without a gap: the one after a bucket's bound begins with
// the next nanosecond.
func TestBuckets(t *testing.T) {
	lower := time.Duration(0) // of bucket i
	for i := range Buckets {
		bound := Bound(i)
		if bound < lower {
			t.Fatalf("bucket %d is from %d to %d", i, lower, bound)
		}
		if Bucket(lower) != i || Bucket(bound) != i {
			t.Fatalf("bucket %d is from %d to %d, these are in %d and %d", i, lower, bound, Bucket(lower), Bucket(bound))
		}
		if i == Buckets-1 {
			break
		}
		if width := bound - lower; width > lower/subBuckets {
			t.Fatalf("bucket %d from %d to %d: an error of more than 1/%d", i, lower, bound, subBuckets)
		}
		lower = bound + 1
	}
	if Bound(Buckets-1) != math.MaxInt64 {
		t.Errorf("the last bucket ends at %d", Bound(Buckets-1))
	}
	for _, d := range []time.Duration{lower, 1 << 41, time.Hour, math.MaxInt64} {
		if got := Bucket(d); got != Buckets-1 {
			t.Errorf("%v is in bucket %d", d, got)
		}
	}
	if got := Bucket(-5); got != 0 {
		t.Errorf("a negative latency is in bucket %d", got)
	}
}

// The layout that bpf/stat.h computes too.
func TestBucketLayout(t *testing.T) {
	for _, test := range []struct {
		latency time.Duration
		bucket  int
		bound   time.Duration
	}{
		{0, 0, 0},
		{31, 31, 31},
		{32, 32, 32},
		{63, 63, 63},
		{64, 64, 65},
		{65, 64, 65},
		{66, 65, 67},
		{127, 95, 127},
		{128, 96, 131},
		{1000, 190, 1007},
		{time.Millisecond, 509, 1015807},
		{1<<41 - 1, Buckets - 1, math.MaxInt64},
	} {
		if got := Bucket(test.latency); got != test.bucket || Bound(got) != test.bound {
			t.Errorf("%d: bucket %d up to %d, want %d up to %d", test.latency, got, Bound(got), test.bucket, test.bound)
		}
	}
}

// Quantiles of latencies that are known exactly: never too small, and at most 1/32 too large.
func TestQuantile(t *testing.T) {
	for _, step := range []time.Duration{1, 7, 1000, 123456} {
		for _, n := range []int{1, 2, 3, 10, 99, 100, 101, 1000, 4321} {
			buckets := make([]uint64, Buckets)
			for i := 1; i <= n; i++ {
				buckets[Bucket(time.Duration(i)*step)]++
			}
			for _, percent := range []int{1, 50, 90, 99, 100} {
				rank := max(1, (n*percent+99)/100) // of those counted from 1
				exact := time.Duration(rank) * step
				got := Quantile(buckets, float64(percent)/100)
				if got < exact || got-exact > exact/subBuckets {
					t.Errorf("%d times %d: p%d is %d, want %d", n, step, percent, got, exact)
				}
			}
		}
	}
}

func TestQuantileOfFew(t *testing.T) {
	if got := Quantile(nil, 0.5); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
	if got := Quantile(make([]uint64, Buckets), 0.99); got != 0 {
		t.Errorf("of empty buckets: %v", got)
	}
	one := make([]uint64, Buckets)
	one[40] = 1
	for _, q := range []float64{0, 0.5, 1} {
		if got := Quantile(one, q); got != Bound(40) {
			t.Errorf("quantile %v of one: %v", q, got)
		}
	}
	overflow := make([]uint64, Buckets)
	overflow[Buckets-1] = 3
	if got := Quantile(overflow, 0.5); got != math.MaxInt64 {
		t.Errorf("above all bounds: %v", got)
	}
	many := make([]uint64, Buckets)
	many[1], many[2] = 1<<62, 1<<62
	if Quantile(many, 0.4) != 1 || Quantile(many, 0.6) != 2 {
		t.Errorf("of 2^63: %v and %v", Quantile(many, 0.4), Quantile(many, 0.6))
	}
}
