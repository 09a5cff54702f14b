# SPDX-License-Identifier: Apache-2.0
# One name per task.  `make demo` and `make test` set everything up on a fresh machine first; that costs minutes once and
# almost nothing later.
SHELL := /bin/bash
PY := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
TESTLOG ?= build/meson-logs/testlog.json
PYTEST_XML ?= build/pytest.xml
PYTEST_TESTS ?= tests
SOURCES = $(shell git ls-files '*.c' '*.h')

.PHONY: help setup build demo test test-c test-python gpu-test wheel bench parity conformance values kills nightly kernels-nvrtc \
	codec-oracle codec-vectors \
	docs fmt lint clean test-frameworks torch-suite loss-parity

help:
	@echo "make demo    train a language model on 2 + 2 emulated GPUs, then compare with a single process"
	@echo "make test    C and Python tests"
	@echo "make conformance    10,000 random cases by value; make kills: 120 random deaths; make nightly: beyond 2^31 elements"
	@echo "make values  every collective, dtype, size and codec by value instead of a sample; 40,000 simulated worlds"
	@echo "make gpu-test   on a machine with GPUs and a PyTorch for them: values, lifetimes, stress, figures against the kept ones"
	@echo "make wheel   one wheel for any Python in dist/, tried in a fresh environment"
	@echo "make torch-suite  torch's own distributed tests on Gloo and here (an hour), into docs/compatibility.md"
	@echo "make loss-parity  DDP, FSDP2, HSDP on 2 + 2 emulated ranks against one process, 200 steps"
	@echo "make test-frameworks  accelerate and Lightning on this backend (installs them)"
	@echo "make bench   all_reduce against Gloo, one JSON line per result"
	@echo "make parity  final loss with each codec against float32 on the bridge, DDP and FSDP2; resumable, takes an hour"
	@echo "make build   library and emulators in build/; make setup: also .venv with the package installed"
	@echo "make codec-oracle  all floats against ml_dtypes; make codec-vectors: 10^9 values for every vector width"
	@echo "make kernels-nvrtc  compile the GPU kernels with NVIDIA's compilers, which are installed for that"
	@echo "make fmt     clang-format and ruff format; make lint: their checks, clang-tidy, mypy, include arrows, sizes"
	@echo "make docs    files under docs/ that are generated"

setup:
	@tools/setup.sh all

build:
	@tools/setup.sh build

demo: setup
	@$(PY) tools/demo.py $(DEMO_ARGS)

test: test-c test-python

test-c: setup
	meson test -C build --no-rebuild --print-errorlogs

test-python: setup
	timeout 1500 $(PY) -m pytest $(PYTEST_TESTS) -q --junitxml=$(PYTEST_XML) $(PYTEST_ARGS)

# Not .venv, whose PyTorch has no GPU: the python3 of the machine.
gpu-test: build
	PYTHONPATH=$(CURDIR)/python GPUBRIDGE_LIBRARY=$${GPUBRIDGE_LIBRARY:-$(CURDIR)/build/src/libgpubridge.so.0} \
	    $${GPU_PYTHON:-/usr/bin/env python3} tools/gpu_test.py $(GPU_TEST_ARGS)

wheel: setup
	@tools/wheel.sh $(WHEEL_PYTHONS)

test-frameworks: setup
	$(PY) -m pip install --quiet --constraint requirements-torch.txt -r requirements-frameworks.txt
	timeout 1200 $(PY) -m pytest tests/frameworks/frameworks.py -q

# Resumable: what build/torch-suite.jsonl has is not run again.
torch-suite: setup
	$(PY) tests/torch_suite/run.py --results build/torch-suite.jsonl --report docs/compatibility.md $(SUITE_ARGS)

loss-parity: setup
	$(PY) tests/python/loss_parity.py --steps 200 --out bench/results/loss_parity.json

bench: setup
	@$(PY) bench/all_reduce.py $(BENCH_ARGS)

parity: setup
	@$(PY) bench/parity.py $(PARITY_ARGS)

# Longer than continuous integration has time for; conformance and the kills of the matrix can be stopped and resumed.
conformance: setup
	$(PY) tests/python/conformance.py --cases 10000 --emulated --state build/conformance.json $(CONFORMANCE_ARGS)

kills: setup
	$(PY) tests/multi/kill_matrix.py --kills 100 --state build/kills.jsonl $(KILLS_ARGS)
	$(PY) tests/multi/kill_random.py --runs 20 --emulate cuda,cuda,hip,hip

values: setup
	GB_TEST_FULL=1 meson test -C build --no-rebuild --print-errorlogs --timeout-multiplier 0 values emulated_values compress \
	    compress_emulated
	GB_TEST_FULL=1 $(PY) -m pytest tests/python/test_values.py -q
	GB_SIM_CASES=40000 meson test -C build --no-rebuild --print-errorlogs --timeout-multiplier 0 --suite sim

nightly: setup
	GB_TEST_NIGHTLY=1 timeout 3600 $(PY) -m pytest tests/python/test_huge.py -q -s

kernels-nvrtc: setup
	$(PY) -m pip install -q --no-deps -r requirements-nvrtc.txt
	$(PY) tests/unit/kernels_nvrtc.py src/codec/kernels.inc
	$(PY) tests/unit/kernels_nvrtc.py src/engine/fetch.inc

# Every float, minutes; and 10^9 values for each codec.
codec-oracle: setup
	$(PY) tests/codec/oracle.py build/tests/codec/libcodec_reference.so --out bench/results/codec/oracle.json

codec-vectors: setup
	build/tests/codec/codec_random 1000

docs: setup
	$(PY) tools/gen_docs.py
	$(PY) tools/gen_man.py

fmt: setup
	clang-format-19 -i $(SOURCES)
	ruff check --fix --quiet .
	ruff format --quiet .

lint: setup
	tools/lint.sh

clean:
	rm -rf build build-* demo-report
