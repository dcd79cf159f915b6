# `make demo` runs the main job, `make test` tries every promise once, `make test-quick` what needs neither Ray nor long,
# and `make test-all` every case, which takes hours. All need Python 3.11+, make and pip alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e
# An install compiles the kernels where they are not those of the source.
INSTALLED_FROM := pyproject.toml setup.py constraints.txt worker/kernels/build.py worker/kernels/source \
	$(wildcard worker/kernels/source/*)

# Two processes compute, two more go on while tests wait for Ray or a store; without those, one more is enough.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --numprocesses
# A hundred processes start: where they may not write bytecode, each compiles all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-quick test-all lint
demo: $(VENV)/installed
	$(BIN)/python -m swiftbatch.scheduler.demo

test: lint
	$(PYTEST) 4

test-quick: lint
	$(PYTEST) 3 -m "not slow and not ray and not long"

test-all: lint
	$(PYTEST) 4 -m ""

# mypy finds a package by its folder alone: one with links has the rooms as an install does.
lint: $(VENV)/installed-dev
	mkdir -p build/links/swiftbatch
	for room in jobs metrics scheduler worker; do ln -sfn ../../../$$room build/links/swiftbatch/$$room; done
	ln -sfn ../../../swiftbatch/__init__.py build/links/swiftbatch/__init__.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/installed: $(INSTALLED_FROM)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	@ls worker/kernels/lib/*.so > /dev/null 2>&1 || echo "no kernels were compiled, torch serves: see docs/kernels.md"
	touch $@

$(VENV)/installed-dev: $(INSTALLED_FROM)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[dev]'
	touch $(VENV)/installed $@
