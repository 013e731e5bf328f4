package unwind

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -go-package unwind -target amd64,arm64 -type counts -type pace sample ../../bpf/unwind.bpf.c -- -O2 -g -mcpu=v3 -Wall -Werror -D__VMLINUX_H__
