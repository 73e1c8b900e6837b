# Everything is installed into .venv, once: a second run installs nothing that has not changed.
#
#   PYTHON    the Python that .venv is made of, 3.11 or newer
#   PIP_ARGS  for pip, e.g. make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   TESTS     what `make test` runs, PYTEST_ARGS how, e.g. make test TESTS=tests/core PYTEST_ARGS=-x
#   BENCH_ARGS  for `make bench`, e.g. make bench BENCH_ARGS="--shapes 1x4 --sizes 4K,64M"; see --help
#   WORKERS   how many test files run at once; 0 is one after the other in one process

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types bench up down clean

PYTHON ?= $(firstword $(foreach each,3.11 3.12 3.13 3.14 3,$(shell command -v python$(each))))
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=
COMPOSE ?= $(shell docker compose version > /dev/null 2>&1 && echo docker compose || echo docker-compose)

BIN := .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
PACKAGES := collective_core orchestrator node_agent client_sdk
SOURCES := $(PACKAGES:%=%/src)

# Fast tests first. What is not named here comes in between.
FIRST := $(addprefix tests/,core orchestrator node_agent client_sdk conformance)
LAST := $(addprefix tests/,chaos e2e browser)
FOLDERS = $(patsubst %/,%,$(wildcard tests/*/))
OTHERS = $(filter-out $(FIRST) $(LAST) tests/support tests/__%,$(FOLDERS)) $(wildcard tests/test_*.py)
TESTS ?= $(wildcard $(FIRST)) $(OTHERS) $(wildcard $(LAST))

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed ## train a network on 2 nodes x 2 ranks; the last line says how it went
	@$(BIN)/allfold run --nodes 2 --nproc-per-node 2 --no-prefix examples/train_digits.py

test: lint types ## check style and types, then run all tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS) $(TESTS)

lint: .venv/.installed-dev ## check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: .venv/.installed-dev ## check the types of the packages, tests, examples and benchmarks
	@$(BIN)/mypy $(SOURCES) tests examples benchmarks

bench: .venv/.installed-bench ## measure Allfold side by side with Gloo and MPICH: some minutes
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

up: ## start Redis, the orchestrator, two agents and the demo in containers
	$(COMPOSE) up --build

down: ## remove those containers and what they stored
	$(COMPOSE) down --volumes

clean: ## remove .venv and every cache
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
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

.venv/.installed-dev: .venv/.installed-bench requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@
