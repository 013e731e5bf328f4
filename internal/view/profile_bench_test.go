package view

import "testing"

// BenchmarkProfile writes a million faults with ten thousand distinct stacks in each format.
func BenchmarkProfile(b *testing.B) {
	p := manyStacks(1_000_000, 10_000)
	for name, write := range map[string]func() ([]byte, error){
		"flame":      func() ([]byte, error) { return AppendFlame(nil, p, nil), nil },
		"svg":        func() ([]byte, error) { return AppendSVG(nil, p, Time), nil },
		"folded":     func() ([]byte, error) { return AppendFolded(nil, p, Time), nil },
		"speedscope": func() ([]byte, error) { return AppendSpeedscope(nil, p), nil },
		"pprof":      func() ([]byte, error) { return AppendPprof(nil, p) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				out, err := write()
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(len(out)), "bytes")
			}
		})
	}
}
