package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Exit codes of faultsnoop itself. With a command, its own code (128+N for signal
// N) is returned instead, and 126 and 127 mean what they mean in a shell.
const (
	exitUsage         = 2
	exitFailure       = 125
	exitNotExecutable = 126
	exitNotFound      = 127
	exitSignal        = 128
)

// exitError ends the program with a code of its own; without err nothing is said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usagef makes the error for a command line that cannot mean anything: one line
// with cause and remedy.
func usagef(format string, args ...any) error {
	return &exitError{code: exitUsage, err: fmt.Errorf(format, args...)}
}

// run is the program without its process: it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer, open opener) int {
	root := newRootCmd(open)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	code := exitFailure
	var exit *exitError
	if errors.As(err, &exit) {
		code = exit.code
	}
	if exit == nil || exit.err != nil {
		fmt.Fprintf(stderr, "faultsnoop: %s\n", oneLine(err))
	}
	return code
}

// oneLine keeps an error that quotes something of several lines on one, and what else
// it quotes from steering a terminal.
func oneLine(err error) string {
	lines := strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' })
	for i := range lines {
		lines[i] = printable(strings.TrimSpace(lines[i]))
	}
	return strings.Join(lines, "; ")
}

// printable writes what cannot be printed the way %q does. The rest, quotes and
// backslashes too, stays as it is.
func printable(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		s = s[n:]
	}
	return b.String()
}

func newRootCmd(open opener) *cobra.Command {
	root := &cobra.Command{
		Use:   "faultsnoop",
		Short: "Trace page faults: which pages, in which process, why, and how long each one took",
		Long: "Faultsnoop traces page faults on a stock kernel: which pages fault, in which process,\n" +
			"why, and how long each fault takes.",
		Example: "  faultsnoop trace -- python3 app.py\n" +
			"  faultsnoop trace -c postgres --major\n" +
			"  faultsnoop doctor",
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.Args = func(cmd *cobra.Command, args []string) error { return checkSubcommand(cmd, args) }
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		var invalid *pflag.InvalidValueError
		if !errors.As(err, &invalid) {
			return usagef("%w; \"%s --help\" lists the flags", err, cmd.CommandPath())
		}
		return usagef("invalid value %q for --%s: %s", invalid.GetValue(), invalid.GetFlag().Name, whyInvalid(invalid))
	})
	root.AddCommand(newTraceCmd(open), newStatCmd(open), newFlameCmd(open), newDoctorCmd(), newWorkloadCmd())
	for _, cmd := range root.Commands() {
		markUsageErrors(cmd)
	}
	return root
}

// whyInvalid says what is wrong with the value of a flag. Flags of ours say it
// themselves, and what would be valid; those of pflag quote functions of Go.
func whyInvalid(err *pflag.InvalidValueError) string {
	var number *strconv.NumError
	switch kind := err.GetFlag().Value.Type(); {
	case kind == "duration":
		return "write a number with its unit, as in 5s, 1m30s or 250ms"
	case !errors.As(err, &number):
		return err.Unwrap().Error()
	case kind == "bool":
		return "neither true nor false"
	case errors.Is(number, strconv.ErrRange):
		return "too large a number"
	}
	return "not a whole number from 0 on"
}

func checkSubcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return usagef("unknown command %q%s; valid are %s", args[0], suggestion(args[0], names), strings.Join(names, ", "))
}

// markUsageErrors makes what cobra says about positional arguments usage errors.
func markUsageErrors(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			err := check(cmd, args)
			var exit *exitError
			if err == nil || errors.As(err, &exit) {
				return err
			}
			return usagef("%w; \"%s --help\" shows what goes there", err, cmd.CommandPath())
		}
	}
	for _, c := range cmd.Commands() {
		markUsageErrors(c)
	}
}

// version is the module's version, or the revision it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	if v != "" && v != "(devel)" {
		return v
	}
	v = "devel"
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			v += "-" + s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			v += "+dirty"
		}
	}
	return v
}

// suggestion is ", did you mean X?" where a valid word is near.
func suggestion(word string, valid []string) string {
	best, least := "", 3 // two typing errors at most
	for _, v := range valid {
		if d := distance(word, v); d < least && d < len(v) {
			best, least = v, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(", did you mean %q?", best)
}

// distance is the number of bytes to insert, delete or replace to turn a into b
// (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
