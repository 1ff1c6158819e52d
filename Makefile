# Everything runs in .venv, made on first use with PYTHON (3.11 or later): make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench

demo: $(READY)
	$(BIN)/python train.py fit --config configs/quickstart.yaml

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/step_cost.py
	$(BIN)/python benchmarks/scaling.py

# Installs again only when what is to be installed has changed.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[app,dev]'
	touch $@
