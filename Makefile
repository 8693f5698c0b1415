# Two commands matter: `make demo` runs one pod through the whole road; `make test` passes the tests.
# Both need root (network namespaces) and install what is missing (scripts/setup says what, before it does).

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Everything, clouds too: their SDKs are in no default build, and compiled here once for build, test and lint.
ALL := --workspace --features peerpod-providers/aws,peerpod-provider-aws/sdk
BINS := -p peerpod -p peerpod-node -p peerpod-relay -p peerpod-guest -p peerpod-provider-local -p peerpod-test-agent

.PHONY: demo test test-long bench lint fuzz setup bins docs

setup:
	@scripts/setup

bins: setup
	$(CARGO) build --locked $(BINS)

demo: bins
	$(TARGET)/debug/peerpod demo

# The binaries first: the tests under tests/ drive them from outside. In one build with the tests, because a build of
# some packages has other features than one of all, and would compile tokio, rustls and all of ours a second time.
test: setup
	$(CARGO) build --locked $(ALL) --all-targets
	$(CARGO) test --locked $(ALL)

# What takes longer than a coffee: soaks, many kills, large counts. The same build as `make test`: what it waits for
# is mostly processes, namespaces and deadlines, not our code.
test-long: setup
	$(CARGO) build --locked $(ALL) --all-targets
	PEERPOD_TEST_LONG=1 $(CARGO) test --locked $(ALL) --no-fail-fast

# The clouds' figures are counts and ratios to what their limits permit: the tests' build does.
bench: setup
	$(CARGO) build --locked --release $(BINS) -p peerpod-benches
	$(TARGET)/release/peerpod-benches
	PEERPOD_BENCH=$(abspath $(TARGET))/bench/summary.json $(CARGO) test --locked $(ALL) --test burst -- --nocapture --test-threads 1

lint: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked $(ALL) --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked $(ALL) --no-deps --document-private-items
	scripts/deny
	scripts/check-trees

# Seconds per target; see fuzz/README.md.
FUZZ_SECONDS ?= 60
fuzz: setup
	fuzz/run $(FUZZ_SECONDS)
