# `make quickstart` and `make test` do all of their set-up.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKDIR ?= runs/quickstart
HARDWARE ?= runs/this-machine.yaml
PYTEST ?= $(BIN)/python -m pytest
# On two cores: slow tests wait for processes and servers for half of their time.
SLOW_WORKERS ?= 3
# Long files first, so that no worker ends alone with one.
INTEGRATION := $(addprefix tests/integration/,run operator)
INTEGRATION += $(filter-out $(INTEGRATION),$(wildcard tests/integration/[a-z]*))
GIVEN_PYTHONPATH := $(PYTHONPATH)
export PYTHONPATH := hack/cluster
# Tests start thousands of processes. Each compiles our sources for 0.9 s if no byte code is kept.
unexport PYTHONDONTWRITEBYTECODE

SEED ?= 0

# Kernels that most tests use, as images have them: tests/integration/run/test_warm.py shows that none is missing.
KERNELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dlrm-warmed

.PHONY: help quickstart test kernels compilation gpu-check quick unit integration oldest smoke e2e node-programs node-images soak faults contended lint format generate dashboards bench lock images release cluster-up cluster-down clean
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: CPython 3.11, 3.12 or 3.13 not found: install one, or set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(INSTALLED) ## train the synthetic example with two ranks, snapshots and evaluation
	@test -s $(HARDWARE) || { mkdir -p $(dir $(HARDWARE)); $(BIN)/dlrmctl profile measure --out $(HARDWARE); }
	$(BIN)/dlrmctl run examples/quickstart.yaml --workdir $(WORKDIR) --hardware $(HARDWARE)

test: unit integration oldest ## run all tests except those on real pods

# Processes that find a kernel missing compile it at the same time, each for itself.
kernels: $(INSTALLED) ## compile kernels once for all processes of tests
	set -o pipefail; NUMBA_CACHE_DIR=$(KERNELS) $(BIN)/python -m dlrm_kernels.warm --dims 8 --features 3 | tail -n 1
	DLRM_KERNEL_CACHE=$(KERNELS) $(BIN)/python -c "import dlrm_kernels"

quick: kernels ## run the quick tests only
	$(PYTEST) -m "not slow" -n 2 tests/unit tests/integration

unit: kernels ## run the unit tests, quick ones first
	$(PYTEST) -m "not slow" -n 2 tests/unit
	$(PYTEST) -m slow -n $(SLOW_WORKERS) --dist loadfile --no-loadscope-reorder tests/unit

integration: kernels ## run the tests on real servers and processes
	$(PYTEST) -n $(SLOW_WORKERS) --dist loadfile --no-loadscope-reorder $(INTEGRATION)

oldest: $(INSTALLED) ## run the part of integration that also covers the oldest tested Kubernetes
	TEST_KUBERNETES=kubernetes-1.35 $(PYTEST) -n $(SLOW_WORKERS) --dist loadfile --no-loadscope-reorder tests/integration/operator

OLDEST_TRITON ?= 3.6.0
COMPILATION := tests/unit/trainer/embedding/gpu/test_compilation.py
$(VENV)/triton-$(OLDEST_TRITON): $(INSTALLED)
	$(BIN)/pip install --quiet --no-deps --target $@ triton==$(OLDEST_TRITON)

compilation: $(VENV)/triton-$(OLDEST_TRITON) ## compile GPU kernels for sm_80 and sm_90 with the pinned Triton and with OLDEST_TRITON
	$(PYTEST) $(COMPILATION)
	PYTHONPATH=$<:$(PYTHONPATH) $(PYTEST) $(COMPILATION)

# Installs nothing: a GPU machine may have no network. Packages that are not installed come from PYTHONPATH.
gpu-check: SOURCES := $(CURDIR) $(addprefix $(CURDIR)/,crds kernels stores checkpointer operator trainer cli tests/support)
gpu-check: export PYTHONPATH := $(subst $(eval) ,:,$(SOURCES) $(GIVEN_PYTHONPATH))
gpu-check: RESULTS ?= runs/gpu-check.json
gpu-check: ## check kernels, exactness, cuts and speed on this machine's GPU within 8 minutes; without one, kernels in Triton's interpreter
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_check --out $(RESULTS)

