# Two commands do everything, set-up included: `make demo` and `make test`.
VENV ?= .venv
ACCEL ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTHON ?= python3
JOBS ?= 2
PYTEST = $(PY) -m pytest tests -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all broad mutants soak check lint types setup native clean
demo: setup
	$(PY) -m loadtest.demo $(if $(KEEP),--keep) $(DEMO_ARGS)

# JOBS files at a time. An engine takes some 2 GB; JOBS=0 runs one test after the other, in this process.
test: setup
	$(PYTEST) -m "not gpu and not soak and not broad"

# The second tier: slow and broad tests, such as fuzzing and other projects' own test suites.
broad: setup
	$(PYTEST) -m "broad and not gpu and not soak"

test-all: test broad

# Whether the tests notice changes of meaning in the pure logic: makes some 180 of them, one at a time, in a copy of the tree,
# runs the tests that must fail, and fails by the name of each that none noticed. About ten minutes of one core.
# MUTANTS=delta: those of files whose path has the word.
mutants: setup
	OMP_NUM_THREADS=1 $(PY) -m tests.mutants $(MUTANTS)

# About an hour: ten thousand swaps under load, and an hour of random schedules.
soak: setup
	OMP_NUM_THREADS=1 $(PY) -m loadtest.soak --json docs/benchmarks/soak.json
	$(PY) -m pytest tests -m soak --timeout 7200

check: lint types
lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
types: setup
	$(VENV)/bin/mypy

setup: $(STAMP) native

# The gateway's request path in machine code. Without a C compiler its sources run instead, slower.
native: $(VENV)/.native
$(VENV)/.native: $(STAMP) $(wildcard server/gateway/*/*.py server/gateway/compiled.py)
	$(PY) -m server.gateway.compiled || echo "make: the gateway's sources run uncompiled; see server/gateway/compiled.py" >&2
	touch $@

$(STAMP): pyproject.toml requirements/$(ACCEL).txt requirements/dev.txt scripts/etcd.sh scripts/chromium.sh scripts/bubblewrap.sh scripts/iproute2.sh scripts/mooncake.sh
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/$(ACCEL).txt -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	scripts/etcd.sh $(VENV)
	scripts/chromium.sh $(VENV)
	scripts/bubblewrap.sh $(VENV)
	scripts/iproute2.sh
	scripts/mooncake.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info server/gateway/_compiled
