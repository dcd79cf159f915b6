# `make demo` runs the main job, `make test` everything that must hold. Both need Python 3.11+, make and pip alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e
# An install compiles the kernels where they are not those of the source.
INSTALLED_FROM := pyproject.toml setup.py constraints.txt worker/kernels/build.py worker/kernels/source \
	$(wildcard worker/kernels/source/*)

.PHONY: demo test lint
demo: $(VENV)/installed
	$(BIN)/python -m scheduler.demo

test: lint
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev
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
