#include "go_asm.h"
#include "textflag.h"

// Of asm-generic/unistd.h and resource.h.
#define NR_exit 93
#define NR_getrusage 165
#define NR_clone 220
#define RUSAGE_THREAD 1

// func cloneOnStack(t *stackThread, flags uintptr) int
TEXT ·cloneOnStack(SB), NOSPLIT|NOFRAME, $0-24
	MOVD t+0(FP), R19
	MOVD flags+8(FP), R0
	MOVD stackThread_top(R19), R1
	MOVD $0, R2
	MOVD stackThread_tls(R19), R3
	ADD  $stackThread_running, R19, R4
	MOVD $NR_clone, R8
	SVC
	CBZ  R0, thread
	MOVD R0, ret+16(FP)
	RET

thread:
	MOVD $RUSAGE_THREAD, R0
	ADD  $stackThread_before, R19, R1
	MOVD $NR_getrusage, R8
	SVC
	MOVD stackThread_other(R19), R20
	MOVD stackThread_pages(R19), R21
	MOVD stackThread_stride(R19), R22
	MOVD $1, R23
	MOVD RSP, R24

page:
	SUB  R22, R24
	MOVD R24, RSP
	MOVB R23, (RSP)
	MOVB R23, (R20)
	ADD  R22, R20
	SUB  $1, R21
	CBNZ R21, page

	MOVD $RUSAGE_THREAD, R0
	ADD  $stackThread_after, R19, R1
	MOVD $NR_getrusage, R8
	SVC
	MOVD $0, R0
	MOVD $NR_exit, R8
	SVC
	BRK
