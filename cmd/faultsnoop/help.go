package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"faultsnoop/internal/view"
)

// helpWidth is where help texts break their lines.
const helpWidth = 100

// setGroupedHelp replaces cobra's single list of flags.
func setGroupedHelp(cmd *cobra.Command, groups []flagGroup, columns bool) {
	cmd.SetUsageFunc(func(cmd *cobra.Command) error {
		var b strings.Builder
		fmt.Fprintf(&b, "Usage:\n  %s\n\nExamples:\n%s\n", cmd.UseLine(), cmd.Example)
		for _, g := range groups {
			fmt.Fprintf(&b, "\n%s\n%s", g.title, g.flags.FlagUsagesWrapped(helpWidth))
		}
		if columns {
			b.WriteString("\n")
			writeColumns(&b)
		}
		_, err := fmt.Fprint(cmd.OutOrStdout(), b.String())
		return err
	})
}

// writeColumns explains the columns from the table that produces them.
func writeColumns(b *strings.Builder) {
	b.WriteString("COLUMNS (without --columns text shows the preset default, CSV and JSON the preset wide)\n")
	for _, p := range view.Presets {
		writeEntry(b, p.Name, "preset: "+p.Help)
	}
	for i := range view.Columns {
		c := &view.Columns[i]
		help := c.Help
		if other := c.Elsewhere(); other != "" {
			help += " (" + other + ")"
		}
		writeEntry(b, c.Name, help)
	}
}

// writeEntry writes a word and its explanation in lines of helpWidth.
func writeEntry(b *strings.Builder, name, text string) {
	const indent = 14
	fmt.Fprintf(b, "  %-*s", indent-2, name)
	used := indent
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
		case used+1+len(word) > helpWidth:
			fmt.Fprintf(b, "\n%*s", indent, "")
			used = indent
		default:
			b.WriteString(" ")
			used++
		}
		b.WriteString(word)
		used += len(word)
	}
	b.WriteString("\n")
}
