# Two commands matter: `make demo` runs one pod from end to end; `make test` runs the tests.
# Both need root (network namespaces). `scripts/setup` names missing packages and installs them.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# The clouds' SDKs and SSH are in no default build: minutes and gigabytes. `make test CLOUDS=1` (as CI does) has them in the one
# build of everything: a second build beside it would have other features, and compile tokio, serde and all of ours again.
# Clouds with a fake in tests/clouds, a test binary each, and a witness.
CLOUD_KINDS := alibabacloud azure gcp ibmcloud powervs vsphere
empty :=
CLOUD_PROVIDERS := peerpod-providers/aws,peerpod-providers/byom
CLOUD_FEATURES := --features $(CLOUD_PROVIDERS),peerpod-provider-aws/sdk,peerpod-test-ec2/moto,peerpod-test-clouds/witness$(subst $(empty) ,,$(CLOUD_KINDS:%=,peerpod-provider-%/witness))
WITH := $(if $(CLOUDS),$(CLOUD_FEATURES))
DEMO := -p peerpod-demo -p peerpod-node -p peerpod-relay -p peerpod-guest -p peerpod-provider-local -p peerpod-test-agent
BINS := -p peerpod -p peerpod-node -p peerpod-relay -p peerpod-guest -p peerpod-images -p peerpod-provider-local -p peerpod-test-agent

# Of the programs and VM images: this machine's. check-arch and the image targets take another one, with a C compiler for it.
ARCH := $(shell uname -m)
OTHER_ARCH := $(filter-out $(shell uname -m),$(ARCH))
MUSL_CC := $(if $(OTHER_ARCH),$(ARCH)-linux-gnu-gcc,musl-gcc)
check-arch image-bins: export CC_$(ARCH)_unknown_linux_musl ?= $(MUSL_CC)

# VM images. The programs in them are static builds of their own profile; the builder runs as any user.
# ARCH=x86_64|aarch64: of the images; those for another machine are in target/image/ARCH.
# KATA=PATH|VERSION: the Kata release that has agent and pause bundle; or KATA_AGENT=PATH and PAUSE_BUNDLE=DIR as files.
# GUEST_COMPONENTS=DIR: further programs of others for the image.
# FORMATS=raw,qcow2,vhd,vmdk, VERITY=off: of the disk. LOCKED=1, MIRROR=, SECURITY_MIRROR=, SNAPSHOTS=: podvm/vm-image/README.md.
IMAGE_TARGET := $(ARCH)-unknown-linux-musl
IMAGE_BINS := $(TARGET)/$(IMAGE_TARGET)/image
IMAGES := $(TARGET)/image$(OTHER_ARCH:%=/%)
IMAGE := $(TARGET)/debug/peerpod-image
IMAGE_SOURCE = --arch $(ARCH) --cache $(TARGET)/image/cache $(if $(LOCKED),,--newest-if-gone) \
	$(if $(MIRROR),--mirror $(MIRROR) --security-mirror $(SECURITY_MIRROR)) $(if $(SNAPSHOTS),--snapshots $(SNAPSHOTS))
IMAGE_PARTS = $(IMAGE_SOURCE) --guest $(IMAGE_BINS)/peerpod-guest --pull $(IMAGE_BINS)/peerpod-pull \
	$(if $(KATA),--kata $(KATA)) $(if $(KATA_AGENT),--kata-agent $(KATA_AGENT)) \
	$(if $(KATA)$(KATA_AGENT),,--test-agent $(IMAGE_BINS)/peerpod-test-agent) \
	$(if $(PAUSE_BUNDLE),--pause-bundle $(PAUSE_BUNDLE)) $(if $(GUEST_COMPONENTS),--guest-components $(GUEST_COMPONENTS))

.PHONY: demo setup-image setup-dist test test-bins test-csi test-kube test-kubernetes test-long test-aws test-clouds bench bench-aws bench-clouds bench-kube lint fuzz setup bins image image-minimal image-disk \
	image-bins image-lock dist release check-arch kustomize

setup:
	@scripts/setup

setup-image:
	@scripts/setup image $(ARCH)

