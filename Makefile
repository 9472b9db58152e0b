# `make demo` and `make test` work on a machine with only Python >= 3.11 and pip: the first call makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := -c requirements/constraints.txt
# Bytecode is kept, whatever the machine's default: else each of the tests' thousands of processes compiles shoal anew.
export PYTHONDONTWRITEBYTECODE :=

# `make bench-… QUICK=1`: a first look within two minutes, which changes no file of results.
HASTE := $(if $(QUICK),--quick)

.PHONY: help setup demo demo-llm test test-slow test-portable test-browser test-gpu check docs settings package wheel-test format clean bench-envs bench-text-envs bench-split bench-skills bench-craftax bench-ppo bench-scores bench-vector bench-rollout bench-update bench-trl-curves bench-stabilisers bench-llm bench-gpu bench-viewer bench-gateway test-integrations bench-learning bench-real-model

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

test-portable: setup  ## on Linux what other systems run: spawn and pipes
	SHOAL_PORTABLE=1 $(BIN)/python -m pytest tests/vector tests/samplers tests/rollout tests/splitting -m "not slow and not gpu" -n 3 --dist worksteal

test-browser: setup  ## the viewer in a headless Chromium (installed from Debian's packages if missing)
	command -v chromium || command -v google-chrome || apt-get install --yes --no-install-recommends chromium
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

settings: setup   ## write what the docs say of settings, after a change to one, its default or its docstring
	PYTHONPATH=src $(BIN)/python docs/make_settings.py
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

bench-envs:       ## rooms, lakes and steps a second beside other libraries (RAGEN=checkout to add it)
	test -d .venv-bench-envs || $(PYTHON) -m venv .venv-bench-envs
	.venv-bench-envs/bin/pip install --quiet --disable-pip-version-check -r requirements/bench-envs.txt
	.venv-bench-envs/bin/python benchmarks/environments.py $(HASTE) $(if $(RAGEN),--ragen $(RAGEN))

bench-text-envs: setup  ## Countdown, MetaMathQA and WebShop beside other libraries
	test -d .venv-bench-text-envs || $(PYTHON) -m venv .venv-bench-text-envs
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		$$(.venv-bench-text-envs/bin/python -c "import site; print(site.getsitepackages()[0])")/main.pth
	.venv-bench-text-envs/bin/pip install --quiet --disable-pip-version-check -r requirements/bench-text-envs.txt
	.venv-bench-text-envs/bin/python benchmarks/text_envs.py $(HASTE)
bench-split: setup ## splitting beside per-window processing, results to benchmarks/results/split.json
	$(BIN)/python benchmarks/split.py $(HASTE)

bench-skills: setup  ## a graph of skills: training, parallel speed-up, transfer
	$(BIN)/python benchmarks/skills.py $(HASTE)
bench-craftax: setup  ## Craftax-Classic with 1 M env steps, about ten minutes a seed (needs the extra "craftax"; CASE="full" or "iron", SEEDS="0 1 2")
	$(BIN)/python benchmarks/craftax_skills.py $(if $(QUICK),--quick,$(CASE) $(SEEDS))

