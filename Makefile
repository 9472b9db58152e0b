# `make demo` and `make test` work on a machine with only Python >= 3.11 and pip: the first call makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := -c requirements/constraints.txt

.PHONY: help setup demo test test-slow check format clean bench-rollout

help:             ## this list
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

setup: $(STAMP)   ## make .venv with the pinned packages and shoal itself
$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/torch.txt $(PINS)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt $(PINS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup       ## train a tiny language-model agent on FrozenLake, about a minute
	$(BIN)/shoal train --config-name demo

test: setup       ## the test suite, no GPU, no network
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadgroup

test-slow: setup  ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu" --timeout 1800

check: setup      ## formatting, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup     ## apply formatting and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-rollout: setup  ## how much of the possible speed a rollout reaches, beside locks and a barrier
	$(BIN)/python benchmarks/rollout.py

clean:            ## remove .venv and build leftovers
	rm -rf $(VENV) build src/*.egg-info
