package process

import (
	"reflect"
	"testing"
)

func TestNodeRanges(t *testing.T) {
	const text = `Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 12
  pages free     3840
        spanned  4095
        present  3998
  start_pfn:           1
Node 0, zone    Device
        spanned  0
  start_pfn:           0
Node 1, zone   Normal
        spanned  262144
  start_pfn:           1048576
`
	want := []NodeRange{{1, 4096, 0}, {1048576, 1310720, 1}}
	if got := nodeRanges(text); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
