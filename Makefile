# Every target sets the environment up first; `make setup` does nothing when nothing changed.
# PYTHON chooses the interpreter (3.11 or later): make setup PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The environment is remade when what decides it changes: pyproject.toml or the interpreter.
# DEPS may name a directory with the dependencies installed already (see .ci/run): they are then used from there.
DEPS ?=
USE_DEPS = import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "deps.pth").write_text("$(DEPS)\n")
KEY := $(shell { cat pyproject.toml scripts/install-engine scripts/install-nixl; $(PYTHON) -c 'import sys; print(sys.version, sys.base_prefix)'; } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.stamp-$(KEY)
ENGINE_STAMP := $(VENV)/.stamp-engine-$(KEY)
POOL := .venv-pool
POOL_STAMP := $(POOL)/.stamp-$(KEY)

PYTEST := $(BIN)/python -m pytest -q
LONG := $(PYTEST) -o faulthandler_timeout=1800 --durations=12

# For `make stress`: which tests (all of them unless named), and how many rounds.
TESTS ?=
ROUNDS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup check .unit .rest test .slow .engine pool stress conformance demo bench clean key

help: ## print this
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(ENGINE_STAMP) ## make the virtual environment in .venv; .venv/bin/kvtally then works

$(STAMP):
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(if $(DEPS),$(BIN)/python -c '$(USE_DEPS)')
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# vLLM's CPU build: some minutes and 3 GB, so apart from what `make check` needs.
$(ENGINE_STAMP): $(STAMP)
	$(if $(DEPS),,scripts/install-engine $(BIN)/python)
	$(if $(DEPS),,scripts/install-nixl $(BIN)/python)
	touch $@

check: $(STAMP) ## lint, format, types and fast tests; under 2 minutes
	+$(MAKE) --no-print-directory --jobs=2 --output-sync=line .unit .rest

# The two halves of `check`, side by side.
.unit:
	$(PYTEST) -m "not slow and not engine" tests/unit

.rest:
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(PYTEST) -m "not slow and not engine" --ignore=tests/unit

test: check setup ## check, then the slow tests and those in real vLLM engines
	+$(MAKE) --no-print-directory --jobs=2 --output-sync=line .slow .engine

# The two halves of `test` after `check`. An engine leaves a third of two processors idle.
.slow:
	$(LONG) -m "slow and not engine"

.engine:
	$(LONG) -m engine

# Real servers and their libraries are in an environment of their own, so that nothing else comes to need them.
$(POOL_STAMP): $(STAMP)
	rm -rf $(POOL)
	$(PYTHON) -m venv $(POOL)
	$(if $(DEPS),$(POOL)/bin/python -c '$(USE_DEPS)')
	$(POOL)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,valkey,s3,seal,pool-servers]'
	touch $@

pool: $(POOL_STAMP) ## only the pool, on real servers: Valkey alone and as a cluster, S3, Mooncake
	$(POOL)/bin/python -m pytest -q --durations=12 tests/pool tests/contract/test_pool.py tests/unit/test_pool.py

stress: setup ## run the tests in rounds beside busy loops on every core: make stress TESTS=tests/chaos ROUNDS=5
	$(BIN)/python scripts/stress.py --rounds $(ROUNDS) $(TESTS)

conformance: setup ## only the harness that judges a connector: every arm, four models; its reports are printed
	$(LONG) -m engine -s tests/engine/test_conformance.py

demo: setup ## see it work: prefill and decode in two real vLLM servers, and what each receipt proves
	$(BIN)/kvtally demo

bench: $(STAMP) ## measure the store against this machine's own limits
	$(BIN)/kvtally bench store

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) $(POOL) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

key: # what names a cached set of dependencies
	@echo $(KEY)
