# Needs python3 (3.11 or newer) with venv and pip, and make. Everything is installed into .venv.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check -qq
INSTALLED := .venv/installed

.PHONY: help install check test clean

help:
	@echo "make check   lint, types and all tests on the tree"
	@echo "make test    make check, and the fast tests on the built wheel"
	@echo "make clean   remove .venv and everything that was built"

install: $(INSTALLED)

# An editable install notes the entry points once, so a changed pyproject.toml installs again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hwrl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

check: $(INSTALLED)
	ci/check

# The wheel first: the last lines are then the summary of all tests.
test: $(INSTALLED)
	ci/wheel
	ci/check

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
