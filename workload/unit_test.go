package workload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// bind parses args as the flags of the kind called name.
func bind(t *testing.T, name string, args ...string) (*Command, error) {
	t.Helper()
	for _, k := range Kinds() {
		if k.Name == name {
			fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
			c := k.Bind(fs)
			return c, fs.Parse(args)
		}
	}
	t.Fatalf("there is no kind %q", name)
	return nil, nil
}

func TestDefaultsAreValid(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range Kinds() {
		if seen[k.Name] || k.Short == "" {
			t.Errorf("kind %q is there twice or has no help", k.Name)
		}
		seen[k.Name] = true
		c, err := bind(t, k.Name)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Validate(); err != nil {
			t.Errorf("%s without flags: %v", k.Name, err)
		}
	}
}

func TestBadFlags(t *testing.T) {
	for _, tc := range []struct{ line, cause string }{
		{"alloc --size 1000", "multiple of the page size"},
		{"alloc --size 0", "multiple of the page size"},
		{"alloc --size -1GB", "invalid size"},
		{"alloc --size lots", "invalid size"},
		{"alloc --size 99999999999GB", "too large"},
		{"alloc --size 16777216GB", "between 1 and"},
		{"alloc --block 4k", "more than 60000"},
		{"touch --pages 0", "--pages 0: must be between 1"},
		{"touch --threads 5000", "--threads 5000: must be between 1 and 4096"},
		{"touch --pages 1048576 --stride 1048576", "--stride 1048576: must be between 1 and 32768"},
		{"touch --name sixteen-bytes-xx", "keeps 15 bytes"},
		{"touch --hold -1s", "must not be negative"},
		{"file --cold --warm", "choose one"},
		{"file --cold --around", "leave --cold out"},
		{"shmem --memfd --sysv", "choose one"},
		{"uffd --delay -1ms", "must not be negative"},
		{"segv --how never", "must be one of maperr, accerr, sigbus"},
		{"storm --cpus 0", "must be all or a number"},
		{"storm --cpus some", "must be all or a number"},
		{"storm --pages -1", "must not be negative"},
		{"storm --duration -1s", "must not be negative"},
		{"thp --pages -3", "must be between 1"},
	} {
		words := strings.Fields(tc.line)
		c, err := bind(t, words[0], words[1:]...)
		if err == nil {
			err = c.Validate()
		}
		switch {
		case err == nil:
			t.Errorf("%s: no error", tc.line)
		case !strings.Contains(err.Error(), tc.cause):
			t.Errorf("%s: error %q does not say %q", tc.line, err, tc.cause)
		case strings.Contains(err.Error(), "\n"):
			t.Errorf("%s: error %q has more than one line", tc.line, err)
		}
	}
}

func TestByteSize(t *testing.T) {
	for text, want := range map[string]byteSize{
		"1GB": 1 << 30, "1GiB": 1 << 30, "10MB": 10 << 20, "4k": 4096, "8192": 8192, "1.5MB": 3 << 19,
	} {
		var s, back byteSize
		if err := s.Set(text); err != nil || s != want {
			t.Errorf("%q is %d, %v; want %d", text, s, err, want)
		}
		if err := back.Set(s.String()); err != nil || back != s {
			t.Errorf("%q prints as %q, which is %d", text, s.String(), back)
		}
	}
}

func TestAddressIsText(t *testing.T) {
	const high = Address(0xffff_ffff_ffff_f000) // not exact as a JSON number
	text, err := json.Marshal(high)
	if err != nil || string(text) != `"0xfffffffffffff000"` {
		t.Errorf("encoded as %s, %v", text, err)
	}
	var back Address
	if err := json.Unmarshal(text, &back); err != nil || back != high {
		t.Errorf("decoded as %#x, %v", uint64(back), err)
	}
}

