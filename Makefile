# Every target works on a bare machine and from any folder (make -C, make -f): what is missing is set up in .venv first.

ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
BIN := $(ROOT)/.venv/bin
READY := $(ROOT)/.venv/.ready

# make serve CONFIG=path/to/proxy.yaml ARGS="--port 9000"; make demo ARGS=...; make test ARGS="-k sticky"
CONFIG ?= $(ROOT)/config/proxy.yaml
ARGS ?=
# A file of tests stays on one worker: its servers are started once. Two workers keep timings of a small machine honest.
WORKERS ?= 2

.PHONY: help demo serve test check bench test-container lock format setup clean
.DEFAULT_GOAL := help

help:
	@echo "make demo            a long conversation is compacted before your eyes: no key, no network"
	@echo "make serve           run the proxy with CONFIG (default: config/proxy.yaml)"
	@echo "make test            every check and every test"
	@echo "make check           format, lint, types, import rules, dependencies, dead code, Dockerfile"
	@echo "make bench           the benchmarks of benchmarks/"
	@echo "make test-container  build the image and run it (root, Debian)"
	@echo "make lock            lock the dependencies of pyproject.toml anew"
	@echo "make format          format the code"

demo: $(READY)
	@$(BIN)/compaction-proxy demo $(ARGS)

serve: $(READY)
	@$(BIN)/compaction-proxy serve --config $(CONFIG) $(ARGS)

test: check
	@cd $(ROOT) && $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

check: $(READY)
	@sh $(ROOT)/scripts/check.sh

bench: $(READY)
	@echo "running benchmarks/economics.py"
	@cd $(ROOT) && $(BIN)/python -m benchmarks.economics $(ARGS)

test-container:
	@bash $(ROOT)/tests/container/build.sh

lock: $(READY)
	@sh $(ROOT)/scripts/lock.sh $(ARGS)

format: $(READY)
	@cd $(ROOT) && $(BIN)/ruff format . && $(BIN)/ruff check --fix .

setup: $(READY)

clean:
	@cd $(ROOT) && rm -rf .venv .setup.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist

$(READY): $(ROOT)/requirements/dev.txt $(ROOT)/pyproject.toml $(ROOT)/scripts/setup.sh
	@sh $(ROOT)/scripts/setup.sh
