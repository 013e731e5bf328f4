// Package page opens the flame graph page in a browser and uses it as a person does.
package page

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"faultsnoop/internal/fault"
	"faultsnoop/internal/view"
)

const hostile = "</script><img src=x onerror=\"document.title='owned'\">"

var session = fault.Session{
	Hook: "fentry", Kernel: "6.12.0-amd64", Host: "build-7", Command: []string{"python3", "train.py", "--epochs", "3"},
}

// run is a profile whose numbers the test knows: 1000 faults, 900 of them from alloc.py:8.
func run() *fault.Profile {
	kernel := fault.Frame{Addr: 1, Func: "_copy_to_iter", Module: "[kernel]", Offset: 1, Lang: fault.LangKernel}
	memset := fault.Frame{Addr: 2, Func: "__memset_avx2_unaligned_erms", Module: "/usr/lib/libc.so.6", Offset: 2, Lang: fault.LangNative}
	numpy := fault.Frame{Addr: 3, Func: "PyArray_Zeros", Module: "/usr/lib/numpy/core/_multiarray_umath.so", Offset: 3, Lang: fault.LangNative}
	eval := fault.Frame{Addr: 4, Func: "_PyEval_EvalFrameDefault", Module: "/usr/lib/libpython3.11.so.1.0", Offset: 4, Lang: fault.LangNative}
	block := fault.Frame{Func: "make_block", File: "/srv/alloc.py", Line: 8, Lang: fault.LangPython}
	other := fault.Frame{Func: "make_block", File: "/srv/alloc.py", Line: 12, Lang: fault.LangPython}
	load := fault.Frame{Func: "load", File: "/srv/data.py", Line: 87, Lang: fault.LangPython}
	main := fault.Frame{Func: "<module>", File: "/srv/alloc.py", Line: 31, Lang: fault.LangPython}
	evil := fault.Frame{Func: hostile, File: "/srv/" + hostile, Line: 1, Module: hostile, Lang: fault.LangCPP, Inlined: true}
	p := &fault.Profile{
		Session: &session, Begin: time.Date(2026, 11, 30, 3, 2, 1, 0, time.UTC), Duration: 12 * time.Second, Faults: 1000, Lost: 3,
	}
	add := func(kind fault.Kind, major bool, faults uint64, each time.Duration, bytes uint64, frames ...fault.Frame) {
		end := fault.StackWhole
		if frames == nil {
			end = fault.StackNone
		}
		p.Samples = append(p.Samples, fault.StackSample{
			Stack: p.Stacks.Add(&fault.Stack{Frames: frames, End: end}), Kind: kind, Major: major, Faults: faults, Time: time.Duration(faults) * each, Bytes: faults * bytes,
		})
	}
	add(fault.Anon, false, 600, time.Microsecond, 4096, memset, numpy, eval, block, main)
	add(fault.THP, false, 250, 40*time.Microsecond, 2<<20, memset, numpy, eval, block, main)
	add(fault.Anon, false, 50, time.Microsecond, 4096, memset, numpy, eval, other, main)
	add(fault.File, true, 40, 900*time.Microsecond, 65536, kernel, eval, load, main)
	add(fault.File, false, 30, 2*time.Microsecond, 65536, evil, eval, load, main)
	add(fault.Anon, false, 30, time.Microsecond, 4096)
	return p
}

// before is a run in which other faults were taken more.
func before() *fault.Profile {
	p := run()
	p.Samples[0].Faults, p.Samples[3].Faults = 100, 400
	p.Faults = 860
	return p
}

