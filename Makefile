# Every target installs what it needs first. PYTHON may be any Python of version 3.10 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python compiles what is imported when it is; all of it would take longer than the rest of the installation.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: install demo demo-clean quick changed test test-all check docs linkcheck lint clean

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "deepnmt needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); run make PYTHON=/path/to/python3"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing deepnmt and its dependencies into $(VENV) (once, a few minutes)"
	@$(PIP_INSTALL) setuptools wheel numpy torch
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python tools/demo.py recipes/demo/admin_18l-18l.yaml

demo-clean:
	rm -rf runs/demo data/demo

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The core, without what starts processes.
quick: $(STAMP)
	@$(PYTEST) -m "quick and not slow" $(addprefix --ignore=tests/,project recipes extras tasks studies nodes gpu)

# The tests that belong to what differs from main.
changed: $(STAMP)
	@$(BIN)/python .ci/changed.py

# All but slow tests; tests/conftest.py says which they are.
test: $(STAMP)
	@$(PYTEST) -m "not slow"

# Everything.
test-all: $(STAMP)
	@$(PYTEST)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/codespell
	@$(BIN)/python .ci/prose.py
	@$(BIN)/python .ci/size.py
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

# Builds the site of docs/ in build/docs. Warnings are errors, for example about broken links.
docs: $(STAMP)
	@$(BIN)/python -m sphinx -q -E -W --keep-going docs build/docs

# Checks every external link; needs a network.
linkcheck: $(STAMP)
	@$(BIN)/python -m sphinx -q -E -b linkcheck docs build/linkcheck

check: lint docs test-all

clean: demo-clean
	rm -rf $(VENV) build *.egg-info
