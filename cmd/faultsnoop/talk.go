package main

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// talk is a slog handler for a person: one plain line a message on stderr, since
// neither time nor level tells the user of a command anything.
type talk struct {
	mu    *sync.Mutex
	w     io.Writer
	attrs string
}

func newLogger(w io.Writer) *slog.Logger { return slog.New(&talk{mu: new(sync.Mutex), w: w}) }

func (t *talk) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (t *talk) Handle(_ context.Context, r slog.Record) error {
	line := "faultsnoop: " + r.Message + t.attrs
	r.Attrs(func(a slog.Attr) bool {
		line += " " + a.String()
		return true
	})
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err := io.WriteString(t.w, strings.ReplaceAll(line, "\n", "; ")+"\n")
	return err
}

func (t *talk) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := *t
	for _, a := range attrs {
		with.attrs += " " + a.String()
	}
	return &with
}

// WithGroup ignores the name: nothing here logs groups.
func (t *talk) WithGroup(string) slog.Handler { return t }
