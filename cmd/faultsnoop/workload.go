package main

import (
	"context"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"faultsnoop/workload"
)

func newWorkloadCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "workload KIND",
		Short: "Take a known number of page faults of one kind",
		Long: `Take a known number of page faults of one kind, and print one line of JSON on
stderr: the process and threads that took them, the addresses, how many faults
were expected there and how many the kernel counted for each thread meanwhile.`,
		Example: `  faultsnoop workload alloc --size 1GB --block 10MB
  faultsnoop trace --json -- faultsnoop workload touch --threads 4`,
		// Without a function of its own cobra would answer a wrong kind with help and success.
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("the kind of workload is missing: name one of %s", strings.Join(kindNames(), ", "))
			}
			return usagef("unknown workload %q%s; valid are %s", args[0], suggestion(args[0], kindNames()), strings.Join(kindNames(), ", "))
		},
	}
	for _, kind := range workload.Kinds() {
		cmd.AddCommand(newWorkloadKindCmd(kind))
	}
	return cmd
}

func kindNames() []string {
	var names []string
	for _, kind := range workload.Kinds() {
		names = append(names, kind.Name)
	}
	return names
}

func newWorkloadKindCmd(kind workload.Kind) *cobra.Command {
	long := "It will " + kind.Short + ".\n" + kind.Long
	cmd := &cobra.Command{Use: kind.Name, Short: kind.Short, Long: long, Args: cobra.NoArgs}
	run := kind.Bind(cmd.Flags())
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if err := run.Validate(); err != nil {
			return usagef("%w", err)
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, end := context.WithCancelCause(cmd.Context())
		defer end(nil)
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
		defer signal.Stop(ch)
		go func() {
			select {
			case sig := <-ch:
				signal.Stop(ch) // the second one ends the process whatever it does
				end(&exitError{code: exitSignal + int(sig.(unix.Signal))})
			case <-ctx.Done():
			}
		}()
		return run.Run(ctx, cmd.ErrOrStderr())
	}
	return cmd
}
