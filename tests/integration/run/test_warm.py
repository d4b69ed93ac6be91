"""Jobs on machine code that ``dlrm_kernels.warm`` compiled, as in images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrm_kernels import cache

# Compiling every kernel takes minutes where other tests run beside it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
WARM = [sys.executable, "-m", "dlrm_kernels.warm", "--dims", "8", "--features", "3"]
"""Sizes of the tiny job."""


@pytest.fixture(scope="module")
def image() -> Path:
    """A directory that only the warm-up writes to; it outlives the test, so equal sources are compiled once."""
    folder = cache.configure().parents[1] / "dlrm-warmed"
    subprocess.run(WARM, env={**os.environ, "NUMBA_CACHE_DIR": str(folder)}, check=True, capture_output=True)
    return folder


def versions(folder: Path) -> set[str]:
    """Files of machine code, one for each version of a kernel."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*.nbc")}


def test_a_job_on_warmed_kernels_compiles_nothing(local: Any, image: Path, tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "DLRM_KERNEL_CACHE": str(image)}
    document = local.write()
    tables = document["spec"]["model"]["tables"]
    for table, tier in zip(tables, ("ddr", "scm"), strict=False):
        table["pin"] = {"tier": tier}
    trainer = {"processesPerReplica": 2, "tierBudgets": {"ddr": "1Gi", "scm": "1Gi"}}
    local.write(model={"tables": tables}, trainer=trainer, checkpoint={"bits": 4})

    local.done(**environment)
    local.done("--set", "spec.data.epochs=3", **environment)

    [used] = (tmp_path / "cache" / "dlrm-operator").iterdir()
    assert versions(used) == versions(image / "dlrm-operator" / used.name)
