package guest

import "testing"

func TestMarks(t *testing.T) {
	for _, m := range []Mark{
		{Event: Ready},
		{Event: Begin, Name: "internal/kernel"},
		{Event: End, Name: "internal/kernel", Status: 139},
		{Event: Fault, Text: "mounting /mnt: no such device"},
		{Event: Done},
	} {
		line := m.Format("nonce")
		for _, l := range []string{line, line + "\r\n", "[    3.1] kernel says" + line} {
			if got, ok := ParseMark(l, "nonce"); !ok || got != m {
				t.Errorf("%q: got %+v, %v, want %+v", l, got, ok, m)
			}
		}
		if _, ok := ParseMark(line, "other"); ok {
			t.Errorf("%q: taken for a mark of another boot", line)
		}
	}
	for _, l := range []string{"", "=vm=nonce=", "=vm=nonce= stop", "=vm=nonce= end x", "=vm=nonce= end x y"} {
		if m, ok := ParseMark(l, "nonce"); ok {
			t.Errorf("%q: taken for %+v", l, m)
		}
	}
}
