"""Each contract is seen to break on a planted import: a contract that cannot break guards nothing."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("crds", "kernels", "stores", "operator", "trainer", "checkpointer", "cli")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PLANTED = {
    "the API is imported by everyone and so imports nobody": ("crds/dlrm_api", "numpy"),
    "a plan is a pure function: the planner reaches no I/O, clock, random source or other package of ours": (
        "operator/dlrm_planner",
        "time",
    ),
    "the operator's packages know only those below them": (
        "operator/dlrm_operator/manifests",
        "dlrm_operator.reconcile.state",
    ),
    "every package is read in one direction: no module imports what imports it": (
        "operator/dlrm_operator/manifests",
        "dlrm_operator.reconcile.state",
    ),
    "what the operator decides is a function of what it knows: no I/O, no clock, no event loop": (
        "operator/dlrm_operator/reconcile",
        "time",
    ),
    "the operator talks to the data plane through manifests alone": ("operator/dlrm_operator", "dlrm_trainer"),
    "the checkpointer runs against any folder of staged rows, without Kubernetes or a trainer": (
        "checkpointer/dlrm_checkpointer",
        "kubernetes",
    ),
    "the sidecar loads no more than it needs: numpy and its stores' clients": (
        "checkpointer/dlrm_checkpointer",
        "pyarrow",
    ),
    "model, rows and data know nothing of the loop that trains them": (
        "trainer/dlrm_trainer/embedding",
        "dlrm_trainer.checkpointing.control",
    ),
    "the checkpointer's packages know only those below them": (
        "checkpointer/dlrm_checkpointer/codec",
        "dlrm_checkpointer.read.restore",
    ),
    "the trainer imports only the checkpointer's public face": (
        "trainer/dlrm_trainer",
        "dlrm_checkpointer.read.restore",
    ),
    "the trainer executes a plan and never makes one, and knows no Kubernetes": (
        "trainer/dlrm_trainer",
        "dlrm_planner",
    ),
    "the trainer's packages know only those below them": ("trainer/dlrm_trainer/distributed", "dlrm_trainer.train"),
    "stores move bytes and know neither arrays nor the programs that use them": ("stores/dlrm_stores", "numpy"),
    "kernels are functions over arrays: no package of ours, no torch": ("kernels/dlrm_kernels", "torch"),
    "dlrmctl reads data, traces ids and measures with the trainer's code, and starts the rest as programs": (
        "cli/dlrm_cli",
        "dlrm_trainer.rank",
    ),
    "one module touches Kubernetes' API": ("cli/dlrm_cli", "kubernetes"),
    "one module touches S3": ("trainer/dlrm_trainer", "boto3"),
    "one module touches fbgemm": ("trainer/dlrm_trainer", "fbgemm_gpu"),
    "Triton compiles for GPUs alone: jobs on hosts do not load it": ("trainer/dlrm_trainer", "triton"),
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "pyproject.toml", root)
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(root / folder) for folder in SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copied_sources(tmp_path: Path) -> Path:
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_every_contract_has_a_planted_import() -> None:
    assert {contract["name"] for contract in CONTRACTS} == set(PLANTED)


@pytest.mark.slow
def test_the_sources_keep_every_contract(copied_sources: Path) -> None:
    result = lint_imports(copied_sources)

    assert result.returncode == 0, result.stdout
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(copied_sources: Path, contract: str) -> None:
    package, forbidden = PLANTED[contract]
    (copied_sources / package / "planted.py").write_text(f"import {forbidden}\n")

    result = lint_imports(copied_sources)

    assert result.returncode == 1
    assert f"{contract} BROKEN" in " ".join(result.stdout.split())
