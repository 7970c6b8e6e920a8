# Everything starts here: `make demo` and `make test` work on a fresh Debian or Ubuntu machine
# with Python 3.11, gcc and make. Each target does the set-up it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
PEERS  := $(VENV)/.peers-ready
QUICK  := $(VENV)/.spark-ready
CACHED := XDG_CACHE_HOME="$(abspath $(VENV))/cache"
NATIVE := $(wildcard src/penstock/*/*.c src/penstock/*/*/*.[ch] include/penstock/*.h)

# Compiled modules are kept, whatever the machine says: a test run starts hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-again test-full lint format bench bench-more fuzz soak sanitize clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the package and everything to work on it

$(STAMP): pyproject.toml setup.py $(NATIVE) tools/system-packages
	@tools/system-packages "$(PYTHON)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# The tests start Spark a dozen times. Meanwhile the tests are compiled: each of the processes that
# run them would do it for itself.
$(QUICK): $(STAMP) src/penstock/pipeline/run/java.py
	@$(BIN)/python -m pytest --collect-only --quiet > $(VENV)/collected.txt & \
	    $(CACHED) $(BIN)/penstock prepare || echo "the tests of Spark take longer"; wait
	@touch $@

demo: $(STAMP) ## a radar, Spark pipelines, volumes and a picture of the storms, in under two minutes
	@$(BIN)/python examples/radar/storm_watch.py

# Three processes for each of two cores: a test often waits, for what it has started or for a time.
# In full, the small ones still have processes of their own: an hour of others leaves threads behind.
SHARED := --dist loadscope --no-loadscope-reorder
SMALL := $(CACHED) $(BIN)/python -m pytest -m "not full" --numprocesses 6 $(SHARED)

test: $(QUICK) ## all tests at small size, below 12 minutes
	@$(SMALL)

test-again: $(QUICK) ## the tests that failed last time, one after the other
	@$(CACHED) $(BIN)/python -m pytest -m "not full" --last-failed --last-failed-no-failures none

test-full: $(QUICK) ## all tests, at full size and then at small: two hours
	@$(CACHED) $(BIN)/python -m pytest -m full --timeout 2400 --numprocesses 4 $(SHARED) --durations 25; \
	    in_full=$$?; $(SMALL) && exit $$in_full

lint: $(STAMP) ## ruff, mypy --strict, and which room may import which
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(STAMP) ## put the source into its usual form
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(PEERS) ## compare with the peers, in one run of 10 minutes; BENCH=--quick: 2 minutes
	@tools/bench-servers
	@$(BIN)/python benches/compare.py $(BENCH)
	@$(BIN)/python benches/classic.py $(filter --quick,$(BENCH))

# A part that misses a target ends with an error; the others run all the same.
bench-more: $(PEERS) ## Spark, decoding, datagrams, UDP queues, remote queues, relay, dispatcher, groups, router, each beside its yardstick
	@tools/bench-servers
	@for part in spark decoding fmqp relaying dispatcher groups psi shell datagrams lhhttt jrtc router radar; do \
	    set -- $(filter --quick,$(BENCH)); \
	    case $$part in psi) set -- ;; radar) set -- --spark "$$@" ;; esac; \
	    $(BIN)/python benches/$$part.py "$$@" || missed="$$missed $$part"; \
	done; test -z "$$missed" || { echo "missed a target, or failed:$$missed"; exit 1; }

$(PEERS): $(STAMP)
	@echo "installing what is compared with into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	@touch $@

fuzz: $(STAMP) ## the fuzz tests at full size
	@$(BIN)/python -m pytest --timeout 3600 --numprocesses 2 --dist loadscope -k fuzz

soak: $(STAMP) ## ten minutes of a small installation whose processes are killed; MINUTES=60
	@$(BIN)/python tools/soak --minutes $(or $(MINUTES),10)

sanitize: ## the tests of the native parts under the address and UB sanitizers, the ring's threads under the thread one
	@tools/sanitize "$(PYTHON)"

clean: ## remove everything that was made here
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache \
	    benches/bin benches/results
	find src tests benches examples -name __pycache__ -prune -exec rm -rf {} +
	find src -name '*.so' -delete
	rm -rf src/*.egg-info
