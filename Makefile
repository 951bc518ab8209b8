# Every target that runs something first makes .venv, once; it is made again only when what it is made of changes.
# ARGS passes flags on: make chat ARGS="--stats --model Qwen/Qwen3-0.6B"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt
# A tenth of what is installed is ever imported: to compile all of it takes longer than that does.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable

# Tests start hundreds of interpreters: what one of them has compiled the others read.
test: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help chat serve viz lessons test test-thorough lint format-check types pytest format soak soak-server mutants clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## +' '/^[a-z-]+:.*## /{printf "  make %-15s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

chat: $(VENV)/.core  ## talk to the embedded model
	@$(BIN)/python -m teachllm_cli chat $(ARGS)

serve: $(VENV)/.serve  ## serve the embedded model over HTTP, the way OpenAI does
	@$(BIN)/python -m teachllm_cli serve $(ARGS)

viz: $(VENV)/.ui  ## watch the embedded model's engine in a browser
	@$(BIN)/python -m teachllm_cli viz $(ARGS)

lessons: $(VENV)/.lessons  ## step through the engine in notebooks
	@PYTHONPATH=.:kernels:cli:webui:lessons $(BIN)/python -m jupyterlab lessons $(ARGS)

test: format-check  ## format and lint checks, types, tests, every notebook
	@$(MAKE) --no-print-directory -j 2 types pytest

test-thorough:  ## the same, but random tests try many times as often
	@TEACHLLM_THOROUGH=1 $(MAKE) --no-print-directory test

lint: format-check types  ## format and lint checks, types

format-check: $(VENV)/.dev
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

types: $(VENV)/.dev
	$(BIN)/python -m mypy

pytest: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal --nbmake --nbmake-timeout=300 $(ARGS)

format: $(VENV)/.dev  ## put every file into the project's format
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

soak: $(VENV)/.core  ## sixty seconds of random work for the scheduler, checked after every step
	PYTHONPATH=.:kernels:cli $(BIN)/python tests/core/soak.py --seconds 60

soak-server: $(VENV)/.dev  ## thousands of requests of every kind for the server, and twenty deaths of each of its processes
	PYTHONPATH=.:kernels:cli $(BIN)/python tests/server/soak.py $(ARGS)

mutants: $(VENV)/.dev  ## plant the faults that lessons ask for, one after the other: each must be found by its test
	PYTHONPATH=.:kernels:lessons $(BIN)/python -m teachllm_lessons.mutants $(ARGS)

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installers talk on stderr: stdout belongs to the answer.
$(VENV)/.core: $(SOURCES) | $(VENV)/.pip
	@echo "installing what teachllm needs into $(VENV) (once) ..." >&2
	@$(INSTALL) . >&2
	@touch $@

$(VENV)/.ui: $(SOURCES) | $(VENV)/.pip
	@echo "installing what teachllm's visualizer needs into $(VENV) (once) ..." >&2
	@$(INSTALL) '.[ui]' >&2
	@touch $(VENV)/.core $@

$(VENV)/.serve: $(SOURCES) | $(VENV)/.pip
	@echo "installing what teachllm's server needs into $(VENV) (once) ..." >&2
	@$(INSTALL) '.[serve]' >&2
	@touch $(VENV)/.core $@

$(VENV)/.lessons: $(SOURCES) | $(VENV)/.pip
	@echo "installing what teachllm's lessons need into $(VENV) (once) ..." >&2
	@$(INSTALL) '.[lessons,serve]' >&2
	@touch $(VENV)/.core $(VENV)/.serve $@

$(VENV)/.dev: $(SOURCES) | $(VENV)/.pip
	@echo "installing what teachllm and its tests need into $(VENV) (once) ..." >&2
	@$(INSTALL) '.[dev]' >&2
	@touch $(VENV)/.core $(VENV)/.ui $(VENV)/.serve $@

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "teachllm needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV) >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip >&2  # an old one takes twice as long
	@touch $@