// browser starts a browser and opens the page that content makes.
func browser(t *testing.T, content []byte) context.Context {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("there is no chromium")
		}
		t.Skip("no chromium in PATH: install the package chromium")
	}
	file := filepath.Join(t.TempDir(), "flame.html")
	if err := os.WriteFile(file, content, 0o644); err != nil {
		t.Fatal(err)
	}
	allocator, stop := chromedp.NewExecAllocator(context.Background(),
		chromedp.ExecPath(path), chromedp.UserDataDir(t.TempDir()), chromedp.NoFirstRun, chromedp.NoDefaultBrowserCheck, chromedp.Headless,
		chromedp.NoSandbox, chromedp.DisableGPU, chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true), chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.WSURLReadTimeout(time.Minute))
	t.Cleanup(stop)
	ctx, stopTab := chromedp.NewContext(allocator)
	t.Cleanup(stopTab)
	err = chromedp.Listen(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			t.Errorf("the page threw %+v", e.ExceptionDetails.Exception)
		case *runtime.EventConsoleAPICalled:
			t.Errorf("the page wrote to the console: %s", e.Type)
		case *network.EventRequestWillBeSent:
			if u := e.Request.URL; !strings.HasPrefix(u, "file:") && !strings.HasPrefix(u, "data:") {
				t.Errorf("the page asked for %s", u)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stopTime := context.WithTimeout(ctx, 2*time.Minute)
	t.Cleanup(stopTime)
	if _, err := chromedp.Call(ctx, network.Enable, network.EnableParams{}); err != nil {
		t.Fatal(err)
	}
	location := url.URL{Scheme: "file", Path: file}
	do(ctx, t, chromedp.EmulateViewport(1280, 800), chromedp.Navigate(location.String()))
	return ctx
}

func do(ctx context.Context, t *testing.T, steps ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	if err := chromedp.Do(ctx, steps...); err != nil {
		t.Fatal(err)
	}
}

// eval is the value of an expression in the page.
func eval[T any](ctx context.Context, t *testing.T, expression string) T {
	t.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// frames are the names and descriptions that the page gives its frames to those who cannot
// see them.
func frames(ctx context.Context, t *testing.T) map[string]string {
	t.Helper()
	named := map[string]string{}
	for _, f := range eval[[][2]string](ctx, t, `[...document.querySelectorAll("#chart g")].map((g) => [g.getAttribute("name"), g.getAttribute("aria-label")])`) {
		named[f[0]] = f[1]
	}
	return named
}

func want(ctx context.Context, t *testing.T, name, label string) {
	t.Helper()
	all := frames(ctx, t)
	if got, ok := all[name]; !ok || got != name+", "+label {
		t.Errorf("frame %q is %q, want %q; all: %q", name, got, label, all)
	}
}

func absent(ctx context.Context, t *testing.T, names ...string) {
	t.Helper()
	all := frames(ctx, t)
	for _, name := range names {
		if label, ok := all[name]; ok {
			t.Errorf("there is a frame %q", label)
		}
	}
}

func text(ctx context.Context, t *testing.T, selector string) string {
	t.Helper()
	return strings.Join(strings.Fields(eval[string](ctx, t, fmt.Sprintf("document.querySelector(%q).innerText", selector))), " ")
}

// on clicks a frame.
func on(name string) chromedp.Action[chromedp.Void] {
	script := fmt.Sprintf(`[...document.querySelectorAll("#chart g")].find((g) => g.getAttribute("name") === %q).dispatchEvent(new MouseEvent("click", {bubbles: true}))`, name)
	return chromedp.Evaluate[chromedp.Void](script)
}

func choose(selector string) chromedp.Action[chromedp.Void] {
	return chromedp.Evaluate[chromedp.Void](fmt.Sprintf("document.querySelector(%q).click()", selector))
}

// searchFor types into the field, over what stands there.
func searchFor(ctx context.Context, t *testing.T, term string) {
	t.Helper()
	do(ctx, t, chromedp.Evaluate[chromedp.Void](`document.querySelector("#search").select()`), chromedp.KeyEvent(term))
}

// shot keeps a picture of the page in the folder that SCREENSHOTS names.
func shot(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	dir := os.Getenv("SCREENSHOTS")
	if dir == "" {
		return
	}
	do(ctx, t, chromedp.Sleep(700*time.Millisecond))
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644); err != nil {
		t.Fatal(err)
	}
}

// scheme says that the person prefers light or dark.
func scheme(ctx context.Context, t *testing.T, name string) {
	t.Helper()
	_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// fits tells whether the page can be read without scrolling sideways.
func fits(ctx context.Context, t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) { // until it has heard of a new width
		over := eval[int](ctx, t, "document.documentElement.scrollWidth - document.documentElement.clientWidth")
		if over <= 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the page is %d px too wide", over)
		}
	}
}

