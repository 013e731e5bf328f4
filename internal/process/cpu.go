package process

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

const onlineFile = "/sys/devices/system/cpu/online"

// OnlineCPUs lists the CPUs that run, in ascending order. Their numbers may have gaps
// and need not begin at 0.
func OnlineCPUs() ([]int, error) {
	b, err := os.ReadFile(onlineFile)
	if err != nil {
		return nil, fmt.Errorf("listing online CPUs: %w", err)
	}
	cpus, err := parseCPUs(strings.TrimSpace(string(b)))
	if err != nil {
		return nil, fmt.Errorf("listing online CPUs: %w", err)
	}
	return cpus, nil
}

// parseCPUs reads a list such as 0-3,8 (bitmap_print_to_pagebuf in lib/bitmap-str.c).
func parseCPUs(list string) ([]int, error) {
	var cpus []int
	for part := range strings.SplitSeq(list, ",") {
		low, high, isRange := strings.Cut(part, "-")
		first, err := strconv.Atoi(low)
		if err != nil {
			return nil, fmt.Errorf("parsing CPU list %q: %w", list, err)
		}
		last := first
		if isRange {
			if last, err = strconv.Atoi(high); err != nil {
				return nil, fmt.Errorf("parsing CPU list %q: %w", list, err)
			}
		}
		for cpu := first; cpu <= last; cpu++ {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}
