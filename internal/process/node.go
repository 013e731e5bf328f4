package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// NodeRange is a range of page frames that belongs to a NUMA node.
type NodeRange struct {
	Start, End uint64 // [Start, End), frame numbers
	Node       int
}

// NodeRanges reads which frames belong to which node from /proc/zoneinfo. Where the
// memory of nodes is interleaved ranges overlap; then the first one counts.
func NodeRanges() ([]NodeRange, error) {
	b, err := os.ReadFile("/proc/zoneinfo")
	if err != nil {
		return nil, fmt.Errorf("reading the frames of NUMA nodes: %w", err)
	}
	return nodeRanges(string(b)), nil
}

// nodeRanges understands
//
//	Node 0, zone    DMA32
//	        spanned  1044480
//	  start_pfn:           4096
func nodeRanges(zoneinfo string) []NodeRange {
	var ranges []NodeRange
	var node int
	var spanned uint64
	for line := range strings.Lines(zoneinfo) {
		f := strings.Fields(line)
		switch {
		case len(f) >= 2 && f[0] == "Node":
			node, _ = strconv.Atoi(strings.TrimSuffix(f[1], ","))
			spanned = 0
		case len(f) == 2 && f[0] == "spanned":
			spanned, _ = strconv.ParseUint(f[1], 10, 64)
		case len(f) == 2 && f[0] == "start_pfn:":
			start, err := strconv.ParseUint(f[1], 10, 64)
			if err == nil && spanned > 0 {
				ranges = append(ranges, NodeRange{start, start + spanned, node})
			}
		}
	}
	return ranges
}

// BalancesNUMA reports whether NUMA balancing is or may be on.
func BalancesNUMA() (bool, error) {
	b, err := os.ReadFile("/proc/sys/kernel/numa_balancing")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // CONFIG_NUMA_BALANCING is off
	}
	return err != nil || strings.TrimSpace(string(b)) != "0", nil
}
