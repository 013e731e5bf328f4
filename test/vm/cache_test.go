package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestCached(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "x")
	var (
		calls int
		fail  error
		valid = true
	)
	get := func() (int, error) {
		return cached(dir, func(string) (int, error) { calls++; return calls, fail }, func(int) bool { return valid })
	}
	expect := func(what string, want int, wantErr bool) {
		t.Helper()
		if got, err := get(); (err != nil) != wantErr || err == nil && got != want {
			t.Errorf("%s: got %d, %v, want %d, error %v", what, got, err, want, wantErr)
		}
	}
	age := func() {
		t.Helper()
		name := filepath.Join(dir, "answer.json")
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		year := time.Now().Format("2006")
		if err := os.WriteFile(name, []byte(strings.Replace(string(data), year, "2001", 1)), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	expect("first call", 1, false)
	expect("fresh answer", 1, false)
	age()
	expect("old answer", 2, false)
	age()
	fail = errors.New("mirror is away")
	expect("old answer, no mirror", 2, false)
	valid = false
	expect("invalid answer, no mirror", 0, true)
	fail = nil
	expect("invalid answer", 5, false)
	valid = true
	if err := os.WriteFile(filepath.Join(dir, "answer.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	valid = false // as the zero answer is
	expect("damaged file", 6, false)
}
