package main

import (
	"maps"
	"testing"
)

// What is used is kept, and what is forgotten was not used for the longest time.
func TestRecent(t *testing.T) {
	forgotten := map[int]string{}
	r := recent[int, string]{limit: 10, forgotten: func(m map[int]string) { maps.Copy(forgotten, m) }}
	for i := range 100 {
		if _, ok := r.get(i); ok {
			t.Fatalf("%d is known before it was put", i)
		}
		r.put(i, "x")
		if _, ok := r.get(3); i >= 3 && !ok {
			t.Fatalf("3 is forgotten after %d, though it is used all the time", i)
		}
		if n := len(r.latest) + len(r.older); n > 20 || n+len(forgotten) != i+1 {
			t.Fatalf("%d are known and %d forgotten of %d", n, len(forgotten), i+1)
		}
	}
	for i := 90; i < 100; i++ {
		if _, ok := r.peek(i); !ok {
			t.Errorf("%d is forgotten", i)
		}
	}
	if _, ok := forgotten[3]; ok {
		t.Error("what was used is said to be forgotten")
	}
}