func TestJoinAdjacent(t *testing.T) {
	one := func(start, end Address) Range {
		n := int64(end-start) / 4096
		return Range{Start: start, End: end, Expectation: Expectation{Pages: n, Faults: n, Minor: n}, Access: "write"}
	}
	got := joinAdjacent([]Range{one(0x8000, 0x9000), one(0x1000, 0x3000), one(0x3000, 0x4000), one(0x5000, 0x8000)})
	want := []Range{one(0x1000, 0x4000), one(0x5000, 0x9000)}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

func TestMatches(t *testing.T) {
	fixed := Expectation{Faults: 5, Minor: 3, Major: 2}
	either := Expectation{Faults: 5, Minor: 1, Either: 4}
	for _, tc := range []struct {
		e              Expectation
		minflt, majflt int64
		want           bool
	}{
		{fixed, 3, 2, true},
		{fixed, 2, 3, false},
		{fixed, 4, 2, false},
		{either, 5, 0, true},
		{either, 1, 4, true},
		{either, 0, 5, false},
		{either, 2, 2, false},
	} {
		if got := tc.e.matches(Counted{tc.minflt, tc.majflt}); got != tc.want {
			t.Errorf("%+v matches %d minor and %d major: %v", tc.e, tc.minflt, tc.majflt, got)
		}
	}
}

func TestWindows(t *testing.T) {
	for pages, want := range map[int64]int64{1: 1, 16: 1, 17: 2, 256: 16} {
		if got := windows(Range{Expectation: Expectation{Pages: pages}}, 4096); got != want {
			t.Errorf("%d pages have %d windows, want %d", pages, got, want)
		}
	}
	if got := windows(Range{Expectation: Expectation{Pages: 3}}, 64<<10); got != 3 {
		t.Errorf("3 pages as large as a window have %d windows", got)
	}
}

func TestSwapAreas(t *testing.T) {
	const head = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
	const zram, disk = "/dev/zram0 partition\t65532\t0\t-2\n", "/swap\\040file file\t1048572\t0\t-3\n"
	for _, tc := range []struct {
		text        string
		areas       []string
		synchronous bool
	}{
		{head, nil, true},
		{head + zram, []string{"/dev/zram0"}, true},
		{head + zram + disk, []string{"/dev/zram0", "/swap\\040file"}, false},
	} {
		areas := swapAreas(tc.text)
		if !reflect.DeepEqual(areas, tc.areas) || synchronous(areas) != tc.synchronous {
			t.Errorf("%q: areas %q, synchronous %v", tc.text, areas, synchronous(areas))
		}
	}
}

func TestDecodeSkipsOtherLines(t *testing.T) {
	early := Report{Type: reportType, Kind: "touch", PID: 7, Ready: true}
	final := Report{Type: reportType, Kind: "touch", PID: 7, Counted: Counted{Minflt: 4}, Threads: []Thread{{TID: 8}}}
	var stream bytes.Buffer
	stream.WriteString("tracing by fentry\n{\"type\":\"fault\",\"pid\":1}\n{broken\n")
	for _, r := range []Report{early, final} {
		if err := r.write(&stream); err != nil {
			t.Fatal(err)
		}
	}
	stream.WriteString("seen 4, lost 0")
	text := stream.Bytes()

	got, err := Decode(bytes.NewReader(text))
	if err != nil || !reflect.DeepEqual(*got, final) {
		t.Errorf("decoded %+v, %v", got, err)
	}
	d := NewDecoder(bytes.NewReader(text))
	if got, err := d.Next(); err != nil || !got.Ready {
		t.Errorf("first report is %+v, %v", got, err)
	}
	if got, err := d.Next(); err != nil || got.Ready {
		t.Errorf("second report is %+v, %v", got, err)
	}
	if _, err := d.Next(); !errors.Is(err, ErrNoReport) {
		t.Errorf("at the end: %v", err)
	}
	if _, err := Decode(strings.NewReader("")); !errors.Is(err, ErrNoReport) {
		t.Errorf("nothing decoded as a report: %v", err)
	}
}

func TestInterruptedHold(t *testing.T) {
	c, err := bind(t, "touch", "--pages", "3", "--threads", "2", "--hold", "1h")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan error)
	go func() { done <- c.Run(ctx, w) }()
	early, err := NewDecoder(r).Next()
	if err != nil || !early.Ready || early.Faults != 6 || early.Minflt != 0 || len(early.Threads) != 2 {
		t.Errorf("early report %+v, %v", early, err)
	}
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled while holding: %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("still running a minute after it was cancelled")
	}
}
