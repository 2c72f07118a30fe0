# make test   set up and check everything       make demo   set up and see it work
# make bench  speed, as ratios to a baseline    make docs   build the site into site/

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install test test-slow lint demo bench docs clean

install: $(STAMP)

# torch first and by its exact version: an open range may pull several GB of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $(STAMP)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -n 2 -m slow

demo: install
	$(BIN)/grape compare demo --out results/demo

bench: install
	$(BIN)/grape bench rotation
	$(BIN)/grape bench attention
	$(BIN)/grape bench decode
	$(BIN)/grape bench train

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis
