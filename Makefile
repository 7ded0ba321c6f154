# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv and install into it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean

demo: .venv/installed
	$(BIN)/lydite demo

test: .venv/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/pytest

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

# torch first: its CPU build has to be chosen before anything that depends on it asks for another.
# open_clip_torch without its dependencies: only for CLIP's official vocabulary, as golden token ids.
.venv/tested: .venv/installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[reference,dev]'
	$(BIN)/pip install --quiet --no-deps open_clip_torch==3.3.0
	touch $@

clean:
	rm -rf .venv demo
