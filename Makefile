# Everything runs in .venv of this checkout; `make demo` and `make test` need nothing set up before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check lint benchmarks multi_node clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[examples,test]'
	touch $(READY)

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

# Two hosts on this machine (network namespaces); needs root or user namespaces.
multi_node: $(READY)
	PYTHON=$(abspath $(BIN)/python) examples/multi_node/run.sh

clean:
	rm -rf $(VENV) demo_output
