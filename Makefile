# bitmill: `make help` lists every target. Needs Python 3.11, git and make; everything else is installed here.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
SCHEME ?= W4A16
# `make setup DEVICE=gpu` on a host with NVIDIA GPUs.
DEVICE ?= cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

QUANTIZER := services/quantizer
INFERENCE := services/inference
ENGINES := services/quantizer/engines
KIT := $(ENGINES)/kit
ENGINE := $(ENGINES)/llmcompressor
PACKAGES := clients/python services/common $(KIT) $(QUANTIZER) $(INFERENCE)
SOURCES := clients/python/src services/common/src $(QUANTIZER)/src $(INFERENCE)/src $(wildcard $(ENGINES)/*/src)
EXAMPLE := build/checkpoints/smollm2-135m-instruct
PROTO_FILES = $(shell find protos -name '*.proto' | sort)
COMPILE := .venv/bin/uv pip compile -q --no-header --no-annotate --python-version 3.11 \
  --python-platform x86_64-manylinux_2_35 --no-emit-package bitmill --no-emit-package bitmill-common --no-emit-package bitmill-engine-kit

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z_-]+):.*## /\1\t/' | expand -t 28

.PHONY: demo
demo: setup $(EXAMPLE)/config.json ## the main job: quantize a real model by RPC, serve it, stream an answer (SCHEME=W8A8_INT8 for int8)
	.venv/bin/python examples/demo.py --scheme $(SCHEME) --checkpoint $(EXAMPLE)

.PHONY: test
test: setup $(EXAMPLE)/config.json ## every test
	.venv/bin/python -m pytest $(PYTEST_ARGS)

.PHONY: check
check: .venv/.ready ## lint, types, protos, and whether the committed stubs are what the protos say
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(SOURCES)
	.venv/bin/buf lint
	.venv/bin/buf format --diff --exit-code
	if git ls-tree -d --name-only main 2>/dev/null | grep -qx protos; then \
	  .venv/bin/buf breaking --against '.git#branch=main'; fi
	rm -rf build/stubs && mkdir -p build/stubs
	$(call make_stubs,build/stubs)
	cd build/stubs && find . -type f | while read -r stub; do cmp "$$stub" "../../clients/python/src/$$stub"; done

.PHONY: bench
bench: setup $(EXAMPLE)/config.json ## the benchmarks behind the README's numbers, into benchmarks/results/
	$(INFERENCE)/.venv/bin/python benchmarks/streaming.py
	$(INFERENCE)/.venv/bin/python benchmarks/overload.py
	$(INFERENCE)/.venv/bin/python benchmarks/admission_window.py
	.venv/bin/python benchmarks/transfer.py

.PHONY: protos
protos: .venv/.ready ## write the client stubs again from protos/
	$(call make_stubs,clients/python/src)

.PHONY: lock
lock: .venv/.ready ## resolve every lock file again from the pyproject files
	$(COMPILE) requirements/dev.in $(QUANTIZER)/pyproject.toml $(INFERENCE)/pyproject.toml -o requirements/dev.lock
	$(COMPILE) $(QUANTIZER)/pyproject.toml -o $(QUANTIZER)/requirements.lock
	for engine in llmcompressor gptqmodel auto_gptq; do \
	  $(COMPILE) $(ENGINES)/$$engine/pyproject.toml -o $(ENGINES)/$$engine/requirements-gpu.lock; done
	$(COMPILE) $(INFERENCE)/pyproject.toml --extra gpu --extra smg -o $(INFERENCE)/requirements-gpu.lock
	for engine in llmcompressor gptqmodel; do $(COMPILE) $(ENGINES)/$$engine/pyproject.toml \
	  --find-links $(TORCH_INDEX)/torch -o $(ENGINES)/$$engine/requirements-cpu.lock; done
	$(COMPILE) $(INFERENCE)/pyproject.toml --extra cpu --extra smg \
	  --find-links $(TORCH_INDEX)/torch --overrides requirements/overrides-inference-cpu.txt -o $(INFERENCE)/requirements-cpu.lock

.PHONY: clean
clean: ## remove what was built; the environments stay
	rm -rf build

# An environment is a virtualenv and a stamp, which is newer than the lock file and the packages' settings that made it.
.PHONY: setup
setup: .venv/.ready $(QUANTIZER)/.venv/.ready $(ENGINE)/.venv/.ready $(ENGINES)/gptqmodel/.venv/.ready $(INFERENCE)/.venv/.ready ## make every environment from its lock file (a second run does nothing)

.PHONY: setup-engine-llmcompressor
setup-engine-llmcompressor: $(ENGINE)/.venv/.ready ## make the environment of the engine llmcompressor

.PHONY: setup-engine-gptqmodel
setup-engine-gptqmodel: $(ENGINES)/gptqmodel/.venv/.ready ## make the environment of the engine gptqmodel

.PHONY: setup-engine-auto_gptq
setup-engine-auto_gptq: $(ENGINES)/auto_gptq/.venv/.ready ## make the environment of the engine auto_gptq, for a host with an NVIDIA GPU

.venv/.ready: requirements/dev.lock $(PACKAGES:%=%/pyproject.toml)
	$(call make_environment,.venv,$<,$(PACKAGES))

$(QUANTIZER)/.venv/.ready: $(QUANTIZER)/requirements.lock $(QUANTIZER)/pyproject.toml
	$(call make_environment,$(@D),$<,clients/python services/common $(QUANTIZER))

$(INFERENCE)/.venv/.ready: $(INFERENCE)/requirements-$(DEVICE).lock $(INFERENCE)/pyproject.toml $(KIT)/pyproject.toml
	$(call make_environment,$(@D),$<,clients/python services/common $(KIT) $(INFERENCE))

$(ENGINE)/.venv/.ready $(ENGINES)/gptqmodel/.venv/.ready: $(ENGINES)/%/.venv/.ready: $(ENGINES)/%/requirements-$(DEVICE).lock $(ENGINES)/%/pyproject.toml $(KIT)/pyproject.toml
	$(call make_environment,$(@D),$<,$(KIT) $(ENGINES)/$*)

# AutoGPTQ works on CUDA only, whatever DEVICE is.
$(ENGINES)/auto_gptq/.venv/.ready: $(ENGINES)/auto_gptq/requirements-gpu.lock $(ENGINES)/auto_gptq/pyproject.toml $(KIT)/pyproject.toml
	$(call make_environment,$(@D),$<,$(KIT) $(ENGINES)/auto_gptq)

$(EXAMPLE)/config.json: $(ENGINE)/.venv/.ready
	$(ENGINE)/.venv/bin/python examples/make_example_checkpoint.py $(@D)

# $(1) virtualenv, $(2) lock file, $(3) local packages. torch for the CPU comes in a step of its own, because only there
# is its index asked: a host that cannot reach that index but has the wheel loses seconds, not minutes.
define make_environment
	@echo "bitmill: making $(1) from $(2)"
	rm -rf $(1)
	$(PYTHON) -m venv $(1)
	if torch=$$(grep '^torch==.*+cpu$$' $(2)); then $(1)/bin/pip install -q --no-deps --retries 1 --timeout 15 \
	  --extra-index-url $(TORCH_INDEX) $$torch; fi
	$(1)/bin/pip install -q --no-deps -r $(2)
	$(1)/bin/pip install -q --no-deps $(foreach package,$(3),-e $(package))
	touch $(1)/.ready
endef

# $(1) folder that gets the stubs.
define make_stubs
	.venv/bin/python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO_FILES)
endef
