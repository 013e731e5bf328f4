package unwind

import "testing"

func TestLineAt310(t *testing.T) {
	c := codeLines{first: 10, table: []byte{
		4, 1, // instructions 0 and 1 on line 11
		6, 0, // 2 to 4 as well
		0, 127, 2, 100, // 5 on line 238
		2, 0x80, // 6 on none
		4, 0x9c, // 7 and 8 on line 138
	}}
	for instruction, want := range []uint32{11, 11, 11, 11, 11, 238, 0, 138, 138, 0} {
		if got := lineAt310(c, uint32(instruction)); got != want {
			t.Errorf("instruction %d is on line %d, want %d", instruction, got, want)
		}
	}
	if got := lineAt310(codeLines{first: 1, table: []byte{2, 0xf0}}, 0); got != 0 {
		t.Errorf("a line before the first of the file is %d, want 0", got)
	}
	if got := lineAt310(codeLines{}, 0); got != 0 {
		t.Errorf("without a table the line is %d, want 0", got)
	}
}

func TestLineAt311(t *testing.T) {
	c := codeLines{first: 10, table: []byte{
		0xf8,             // 0 on none, as in functions with closures
		0xd9, 0x04, 0x0b, // 1 and 2 on line 11
		0x80, 0x10, // 3 there as well
		0xf9,             // 4 and 5 on none
		0xe8, 0x48, 0x03, // 6 on line 111
		0xf0, 0x49, 0x03, 0x05, 0x05, 0x06, // 7 on line 11 again
	}}
	for instruction, want := range []uint32{0, 11, 11, 11, 0, 0, 111, 11, 0} {
		if got := lineAt311(c, uint32(instruction)); got != want {
			t.Errorf("instruction %d is on line %d, want %d", instruction, got, want)
		}
	}
	for _, table := range [][]byte{nil, {0x04}, {0xf0}, {0xe8}, {0xe8, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f}, {0xe8, 0x63, 0x3f}} {
		lineAt311(codeLines{first: 1, table: table}, 0) // no panic
	}
	if got := lineAt311(codeLines{first: 1, table: []byte{0xe8, 0x05}}, 0); got != 0 {
		t.Errorf("a line before the first of the file is %d, want 0", got)
	}
}
