# bitmill: `make help` lists every target. Needs Python 3.11, git and make; everything else is installed here.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
SCHEME ?= W4A16
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

ENGINE := services/quantizer/engines/llmcompressor
DEV_BIN := .venv/bin
EXAMPLE := build/checkpoints/smollm2-135m-instruct

# An environment is a virtualenv and a stamp; the stamp is newer than the lock file that made it.
STAMPS := .venv/.ready services/quantizer/.venv/.ready $(ENGINE)/.venv/.ready services/inference/.venv/.ready

define make_venv # $(1) folder of the virtualenv, $(2) lock file, $(3) local packages
	rm -rf $(1)
	$(PYTHON) -m venv $(1)
	if torch=$$(grep -o '^torch==.*+cpu' $(2)); then \
	  $(1)/bin/pip install -q --no-deps --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX) $$torch; fi
	$(1)/bin/pip install -q --no-deps -r $(2)
	$(1)/bin/pip install -q --no-deps $(foreach package,$(3),-e $(package))
	touch $(1)/.ready
endef

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

.PHONY: setup
setup: $(STAMPS) ## make every environment from its lock file (a second run does nothing)

.venv/.ready: requirements/dev.lock
	$(call make_venv,.venv,$<,clients/python services/common services/quantizer services/inference)

services/quantizer/.venv/.ready: services/quantizer/requirements.lock
	$(call make_venv,services/quantizer/.venv,$<,clients/python services/common services/quantizer)

services/inference/.venv/.ready: services/inference/requirements-cpu.lock
	$(call make_venv,services/inference/.venv,$<,clients/python services/common services/inference)

$(ENGINE)/.venv/.ready: $(ENGINE)/requirements.lock
	$(call make_venv,$(ENGINE)/.venv,$<,$(ENGINE))

PROTO_FILES := $(shell find protos -name '*.proto' | sort)

.PHONY: protos
protos: .venv/.ready ## write the client stubs again from protos/
	$(DEV_BIN)/python -m grpc_tools.protoc -I protos --python_out=clients/python/src --pyi_out=clients/python/src \
	  --grpc_python_out=clients/python/src $(PROTO_FILES)
