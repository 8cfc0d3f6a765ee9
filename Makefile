# One way in: every target sets up what it needs in .venv, and does nothing that is done already.
# The Python that makes .venv must be 3.11 or newer: make test PYTHON=/path/to/python3.12

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup test test-kubernetes lint demo bench docs stories pin clean

help:  ## Say what the targets do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Make .venv with the versions of constraints.txt

test: lint  ## Run all checks and all tests
	@scripts/provision haproxy openssl postgresql tmux
	$(BIN)/pytest -n 2

test-kubernetes: $(READY)  ## Run the tests that need a real Kubernetes: built from Debian's packages once, as root
	@scripts/provision openssl gcc iproute2 iptables
	$(BIN)/python -m stretto.testing.kubernetes.building
	$(BIN)/pytest -m cluster tests/kubernetes

lint: $(READY)  ## Check style, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

demo: $(READY)  ## Two real training jobs that do not fit together, gang beside elastic; a table, and a picture in out/
	$(BIN)/stretto lab demo --png out/two-jobs.png

bench: $(READY)  ## Run every benchmark; STRETTO_DATA=folder adds those that need the public traces
	@set -e; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file; done

docs: $(READY)  ## Write the tables of policies and the examples of the guide into their pages anew
	$(BIN)/python docs/tables.py

stories: $(READY)  ## Write today's transcripts and decisions into the tests; read the difference before you keep it
	REWRITE=1 $(BIN)/pytest tests/test_scenarios.py tests/sim/test_live_record.py

pin: $(READY)  ## Write the versions that are installed now to constraints.txt
	@{ sed -n '/^#/p' constraints.txt; { $(PIP) freeze --exclude-editable --exclude torch; grep '^torch==' constraints.txt; } | sort -fu; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## Remove .venv, caches and out/
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache out

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Stretto needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
