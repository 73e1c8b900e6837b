# Everything is installed into .venv, once: a second run installs nothing that has not changed.
#
#   PYTHON    the Python that .venv is made of, 3.11 or newer
#   OTHER_PYTHON  that `make test-python` runs the tests of one process on; see there
#   PIP_ARGS  for pip, e.g. make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   TESTS     run these alone, PYTEST_ARGS how, e.g. make test TESTS=tests/core PYTEST_ARGS=-x
#   CHAOS_ARGS  for `make chaos`, e.g. make chaos CHAOS_ARGS="--nodes 8 --seed 7"; see --help
#   BENCH_ARGS  for `make bench`, e.g. make bench BENCH_ARGS="--shapes 1x4 --sizes 4K,64M"; see --help
#   TORCH     the versions of torch of `make test-torch`, e.g. make test-torch TORCH=2.14.1
#   WORKERS   how many test files run at once; 0 is one after the other in one process

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-wan check test test-all times chaos simulate fuzz pure coverage collected lint types docs docs-check site site-serve bench bench-pages openmpi up down clean wheels lock version test-torch test-clients test-python

PYTHON ?= $(firstword $(foreach each,3.11 3.12 3.13 3.14 3,$(shell command -v python$(each))))
OTHER_PYTHON ?= $(firstword $(foreach each,$(filter-out $(PYTHON),python3.14 python3.13 python3.12),$(call works,$(each))))
works = $(shell $(1) -c '' 2> /dev/null && echo $(1))
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 3
CHAOS_ARGS ?=
FUZZ_TIMES ?= 100
NIGHTLY_FUZZ_TIMES ?= 8
BENCH_ARGS ?=
# The engine that tests of containers start keeps its base images here.
export ALLFOLD_DOCKER_ROOT ?= $(CURDIR)/.venv/docker
COMPOSE ?= $(shell docker compose version > /dev/null 2>&1 && echo docker compose || echo docker-compose)

BIN := .venv/bin
# Python compiles what it imports; pip would compile all that there is, on one processor.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt $(PIP_ARGS)
PACKAGES := collective_core orchestrator node_agent client_sdk
SOURCES := $(PACKAGES:%=%/src)
# Without the theme's notice about its successor.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