func TestPage(t *testing.T) {
	ctx := browser(t, view.AppendFlame(nil, run(), nil))
	do(ctx, t, choose("#stackless")) // the sums are of all faults

	// The line that allocates, with its share.
	want(ctx, t, "make_block alloc.py:8", "850 faults, 85.0 %")
	want(ctx, t, "make_block alloc.py:12", "50 faults, 5.0 %")
	want(ctx, t, "[no stack]", "30 faults, 3.0 %")
	want(ctx, t, "all", "1,000 faults, 100.0 %")
	for _, fact := range []string{"1,000", "970 (97.0 %)", "lost 3", "build-7", "6.12.0-amd64", "fentry", "12 s"} {
		if head := text(ctx, t, "header"); !strings.Contains(head, fact) {
			t.Errorf("the head does not say %q: %s", fact, head)
		}
	}
	if command := text(ctx, t, "#command"); command != "python3 train.py --epochs 3" {
		t.Errorf("command %q", command)
	}

	// Names are text, whatever they hold.
	want(ctx, t, hostile+" "+strings.TrimPrefix(hostile[strings.LastIndex(hostile, "/"):], "/")+":1", "30 faults, 3.0 %")
	title, images := eval[string](ctx, t, "document.title"), eval[int](ctx, t, "document.images.length")
	if title != "page faults of python3 train.py --epochs 3 on build-7" || images != 0 {
		t.Errorf("title %q, %d images: a name became markup", title, images)
	}

	shot(ctx, t, "light-1280")
	scheme(ctx, t, "dark")
	shot(ctx, t, "dark-1280")
	do(ctx, t, chromedp.EmulateViewport(390, 844))
	fits(ctx, t)
	shot(ctx, t, "dark-390")
	scheme(ctx, t, "light")
	shot(ctx, t, "light-390")
	do(ctx, t, chromedp.EmulateViewport(1280, 800))
	fits(ctx, t)

	// Zoom and back.
	do(ctx, t, on("load data.py:87"))
	absent(ctx, t, "make_block alloc.py:8", "[no stack]")
	want(ctx, t, "_copy_to_iter", "40 faults, 4.0 %")
	if details := text(ctx, t, "#details"); !strings.Contains(details, "/srv/data.py:87") || !strings.Contains(details, "70 faults (7.0 %)") || !strings.Contains(details, "40 major") {
		t.Errorf("details %q", details)
	}
	shot(ctx, t, "zoomed")
	do(ctx, t, choose("#reset"))
	want(ctx, t, "make_block alloc.py:8", "850 faults, 85.0 %")

	// Search: frames below one that matches are part of it.
	searchFor(ctx, t, "ALLOC.py:8")
	if got := text(ctx, t, "#matched"); got != "85.0 % of faults in 1 frame" {
		t.Errorf("matched %q", got)
	}
	marked := eval[[]string](ctx, t, `[...document.querySelectorAll("#chart g.match")].map((g) => g.getAttribute("name"))`)
	if len(marked) != 1 || marked[0] != "make_block alloc.py:8" {
		t.Errorf("marked %q", marked)
	}
	shot(ctx, t, "search")
	searchFor(ctx, t, "libpython")
	if got := text(ctx, t, "#matched"); got != "97.0 % of faults in 3 frames" {
		t.Errorf("matched %q", got)
	}
	searchFor(ctx, t, "(")
	if got := text(ctx, t, "#matched"); got != "0.0 % of faults in 0 frames" {
		t.Errorf("matched %q", got)
	}
	do(ctx, t, chromedp.KeyEvent(kb.Backspace))

	// Values.
	do(ctx, t, choose(`input[name="value"][value="1"]`))
	want(ctx, t, "_copy_to_iter", "36 ms, 77.0 %")
	do(ctx, t, choose(`input[name="value"][value="2"]`))
	want(ctx, t, "_copy_to_iter", "2.50 MiB, 0.5 %")
	absent(ctx, t, "make_block alloc.py:12") // too narrow
	do(ctx, t, choose(`input[name="value"][value="0"]`))

	// Kinds are counted anew.
	do(ctx, t, choose(`input[name="kind"][value="anon"]`))
	want(ctx, t, "all", "320 faults, 100.0 %")
	want(ctx, t, "make_block alloc.py:8", "250 faults, 78.1 %")
	absent(ctx, t, "[no stack]", "make_block alloc.py:12")
	do(ctx, t, choose("#major"))
	want(ctx, t, "_copy_to_iter", "40 faults, 100.0 %")
	absent(ctx, t, "make_block alloc.py:8")
	do(ctx, t, choose(`input[name="kind"][value="file"]`))
	if got := text(ctx, t, "#empty"); got != "No fault is of these kinds." {
		t.Errorf("with no fault left the page says %q", got)
	}
	do(ctx, t, choose(`input[name="kind"][value="file"]`), choose("#major"), choose(`input[name="kind"][value="anon"]`))

	// Lines of a function as one.
	do(ctx, t, choose("#lines"))
	want(ctx, t, "make_block alloc.py", "900 faults, 90.0 %")
	do(ctx, t, choose("#lines"))

	// The other way up.
	tops := func() (root, leaf float64) {
		y := eval[[]float64](ctx, t, `["all", "_copy_to_iter"].map((name) =>
			[...document.querySelectorAll("#chart g")].find((g) => g.getAttribute("name") === name).getBoundingClientRect().top)`)
		return y[0], y[1]
	}
	if root, leaf := tops(); root >= leaf {
		t.Errorf("icicle: the root is at %v, a leaf at %v", root, leaf)
	}
	do(ctx, t, choose(`input[name="layout"][value="flame"]`))
	if root, leaf := tops(); root <= leaf {
		t.Errorf("flame: the root is at %v, a leaf at %v", root, leaf)
	}
	shot(ctx, t, "flame")
	do(ctx, t, choose(`input[name="layout"][value="icicle"]`))
}

