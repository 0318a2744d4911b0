PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed

.PHONY: quickstart check test test-long lint install sglang vllm slurm docs clean

quickstart: $(INSTALLED)  ## train the letter-sorting model on two CPU cores
	$(VENV)/bin/python examples/letter_sort.py --config configs/letter_sort.yaml \
		run_dir=runs/quickstart $(ARGS)

test: lint sglang slurm  ## everything that has to be green
	$(VENV)/bin/python -m pytest -n 2 -m "not long" $(ARGS)

test-long: lint sglang vllm slurm  ## what `make test` leaves out: quick benchmarks, vLLM, repeats
	$(VENV)/bin/python -m pytest -n 2 -m long $(ARGS)

check: lint  ## while you work: lint, types and the unit tests, without those of several seconds
	$(VENV)/bin/python -m pytest -n 2 -q -m "not slow" tests/unit $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

install: $(INSTALLED)

docs: $(INSTALLED)  ## the API reference, in build/docs
	$(VENV)/bin/python -W error docs/build_api.py build/docs

sglang:  ## SGLang for CPUs, in .venv-sglang; at once where it is there
	PYTHON=$(PYTHON) tests/sglang_server/install.sh

vllm:  ## vLLM for CPUs, in .venv-vllm; at once where it is there
	PYTHON=$(PYTHON) tests/vllm_server/install.sh

slurm:  ## SLURM for its tests, from Debian's packages; at once where it is there
	tests/slurm_cluster/install.sh

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
