package unwind

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

func TestTry2(t *testing.T) {
	u, err := Open(Options{Every: 1})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", "sleep 0.1; "+os.Getenv("TRY"))
	cmd.Start()
	u.Want(uint32(cmd.Process.Pid))
	go func() { cmd.Wait(); time.Sleep(100 * time.Millisecond); u.Stop() }()
	last := ""
	t0 := uint64(0)
	n := 0
	for tr := range u.Traces() {
		if t0 == 0 {
			t0 = tr.Time
		}
		leaf := false
		py := false
		for _, f := range tr.Stack.Frames {
			leaf = leaf || f.Func == "leaf"
			py = py || f.Lang.String() == "python"
		}
		s := fmt.Sprint(tr.PID, " ", tr.Comm, " ", tr.Stack.End, " frames ", len(tr.Stack.Frames) > 0, " leaf ", leaf, " python ", py)
		if s != last {
			fmt.Println(n)
			fmt.Print((tr.Time-t0)/1000000, " ", s, " ")
			n = 0
		}
		n++
		last = s
	}
	fmt.Println(n)
	c, err := u.Counts()
	t.Logf("%+v %v", c, err)
	u.Close()
}