CURRENT = $(shell sed -n 's/^version = "\(.*\)"/\1/p' client_sdk/pyproject.toml)
VERSIONED = $(PACKAGES:%=%/pyproject.toml) $(wildcard $(PACKAGES:%=%/src/*/__init__.py)) \
  $(wildcard docker-compose*.yml deploy/kubernetes/*/*.yaml deploy/kubernetes/*/*/*.yaml \
  deploy/helm/allfold/*.yaml docs/gpu_deployment.md docs/kubernetes.md)

# mypy keeps one core busy.
AT_ONCE := --no-print-directory --jobs 2 --output-sync=target

# Without bytecode, each process of the tests would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# The tiers, and what each runs beside the one before it: tests/support/tiers.py.
PURE := tests/control tests/core tests/orchestrator/membership
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
PURE_TESTS = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --hypothesis-seed=0 -m "not long" $(PURE)
TORCH ?= 2.14.1 2.15.0
ifeq ($(origin TESTS),undefined)
TESTS := tests
GATE := -m "not pure and not long and not clients"
PURE_TOO := pure collected
endif

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed ## torchrun, then a training on 2 nodes x 2 ranks; the last line says how it went
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/quickstart_torch.py
	$(BIN)/allfold run --nodes 2 --nproc-per-node 2 --no-prefix examples/train_digits.py

demo-wan: .venv/.installed-bench ## three minutes, as root: DDP and DiLoCo on lines of 50 Mbit/s; the last line has the figures
	@$(BIN)/python examples/demo_wan.py

check: .venv/.installed-dev ## three minutes: style, types, made files, the core and membership
	@$(MAKE) $(AT_ONCE) lint types docs-check pure collected

test: .venv/.installed-dev ## the gate, twelve minutes: all that, and each promise once
	@$(MAKE) $(AT_ONCE) lint types docs-check $(PURE_TOO)
	@$(PYTEST) $(GATE) $(TESTS)

test-all: .venv/.installed-dev ## each night: every test, coverage, the clients, the site, the cores on another Python
	@$(MAKE) $(AT_ONCE) lint types docs-check coverage collected
	@$(MAKE) --no-print-directory site test-clients test-python
	@ALLFOLD_FUZZ_TIMES=$(NIGHTLY_FUZZ_TIMES) $(PYTEST) -m "(long or not pure) and not clients" tests

times: .venv/.installed-dev ## run every test and write the time that each takes into tests/times.tsv
	@$(PYTEST) -m "not clients" --write-times tests

chaos: .venv/.installed-dev ## ten minutes of faults and churn on real processes; every op is compared afterwards
	@$(BIN)/python -m chaos --seconds 600 $(CHAOS_ARGS)

simulate: .venv/.installed-dev ## an hour of stories of faults in one process, on virtual time; the first that goes wrong is shown
	@$(BIN)/python -m tests.simulator --seconds 3600 $(SIMULATE_ARGS)

fuzz: .venv/.installed-dev ## the fuzz tests with FUZZ_TIMES (100) times as many inputs as `make test`
	@ALLFOLD_FUZZ_TIMES=$(FUZZ_TIMES) $(BIN)/python -m pytest --timeout 7200 $(PYTEST_ARGS) tests/fuzz

pure: .venv/.installed-dev ## run the tests of the core and of membership
	@$(PURE_TESTS)

coverage: .venv/.installed-dev ## the same, and show that they run every branch of both
	@$(PURE_TESTS) --cov --cov-report=term:skip-covered

collected: .venv/.installed-dev ## show that every test can be imported; later runs find them compiled
	@$(BIN)/python -m pytest --collect-only -q tests > .venv/collected || { cat .venv/collected; false; }

test-torch: $(TORCH:%=test-torch-%) ## run the torch tests on later versions of torch, each in an environment of its own

test-torch-%: .venv-torch-%/.installed
	@.venv-torch-$*/bin/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS) tests/torch_backend

test-clients: .venv-clients/.installed ## run what docs/ shows with other libraries, in an environment of its own
	@.venv-clients/bin/python -m pytest $(PYTEST_ARGS) tests/clients

test-python: $(if $(OTHER_PYTHON),.venv-other/.installed) ## run the tests of one process on another Python, if there is one
	@$(if $(OTHER_PYTHON),.venv-other/bin/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) \
	  -m "not long and not slow and not redis" $(PURE) tests/orchestrator tests/node_agent,\
	  echo "No other Python is here: all tests ran on $(PYTHON) alone")

lint: .venv/.installed-dev ## check style, format, the layers of the packages and their sizes
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo --cache-dir .ruff_cache/imports
	@$(BIN)/python -m tools.sizes

types: .venv/.installed-dev ## check the types of the packages, tests, tools, examples, benchmarks and chaos
	@$(BIN)/mypy $(SOURCES) tests tools examples benchmarks chaos

docs: .venv/.installed-dev ## write again what is made from the code: tables of docs/, the dashboard
	@$(BIN)/python -m tools.made_files

docs-check: .venv/.installed-dev ## show where that is not what the code says
	@$(BIN)/python -m tools.made_files --check

site: .venv/.installed-dev ## build the documentation site of docs/ into site/
	@$(MKDOCS) build --strict

site-serve: .venv/.installed-dev ## show the site at http://127.0.0.1:8000 while its pages are written
	@$(MKDOCS) serve

bench: .venv/.installed-bench openmpi ## measure Allfold side by side with Gloo, MPICH and Open MPI: half an hour
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-pages: .venv/.installed-bench openmpi ## measure and write docs/performance.md: a quarter of an hour, as root for networks
	@$(BIN)/python -m benchmarks --pages docs $(BENCH_ARGS)
	@$(MAKE) --no-print-directory docs