soak: SCHEDULES ?= 5000
soak: MESSAGES ?= 10000
soak: $(INSTALLED) ## run SCHEDULES random snapshot fault schedules and MESSAGES damaged messages of ranks, from SEED, and repeat others
	SOAK_MESSAGES=$(MESSAGES) SOAK_SEED=$(SEED) $(PYTEST) -s --show-capture=no tests/unit/trainer/embedding/test_damaged_messages.py
	SOAK_SCHEDULES=$(SCHEDULES) SOAK_SEED=$(SEED) $(PYTEST) -s --show-capture=no tests/unit/checkpointer/test_soak.py
	SOAK=1 $(PYTEST) -m soak -n $(SLOW_WORKERS) --dist loadfile --no-loadscope-reorder --timeout=7200 tests/unit tests/integration

faults: SCHEDULES ?= 500
faults: $(INSTALLED) ## run SCHEDULES random operator fault schedules on a real control plane, from SEED
	FAULT_SCHEDULES=$(SCHEDULES) FAULT_SEED=$(SEED) $(PYTEST) -s --show-capture=no tests/integration/operator/test_fault_schedules.py

contended: TRIALS ?= 300
contended: GANG_SCHEDULERS ?= native kueue
contended: $(INSTALLED) ## let gangs of 64 pods contend for room for one, TRIALS times from SEED for each of GANG_SCHEDULERS
	GANG_SCHEDULERS="$(GANG_SCHEDULERS)" GANG_TRIALS=$(TRIALS) GANG_SEED=$(SEED) $(PYTEST) -s --show-capture=no --timeout=0 tests/integration/operator/gangs/test_contended_gangs.py

lint: $(INSTALLED) ## check formatting, lints, types, import contracts and generated files
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

dashboards: $(INSTALLED) ## draw the dashboards into docs/images from a Prometheus that watches jobs for 8 minutes
	DASHBOARD_IMAGES=docs/images $(PYTEST) tests/integration/operator/test_dashboards.py

bench: $(INSTALLED) ## measure against peers (BENCH=--quick for a trial; needs fio, and root for memory limits)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps torchrec==1.8.0
	$(BIN)/python -m benchmarks.training $(BENCH)
	$(BIN)/python -m benchmarks.tiers $(BENCH)
	$(BIN)/python -m benchmarks.memory_limit $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.snapshots $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.quantizing $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.embeddings $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.id_quality $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.dim_quality $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.queueing $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.scm_nodes $(if $(filter --quick,$(BENCH)),--only F1)
	$(BIN)/python -m benchmarks.operator_scale $(filter --quick,$(BENCH))
	$(BIN)/python -m benchmarks.scale $(filter --quick,$(BENCH))

lock: ## rewrite constraints.txt (needs uv)
	{ echo "# Exact versions that were tested together. Made by: make lock"; \
	uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --extra dev --extra bench pyproject.toml; } \
	> constraints.new && mv constraints.new constraints.txt

images: BASE ?= docker.io/library/python:3.12-slim-bookworm
images: TRAINER_VARIANT ?= cpu
images: $(INSTALLED) ## build the changed container images (needs root and buildah; BASE=debian builds the base from Debian packages)
	$(BIN)/python -m dlrm_cluster.project_images build --base $(BASE) --variant $(TRAINER_VARIANT)

release: BASE ?= docker.io/library/python:3.12-slim-bookworm
release: VARIANTS ?= cpu
release: $(INSTALLED) ## build wheel, chart, images, SBOMs and checksums into dist/<version> (root; REGISTRY=host/path: push; VARIANTS="cpu cuda")
	$(BIN)/python hack/release.py --base $(BASE) --variants $(VARIANTS) $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(OUT),--out $(OUT))

e2e: ## run the tests with real pods, on the cluster of KUBECONFIG or on a node created for them (root)
	@$(MAKE) --no-print-directory --jobs $(INSTALLED) $(if $(KUBECONFIG),,node-programs node-images)
	$(PYTEST) -m e2e

# Parts of the test node. A failure here shows up again in the tests that need the part.
node-programs:
	-@$(PYTHON) -m dlrm_cluster build etcd kubernetes-1.35 node coredns versitygw helm
node-images:
	-@$(PYTHON) -m dlrm_cluster.project_images build

smoke: $(INSTALLED) ## run the part of e2e that CI runs: install the chart, run one job, two drills
	$(PYTEST) -m smoke tests/e2e

cluster-up: $(INSTALLED) ## start a Kubernetes control plane built from Go modules (NODE=1: with a node that runs pods; root)
	$(BIN)/python -m dlrm_cluster up $(if $(NODE),--node)

cluster-down: $(INSTALLED) ## stop it
	$(BIN)/python -m dlrm_cluster down

clean: ## remove build and test artifacts
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