setup-dist:
	@scripts/setup dist

bins: setup
	$(CARGO) build --locked $(BINS)

# target/image/minimal: kernel and initramfs. target/image/disk: a disk for clouds. `make image ARCH=aarch64`: both for
# another architecture. See podvm/vm-image/README.md.
image: image-minimal image-disk

image-minimal: image-bins
	$(IMAGE) minimal $(IMAGE_PARTS) --out $(IMAGES)/minimal

image-disk: image-bins
	$(IMAGE) disk $(IMAGE_PARTS) --initrd $(IMAGE_BINS)/peerpod-initrd --out $(IMAGES)/disk \
		$(if $(FORMATS),--formats $(FORMATS)) $(if $(filter off,$(VERITY)),--no-verity)

image-bins: setup-image
	$(CARGO) build --locked --workspace --bin peerpod-image $(WITH)
	$(CARGO) build --locked --profile image --target $(IMAGE_TARGET) \
		$(if $(OTHER_ARCH),--config 'target.$(IMAGE_TARGET).linker="$(MUSL_CC)"') \
		-p peerpod-guest -p peerpod-images -p peerpod-initrd \
		$(if $(KATA)$(KATA_AGENT),,-p peerpod-test-agent)

# Writes podvm/vm-image/packages.ARCH.lock anew, with the newest versions.
image-lock:
	$(CARGO) run --locked -p peerpod-image -- lock --arch $(ARCH) --cache $(TARGET)/image/cache

# Whether everything that is shipped compiles for another architecture: `make check-arch ARCH=aarch64`.
SHIPPED = $(DIST_PACKAGES) peerpod-guest peerpod-images peerpod-initrd peerpod-wireguard
check-arch: setup-image # the Rust target, and a C compiler for it
	$(CARGO) check --locked --target $(ARCH)-unknown-linux-musl $(SHIPPED:%=-p %) $(DIST_WITH)

# The files of a release, for this machine's architecture: programs, container image, VM images, chart, bill of materials,
# notes, checksums, signatures. PARTS="tree chart": these alone. scripts/release describes parts and variables.
release:
	scripts/release $(PARTS)

# The container image's tree: target/dist/rootfs, and what it is made of (target/dist/sbom.cdx.json). Static programs;
# CLOUDS=1: with the clouds' SDKs. PROFILE=dev: with the programs of the tests' build, and the libraries that these need.
DIST_TARGET := $(ARCH)-unknown-linux-musl
DIST_PACKAGES := peerpod-node peerpod-relay peerpod-cluster peerpod-csi peerpod
DIST_WITH := $(if $(CLOUDS),--features $(CLOUD_PROVIDERS))
# Commit that `peerpod version` shows; empty outside of a checkout.
COMMIT ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null)
# Paths of this machine are not in what is built.
DIST_FLAGS = --remap-path-prefix=$(CURDIR)=/src --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo
dist: setup-dist
ifeq ($(PROFILE),dev)
	$(CARGO) build --locked --workspace --bins $(WITH)
	$(TARGET)/debug/peerpod-dist --from $(TARGET)/debug --out $(TARGET)/dist $(DIST_PACKAGES:%=--program %)
else
	$(CARGO) build --locked --workspace --bin peerpod-dist $(WITH)
	RUSTFLAGS="$(DIST_FLAGS)" $(COMMIT:%=PEERPOD_COMMIT=%) $(CARGO) build --locked --profile dist --target $(DIST_TARGET) --bins \
		$(DIST_PACKAGES:%=-p %) $(DIST_WITH)
	$(TARGET)/debug/peerpod-dist --from $(TARGET)/$(DIST_TARGET)/dist --out $(TARGET)/dist --target $(DIST_TARGET) \
		$(DIST_PACKAGES:%=--program %) $(DIST_WITH)
endif

# What others make of the chart: deploy/kustomize, and the webhook's registration. A test says when they are out of date.
kustomize: setup
	tests/kube/build
	deploy/kustomize/make

demo:
	@scripts/setup demo
	$(CARGO) build --locked $(DEMO) --bins
	$(TARGET)/debug/peerpod-demo