# It is no Python package. Where it cannot be installed here, the run says that it is left out.
openmpi:
	@command -v mpirun.openmpi > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || \
	  { apt-get update -qq && apt-get install -qq -y --no-install-recommends openmpi-bin; } > /dev/null || true

up: ## start Redis, the orchestrator, two agents and the demo in containers
	@docker version > /dev/null 2>&1 || \
	  { echo 'No Docker engine answers: install Docker, start it, or name it in DOCKER_HOST; see `docker version`' >&2; exit 1; }
	$(COMPOSE) up --build

down: ## remove those containers and what they stored
	$(COMPOSE) --profile "*" down --volumes

wheels: .venv/.made ## build the wheels of the four packages into dist/
	rm -rf dist
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist $(PACKAGES:%=./%)

lock: .venv/.installed-dev ## write constraints.txt anew: the newest versions that fit together
	$(BIN)/python deploy/docker/requirements.py $(PACKAGES:%=%/pyproject.toml) 'client_sdk/pyproject.toml[cli]' \
	  | cat - requirements-dev.txt requirements-bench.txt constraints.in > .venv/requirements.in
	cd .venv && bin/pip-compile --quiet --strip-extras --no-emit-index-url --no-emit-find-links \
	  --allow-unsafe --no-header --no-annotate --output-file locked.txt requirements.in
	{ sed -n '/^#/p' constraints.txt; \
	  sed -E 's/\+cpu$$//; /^(cuda-|nvidia-|#|$$)/d' .venv/locked.txt; } > .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt

version: ## give everything another version: make version VERSION=1.2.3
	@test -n '$(VERSION)' || { echo 'say which: make version VERSION=1.2.3' >&2; exit 1; }
	sed -i 's/\b$(subst .,\.,$(CURRENT))\b/$(VERSION)/g' $(VERSIONED)
	@echo 'now write the section of CHANGELOG.md; tests/test_versions.py checks that all agree'

clean: ## remove .venv and every cache
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.made:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Allfold needs Python 3.11 or newer. Name one: make demo PYTHON=/path/to/python' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.made constraints.txt $(PACKAGES:%=%/pyproject.toml)
	$(PIP) $(patsubst %,-e %,$(filter-out client_sdk,$(PACKAGES))) -e 'client_sdk[local]' scikit-learn
	@touch $@

.venv/.installed-bench: .venv/.installed requirements-bench.txt
	$(PIP) -r requirements-bench.txt
	@touch $@

.venv/.installed-dev: .venv/.installed-bench requirements-dev.txt requirements-tools.txt
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps -r requirements-tools.txt
	@touch $@

EDITABLE = $(patsubst %,-e %,$(filter-out client_sdk,$(PACKAGES))) -e 'client_sdk[local]'

# Make removes a file that only leads to another one, unless it is said to be of worth.
.PRECIOUS: .venv-torch-%/.installed
# CUDA builds bring versions of their own of what the lock file pins for the CPU's.
.venv-torch-%/.installed: $(PACKAGES:%=%/pyproject.toml) requirements-dev.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) torch==$* $(EDITABLE) \
	  -r requirements-dev.txt
	@touch $@

.venv-other/.installed: constraints.txt $(PACKAGES:%=%/pyproject.toml) requirements-bench.txt requirements-dev.txt
	$(OTHER_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS) $(EDITABLE) \
	  -r requirements-bench.txt -r requirements-dev.txt
	@touch $@

# The newest libraries: of the lock file, torch alone is kept.
.venv-clients/.installed: $(PACKAGES:%=%/pyproject.toml) constraints.txt requirements-clients.txt
	$(PYTHON) -m venv $(@D)
	grep '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c $(@D)/constraints.txt \
	  $(EDITABLE) -r requirements-clients.txt
	@touch $@
