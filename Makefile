# `make demo` and `make test` work on a machine with only Python >= 3.11 and pip: the first call makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := -c requirements/constraints.txt
# Bytecode is kept, whatever the machine's default: else each of the tests' thousands of processes compiles shoal anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo demo-llm test test-slow test-cluster test-portable test-browser test-gpu check docs settings package wheel-test format clean test-integrations

help:             ## this list (every bench-… takes QUICK=1: a table within two minutes, nothing is saved)
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

demo-llm: setup   ## a pretrained language model (SmolLM2-135M, downloaded once) learns a two-armed bandit, some minutes
	$(BIN)/shoal model get smollm2
	$(BIN)/shoal train --config-name smollm2-bandit

test: setup       ## the test suite, no GPU, no network
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 3 --dist worksteal

test-slow: setup  ## the tests that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu and not browser" --timeout 1800

test-cluster: setup  ## three machines of Ray in namespaces (Linux, root), of which one is lost in each of 20 iterations
	SHOAL_KILLS=20 $(BIN)/python -m pytest tests/cluster --timeout 3600

test-portable: setup  ## on Linux what other systems run: spawn and pipes
	SHOAL_PORTABLE=1 $(BIN)/python -m pytest tests/vector tests/samplers tests/rollout tests/splitting -m "not slow and not gpu" -n 3 --dist worksteal

test-browser: setup  ## the viewer in a headless Chromium (installed from Debian's packages if missing)
	command -v chromium || command -v google-chrome || apt-get install --yes --no-install-recommends chromium
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps axe-playwright-python==0.1.8  # for its axe-core
	$(BIN)/python -m pytest tests/viewer -m browser --timeout 300

test-gpu:         ## the tests that need a GPU, with $(PYTHON)
	PYTHONPATH=src:. $(PYTHON) -m pytest -m gpu tests/samplers/huggingface/test_gpu.py tests/samplers/huggingface/test_invariant.py tests/train/agent/processes/test_determinism.py -p no:cacheprovider

check: setup      ## formatting, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: setup       ## the site of the documents, into build/site
	PYTHONPATH=src $(BIN)/python docs/make_reference.py
	test -d .venv-docs || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

settings: setup   ## write what the docs say of settings and options, after a change to one, its default or its docstring
	PYTHONPATH=src $(BIN)/python docs/make_settings.py
	PYTHONPATH=src $(BIN)/python docs/make_commands.py
	PYTHONPATH=src $(BIN)/python docs/make_presets.py
	PYTHONPATH=src $(BIN)/python docs/make_metrics.py

package:          ## the wheel and the sdist, into dist
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -c "import setuptools.build_meta as b; b.build_sdist('dist')"

wheel-test:       ## the wheel in a clean environment of each Python 3.11 to 3.14 that is installed, with pinned and with the newest packages, minutes
	.ci/wheel-test

format: setup     ## apply formatting and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Packages that other trainers and servers pin differently; each environment has exact versions of all it needs.
.venv-%/.installed: requirements/integrations-%.txt requirements/torch.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/integrations-$*.txt
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

.venv-agents/.installed: requirements/agents.txt $(STAMP)
	$(PYTHON) -m venv .venv-agents
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		$$(.venv-agents/bin/python -c "import site; print(site.getsitepackages()[0])")/main.pth
	.venv-agents/bin/pip install --quiet --disable-pip-version-check -r requirements/agents.txt
	touch $@

test-integrations: setup .venv-trl/.installed .venv-verl/.installed .venv-vllm/.installed .venv-agents/.installed  ## TRL, verl, vLLM and packages of agents, each in an environment of its own
	PYTHONPATH=src .venv-agents/bin/python -m pytest tests/gateway/test_packages.py --timeout 600
	.venv-trl/bin/python -m pytest tests/integrations --timeout 600
	.venv-verl/bin/python -m pytest tests/integrations --timeout 600
	$(BIN)/shoal model get smollm2
	SHOAL_TEST_VLLM=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/samplers/vllm/test_vllm_server.py tests/samplers/vllm/test_vllm.py tests/train/agent/test_real_server.py --timeout 900

clean:            ## remove .venv and build leftovers
	rm -rf $(VENV) .venv-* build src/*.egg-info

include benchmarks/Makefile
