#include "go_asm.h"
#include "textflag.h"

// Of unistd_64.h and resource.h.
#define NR_clone 56
#define NR_exit 60
#define NR_getrusage 98
#define RUSAGE_THREAD 1

// func cloneOnStack(t *stackThread, flags uintptr) int
TEXT ·cloneOnStack(SB), NOSPLIT, $0-24
	MOVQ t+0(FP), R12
	MOVQ flags+8(FP), DI
	MOVQ stackThread_top(R12), SI
	XORL DX, DX
	LEAQ stackThread_running(R12), R10
	MOVQ stackThread_tls(R12), R8
	MOVL $NR_clone, AX
	SYSCALL
	TESTQ AX, AX
	JZ   thread
	MOVQ AX, ret+16(FP)
	RET

thread:
	MOVL $RUSAGE_THREAD, DI
	LEAQ stackThread_before(R12), SI
	MOVL $NR_getrusage, AX
	SYSCALL
	MOVQ stackThread_other(R12), BX
	MOVQ stackThread_pages(R12), R13
	MOVQ stackThread_stride(R12), R15
	MOVQ SP, R14

page:
	SUBQ R15, R14
	MOVQ R14, SP
	MOVB $1, 0(SP)
	MOVB $1, (BX)
	ADDQ R15, BX
	DECQ R13
	JNZ  page

	MOVL $RUSAGE_THREAD, DI
	LEAQ stackThread_after(R12), SI
	MOVL $NR_getrusage, AX
	SYSCALL
	XORL DI, DI
	MOVL $NR_exit, AX
	SYSCALL
	INT  $3