# Tests that boot VMs or build their images, and those of clouds. They mostly wait, so `make test` runs both lists beside
# the others, and of the clouds' tests more at once.
CLOUD_TESTS := $(CLOUD_KINDS:%=--test %) $(if $(CLOUDS),--test aws --test byom)
MACHINES := --test build --test guest --test libvirt --test machines

# The binaries first: the tests under tests/ drive them from outside. In one build with the tests, because a build of
# some packages has other features than one of all, and would compile tokio, rustls and all of ours a second time.
# The images before the tests that boot them.
test: test-bins
	@$(CARGO) test --locked --workspace --no-fail-fast $(WITH) $(MACHINES) >$(TARGET)/test-machines.log 2>&1 & machines=$$!; \
	RUST_TEST_THREADS=8 $(CARGO) test --locked --workspace --no-fail-fast $(WITH) $(CLOUD_TESTS) >$(TARGET)/test-clouds.log 2>&1 & clouds=$$!; \
	$(CARGO) test --locked --workspace --no-fail-fast $(WITH); others=$$?; \
	wait $$machines || others=1; wait $$clouds || others=1; \
	cat $(TARGET)/test-machines.log $(TARGET)/test-clouds.log; exit $$others

test-bins: setup image
	$(CARGO) build --locked --workspace --all-targets $(WITH)
	$(CARGO) build --locked --workspace $(WITH) $(MACHINES) $(CLOUD_TESTS)

# The cluster's side against a real kube-apiserver with etcd. The servers are compiled once, from Kubernetes' own Go
# modules (tests/kube/build); that is why it is not part of `make test`.
test-kube: setup
	tests/kube/build
	$(CARGO) build --locked --workspace --all-targets $(WITH)
	$(CARGO) test --locked --workspace --no-fail-fast $(WITH) --test cluster

# Pods on a real node with kubelet, containerd and Kata's programs, which the folder KATA_DIR contains (CONTRIBUTING.md).
# SLICE=1: a dozen cases, which need no image of a VM and none of Kubernetes' programs for CSI (as in CI).
test-kubernetes: setup $(if $(SLICE),,image-minimal)
	tests/kube/build
	$(if $(SLICE),,tests/csi/build sidecars)
	$(CARGO) build --locked --workspace --all-targets $(WITH)
	mkdir -p $(TARGET)/bench
	$(if $(SLICE),PEERPOD_TEST_PARTS=cases PEERPOD_TEST_CASES=slice) PEERPOD_TEST_BENCH=$(abspath $(TARGET))/bench/summary.json $(CARGO) test --locked --workspace $(WITH) --test kubernetes

# The CSI wrapper before a real driver (Kubernetes' mock CSI driver), by csi-sanity. Both are compiled once (tests/csi/build).
test-csi: setup
	tests/csi/build
	tests/kube/build
	$(CARGO) build --locked --workspace --all-targets $(WITH)
	$(CARGO) test --locked --workspace --no-fail-fast $(WITH) --test csi

# Figures of the cluster's side, with the counts that are promised: 500 deletes and 20 kills (controller_500_deletes_vs_ideal,
# controller_leaks), 2,000 admissions (webhook_p99_ms, webhook_p99_vs_noop), the faults whose cause and remedy are named
# (faults_named, faults_total), and the items of a check (check_items).
bench-kube: setup
	tests/kube/build
	$(CARGO) build --locked --workspace --all-targets $(WITH)
	mkdir -p $(TARGET)/bench
	PEERPOD_TEST_BENCH=$(abspath $(TARGET))/bench/summary.json $(CARGO) test --locked --workspace $(WITH) --test cluster -- --nocapture check controller faults webhook

