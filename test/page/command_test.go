package page

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"golang.org/x/sys/unix"

	"faultsnoop/test/memlock"
)

// launchEnv makes the test binary start the program of its arguments where the unwinder of
// any language loads.
const launchEnv = "FAULTSNOOP_LAUNCH"

func TestMain(m *testing.M) {
	if os.Getenv(launchEnv) == "" {
		os.Exit(m.Run())
	}
	runtime.LockOSThread() // exec keeps the caller's system call filter
	os.Unsetenv(launchEnv)
	err := memlock.Allow()
	if err == nil {
		err = unix.Exec(os.Args[1], os.Args[1:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// The command of the documentation makes a page that shows the line which allocates.
func TestCommand(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the unwinder of any language needs root")
	}
	for _, name := range []string{"go", "python3", "chromium"} {
		if _, err := exec.LookPath(name); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatalf("there is no %s", name)
			}
			t.Skipf("there is no %s in PATH", name)
		}
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	tool, file := filepath.Join(dir, "faultsnoop"), filepath.Join(dir, "f.html")
	output(t, root, "go", "build", "-o", tool, "./cmd/faultsnoop")
	// The interpreter itself: python3 may be a script that chooses one.
	python := strings.TrimSpace(output(t, root, "python3", "-c", "import sys; print(sys.executable)"))

	var said bytes.Buffer
	cmd := exec.Command("/proc/self/exe", tool, "flame", "-o", file, "--", python, "workload/alloc.py")
	cmd.Dir, cmd.Env, cmd.Stderr = root, append(os.Environ(), launchEnv+"=1"), &said
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, said.String())
	}
	if strings.Contains(said.String(), "stacks by frame pointers") {
		t.Fatal(said.String())
	}
	coverage := regexp.MustCompile(`(?m)^([0-9,]+) faults, estimated from the stacks of ([0-9,]+) \(`).FindStringSubmatch(said.String())
	if coverage == nil {
		t.Fatalf("nothing is said of what share has a stack:\n%s", said.String())
	}
	all, taken := number(t, coverage[1]), number(t, coverage[2])
	const pages = 1 << 30 >> 12
	if all < pages {
		t.Errorf("%d faults, %d of them alone are of alloc.py", all, pages)
	}

	source, err := os.ReadFile(filepath.Join(root, "workload/alloc.py"))
	if err != nil {
		t.Fatal(err)
	}
	line := func(word string) string {
		before, _, ok := strings.Cut(string(source), word)
		if !ok {
			t.Fatalf("alloc.py has no %q", word)
		}
		return "alloc.py:" + strconv.Itoa(strings.Count(before, "\n")+1)
	}
	leaf, caller := "touch_pages "+line("] = ones"), "main "+line("= touch_pages(block, b")

	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	ctx := browser(t, page)
	if command := text(ctx, t, "#command"); command != python+" workload/alloc.py" {
		t.Errorf("command %q", command)
	}
	if facts := text(ctx, t, "#facts"); !strings.Contains(facts, coverage[2]+" (") || !strings.Contains(facts, "the others estimated from these") || taken >= all {
		t.Errorf("what is told of the stacks of %d of %d faults: %q", taken, all, facts)
	}
	shown, _ := widest(ctx, t, "all", `([0-9,]+) faults, (100.0) %`) // but for those of which no stack came
	stacked := number(t, shown)
	shot(ctx, t, "alloc")

	// Most faults are of this line, as many as it has taken, and its share is what their number says.
	faults, share := widest(ctx, t, leaf, `([0-9,]+) faults?, ([0-9.]+) %`)
	if n := number(t, faults); n*10 < pages*8 || n*10 > pages*11 {
		t.Errorf("%s has %d faults by estimate, want about %d", leaf, n, pages)
	}
	if want := fmt.Sprintf("%.1f", 100*float64(number(t, faults))/float64(stacked)); share != want {
		t.Errorf("%s has a share of %s %%, and %s of %d faults, which is %s %%", leaf, share, faults, stacked, want)
	}
	widest(ctx, t, caller, `([0-9,]+) faults?, ([0-9.]+) %`)

	// What the search finds is no less: an unwinding may have begun in the middle.
	searchFor(ctx, t, strings.TrimPrefix(leaf, "touch_pages "))
	matched := regexp.MustCompile(`^([0-9.]+) % of faults in [1-9][0-9]* frames?$`).FindStringSubmatch(text(ctx, t, "#matched"))
	if matched == nil || percent(t, matched[1]) < percent(t, share) {
		t.Errorf("searched for its line: %q, want %s %% at least", text(ctx, t, "#matched"), share)
	}

	// Zoom: no frame that is not of this one's stacks is left.
	do(ctx, t, chromedp.Evaluate[chromedp.Void](fmt.Sprintf(`[...document.querySelectorAll("#chart g")].find((g) => g.getAttribute("aria-label").startsWith(%q)).dispatchEvent(new MouseEvent("click", {bubbles: true}))`,
		leaf+", "+faults+" fault")))
	absent(ctx, t, "(incomplete)")
	if details := text(ctx, t, "#details"); !strings.Contains(details, filepath.Join("workload", strings.TrimPrefix(leaf, "touch_pages "))) || !strings.Contains(details, faults+" faults ("+share+" %)") {
		t.Errorf("details %q", details)
	}
	do(ctx, t, choose("#reset"))

	// With all the others.
	do(ctx, t, choose("#stackless"))
	want(ctx, t, "all", coverage[1]+" faults, 100.0 %")
	if without, _ := widest(ctx, t, "[no stack]", `([0-9,]+) faults?, ([0-9.]+) %`); number(t, without) != all-stacked {
		t.Errorf("%s faults have no stack, want %d", without, all-stacked)
	}
	do(ctx, t, choose("#stackless"))

	// Its time and its bytes.
	do(ctx, t, choose(`input[name="value"][value="1"]`))
	if took, share := widest(ctx, t, leaf, `([0-9.]+ (?:ms|s)), ([0-9.]+) %`); percent(t, share) < 50 {
		t.Errorf("%s took %s, %s %%", leaf, took, share)
	}
	do(ctx, t, choose(`input[name="value"][value="2"]`))
	if bytes, share := widest(ctx, t, leaf, `([0-9.]+ [MG]iB), ([0-9.]+) %`); percent(t, share) < 50 {
		t.Errorf("%s mapped %s, %s %%", leaf, bytes, share)
	}
	shot(ctx, t, "alloc-bytes")
}

// widest is what the page says of the widest of the frames with a name, by its two
// submatches of a pattern.
func widest(ctx context.Context, t *testing.T, name, pattern string) (value, share string) {
	t.Helper()
	labels := eval[[]string](ctx, t, fmt.Sprintf(`[...document.querySelectorAll("#chart g")].filter((g) => g.getAttribute("name") === %q)
		.sort((a, b) => b.getBoundingClientRect().width - a.getBoundingClientRect().width).map((g) => g.getAttribute("aria-label"))`, name))
	if len(labels) == 0 {
		t.Fatalf("there is no frame %q; all: %q", name, frames(ctx, t))
	}
	m := regexp.MustCompile("^" + regexp.QuoteMeta(name) + ", " + pattern + "$").FindStringSubmatch(labels[0])
	if m == nil {
		t.Fatalf("frame %q, want %s", labels[0], pattern)
	}
	return m[1], m[2]
}

func output(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, stderr.String())
	}
	return string(out)
}

// number reads one with commas between its thousands.
func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(strings.ReplaceAll(s, ",", ""))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func percent(t *testing.T, s string) float64 {
	t.Helper()
	p, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
