package aggregate

import (
	"path"
	"regexp"
	"slices"
	"strings"

	"faultsnoop/internal/fault"
)

// runtimeModules match the names, without folder, of files whose native code serves programs
// of all kinds: it is seldom what one looks for. docs/stacks.md lists them.
var runtimeModules = []struct {
	what  string
	names *regexp.Regexp
}{
	{"C library and loader", regexp.MustCompile(`^(libc|libpthread|libm|libdl|librt|ld)(-[0-9.]+)?\.so(\.[0-9]+)*$|^ld-(linux|musl)[-a-z0-9_]*\.so(\.[0-9]+)*$|^libc\.musl-[a-z0-9_]+\.so\.[0-9]+$`)},
	{"C++ and compiler libraries", regexp.MustCompile(`^lib(stdc\+\+|c\+\+|c\+\+abi|gcc_s|unwind|supc\+\+)\.so(\.[0-9]+)*$`)},
	{"allocators", regexp.MustCompile(`^lib(jemalloc|tcmalloc|tcmalloc_minimal|mimalloc|tbbmalloc|tbbmalloc_proxy|hoard|snmalloc)[-_a-z0-9]*\.so(\.[0-9]+)*$`)},
	{"Python", regexp.MustCompile(`^libpython[0-9.]+[a-z]*\.so(\.[0-9]+)*$|^python[0-9.]*[a-z]*$`)},
	{"Java", regexp.MustCompile(`^lib(jvm|java|jli)\.so$|^java$`)},
	{"Node", regexp.MustCompile(`^node(js)?$|^libnode\.so(\.[0-9]+)*$`)},
	{"Ruby", regexp.MustCompile(`^libruby[-0-9.]*\.so(\.[0-9]+)*$|^ruby[0-9.]*$`)},
	{"Perl", regexp.MustCompile(`^libperl\.so(\.[0-9]+)*$|^perl[0-9.]*$`)},
	{"PHP", regexp.MustCompile(`^libphp[0-9.]*\.so$|^php(-fpm|-cgi)?[0-9.]*$`)},
	{".NET", regexp.MustCompile(`^lib(coreclr|clrjit|clrgc|System\.Native)\.so$|^dotnet$`)},
	{"BEAM", regexp.MustCompile(`^beam(\.smp)?$`)},
}

// runtimeFunctions are those of the same kind in programs that hold a copy of them.
var runtimeFunctions = []string{
	"malloc", "calloc", "realloc", "reallocarray", "free", "memalign", "posix_memalign", "aligned_alloc", "valloc", "pvalloc",
	"_int_malloc", "_int_realloc", "_int_memalign", "_int_free", "sysmalloc", "malloc_consolidate", "ptmalloc_init", "tcache_init",
	"memset", "memcpy", "memmove", "mempcpy", "bzero", "bcopy", "strcpy", "strncpy", "strdup", "strndup",
}

var runtimePrefixes = []string{"__memset_", "__memcpy_", "__memmove_", "__mempcpy_", "__libc_", "__GI_", "operator new", "operator delete"}

// languagePrefixes are those of the standard library in a language's own names.
var languagePrefixes = map[fault.Lang][]string{
	fault.LangGo: {"runtime.", "internal/runtime/", "runtime/internal/", "internal/bytealg.", "internal/abi."},
	// Rust's names of the implementation of a trait begin with <.
	fault.LangRust: {"core::", "alloc::", "std::", "hashbrown::", "<core::", "<alloc::", "<std::", "<hashbrown::", "__rust_", "__rustc", "__rdl_"},
	fault.LangCPP:  {"std::", "__gnu_cxx::", "void std::", "void* std::"},
	fault.LangJava: {"java.", "jdk.", "sun."},
	// Frames that V8 has for itself, and code of its own in maps of compiled code.
	fault.LangNode: {"V8::", "Builtin:", "BytecodeHandler:", "<external-file>"},
}

// filePrefixes are those of the source files of an interpreter's own modules.
var filePrefixes = map[fault.Lang]string{fault.LangPython: "<frozen ", fault.LangNode: "node:"}

// Runtime reports whether a frame belongs to the kernel, the C library or its like, an
// allocator, the native side of an interpreter, or the runtime and standard library of a
// compiled language. docs/stacks.md has the list.
func Runtime(f *fault.Frame) bool {
	if f.Lang == fault.LangKernel || f.Module == "[kernel]" || f.Module == "[vdso]" || f.Module == "[vsyscall]" {
		return true
	}
	name := f.Func
	if f.Lang == fault.LangJava {
		if name = javaMethod(name); name == "" && f.Func != "" && f.File == "" {
			return true
		}
	}
	for _, prefix := range languagePrefixes[f.Lang] {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	if prefix := filePrefixes[f.Lang]; prefix != "" && strings.HasPrefix(f.File, prefix) {
		return true
	}
	switch f.Lang {
	case fault.LangUnknown, fault.LangNative, fault.LangCPP, fault.LangRust:
	default:
		// Code of a language that a runtime runs. What it cannot even name leads nowhere, but
		// who has called it does.
		return f.Func == "" && f.File == "" && f.Module == ""
	}
	if slices.Contains(runtimeFunctions, f.Func) {
		return true
	}
	for _, prefix := range runtimePrefixes {
		if strings.HasPrefix(f.Func, prefix) {
			return true
		}
	}
	module := strings.TrimSuffix(f.Module, " (deleted)")
	if path.Base(path.Dir(module)) == "lib-dynload" { // Python's own extension modules
		return true
	}
	name = path.Base(module)
	for i := range runtimeModules {
		if runtimeModules[i].names.MatchString(name) {
			return true
		}
	}
	return false
}

// javaMethod is CLASS.METHOD of the name of a Java method, which may have the type of what
// it returns in front, and parameters. It is empty of the code that the virtual machine has
// made for itself, whose names are of no class: Interpreter, new_type_array Runtime1 stub,
// StubRoutines (1) [call_stub_return_address].
func javaMethod(name string) string {
	name, _, _ = strings.Cut(name, "(")
	name = name[strings.LastIndexByte(name, ' ')+1:]
	if !strings.Contains(name, ".") {
		return ""
	}
	return name
}
