# Each target installs what it needs into .venv on its first run, and again only after SOURCES have changed.
# ARGS passes flags on: make chat ARGS="--stats --model Qwen/Qwen3-0.6B"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt
# Only a tenth of the installed modules is ever imported, so compiling all of them would take longer than it saves.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# What nearly every test imports is compiled after all: each of two workers would do it, beside the type checker.
COMPILE := import fastapi, gradio, hypothesis, ipykernel, matplotlib.pyplot, openai, playwright.sync_api, torch, \
	transformers.models.llama.modeling_llama, triton

# PyPI's torch for Linux brings several GB of CUDA libraries. A Linux machine without an NVIDIA driver takes PyTorch's
# CPU build instead, if PyTorch's index answers. TORCH_INDEX=URL takes torch from that index; TORCH_INDEX= (empty) takes
# whatever pip finds by default.
TORCH_INDEX ?= auto
CPU_INDEX := https://download.pytorch.org/whl/cpu
# Only torch itself comes from that index. Its dependencies come with the rest, so an index that lacks them will do.
INSTALL_TORCH := $(INSTALL) --no-deps torch --index-url
HAS_DRIVER := test -e /dev/nvidiactl || command -v nvidia-smi >/dev/null
# A timer ends the request after 5 seconds: urlopen's own timeout covers neither name resolution nor a second address.
CPU_INDEX_ANSWERS := $(BIN)/python -c 'import os, threading, urllib.request; \
	timer = threading.Timer(5, os._exit, [1]); timer.daemon = True; timer.start(); \
	urllib.request.urlopen("$(CPU_INDEX)/torch/")' 2>/dev/null

# Both test workers and the programs that tests start share the bytecode that the first of them compiles.
test: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help chat serve viz lessons test test-thorough test-clients lint format-check types pytest format soak soak-server \
	mutants clean
.DEFAULT_GOAL := help

help:  ## print this list
	@awk -F ':.*## +' '/^[a-z-]+:.*## /{printf "  make %-15s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

chat: $(VENV)/.core  ## talk to the embedded model
	@$(BIN)/python -m teachllm_cli chat $(ARGS)

serve: $(VENV)/.serve  ## serve the embedded model over HTTP with OpenAI's API
	@$(BIN)/python -m teachllm_cli serve $(ARGS)

viz: $(VENV)/.ui  ## watch the engine run the embedded model, in a browser
	@$(BIN)/python -m teachllm_cli viz $(ARGS)

lessons: $(VENV)/.lessons  ## open the notebooks that step through the engine
	@PYTHONPATH=.:kernels:cli:webui:lessons $(BIN)/python -m teachllm_cli lesson open $(ARGS)

test: format-check  ## run format and lint checks, the type checker, the tests and two notebooks
	@$(MAKE) --no-print-directory -j 2 types pytest

test-thorough:  ## run the same with many more examples per randomized test, and every notebook
	@TEACHLLM_THOROUGH=1 $(MAKE) --no-print-directory test

test-clients: $(VENV)/.serve $(VENV)/clients/.installed  ## try other projects' newest clients on the server
	@TEACHLLM_PYTHON=$(BIN)/python $(VENV)/clients/bin/python -m pytest -c tests/other_clients/pytest.ini \
		tests/other_clients $(ARGS)

lint: format-check types  ## run format and lint checks and the type checker

format-check: $(VENV)/.dev
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check

types: $(VENV)/.dev
	$(BIN)/python -m mypy

# The option is defined in tests/conftest.py, which is not loaded when ARGS names notebooks alone.
pytest: BUDGET = $(if $(findstring .ipynb,$(ARGS)),,--budget)
pytest: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal $(BUDGET) --nbmake --nbmake-timeout=300 $(ARGS)

format: $(VENV)/.dev  ## format every file and apply the linter's fixes
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

soak: $(VENV)/.core  ## give the scheduler random work for a minute and check it after every step
	PYTHONPATH=.:kernels:cli $(BIN)/python tests/core/soak.py --seconds 60

soak-server: $(VENV)/.dev  ## send the server thousands of valid and broken requests and kill each of its processes 20 times
	PYTHONPATH=.:kernels:cli $(BIN)/python tests/server/soak.py $(ARGS)

mutants: $(VENV)/.dev  ## plant each fault from the lessons in turn: its test must find it
	PYTHONPATH=.:kernels:lessons $(BIN)/python -m teachllm_lessons.mutants $(ARGS)

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/clients/.installed: tests/other_clients/requirements.txt | $(VENV)/.pip
	@echo "installing the clients into $(VENV)/clients (once) ..." >&2
	@$(PYTHON) -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $< >&2
	@touch $@

# Installers write to stderr: stdout belongs to the answer.
$(VENV)/.core: $(SOURCES) | $(VENV)/.torch
	@echo "installing what teachllm needs into $(VENV) (once) ..." >&2
	@$(INSTALL) --editable . >&2
	@touch $@

$(VENV)/.ui: $(SOURCES) | $(VENV)/.torch
	@echo "installing what teachllm's visualizer needs into $(VENV) (once) ..." >&2
	@$(INSTALL) --editable '.[ui]' >&2
	@touch $(VENV)/.core $@

$(VENV)/.serve: $(SOURCES) | $(VENV)/.torch
	@echo "installing what teachllm's server needs into $(VENV) (once) ..." >&2
	@$(INSTALL) --editable '.[serve]' >&2
	@touch $(VENV)/.core $@

$(VENV)/.lessons: $(SOURCES) | $(VENV)/.torch
	@echo "installing what teachllm's lessons need into $(VENV) (once) ..." >&2
	@$(INSTALL) --editable '.[lessons,serve]' >&2
	@touch $(VENV)/.core $(VENV)/.serve $@

$(VENV)/.dev: $(SOURCES) | $(VENV)/.torch
	@echo "installing what teachllm and its tests need into $(VENV) (once) ..." >&2
	@$(INSTALL) --editable '.[dev]' >&2
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c '$(COMPILE)' >&2
	@touch $(VENV)/.core $(VENV)/.ui $(VENV)/.serve $@

$(VENV)/.torch: constraints.txt | $(VENV)/.pip
ifeq ($(TORCH_INDEX),auto)
	@[ "$$(uname)" != Linux ] || $(HAS_DRIVER) || { $(CPU_INDEX_ANSWERS) && \
		echo "installing PyTorch's CPU build into $(VENV) (once) ..." && $(INSTALL_TORCH) $(CPU_INDEX); } >&2 || \
		echo "no CPU build of PyTorch from $(CPU_INDEX): taking the one that pip finds" >&2
else ifneq ($(TORCH_INDEX),)
	@$(INSTALL_TORCH) '$(TORCH_INDEX)' >&2
endif
	@touch $@

$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "teachllm needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV) >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip >&2  # an old pip takes twice as long
	@touch $@
