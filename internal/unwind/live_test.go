package unwind

import (
	"testing"
	"os/exec"
	"time"
	"fmt"
	"os"
	"strings"
)

func TestTry(t *testing.T) {
	start := time.Now()
	u, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Log("open", time.Since(start))
	os.WriteFile("/tmp/i4c_t.py", []byte(`
import mmap,time,sys
def leaf(m):
    for i in range(400): m[i*4096]=1
def outer(): leaf(mmap.mmap(-1,400*4096))
for i in range(int(sys.argv[1])):
    outer()
    time.sleep(float(sys.argv[2]))
`), 0o644)
	cmd := exec.Command("sh", "-c", "sleep 0.1; " + os.Getenv("TRY"))
	cmd.Start()
	u.Want(uint32(cmd.Process.Pid))
	go func() { cmd.Wait(); time.Sleep(100*time.Millisecond); u.Stop() }()
	n := map[string]int{}
	t0 := uint64(0)
	for tr := range u.Traces() {
		if t0 == 0 { t0 = tr.Time }
		var b strings.Builder
		for _, f := range tr.Stack.Frames { fmt.Fprintf(&b, "   %s %s %s:%d %s+%#x %#x\n", f.Lang, f.Func, f.File, f.Line, f.Module, f.Offset, f.Addr) }
		s := fmt.Sprintln(tr.Comm, tr.Stack.End)+b.String()
		if n[s] == 0 && len(n) < 12 { fmt.Println((tr.Time-t0)/1000000, s) }
		n[s]++
	}
	c, err := u.Counts()
	t.Logf("%+v %v stacks %d", c, err, len(n))
	leaf := 0
	for s, k := range n { if strings.Contains(s, "leaf") { leaf += k } }
	t.Log("leaf", leaf)
	start = time.Now()
	u.Close()
	t.Log("close", time.Since(start))
}
