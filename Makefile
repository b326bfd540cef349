# make quickstart   a small model learns to reason on two CPU cores
# make test         the test suite; make test-all adds the minutes-long ones; both test the
#                   report's page too where chromium is installed
# make test-megatron  the trainer's tests on the newest megatron-core it is known to run on
# All make .venv from requirements/cpu.lock first, once.

PYTHON ?= $(firstword $(shell command -v python3.11 python3))
VENV ?= .venv
# Where pip finds torch's "+cpu" wheels, if your package index has none: PyTorch's CPU wheel index.
TORCH_INDEX ?=
# The newer megatron-core of make test-megatron; requirements/cpu.lock has the one of make test.
NEWER_MEGATRON ?= 0.19.2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The report's page is tested in Chromium where there is one.
BROWSER := $(if $(shell command -v chromium),,and not browser)
MEGATRON := build/megatron-core-$(NEWER_MEGATRON)

.PHONY: quickstart test test-all test-megatron lint format install clean

quickstart: install
	$(BIN)/megadapo train configs/quickstart.toml

test: install
	$(BIN)/pytest -m "not gpu and not full $(BROWSER)" --durations=12 tests

test-all: install
	$(BIN)/pytest -m "not gpu $(BROWSER)" --durations=30 tests

test-megatron: install $(MEGATRON)
	MEGADAPO_TEST_MEGATRON=$(NEWER_MEGATRON) PYTHONPATH="$(CURDIR)/$(MEGATRON)" \
		$(BIN)/pytest -m "not gpu and not full" --durations=6 \
		tests/distributed/test_trainer_*.py tests/distributed/test_policy_head_ddp.py

# its wheel is for Python 3.12; what the trainer needs of it runs on 3.11 as well
$(MEGATRON): | $(STAMP)
	rm -rf $@.wheel $@.part
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
		--dest $@.wheel megatron-core==$(NEWER_MEGATRON)
	$(BIN)/python -m zipfile -e $@.wheel/*.whl $@.part
	rm -r $@.wheel
	mv $@.part $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

$(STAMP): requirements/cpu.lock setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "requirements/cpu.lock is for Python 3.11: run make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-r requirements/cpu.lock || \
		{ echo "If torch==2.13.0+cpu was not found: make TORCH_INDEX=<the URL of PyTorch's CPU wheel index>"; exit 1; }
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
