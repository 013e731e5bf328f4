package symbol

import (
	"strings"

	"github.com/ianlancetaylor/demangle"

	"faultsnoop/internal/fault"
)

// maxDemangled is the longest name that is made of a mangled one, as a power of 2: a few
// bytes can stand for gigabytes.
const maxDemangled = 12

// demangled is a name for people: of C++ without the types of parameters, of Rust without
// the hash. What is not mangled stays as it is.
func demangled(name string) (s string) {
	if !mangled(name) {
		return name
	}
	defer func() {
		if recover() != nil {
			s = name
		}
	}()
	s, err := demangle.ToString(name, demangle.NoParams, demangle.MaxLength(maxDemangled))
	if err != nil || s == "" {
		return name
	}
	return s
}

func mangled(name string) bool { return strings.HasPrefix(name, "_Z") || strings.HasPrefix(name, "_R") }

// langOfName is the language that a name was mangled for.
func langOfName(name string) fault.Lang {
	switch {
	case !mangled(name) || demangled(name) == name:
		return fault.LangNative
	case strings.HasPrefix(name, "_R"):
		return fault.LangRust
	}
	// Rust's old names are C++'s with a hash at the end: 17h, 16 digits, E.
	name, _, _ = strings.Cut(name, ".")
	const hash = len("17h0123456789abcdefE")
	if at := len(name) - hash; at > 0 && strings.HasPrefix(name[at:], "17h") && name[len(name)-1] == 'E' &&
		strings.Trim(name[at+3:len(name)-1], "0123456789abcdef") == "" {
		return fault.LangRust
	}
	return fault.LangCPP
}
