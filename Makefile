# The daily commands. Nothing here is needed to use walstream: README.md shows the same without make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
ARGS ?=

.PHONY: help install test slow lint format matrix demo wheel ci clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## a virtual environment in .venv with everything that development needs

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -e '.[test]'
	@touch $@

test: $(INSTALLED)  ## the default tests, on an embedded Postgres (make test ARGS='tests/unit -x')
	$(BIN)/python -m pytest -n 2 $(ARGS)

slow: $(INSTALLED)  ## the long ones
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

lint: $(INSTALLED)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## what ruff can put right by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

matrix: $(INSTALLED)  ## the default tests on PostgreSQL 14 to 18
	$(BIN)/python -m tests.matrix $(ARGS)

demo: $(INSTALLED)  ## the demo
	$(BIN)/walstream demo $(ARGS)

wheel: $(INSTALLED)  ## a wheel and an sdist in dist/
	$(BIN)/python -m build

ci:  ## what CI runs
	.ci/run

clean:  ## remove what the commands above made
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
