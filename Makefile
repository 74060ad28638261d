# Two commands do everything on a fresh machine: `make run` and `make test`.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# uv does not read pip's settings: pass on a local wheel folder where pip knows one. On a GPU
# machine, `make setup UV_FIND_LINKS=` takes torch's own build instead.
UV_FIND_LINKS ?= $(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null || echo $$PIP_FIND_LINKS)
export UV_FIND_LINKS

.PHONY: help setup run test check lint clean

help:
	@echo "make run    set up, then train the main job (jobs/digits.py) to its end"
	@echo "make test   set up, then lint, types, layers and the whole test suite"
	@echo "make check  the same without the slow tests"
	@echo "make setup  only make the virtual environment in $(VENV)"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[jobs]' --group dev
	touch $@

run: setup
	$(BIN)/rayway run jobs/digits.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint
	$(BIN)/python -m pytest -m "not slow and not ray and not gpu"

test: lint
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered --fail-under=90

clean:
	rm -rf $(VENV) .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info platform/*.egg-info