# What takes longer than a coffee: soaks, many kills, large counts; also of the cluster's side, of the CSI wrapper and, with
# KATA_DIR, of pods on a real node; the VM images for aarch64 in emulated machines; then each fuzz target, FUZZ_SECONDS
# long, and the documented commands of at most 20 minutes. Not an optimised build: what it waits for is mostly processes,
# namespaces and deadlines, not our code.
test-long: FUZZ_SECONDS = 600
test-long: setup image
	scripts/setup long
	$(MAKE) image ARCH=aarch64
	tests/csi/build $(if $(KATA_DIR),sidecars)
	tests/kube/build
	$(CARGO) build --locked --workspace --all-targets $(WITH)
	PEERPOD_TEST_LONG=1 $(CARGO) test --locked --workspace --no-fail-fast $(WITH)
	PEERPOD_TEST_LONG=1 $(CARGO) test --locked --workspace --no-fail-fast $(WITH) $(MACHINES) $(CLOUD_TESTS) --test cluster --test csi --test kubernetes
	FUZZ_WITH="$(WITH)" fuzz/run $(FUZZ_SECONDS)
	scripts/documented-commands --at-most 20

# The AWS provider, and the real node with it, against a simulated EC2 (moto, from PyPI) behind a proxy that refuses as
# EC2 does. The same features as `make test CLOUDS=1`, so the two share their build: the binaries are built with the tests,
# because without them tokio has other features (tests stop its clock), and the SDK would be compiled twice.
AWS_TESTS := --test aws --test ec2_proxy
test-aws: setup
	$(CARGO) build --locked --workspace $(CLOUD_FEATURES) --bins $(AWS_TESTS)
	$(CARGO) test --locked --workspace $(CLOUD_FEATURES) $(AWS_TESTS)

# The fakes of clouds, what their vendors' models and clients say of them, and the providers with the fakes. The same build
# again.
FAKE_TESTS := --test clouds --test byom $(CLOUD_KINDS:%=--test %)
test-clouds: setup
	$(CARGO) build --locked --workspace $(CLOUD_FEATURES) --bins $(FAKE_TESTS)
	$(CARGO) test --locked --workspace $(CLOUD_FEATURES) $(FAKE_TESTS)

# Counts and ratios to what the account's limits permit: the tests' build does.
AWS_BENCHES := --test aws --test e2e
bench-aws: setup
	$(CARGO) build --locked --workspace $(CLOUD_FEATURES) --bins $(AWS_BENCHES)
	mkdir -p $(TARGET)/bench
	PEERPOD_TEST_BENCH=$(abspath $(TARGET))/bench/summary.json $(CARGO) test --locked --workspace $(CLOUD_FEATURES) $(AWS_BENCHES) \
		-- --nocapture --test-threads 1 node:: provider_external::

# The same for the fakes of clouds, and the number of broken promises of each provider.
CLOUD_BENCHES := --test byom $(CLOUD_KINDS:%=--test %)
bench-clouds: setup
	$(CARGO) build --locked --workspace $(CLOUD_FEATURES) --bins $(CLOUD_BENCHES)
	mkdir -p $(TARGET)/bench
	PEERPOD_TEST_BENCH=$(abspath $(TARGET))/bench/summary.json $(CARGO) test --locked --workspace $(CLOUD_FEATURES) $(CLOUD_BENCHES) \
		-- --nocapture --test-threads 1 node:: conformance:: disks:: claims::

bench: image
	$(CARGO) build --locked --release $(BINS) -p peerpod-benches
	$(TARGET)/release/peerpod-benches

# LINTED=1: the build ran clippy already, as in CI. The docs are then without the clouds' SDKs, which cost minutes. The build
# without them is to compile in any case.
lint: setup
	$(CARGO) fmt --all --check
	$(if $(LINTED),,$(CARGO) clippy --locked --workspace --all-targets $(WITH) -- -D warnings)
	$(if $(LINTED),,$(CARGO) clippy --locked --workspace $(MACHINES) $(CLOUD_TESTS) --test cluster --test csi $(WITH) -- -D warnings)
	$(CARGO) check --locked --workspace
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace $(if $(LINTED),,$(WITH)) --no-deps --document-private-items
	scripts/deny
	scripts/check-trees
	scripts/check-errors
	scripts/check-docs
	scripts/documented-commands --check

# Seconds per target; see fuzz/README.md.
FUZZ_SECONDS ?= 60
fuzz: setup
	FUZZ_WITH="$(WITH)" fuzz/run $(FUZZ_SECONDS)
