# `make demo` runs the main job, `make test` tries every promise once, `make test-quick` what needs neither Ray nor long,
# and `make test-all` every case, which takes hours. All need Python 3.11+, make and pip alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BACKEND := build/backend
# Bytecode comes at the first import: a tenth of these files is ever imported.
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PROJECT = import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))
NEEDS = $(BIN)/python -c '$(PROJECT); own = project["project"]; \
	print(*own["dependencies"], *(line for name in sys.argv[1:] for line in own["optional-dependencies"][name]), sep="\n")'
BUILD_NEEDS = $(BIN)/python -c '$(PROJECT); print(*project["build-system"]["requires"], sep="\n")'
# The kernels are compiled by then: pip itself would compile them before it unpacks anything, with a backend of its own.
# An editable install is what setuptools warns of.
INSTALL = PYTHONWARNINGS="ignore:Editable installation" PYTHONPATH=$(BACKEND) $(PIP) --no-deps --no-build-isolation -e .

# Two processes compute, two more go on while tests wait for Ray or a store; without those, one more is enough. Each
# one costs ten seconds of a core: it imports all tests, and has models and servers of its own.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --numprocesses
# A hundred processes start: where they may not write bytecode, each compiles all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE
# Kernels compile on one core while pip unpacks on another, and mypy checks while tests begin.
MAKEFLAGS += --jobs=2

.PHONY: demo test test-quick test-all lint style types tests
demo: $(VENV)/installed
	$(BIN)/python -m swiftbatch.scheduler.demo

test: CHOSEN = 4
test-quick: CHOSEN = 3 -m "not slow and not ray and not long"
test-all: CHOSEN = 4 -m ""
test test-quick test-all: lint tests

tests: style $(VENV)/imported
	$(PYTEST) $(CHOSEN)

lint: style types

style: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: style
	$(BIN)/mypy

# Pythons come with an older pip, which takes three times as long to find out which versions there are.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/needs: pyproject.toml constraints.txt | $(BIN)/pip
	$(NEEDS) | $(PIP) -r /dev/stdin
	touch $@

$(VENV)/needs-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(NEEDS) dev | $(PIP) -r /dev/stdin
	touch $(VENV)/needs $@

$(BACKEND)/installed: pyproject.toml | $(BIN)/pip
	$(BUILD_NEEDS) | $(PIP) --upgrade --target $(BACKEND) -r /dev/stdin
	touch $@

build/compiled: $(BACKEND)/installed worker/kernels/build.py worker/kernels/source $(wildcard worker/kernels/source/*)
	PYTHONPATH=$(BACKEND) $(BIN)/python -m swiftbatch.worker.kernels.build \
		|| echo "no kernels were compiled, torch serves: see docs/kernels.md"
	touch $@

$(VENV)/installed: setup.py $(VENV)/needs build/compiled
	$(INSTALL)
	touch $@

$(VENV)/installed-dev: setup.py $(VENV)/needs-dev build/compiled
	$(INSTALL)
	touch $(VENV)/installed $@

# One process writes the bytecode of all that tests import. Each of those that run them would, as they start together.
$(VENV)/imported: $(VENV)/installed-dev
	$(BIN)/python -m pytest --collect-only --quiet > /dev/null || true
	touch $@
