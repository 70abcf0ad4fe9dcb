# `make demo` and `make test` need nothing but Python 3.11+ and make: each builds .venv once, at the
# versions pinned in constraints.txt, and does its job. A second call does not reinstall.
PYTHON ?= python3
BIN := .venv/bin
# A file stays with one worker: its tests share what is slow to compute.
PARALLEL := --numprocesses 2 --dist loadfile
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test lint typecheck pytest coverage wheel test-oldest format clean

help:
	@echo "make demo         compare Neumann with four others on digits: a table and a report (2 minutes)"
	@echo "make test         ruff, mypy --strict, pytest, and the wheel in an empty environment"
	@echo "make coverage     the tests of neumann.optim again, and the lines that they reach"
	@echo "make test-oldest  the optimizer and its training stacks on the oldest supported torch"
	@echo "make format       ruff, fixing what it can"
	@echo "make clean        remove everything that make created"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; pass PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing the pinned versions into .venv (a few minutes, once)"
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[lab,cpu]"
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing the pinned versions into .venv (a few minutes, once)"
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[dev,lab,cpu]"
	@touch $@ .venv/.demo

demo: .venv/.demo
	$(BIN)/python -m neumann demo

test: lint typecheck pytest wheel

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: .venv/.dev
	$(BIN)/mypy

pytest: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

# Apart from `test`: tracing doubles the time of what numba compiles and Triton interprets.
coverage: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) tests/optim tests/stacks --cov=src/neumann/optim --cov-report=term-missing:skip-covered --cov-fail-under=95

# The environment holds what the wheel's own metadata asks for and nothing else.
.venv-wheel/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python $(PIP_INSTALL) --constraint constraints.txt torch
	@touch $@

wheel: .venv/.dev .venv-wheel/.installed
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	.venv-wheel/bin/python -m pip uninstall --quiet --yes neumann-optimizer
	.venv-wheel/bin/python $(PIP_INSTALL) --constraint constraints.txt dist/*.whl
	cd dist && ../.venv-wheel/bin/python -W ignore -I -c "import neumann; print('wheel: neumann', neumann.__version__, 'imports from', neumann.__file__)"

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python $(PIP_INSTALL) --constraint constraints-oldest.txt pytest pytest-xdist hypothesis numpy scikit-learn --editable ".[cpu]"
	@touch $@

test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(PARALLEL) tests/optim tests/stacks

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-wheel .venv-oldest dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
