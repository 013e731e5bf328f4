// Faultsnoop traces page faults: which pages, in which process, why, and how long
// each one took.
package main

import (
	"context"
	"os"
)

func main() {
	beShim()
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr, openSource))
}
