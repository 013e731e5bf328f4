package unwind

import (
	"fmt"
	"os"
	"testing"

	"faultsnoop/test/memlock"
)

func TestMain(m *testing.M) {
	if err := memlock.Allow(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(m.Run())
}