RIVALS := .venv-bench-vector
.PHONY: rivals
rivals: setup     # another environment: what shoal stands on, and the packages that are measured beside it
	test -d $(RIVALS) || $(PYTHON) -m venv $(RIVALS)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		$$($(RIVALS)/bin/python -c "import site; print(site.getsitepackages()[0])")/main.pth
	$(RIVALS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/bench-vector.txt

bench-ppo: rivals  ## PPO beside Stable-Baselines3, sbx and a single-file PPO, fifteen minutes to an hour; CLEANRL=checkout adds its programs
	$(RIVALS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/bench-ppo.txt
	$(RIVALS)/bin/python benchmarks/ppo.py $(HASTE) $(if $(CLEANRL),--cleanrl $(CLEANRL))

SCORES := runs/scores$(if $(QUICK),-quick)
bench-scores: rivals  ## MuJoCo with the presets, three seeds, half an hour; CLEANRL=checkout runs CleanRL beside it, two hours
	for seed in $(if $(QUICK),1,1 2 3); do for env in $(if $(QUICK),Hopper-v5,Walker2d-v5 Hopper-v5 HalfCheetah-v5); do \
		PYTHONPATH=src $(RIVALS)/bin/python -m shoal train-ppo --env $$env --seed $$seed --backend serial \
			--run-dir $(SCORES)/shoal-$$env-$$seed $(if $(QUICK),--total-timesteps 50000) || exit 1; \
		test -z "$(CLEANRL)" || $(RIVALS)/bin/python benchmarks/ppo_cleanrl.py "$(CLEANRL)" --env $$env --seed $$seed \
			--out $(SCORES)/cleanrl-$$env-$$seed $(if $(QUICK),--total-timesteps 50000) || exit 1; \
	done; done
	$(BIN)/python benchmarks/ppo.py $(HASTE) --scores $(SCORES)/*

bench-vector: rivals  ## vector environments beside Gymnasium, Stable-Baselines3, PufferLib and EnvPool, about twenty minutes
	$(RIVALS)/bin/python benchmarks/vector.py $(HASTE)
	$(RIVALS)/bin/python benchmarks/vector.py $(HASTE) --busy-core
	PYTHONPATH=src $(RIVALS)/bin/python benchmarks/faults.py $(HASTE)
	$(if $(QUICK),,$(BIN)/python benchmarks/tables.py vector)
bench-rollout: setup  ## utilisation of a rollout, beside locks and a barrier
	$(BIN)/python benchmarks/rollout.py $(HASTE)

bench-llm: setup  ## tokens a second of SmolLM2 on shipped configs, beside a plain loop of transformers
	$(BIN)/shoal model get smollm2
	$(BIN)/python benchmarks/llm.py $(HASTE)

bench-gpu:        ## one GPU in eight minutes with $(PYTHON), no network: exactness, resume, tokens/s, memory, Pong
	$(PYTHON) benchmarks/gpu.py $(HASTE)

bench-update: .venv-trl/.installed  ## one update of the weights beside TRL's GRPOTrainer, about five minutes
	.venv-trl/bin/python benchmarks/trl_update.py $(HASTE)

bench-trl-curves: .venv-trl/.installed  ## GRPO learns one task in shoal and in TRL's GRPOTrainer, six seeds, about four CPU minutes
	.venv-trl/bin/python benchmarks/trl_curves.py $(HASTE)

bench-stabilisers: setup  ## what settings that no algorithm has do: runs without each and without all, about two hours, goes on where it was
	$(BIN)/python benchmarks/stabilisers.py $(HASTE)

# Packages that other trainers and servers pin differently; each environment has exact versions of all it needs.
.venv-%/.installed: requirements/integrations-%.txt requirements/torch.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/integrations-$*.txt
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

test-integrations: setup .venv-trl/.installed .venv-verl/.installed .venv-vllm/.installed  ## TRL, verl and vLLM, each in an environment of its own
	.venv-trl/bin/python -m pytest tests/integrations --timeout 600
	.venv-verl/bin/python -m pytest tests/integrations --timeout 600
	$(BIN)/shoal model get smollm2
	SHOAL_TEST_VLLM=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/samplers/vllm/test_vllm_server.py tests/samplers/vllm/test_vllm.py --timeout 900

bench-viewer: setup  ## the viewer and shoal show on a run of 100,000 episodes
	command -v chromium || command -v google-chrome || apt-get install --yes --no-install-recommends chromium
	$(BIN)/python benchmarks/viewer.py $(HASTE)

bench-gateway: setup  ## what the gateway costs a call, beside a bare Starlette echo
	$(BIN)/python benchmarks/gateway.py $(HASTE)

bench-learning: setup  ## three seeds of every config that learns, about three CPU hours
	$(if $(QUICK),,$(BIN)/shoal model get smollm2)
	$(BIN)/python benchmarks/learning.py $(HASTE)
	$(if $(QUICK),,$(BIN)/python benchmarks/tables.py learning)

bench-real-model: setup  ## SmolLM2 on six small games of one's own, three seeds, up to six CPU hours; goes on where it was ended
	$(BIN)/shoal model get smollm2
	$(BIN)/python benchmarks/real_model.py $(HASTE)
	$(if $(QUICK),,$(BIN)/python benchmarks/tables.py real_model)

clean:            ## remove .venv and build leftovers
	rm -rf $(VENV) .venv-* build src/*.egg-info
