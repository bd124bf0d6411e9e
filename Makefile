# Two commands: `make demo` and `make test`. Both need Python 3.11 to 3.13 and nothing else. `make faults` takes longer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
FILE   ?=
FAULTS ?= 500
SEED   ?= 1

.PHONY: demo test lint docs types unit faults proto clean

demo: $(VENV)/.run
	$(BIN)/kvrecall demo $(if $(FILE),--file "$(FILE)")

test: $(VENV)/.test lint types unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Generated pages of docs/reference, then the site. Tests check that the former are current and that the latter builds.
docs: $(VENV)/.test
	$(BIN)/python docs/tools/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

types: $(VENV)/.test
	$(BIN)/mypy

# File by file, in their order: the slow ones, which start processes, come first, so that no core is idle at the end. The
# front door's tests run a server in a thread; processes of their own keep them apart from what others do to theirs.
unit: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/gateway
	$(BIN)/pytest -n 2 --dist loadfile tests/gateway

# Half an hour of kills, cuts, full disks and flipped bits, e.g. `make faults FAULTS=50 SEED=7`; prints what it counted.
faults: $(VENV)/.test
	$(BIN)/python -m benchmarks.faults --faults $(FAULTS) --seed $(SEED)

# The wire's Python stubs. A test makes them again and compares.
proto: $(VENV)/.test
	$(BIN)/python -m grpc_tools.protoc -Ikvrecall/protocol/v1=proto/kvrecall/v1 --python_out=. --pyi_out=. --grpc_python_out=. \
		kvrecall/protocol/v1/worker.proto

# torch first and by its version: a bare "torch" would bring gigabytes of CUDA packages to a machine without a GPU.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/.run pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info runs
