"""``dlrmctl run`` plans for the memory that is free on this machine, once that of an earlier run is."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import psutil
import pytest
import yaml

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.job import DLRMJob
from dlrm_cli import app
from dlrm_cli.checks import this_machine
from dlrm_cli.run import command
from dlrm_cli.run.workdir import WorkDir, has_processes


def test_a_plan_leaves_what_is_in_use_and_some_to_the_system() -> None:
    memory = psutil.virtual_memory().total

    assert this_machine(1).spec.tiers.ddr.bytes <= round(0.95 * memory)
    assert this_machine(4).spec.tiers.ddr.bytes <= round(0.95 * memory / 4)


def test_memory_of_an_earlier_run_is_available_once_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"tables": [{"name": name, "rows": 9, "dim": 8} for name in "tu"], "topMlp": [1]},
            "data": {"format": "synthetic"},
            "checkpoint": {"uri": (tmp_path / "snapshots").as_uri()},
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    root, held = tmp_path / "work", []

    def plan(job: DLRMJob, *_: object) -> None:
        held.append(has_processes(root))
        raise InfeasiblePlanError("spec.trainer", [f"{job.metadata.name} is not to run"])

    monkeypatch.setattr(command, "_plan", plan)
    assert not has_processes(root)
    root.mkdir()
    with WorkDir(root).process_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert has_processes(root)
        threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        app.main(["run", str(tmp_path / "job.yaml"), "--workdir", str(root)])

    assert held == [False]
