from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from dlrm_api.process import free_memory_bytes, usable_cpus, usable_memory_bytes

CPUS = len(os.sched_getaffinity(0))
MEMORY = psutil.virtual_memory().total


class Machine:
    """Control groups as files of a folder."""

    def __init__(self, folder: Path, groups: str, files: Mapping[str, str]) -> None:
        self.groups, self.mount = folder / "groups", folder / "mount"
        self.groups.write_text(groups)
        for name, text in files.items():
            (self.mount / name).parent.mkdir(parents=True, exist_ok=True)
            (self.mount / name).write_text(text + "\n")

    @property
    def seen(self) -> tuple[int, int]:
        """Bytes of memory, CPUs."""
        return usable_memory_bytes(self.mount, self.groups), usable_cpus(self.mount, self.groups)


def test_a_machine_without_limits_is_all_ours(tmp_path: Path) -> None:
    files = {"memory.max": "max", "cpu.max": "max 100000"}

    assert Machine(tmp_path, "0::/\n", files).seen == (MEMORY, CPUS)


def test_a_machine_without_control_groups_is_all_ours(tmp_path: Path) -> None:
    assert usable_memory_bytes(tmp_path, tmp_path / "none") == MEMORY
    assert usable_cpus(tmp_path, tmp_path / "none") == CPUS


def test_each_group_above_ours_limits_us_too(tmp_path: Path) -> None:
    files = {
        "user.slice/memory.max": "2000",
        "user.slice/cpu.max": "100000 100000",
        "user.slice/run.scope/memory.max": "3000",
        "user.slice/run.scope/cpu.max": "max 100000",
        "user.slice/other.scope/memory.max": "1",
    }

    assert Machine(tmp_path, "0::/user.slice/run.scope\n", files).seen == (2_000, 1)


def test_a_container_of_version_2_finds_its_limit_at_the_root(tmp_path: Path) -> None:
    assert Machine(tmp_path, "0::/\n", {"memory.max": "4096", "cpu.max": "150000 100000"}).seen == (4_096, 1)
    assert Machine(tmp_path, "0::/../../pod\n", {"memory.max": "2048"}).seen[0] == 2_048


@pytest.mark.parametrize("below", ["", "jobs/7/"])
def test_version_1_has_a_folder_for_each_controller(tmp_path: Path, below: str) -> None:
    groups = "4:memory:/jobs/7\n3:cpu,cpuacct:/jobs/7\n2:pids:/\n0::/\n"
    files = {
        f"memory/{below}memory.limit_in_bytes": "8192",
        f"cpu,cpuacct/{below}cpu.cfs_quota_us": "50000",
        f"cpu,cpuacct/{below}cpu.cfs_period_us": "100000",
        "pids/memory.max": "1",
    }

    assert Machine(tmp_path, groups, files).seen == (8_192, 1)


def test_version_1_says_no_limit_by_a_negative_quota_and_a_huge_number(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }

    assert Machine(tmp_path, "4:memory:/\n1:cpu:/\n0::/\n", files).seen == (MEMORY, CPUS)


@pytest.mark.parametrize(
    ("limit", "available", "free"),
    [
        ("max", 0.5, 0.5),
        ("max", 0.999, 0.95),
        ("max", None, 0.95),
        (str(MEMORY // 4), 0.5, 0.25 * 0.95),
        (str(MEMORY // 2), 0.25, 0.25),
    ],
)
def test_memory_in_use_is_not_free_and_a_twentieth_is_kept_back(
    tmp_path: Path, limit: str, available: float | None, free: float
) -> None:
    machine, said = Machine(tmp_path, "0::/\n", {"memory.max": limit}), tmp_path / "meminfo"
    if available is not None:
        said.write_text(f"MemTotal: {MEMORY // 1024} kB\nMemAvailable:   {int(MEMORY * available) // 1024} kB\n")

    assert free_memory_bytes(machine.mount, machine.groups, said) == pytest.approx(MEMORY * free, abs=1_024)
