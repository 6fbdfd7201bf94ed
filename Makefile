# Everything runs in .venv of this checkout; `make demo` and `make test` need nothing set up before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check lint lock versions multi_node gpu clean

$(READY): pyproject.toml requirements.lock .ci/install.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python .ci/install.py examples test
	touch $(READY)

UV := $(BIN)/uv
$(UV): $(READY)
	$(BIN)/python -m pip install --quiet uv

demo: $(READY)
	$(BIN)/placer demo

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check placer tests examples benchmarks
	$(BIN)/ruff format --check placer tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

# Exact releases for every supported Python, from the ranges of pyproject.toml.
lock: $(UV)
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate \
	    --custom-compile-command 'make lock' --extra examples --extra test pyproject.toml \
	    --output-file requirements.lock

# The suite's chosen part over the ranges of pyproject.toml: an environment per row, some 3 GB each.
versions: $(UV)
	$(BIN)/python -m benchmarks.versions --uv $(UV)

# Two hosts on this machine (network namespaces); needs root or user namespaces.
multi_node: $(READY)
	PYTHON=$(abspath $(BIN)/python) examples/multi_node/run.sh

# On a machine with a GPU (of 80 GB, for the benchmarks): equality, bytes, plans at the memory limit, speed.
# As a whole this has not been run on a GPU yet: the figures for an H100 are of an earlier program. Without
# a GPU the tests run on the CPU, and the first benchmark says what it needs.
gpu: $(READY)
	$(BIN)/python .ci/install.py examples test benchmarks
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m benchmarks.memory_gpu
	$(BIN)/python -m benchmarks.fits_gpu
	$(BIN)/python -m benchmarks.overhead --device cuda

clean:
	rm -rf $(VENV) demo_output
