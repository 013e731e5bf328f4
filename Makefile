# Each target installs what it needs on Debian when it runs as root, or says in
# one line what is missing. Run `make` for the list.
SHELL := /bin/bash
.DEFAULT_GOAL := help

.PHONY: help
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/faultsnoop, one static binary
	@scripts/need go
	CGO_ENABLED=0 go build -trimpath -o bin/faultsnoop ./cmd/faultsnoop

.PHONY: demo
demo: build ## trace the Python workload and compare the counts with the kernel's
	@scripts/demo

.PHONY: test
test: ## run all tests that this machine's kernel allows
	@scripts/test ./...

.PHONY: test-vm
test-vm: ## run the live tests on stock kernels in QEMU; one of them: KERNEL=6.12
	@scripts/need go
	go run ./test/vm $(if $(KERNEL),-kernel $(KERNEL)) $(if $(RUN),-run '$(RUN)')

.PHONY: lint
lint: ## vet, golangci-lint, formatting of Go and C
	@scripts/lint

.PHONY: fmt
fmt: ## format Go and C
	@scripts/lint --fix

.PHONY: generate
generate: ## compile bpf/ into the objects that are committed
	@scripts/need go clang-19 llvm-strip-19 bpf-headers
	go generate ./internal/kernel ./internal/unwind

.PHONY: web
web: ## bundle the script and style of the flame graph page, which are committed
	@scripts/need node npm
	cd internal/view/web && npm ci --silent && npm run --silent build

.PHONY: check-generated
check-generated: generate web ## fail if the committed objects and bundle are not what their sources make
	@scripts/need git
	@git diff --exit-code --stat -- internal/kernel internal/unwind internal/view/web || \
		{ echo >&2 'generated files are not current: run make generate web and commit the result'; exit 1; }

.PHONY: bench
bench: build ## measure the overhead beside bpftrace and perf; updates docs/overhead.md
	@scripts/need bpftrace perf
	go run ./test/bench -faultsnoop bin/faultsnoop -update docs/overhead.md $(BENCHFLAGS)

.PHONY: clean
clean: ## remove what was built
	rm -rf bin
