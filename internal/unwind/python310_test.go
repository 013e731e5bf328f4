package unwind

import "testing"

func TestLineAt(t *testing.T) {
	c := codeLines{first: 10, table: []byte{
		4, 1, // instructions 0 and 1 on line 11
		6, 0, // 2 to 4 as well
		0, 127, 2, 100, // 5 on line 238
		2, 0x80, // 6 on none
		4, 0x9c, // 7 and 8 on line 138
	}}
	for instruction, want := range []uint32{11, 11, 11, 11, 11, 238, 0, 138, 138, 0} {
		if got := lineAt(c, uint32(instruction)); got != want {
			t.Errorf("instruction %d is on line %d, want %d", instruction, got, want)
		}
	}
	if got := lineAt(codeLines{first: 1, table: []byte{2, 0xf0}}, 0); got != 0 {
		t.Errorf("a line before the first of the file is %d, want 0", got)
	}
	if got := lineAt(codeLines{}, 0); got != 0 {
		t.Errorf("without a table the line is %d, want 0", got)
	}
}
