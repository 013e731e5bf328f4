package process

import (
	"slices"
	"testing"
)

func TestParseCPUs(t *testing.T) {
	for list, want := range map[string][]int{
		"0":         {0},
		"0-3":       {0, 1, 2, 3},
		"0,2-3,128": {0, 2, 3, 128},
		"0,2-3,7":   {0, 2, 3, 7},
		"4-5":       {4, 5},
	} {
		if got, err := parseCPUs(list); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: got %v, %v, want %v", list, got, err, want)
		}
	}
	for _, list := range []string{"", "x", "1-", "-1", "1,,2"} {
		if got, err := parseCPUs(list); err == nil {
			t.Errorf("%q: got %v, want an error", list, got)
		}
	}
}

func TestOnlineCPUs(t *testing.T) {
	cpus, err := OnlineCPUs()
	if err != nil || len(cpus) == 0 || !slices.IsSorted(cpus) {
		t.Errorf("got %v, %v", cpus, err)
	}
}