// All can be done with the keyboard.
func TestKeyboard(t *testing.T) {
	ctx := browser(t, view.AppendFlame(nil, run(), nil))
	do(ctx, t, choose("#stackless")) // the sums are of all faults
	press := func(keys ...string) {
		for _, key := range keys {
			do(ctx, t, chromedp.KeyEvent(key))
		}
	}
	focused := func(name string) {
		t.Helper()
		if got := eval[string](ctx, t, `document.activeElement.getAttribute("name") ?? document.activeElement.id`); got != name {
			t.Errorf("the focus is on %q, want %q", got, name)
		}
	}
	do(ctx, t, chromedp.Focus(`#chart g[tabindex="0"]`))
	focused("all")
	press(kb.ArrowDown, kb.ArrowDown)
	focused("make_block alloc.py:8")
	if details := text(ctx, t, "#details"); !strings.Contains(details, "/srv/alloc.py:8") || !strings.Contains(details, "850 faults (85.0 %)") {
		t.Errorf("details %q", details)
	}
	press(kb.ArrowLeft)
	focused("make_block alloc.py:12")
	press(kb.ArrowLeft)
	focused("load data.py:87")
	press(kb.ArrowRight, kb.ArrowRight, kb.Enter)
	absent(ctx, t, "load data.py:87")
	focused("make_block alloc.py:8")
	press(kb.ArrowUp)
	focused("<module> alloc.py:31")
	press(kb.Escape)
	want(ctx, t, "load data.py:87", "70 faults, 7.0 %")
	press("/")
	focused("search")
}

func TestDifference(t *testing.T) {
	ctx := browser(t, view.AppendFlame(nil, run(), before()))
	do(ctx, t, choose("#stackless")) // the sums are of all faults
	fill := func(name string) string {
		return eval[string](ctx, t, fmt.Sprintf(`[...document.querySelectorAll("#chart g")].find((g) => g.getAttribute("name") === %q).querySelector("rect").getAttribute("fill")`, name))
	}
	// 85 % of 1000 after 350 of 860: far more than a tenth of all, so the full colour.
	if got := fill("make_block alloc.py:8"); got != "rgb(216,126,57)" {
		t.Errorf("what has risen is %s", got)
	}
	if got := fill("load data.py:87"); got != "rgb(56,141,190)" {
		t.Errorf("what has fallen is %s", got)
	}
	if got := fill("all"); got != "rgb(222,223,226)" {
		t.Errorf("what is the same is %s", got)
	}
	do(ctx, t, on("make_block alloc.py:8"))
	if details := text(ctx, t, "#details"); !strings.Contains(details, "850 faults (85.0 %), +44.3 points") {
		t.Errorf("details %q", details)
	}
	shot(ctx, t, "difference")
	do(ctx, t, choose(`input[name="widths"][value="1"]`))
	want(ctx, t, "_copy_to_iter", "400 faults, 46.5 %")
	do(ctx, t, choose(`input[name="colours"][value="language"]`))
	if legend := text(ctx, t, "#legend"); legend != "other kernel native c++ python" {
		t.Errorf("legend %q", legend)
	}
}

