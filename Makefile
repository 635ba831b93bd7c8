# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# torch first, in a version of its own: later requirements are then satisfied and pull nothing more.
TORCH  ?= torch==2.13.0

.PHONY: demo test lint tables benchmarks clean

demo: $(VENV)/installed
	$(BIN)/fewbit solve gelu --bits 3
	$(BIN)/fewbit compare gelu --bits 3
	@mkdir -p demo
	$(BIN)/fewbit plot gelu --bits 3 -o demo/gelu_3bit.png --force

test: $(VENV)/installed-tests lint
	$(BIN)/python -m pytest

lint: $(VENV)/installed-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

tables: $(VENV)/installed
	$(BIN)/python -m fewbit.shipping

benchmarks: $(VENV)/installed-benchmarks
	$(BIN)/python benchmarks/solver.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml setup.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-tests: $(VENV)/installed
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/installed-benchmarks: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[benchmark]'
	@touch $@

clean:
	rm -rf $(VENV) build demo *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
