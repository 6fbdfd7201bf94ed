# Everything runs in .venv of this checkout; `make demo` and `make test` need nothing set up before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test law check lint docs lock versions multi_node gpu simulated_gpu clean

$(READY): pyproject.toml requirements.lock .ci/install.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python .ci/install.py docs examples test
	touch $(READY)

UV := $(BIN)/uv
$(UV): $(READY)
	$(BIN)/python -m pip install --quiet uv

demo: $(READY)
	$(BIN)/python -m examples.demo

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile

# The whole of every matrix of models, specs and schedules, of which `make test` runs a fixed sample.
law: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --law

lint: $(READY)
	$(BIN)/ruff check placer tests examples benchmarks
	$(BIN)/ruff format --check placer tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

# The site, in build/site; open index.html. A broken link is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Exact releases for every supported Python, from the ranges of pyproject.toml.
lock: $(UV)
	$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate \
	    --custom-compile-command 'make lock' --extra docs --extra examples --extra test pyproject.toml \
	    --output-file requirements.lock

# The suite's chosen part over the ranges of pyproject.toml: an environment per row, some 3 GB each.
versions: $(UV)
	$(BIN)/python -m benchmarks.versions --uv $(UV)

# Two hosts on this machine (network namespaces); needs root or user namespaces.
multi_node: $(READY)
	PYTHON=$(abspath $(BIN)/python) examples/multi_node/run.sh

# On a machine with a GPU (of 80 GB, for the benchmarks) and nothing else on it: equality, then bytes, plans
# at the memory limit, seconds, and the cost of placing. Much of the time goes into planning, on the CPU: JOBS=8
# plans so many cases at once. Each benchmark stops after nine minutes and writes its page after every case:
# `make gpu RESUME=--resume` measures what is left.
# Without a GPU the tests run on the CPU, and the first benchmark says what it needs.
RESUME ?=
JOBS ?= 1
WITHIN := --minutes 9 --jobs $(JOBS) $(RESUME)
gpu: $(READY)
	$(BIN)/python .ci/install.py docs examples test benchmarks
	$(BIN)/python -m pytest tests/gpu --law
	$(BIN)/python -m benchmarks.memory_gpu $(WITHIN)                   # 28 runs
	$(BIN)/python -m benchmarks.fits_gpu kept $(WITHIN)                # 25 runs
	$(BIN)/python -m benchmarks.fits_gpu auto $(WITHIN)                # 23 runs, of up to 9 s a step
	$(BIN)/python -m benchmarks.steps_gpu --calibrate $(WITHIN)        # 26 runs
	$(BIN)/python -m benchmarks.overhead --device cuda $(WITHIN)       # 6 runs

# The executor on a simulated accelerator of four devices, which is compiled first (a minute). Its tests
# fail where a kernel or a copy does not wait for what it needs. No GPU is used.
simulated_gpu: $(READY)
	$(BIN)/python -m pip install --quiet ninja
	$(BIN)/python -m pytest tests/gpu/simulated

clean:
	rm -rf $(VENV) demo_output
