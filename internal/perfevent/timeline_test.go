package perfevent

import (
	"os"
	"reflect"
	"testing"

	"faultsnoop/internal/process"
)

// TestTimelineForgetsLost: behind a loss of records mappings are those that the process has,
// since one that has taken another's place may be among what was lost.
func TestTimelineForgetsLost(t *testing.T) {
	pid := uint32(os.Getpid())
	s := &Session{readProc: true, tasks: newTasks(true, nil, false)}
	records := &ring{}
	s.rings = []*ring{records}
	timeline := &Timeline{session: s}
	at := uint64(reflect.ValueOf(TestTimelineForgetsLost).Pointer())
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path := func(time uint64) string {
		m := timeline.MappingsOf(pid, time).Find(at)
		if m == nil {
			return "nothing"
		}
		return m.Path
	}
	if got := path(1); got != exe {
		t.Fatalf("our code is of %s, want %s", got, exe)
	}
	before := process.Mapping{Start: at &^ 4095, End: at&^4095 + 4096, Inode: 1, Path: "/before", Since: 2, ExactSince: process.Never}
	records.queue = append(records.queue,
		record{kind: mapped, time: 2, pid: pid, tid: pid, side: &side{mapping: before}},
		record{kind: loss, time: 4, side: &side{until: 4}})
	if got := path(3); got != "/before" {
		t.Errorf("before the loss our code is of %s, want /before", got)
	}
	if got := path(5); got != exe {
		t.Errorf("behind the loss our code is of %s, want %s", got, exe)
	}
}
