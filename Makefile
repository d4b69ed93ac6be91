# The verbs of this project. `make quickstart` and `make test` do all of their set-up.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKDIR ?= runs/quickstart
PYTEST ?= $(BIN)/python -m pytest
export PYTHONPATH := hack/cluster

SEED ?= 0

.PHONY: help quickstart test test-fast e2e node-programs node-images e2e-smoke soak faults lint format generate bench lock images cluster-up cluster-down clean
help: ## what each verb does
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: CPython 3.11, 3.12 or 3.13 is needed: install one, or say PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(INSTALLED) ## train the synthetic job on this machine with two ranks, snapshots and evaluation
	$(BIN)/dlrmctl run examples/quickstart.yaml --workdir $(WORKDIR)

test: $(INSTALLED) ## every test but those on real pods: quick ones first, then those that start servers and jobs
	$(PYTEST) -m "not slow" -n 2
	$(PYTEST) -m "slow and not e2e" -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(INSTALLED) ## the quick tests alone
	$(PYTEST) -m "not slow" -n 2

soak: SCHEDULES ?= 5000
soak: $(INSTALLED) ## snapshots in random faults: SCHEDULES lives of a job from SEED on
	SOAK_SCHEDULES=$(SCHEDULES) SOAK_SEED=$(SEED) $(PYTEST) -s --show-capture=no tests/unit/checkpointer/test_soak.py

faults: SCHEDULES ?= 500
faults: $(INSTALLED) ## the operator in random faults on a real control plane: SCHEDULES lives of a job from SEED on
	FAULT_SCHEDULES=$(SCHEDULES) FAULT_SEED=$(SEED) $(PYTEST) -s --show-capture=no tests/integration/operator/test_fault_schedules.py

lint: $(INSTALLED) ## formatting, lints, types, import contracts, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python hack/generate.py --check

format: $(INSTALLED) ## format and fix what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(INSTALLED) ## write CRDs, API reference, metric tables and dashboards from the code
	$(BIN)/python hack/generate.py

bench: $(INSTALLED) ## measure training, tiers, snapshots and the operator against their peers (BENCH=--quick tries it; the memory limits need root, fio on PATH)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps torchrec==1.8.0
	$(BIN)/python -m benchmarks.training $(BENCH)
	$(BIN)/python -m benchmarks.tiers $(BENCH)
	$(BIN)/python -m benchmarks.memory_limit $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.snapshots $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.quantizing $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.operator_scale $(filter --quick,$(BENCH))

lock: ## write constraints.txt anew (needs uv)
	{ echo "# Exact versions that were tested together. Made by: make lock"; \
	uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --extra dev --extra bench pyproject.toml; } \
	> constraints.new && mv constraints.new constraints.txt

images: BASE ?= docker.io/library/python:3.12-slim-bookworm
images: TRAINER_VARIANT ?= cpu
images: $(INSTALLED) ## build the container images that changed (needs root and buildah; BASE=debian makes a base of Debian's packages)
	$(BIN)/python -m dlrm_cluster.project_images build --base $(BASE) --variant $(TRAINER_VARIANT)

e2e: ## tests with real pods: on the cluster of KUBECONFIG, else on a node made for them (root, Debian packages)
	@$(MAKE) --no-print-directory --jobs $(INSTALLED) $(if $(KUBECONFIG),,node-programs node-images)
	$(PYTEST) -m e2e

# What a node is made of, beside the virtual environment; a failure is met again by the tests, which say whom it concerns.
node-programs:
	-@$(PYTHON) -m dlrm_cluster build etcd kubernetes node coredns versitygw helm
node-images:
	-@$(PYTHON) -m dlrm_cluster.project_images build

e2e-smoke: $(INSTALLED) ## the part of them that CI runs: the chart installed, one job to its end, two drills
	$(PYTEST) -m smoke tests/e2e

cluster-up: $(INSTALLED) ## a real Kubernetes control plane, built from Go modules; NODE=1: with a node that runs pods (root)
	$(BIN)/python -m dlrm_cluster up $(if $(NODE),--node)

cluster-down: $(INSTALLED) ## end it
	$(BIN)/python -m dlrm_cluster down

clean: ## remove what the verbs made in this folder
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