// A large page opens soon and can be used.
func TestLarge(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	p := &fault.Profile{Session: &session, Faults: 10_000}
	frames := []fault.Frame{{Func: "main"}}
	for range 10_000 {
		frames = frames[:max(len(frames)-r.IntN(8), 1)]
		for len(frames) < 20+r.IntN(40) {
			i := r.IntN(5000)
			frames = append(frames, fault.Frame{
				Func: fmt.Sprintf("class%d::method%d", i%300, i), File: fmt.Sprintf("/src/file%d.cc", i%700), Line: uint32(i), Module: "/bin/server",
				Lang: fault.Lang(i % 6),
			})
		}
		stack := make([]fault.Frame, len(frames))
		for i := range frames {
			stack[len(frames)-1-i] = frames[i]
		}
		p.Samples = append(p.Samples, fault.StackSample{Stack: p.Stacks.Add(&fault.Stack{Frames: stack}), Kind: fault.Anon, Faults: 1})
	}
	content := view.AppendFlame(nil, p, nil)
	start := time.Now()
	ctx := browser(t, content)
	opened := time.Since(start)
	want(ctx, t, "all", "10,000 faults, 100.0 %")
	took := eval[float64](ctx, t, `(() => { const start = performance.now(); document.querySelector("#lines").click(); return performance.now() - start; })()`)
	t.Logf("%d bytes: browser and page open after %v, drawn anew in %.0f ms", len(content), opened.Round(time.Millisecond), took)
	shot(ctx, t, "large")
	if took > 20_000 {
		t.Errorf("drawing anew took %.0f ms", took)
	}
}

// A graph that is higher than the window shows where its root is, and what a search has found.
func TestReveal(t *testing.T) {
	p := &fault.Profile{Session: &session, Faults: 20}
	for _, leaf := range []string{"needle", "straw"} {
		stack := &fault.Stack{Frames: []fault.Frame{{Func: leaf}}}
		for i := range 120 {
			stack.Frames = append(stack.Frames, fault.Frame{Func: fmt.Sprintf("deep%d", i)})
		}
		p.Samples = append(p.Samples, fault.StackSample{Stack: p.Stacks.Add(stack), Kind: fault.Anon, Faults: 10})
	}
	ctx := browser(t, view.AppendFlame(nil, p, nil))
	inSight := func(name string, yes bool) {
		t.Helper()
		script := fmt.Sprintf(`(() => {
			const box = [...document.querySelectorAll("#chart g")].find((g) => g.getAttribute("name") === %q).getBoundingClientRect();
			return box.top >= document.querySelector("#search-row").getBoundingClientRect().bottom - 1 && box.bottom <= document.querySelector("#details").getBoundingClientRect().top + 1;
		})()`, name)
		if got := eval[bool](ctx, t, script); got != yes {
			t.Errorf("%s is in sight: %v", name, got)
		}
	}
	inSight("all", true)
	inSight("needle", false)
	searchFor(ctx, t, "needle")
	inSight("needle", true)
	inSight("all", false)
	if got := eval[string](ctx, t, `document.querySelector("#search").value`); got != "needle" {
		t.Errorf("the field has %q", got)
	}
	shot(ctx, t, "reveal")
	searchFor(ctx, t, "deep119")
	inSight("deep119", true)
	do(ctx, t, choose(`input[name="layout"][value="flame"]`))
	inSight("all", true)
	shot(ctx, t, "reveal-flame")
	searchFor(ctx, t, "straw")
	inSight("straw", true)
	inSight("all", false)
	do(ctx, t, choose(`input[name="layout"][value="icicle"]`))
	inSight("all", true)
}
