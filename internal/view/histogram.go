package view

import (
	"fmt"
	"strings"
	"time"

	"faultsnoop/internal/aggregate"
)

// histWidth is the longest bar, in terminal columns.
const histWidth = 50

// appendHistograms draws the latencies of each kind, four steps to each power of two.
func (s *Stat) appendHistograms(b []byte) []byte {
	for _, kind := range s.kinds() {
		k := &s.Rows.Kinds[kind]
		steps := coarse(k.Buckets)
		if len(steps) == 0 {
			continue
		}
		var most uint64
		for _, st := range steps {
			most = max(most, st.count)
		}
		b = fmt.Appendf(b, "\n%s, latency\n", kind)
		for _, st := range steps {
			b = fmt.Appendf(b, "  <= %-6s %11s", duration(min(st.bound, k.Max)), group(st.count))
			if st.count > 0 {
				b = append(append(b, ' '), bar(st.count, most)...)
			}
			b = append(b, '\n')
		}
	}
	return b
}

type histStep struct {
	bound time.Duration
	count uint64
}

// coarse joins buckets to steps and leaves out the empty ones at both ends.
func coarse(buckets []uint64) []histStep {
	const join = 8
	var steps []histStep
	last := 0
	for i := 0; i+join <= len(buckets); i += join {
		var n uint64
		for _, c := range buckets[i : i+join] {
			n += c
		}
		if n == 0 && len(steps) == 0 {
			continue
		}
		steps = append(steps, histStep{aggregate.Bound(i + join - 1), n})
		if n > 0 {
			last = len(steps)
		}
	}
	return steps[:last]
}

// bar draws n of most in eighths of a column.
func bar(n, most uint64) string {
	const eighths = "▏▎▍▌▋▊▉"
	units := n * histWidth * 8 / max(most, 1)
	s := strings.Repeat("█", int(units/8))
	if rest := units % 8; rest > 0 {
		const size = len("▏")
		s += eighths[(rest-1)*uint64(size) : rest*uint64(size)]
	} else if n > 0 && units == 0 {
		s = "▏"
	}
	return s
}
