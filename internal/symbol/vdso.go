package symbol

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"faultsnoop/internal/process"
)

// readVDSO reads the code that the kernel maps into all processes of 64 bits: an ELF
// image, taken from our own memory.
func readVDSO() (*Code, error) {
	maps, err := process.ReadMaps(os.Getpid())
	if err != nil {
		return nil, err
	}
	for _, m := range maps {
		if m.Label != "[vdso]" {
			continue
		}
		f, err := os.Open("/proc/self/mem")
		if err != nil {
			return nil, fmt.Errorf("reading the vdso: %w", err)
		}
		defer f.Close()
		b := make([]byte, min(m.End-m.Start, maxVDSO))
		if _, err := f.ReadAt(b, int64(m.Start)); err != nil {
			return nil, fmt.Errorf("reading the vdso: %w", err)
		}
		c, err := NewCode(bytes.NewReader(b))
		if err != nil {
			return nil, fmt.Errorf("reading the vdso: %w", err)
		}
		return c, nil
	}
	return nil, errors.New("reading the vdso: there is none")
}

const maxVDSO = 1 << 20
