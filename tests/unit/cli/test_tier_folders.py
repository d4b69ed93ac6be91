"""Folders of slower tiers: made where a plan needs them, refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_api.errors import DeviceError, NoPermissionError
from dlrm_api.job import parse_job
from dlrm_api.names import Env
from dlrm_api.plan import Plan, RankPlan
from dlrm_cli.checks import make_tier_folders
from dlrm_cli.run.appdef import LocalGang, free_ports
from dlrm_cli.run.workdir import WorkDir


def plan(**bytes_per_tier: int) -> Plan:
    rank = RankPlan(rank=0, node=0, bytes_per_tier={"ddr": 1, **bytes_per_tier})
    return Plan(world_size=1, processes_per_node=1, ranks=(rank,), tables=(), handoff_bytes=(1,))


def test_a_folder_is_made_for_each_tier_that_lies_in_files(tmp_path: Path) -> None:
    make_tier_folders(tmp_path / "tiers", plan(scm=5, block=7))

    assert sorted(path.name for path in (tmp_path / "tiers").iterdir()) == ["block", "scm"]


def test_a_plan_in_ddr_alone_needs_no_folder(tmp_path: Path) -> None:
    make_tier_folders(tmp_path / "tiers", plan())

    assert list(tmp_path.iterdir()) == []


def test_a_full_device_is_reported_with_the_missing_bytes(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=rf"{tmp_path}/scm: .*{2**60} bytes"):
        make_tier_folders(tmp_path, plan(block=1, scm=2**60 - 1))


def test_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DeviceError):
        make_tier_folders(tmp_path / "tiers", plan(scm=1, block=2**60))

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(NoPermissionError, match=r"file/block: .*choose another folder with --tier-dir"):
        make_tier_folders(tmp_path / "file", plan(block=1))


def test_every_process_gets_tier_folder_and_secret(tmp_path: Path) -> None:
    table = {"name": "C1", "rows": 10, "dim": 4}
    model = {"tables": [table], "interaction": "dcn"}
    spec = {"model": model, "data": {"format": "synthetic"}, "checkpoint": {"uri": "file:///s"}}
    job = parse_job({"metadata": {"name": "job"}, "spec": spec})
    workdir = WorkDir(tmp_path)
    workdir.prepare_attempt(1, 1)
    gang = LocalGang(job=job, workdir=workdir, attempt=1, ports=free_ports(1), tier_dir=tmp_path / "t")

    roles = gang.app_def().roles

    assert [role.name for role in roles] == ["trainer-0", "checkpointer-0"]
    assert [role.env[Env.TIER_DIR] for role in roles] == [str(tmp_path / "t")] * 2
    assert [role.env[Env.GANG_SECRET] for role in roles] == [gang.secret] * 2
    assert len(gang.secret) == 64
    assert gang.secret not in repr(gang)
