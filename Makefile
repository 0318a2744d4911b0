PYTHON ?= python3
VENV := .venv
# pip would compile gigabytes; what workers import is compiled by importing it
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt
IMPORT := $(VENV)/bin/python -c 'import importlib; from areal_sc.nodes.agent import PRELOAD; \
	[importlib.import_module(name) for name in PRELOAD if ":" not in name]'
RUNS := $(VENV)/runs  # made when what runs need is installed
INSTALLED := $(VENV)/installed  # made when what developers need is installed too
COMPILED := $(VENV)/compiled  # made when Python files have been compiled, for what is there now

# a variable of some containers; without compiled files each process compiles the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart check test test-long test-needs lint install sglang vllm slurm chromium clients real-model \
	docs clean

quickstart: $(RUNS)  ## train the letter-sorting model on two CPU cores
	$(VENV)/bin/python examples/letter_sort.py --config configs/letter_sort.yaml \
		run_dir=runs/quickstart $(ARGS)

# -n 4 on two cores: what starts processes waits about as often as it computes
test: test-needs  ## everything that has to be green
	$(VENV)/bin/python -m pytest -n 4 -m "not long" $(ARGS)

test-long: test-needs vllm  ## what `make test` leaves out: quick benchmarks, vLLM, repeats
	$(VENV)/bin/python -m pytest -n 2 -m long $(ARGS)

test-needs:  ## beside each other: all of it takes a core, or waits for a network
	$(MAKE) --no-print-directory --jobs=3 --output-sync=target lint $(COMPILED) sglang slurm \
		chromium clients real-model

check: lint  ## while you work: lint, types and the unit tests, without those of several seconds
	$(VENV)/bin/python -m pytest -n 2 -q -m "not slow" tests/unit $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(RUNS)

docs: $(INSTALLED)  ## the API reference, in build/docs
	$(VENV)/bin/python -W error docs/build_api.py build/docs

sglang:  ## SGLang for CPUs, in .venv-sglang; at once where it is there
	PYTHON=$(PYTHON) tests/sglang_server/install.sh

vllm:  ## vLLM for CPUs, in .venv-vllm; at once where it is there
	PYTHON=$(PYTHON) tests/vllm_server/install.sh

slurm:  ## SLURM for its tests, from Debian's packages; at once where it is there
	tests/slurm_cluster/install.sh

clients:  ## what agents call models with, in .venv-clients; at once where it is there
	PYTHON=$(PYTHON) tests/agent_clients/install.sh

real-model: $(RUNS)  ## SmolLM2-135M-Instruct, in .venv-models; at once where it is there
	PYTHON=$(VENV)/bin/python tests/real_model/install.sh

# after slurm, as apt-get does one thing at a time
chromium: slurm  ## Chromium for the tests of the page, likewise
	tests/browser/install.sh

$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	$(IMPORT)
	touch $@

# after $(RUNS): two calls of pip at once in one environment break each other
$(INSTALLED): $(RUNS)
	$(PIP) --editable '.[dev]'
	$(IMPORT)
	touch $@

# else each process of the tests compiles all of them; the tests tell what cannot be imported
$(COMPILED): $(INSTALLED) $(shell find areal_sc tests -name '*.py')
	-$(VENV)/bin/python -m pytest --collect-only -qq > $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
