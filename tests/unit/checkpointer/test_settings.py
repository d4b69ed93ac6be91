"""Test reading the job's document and the environment."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.errors import UsageError
from dlrm_api.names import Env
from dlrm_checkpointer.settings import read_settings


def written(folder: Path, **parts: dict[str, Any]) -> Path:
    spec: dict[str, dict[str, Any]] = {
        "model": {"interaction": "dcn", "topMlp": [1], "tables": [{"name": "t", "rows": 9, "dim": 8}]},
        "data": {"format": "synthetic"},
        "checkpoint": {"uri": "s3://bucket/job"},
    }
    for name, part in parts.items():
        spec[name] = spec.get(name, {}) | part
    job = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "metadata": {"name": "job"}, "spec": spec}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def test_the_job_says_how_snapshots_are_made_and_kept(tmp_path: Path) -> None:
    checkpoint = {
        "policy": "consecutive",
        "bits": "auto",
        "baseEvery": "6h",
        "maxChain": 5,
        "maxRestoreTime": "10m",
        "restoreBandwidth": "1G",
        "retention": {"keepLast": 2, "keepEvery": "1d"},
        "publish": {"uri": "file:///deltas", "bits": 8},
        "s3": {"encryption": "aws:kms", "kmsKeyId": "alias/snapshots"},
    }
    job = written(tmp_path, checkpoint=checkpoint, trainer={"replicas": 3, "processesPerReplica": 2})

    settings = read_settings(job, {Env.HANDOFF_DIR: "/handoff", Env.REPLICA: "1"})

    found = settings.checkpoint
    assert (settings.pods, settings.ranks) == (3, range(2, 4))
    assert (found.policy, found.bits, found.max_chain) == ("consecutive", "auto", 5)
    assert (found.base_every, found.max_restore_time, found.restore_bandwidth) == (21_600, 600, 10**9)
    assert (found.retention.keep_last, found.retention.keep_every) == (2, 86_400)
    assert found.publish is not None
    assert (found.publish.bits, found.publish.keep_last) == (8, 100)
    assert settings.options.s3 is found.s3


def test_snapshots_are_exact_increments_by_default(tmp_path: Path) -> None:
    settings = read_settings(written(tmp_path), {Env.HANDOFF_DIR: "/handoff"})

    found = settings.checkpoint
    assert (found.policy, found.bits, found.max_chain, found.restore_bandwidth) == ("intermittent", 32, 24, 200_000_000)
    assert (found.base_every, found.max_restore_time, found.restore_from, found.publish) == (None, None, None, None)
    assert found.s3.encryption == "none"


@pytest.mark.parametrize(("checkpoint", "expected"), [({}, 7), ({"expectedRestores": 0}, 0)])
def test_the_restart_budget_is_expected_where_no_restores_are_given(
    tmp_path: Path, checkpoint: dict[str, int], expected: int
) -> None:
    job = written(tmp_path, checkpoint=checkpoint, lifecycle={"restart": {"maxRestarts": 7}})

    assert read_settings(job, {Env.HANDOFF_DIR: "/handoff"}).expected_restores == expected


def test_a_missing_hand_off_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"DLRM_HANDOFF_DIR is not set"):
        read_settings(written(tmp_path), {})
