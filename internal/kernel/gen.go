package kernel

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -go-package kernel -target amd64,arm64 -type fault_record -type name_record -type max_record -type counters -type kind_row -type stat_key -type cost -type stack_record -type mapping_record fault ../../bpf/fault.bpf.c -- -O2 -g -mcpu=v3 -Wall -Werror -D__VMLINUX_H__
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -go-package kernel -target amd64,arm64 witness ../../bpf/witness.bpf.c -- -O2 -g -mcpu=v3 -Wall -Werror -D__VMLINUX_H__
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -go-package kernel -target amd64,arm64 vmfault ../../bpf/vmfault.bpf.c -- -O2 -g -mcpu=v3 -Wall -Werror -D__VMLINUX_H__
