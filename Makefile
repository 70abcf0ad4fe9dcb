# `make demo` and `make test` need nothing but Python 3.11+ and make: each builds .venv once, at the
# versions pinned in constraints.txt, and does its job. A second call does not reinstall.
PYTHON ?= python3
BIN := .venv/bin
# Each worker starts with half of the files. One that runs out of tests takes some from the other.
# Compiled test files are kept even where the environment asks for none: they save seconds a worker.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
# What is ignored has no quick test, but takes seconds to import.
QUICK := -m "not slow and not gpu and not distributed" --ignore tests/integrations
QUICK += --ignore tests/optim/backends/cuda --ignore tests/optim/preconditioners/cuda --ignore-glob "*/test_traced*.py"
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# On Linux with x86, the torch of PyPI brings 4 GB of CUDA libraries.
define announce_install
@echo "installing the pinned versions into .venv (a few minutes, once)"
@if [ "$$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi > /dev/null; then \
  echo "there is no GPU here: with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu this downloads 4 GB less"; \
fi
endef

.PHONY: help demo check test lint typecheck quick pytest soak coverage dist wheel package test-oldest docs site \
        format clean

help:
	@echo "make demo         five optimizers on digits in 40 large steps: a table and a report (1 minute)"
	@echo "make check        ruff, mypy --strict and the quick tests: run it while you work"
	@echo "make test         ruff, mypy --strict and all tests (about 20 minutes on 2 cores)"
	@echo "make soak         try to break it, for SECONDS=3600: kills, damaged files, interrupts, random runs"
	@echo "make coverage     the tests of neumann.optim again, and the lines that they reach"
	@echo "make wheel        build wheel and sdist, and train with each in an empty environment"
	@echo "make package      the same with every extra, and twine check (10 minutes)"
	@echo "make test-oldest  the tests of neumann.optim on the oldest supported torch"
	@echo "make docs         run the code blocks of README and docs, check links and file paths, build the site"
	@echo "make site         build the site: open site/index.html"
	@echo "make format       ruff, fixing what it can"
	@echo "make clean        remove everything that make created"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; pass PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

# timm has the demo's Muon. All but a few megabytes of what it needs comes with torchvision and the lab.
.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	$(announce_install)
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[lab,cpu,timm]"
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(announce_install)
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable ".[dev,lab,cpu]"
	@touch $@ .venv/.demo

demo: .venv/.demo
	$(BIN)/python -m neumann demo

# mypy uses one core, so it runs beside the tests.
check: .venv/.dev
	@$(MAKE) --no-print-directory --jobs 2 lint typecheck quick

test: .venv/.dev
	@$(MAKE) --no-print-directory --jobs 2 lint typecheck pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: .venv/.dev
	$(BIN)/mypy

quick: .venv/.dev
	$(PYTEST) $(QUICK)

pytest: .venv/.dev
	$(PYTEST)

# Not part of `test`, which runs the first cases of each program. A failure says how to repeat it.
SECONDS ?= 3600
SEED ?= 0
soak: .venv/.dev
	$(BIN)/python -m tests.soak --seconds $(SECONDS) --seed $(SEED) --out results/soak.json

# Not part of `test`: measuring coverage doubles the time of the Triton kernels, which are interpreted.
coverage: .venv/.dev
	$(PYTEST) tests/optim --cov=src/neumann/optim --cov-report=term-missing:skip-covered --cov-fail-under=95

.venv-torch/.installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-torch
	.venv-torch/bin/python $(PIP_INSTALL) --constraint constraints.txt torch
	@touch $@

.venv-twine/.installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-twine
	.venv-twine/bin/python $(PIP_INSTALL) --constraint constraints.txt twine
	@touch $@

dist: .venv/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null

wheel: dist .venv-torch/.installed
	$(BIN)/python -m tests.check_installs dist --torch .venv-torch --extras alone

package: dist .venv-torch/.installed .venv-twine/.installed
	.venv-twine/bin/python -m twine check --strict dist/*
	$(BIN)/python -m tests.check_installs dist --torch .venv-torch

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python $(PIP_INSTALL) --constraint constraints-oldest.txt pytest pytest-xdist hypothesis numpy scikit-learn --editable ".[cpu]"
	@touch $@

test-oldest: BIN := .venv-oldest/bin
test-oldest: .venv-oldest/.installed
	$(PYTEST) tests/optim

docs: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_docs.py tests/test_site.py

# The tests build it too, and check what it links to and loads.
site: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .venv .venv-torch .venv-twine .venv-oldest dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
