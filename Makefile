# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv and install into it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed
	$(BIN)/lydite demo

# Types are checked for Linux and for macOS; neither machine is needed for the other's.
test: .venv/tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonplatform Darwin & mac=$$!; $(BIN)/pyright --pythonplatform Linux && wait $$mac
	$(BIN)/lint-imports
	$(BIN)/pytest

# A .venv whose Python is gone, or too old, is made anew.
.venv/bin/python: tools/check_python_version.py
	@$(PYTHON) tools/check_python_version.py $(MAKECMDGOALS)
	@if [ -e $@ ] && ! $@ tools/check_python_version.py >/dev/null 2>&1; then rm -rf .venv; fi
	$(PYTHON) -m venv .venv
	touch $@

.venv/installed: .venv/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

# torch first: its CPU build has to be chosen before anything that depends on it asks for another.
# open_clip_torch without its dependencies: only for CLIP's official vocabulary, as golden token ids.
# References of the feature networks ask for torchvision, which has no build for this torch. They lie
# in a folder of their own, where no other package finds them.
.venv/tested: .venv/installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[reference,dev]'
	$(BIN)/pip install --quiet --no-deps open_clip_torch==3.3.0
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/no_torchvision \
		torch-fidelity==0.4.0 clean-fid==0.1.35 lpips==0.1.4
	touch $@

clean:
	rm -rf .venv demo
