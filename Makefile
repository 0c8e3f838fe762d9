# Each target works as the first and only command on a machine with Python >= 3.11 and a C compiler
# (without a compiler the kernels are numpy's).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT := In the beginning

.PHONY: demo test lint identical ci-deps clean

demo: $(VENV)/installed
	$(BIN)/moe-coord --io-workers 1 --pin-cores -p "$(PROMPT)" -n 64 \
		--temperature 0.8 --top-p 0.95 --seed 1

# Two files of tests at a time, then those that need the machine for themselves.
test: $(VENV)/installed-for-tests lint
	$(BIN)/python -m pytest -m "not alone" --numprocesses 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m alone

lint: $(VENV)/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every combination of the settings that must not change a bit; `make test` runs a covering set.
identical: $(VENV)/installed-for-tests
	$(BIN)/python tests/identical.py --all

# Debian packages that some tests use; without them those tests skip and name the package.
ci-deps:
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends \
		prometheus zsh fish systemd chromium chromium-driver

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# `build` holds objects of an earlier compiler run: without it every install compiles anew
$(VENV)/installed: pyproject.toml $(wildcard compute_worker/native/*) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check .
	touch $@

# --no-compile: most modules of these packages are never imported
$(VENV)/installed-for-tests: pyproject.toml $(wildcard compute_worker/native/*.[ch]) \
		compute_worker/native/build_native.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[test]"
	touch $@ $(VENV)/installed
