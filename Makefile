# Thin targets over the tools; CI calls the same names. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
BED    := $(PY) -m e2e.bed
# for levels whose tests share nothing
SPREAD := -n auto --dist worksteal
# local (default on Linux as root) | existing, with CONTEXT=<name>
CLUSTER ?= local
export CLUSTER CONTEXT

.PHONY: docs help setup generate verify format lint type unit sim fakeapi api e2e e2e-short e2e-real bench golden chart image \
        bench-flags demo demo-down test all lock clean

help:  ## This list
	@awk -F':.*## ' '/^[a-z0-9%-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up ------------------------------------------------------------------------------------------------------
setup: $(VENV)/.ready  ## Python environment from the hash-pinned lock file

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}: set PYTHON=…")'
	@echo "==> Python environment ($(VENV)) from requirements/dev.txt"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lock:  ## Renew requirements/*.txt (maintainers; needs uv)
	@echo 'setuptools>=77' | uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-header --no-annotate --quiet - --output-file requirements/build.txt
	@for extra in operator engine router dev; do uv pip compile --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate --quiet --extra $$extra pyproject.toml \
	  --output-file requirements/$$extra.txt || exit 1; done

# ---- without a cluster -------------------------------------------------------------------------------------------
generate: setup  ## CRDs and what is derived from them
	$(PY) -m sluice.api.crdgen crds charts/sluice-crds/templates
	$(PY) -m manifests.render
	$(PY) -m docs.generate
	$(PY) -m docs.planschema

docs: setup  ## Reference tables of docs/reference.md, schema of plans
	$(PY) -m docs.generate
	$(PY) -m docs.planschema

verify: setup  ## Generated files are up to date
	$(PY) -m sluice.api.crdgen --check crds charts/sluice-crds/templates
	$(PY) -m manifests.render --check
	$(PY) -m docs.generate --check
	$(PY) -m docs.planschema --check

format: setup  ## Format the code
	$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

lint: setup  ## ruff, import contracts, spelling
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell operator engine-image tests e2e charts manifests docs README.md CONTRIBUTING.md CHANGELOG.md

type: setup  ## mypy, strict
	$(VENV)/bin/mypy

unit: setup  ## Pure decisions: tables and properties
	$(PYTEST) $(SPREAD) tests/unit

sim: setup  ## Planner against a simulated cluster, seeded random order
	$(PYTEST) $(SPREAD) tests/sim

fakeapi: setup  ## Operator against the fake API server
	$(PYTEST) $(SPREAD) tests/fakeapi

golden: setup  ## Renew golden files; read the diff
	GOLDEN_UPDATE=1 $(PYTEST) tests/unit tests/sim -q

all: lint type verify unit sim fakeapi  ## Everything that needs no cluster

# ---- with a cluster ----------------------------------------------------------------------------------------------
api: setup  ## Real API server and scheduler, played pods
	$(BED) build etcd k8s helm
	$(PYTEST) tests/api --durations=10

e2e-short: setup  ## Real kubelets, each row once
	$(BED) build
	$(PYTEST) e2e/suites --durations=20

e2e: setup  ## Real kubelets, full counts
	$(BED) build
	SLUICE_E2E=full $(PYTEST) e2e/suites --durations=20

e2e-real: setup  ## A real vLLM on CPU behind the product (3 GB of disk, 1 GB of download once)
	$(BED) build
	$(PYTEST) e2e/real -s --durations=10

bench bench-lifecycle: export SLUICE_E2E = full

bench: setup  ## All figures: build/bench/*.jsonl
	$(PY) -m e2e.bench

bench-%: setup  ## One group of figures, for example bench-reconcile
	$(PY) -m e2e.bench $*

bench-flags: setup  ## Arguments of all goldens to the engines' own parsers; needs SLUICE_VLLM_PYTHON (ENGINES="vllm sglang")
	$(PY) -m e2e.bench.flags $(ENGINES)

image: setup  ## The three images, from the Dockerfiles by BuildKit
	$(BED) image

chart: setup  ## Render the charts
	$(PYTEST) tests/unit/charts

demo: setup  ## From nothing to streamed tokens on a local Kubernetes
	$(PY) -m e2e.demo up

demo-down:  ## Remove every trace of the demo
	@if test -x $(PY); then $(PY) -m e2e.demo down; else echo "nothing to remove: no demo ran in this checkout"; fi

# The cluster programs build in the background while the levels without a cluster run.
test: setup  ## All test levels, end-to-end in short form
	@set -e; mkdir -p build; $(BED) build >build/bed-build.log 2>&1 & builder=$$!; \
	trap 'kill $$builder 2>/dev/null || true' EXIT; \
	$(MAKE) --no-print-directory all; \
	echo "==> waiting for the cluster programs (build/bed-build.log)"; \
	wait $$builder || { cat build/bed-build.log; exit 1; }; \
	$(MAKE) --no-print-directory api; \
	$(MAKE) --no-print-directory e2e-short

clean:  ## Remove what the checkout built (not the cache of cluster programs)
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
