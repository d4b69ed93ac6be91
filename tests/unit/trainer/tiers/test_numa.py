"""NUMA nodes of mounts, on trees laid out as the kernel does."""

import logging
import mmap
from pathlib import Path

import numpy as np
import pytest

from dlrm_trainer.embedding.tiers.memory import bind, memory_nodes, node_of_folder, processors_near

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 27 259:3 / /mnt/scm rw,relatime shared:7 - ext4 /dev/pmem1 rw,dax=always
32 27 0:40 / /mnt/cxl rw,relatime - tmpfs cxl rw,size=64g,mpol=bind:3,inode64
33 27 0:41 / /mnt/cxl/two rw,relatime - tmpfs cxl rw,mpol=bind:2-3
34 27 0:42 / /mnt/with\040space rw,relatime - tmpfs cxl rw,mpol=prefer=static:1
35 27 0:43 / /mnt/plain rw,relatime - tmpfs tmpfs rw,size=1g
36 27 0:44 / /mnt/hidden rw,relatime - tmpfs tmpfs rw,mpol=bind:1
37 27 259:9 / /mnt/hidden rw,relatime - ext4 /dev/nvme0n1 rw
38 27 259:4 / /mnt/anywhere rw,relatime - xfs /dev/pmem2p1 rw,dax
"""


@pytest.fixture
def mountinfo(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    devices = {
        "259:3": ("ndbus0/region1/namespace1.0/block/pmem1", "ndbus0/region1/namespace1.0", 1),
        "259:4": ("ndbus0/region2/namespace2.0/block/pmem2/pmem2p1", "ndbus0/region2", -1),
        "259:9": ("pci0000:00/0000:00:1f.0/nvme/nvme0/nvme0n1", "pci0000:00/0000:00:1f.0", 1),
    }
    (root / "dev/block").mkdir(parents=True)
    for number, (device, parent, node) in devices.items():
        (root / "devices" / device).mkdir(parents=True)
        (root / "devices" / parent / "numa_node").write_text(f"{node}\n")
        (root / "dev/block" / number).symlink_to(f"../../devices/{device}")
    nodes = {0: ("0-3,8", "10 20 17 30"), 1: ("4-7", "20 10 28 17"), 2: ("", "17 28 10 40"), 3: ("", "30 17 40 10")}
    for node, (processors, distances) in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")
        (folder / "distance").write_text(f"{distances}\n")
    (root / "devices/system/node/online").write_text("0-3\n")
    (root / "devices/system/node/has_memory").write_text("0,2-3\n")
    return root


@pytest.mark.parametrize(
    ("folder", "node"),
    [
        ("/mnt/scm/rank-0", 1),
        ("/mnt/cxl", 3),
        ("/mnt/cxl/one/scm", 3),
        ("/mnt/cxl/two", None),
        ("/mnt/with space/scm", 1),
        ("/mnt/plain", None),
        ("/mnt/hidden", None),
        ("/mnt/anywhere", None),
        ("/mnt/scm-not", None),
        ("/home", None),
    ],
)
def test_a_mount_says_which_nodes_memory_it_is(folder: str, node: int | None, mountinfo: Path, sysfs: Path) -> None:
    assert node_of_folder(Path(folder), mountinfo, sysfs) == node


@pytest.mark.parametrize(
    ("node", "near"), [(0, {0, 1, 2, 3, 8}), (1, {4, 5, 6, 7}), (2, {0, 1, 2, 3, 8}), (3, {4, 5, 6, 7})]
)
def test_memory_without_processors_is_served_by_the_nearest(node: int, near: set[int], sysfs: Path) -> None:
    assert processors_near(node, sysfs) == near


def test_nodes_with_memory_are_counted(sysfs: Path, tmp_path: Path) -> None:
    assert memory_nodes(sysfs) == (0, 2, 3)
    assert memory_nodes(tmp_path / "absent") == ()


def test_this_hosts_own_mounts_can_be_read(tmp_path: Path) -> None:
    assert node_of_folder(tmp_path) is None or node_of_folder(tmp_path) in memory_nodes()


def test_pages_hold_what_is_stored_whether_or_not_binding_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    with caplog.at_level(logging.WARNING):
        bound = bind(memory.ctypes.data, 1 << 20, 0)
        refused = bind(memory.ctypes.data, 1 << 20, 1_000)

    memory[:] = 7

    assert memory.sum(dtype=np.int64) == 7 << 20
    assert not refused
    assert len(caplog.records) == 2 - bound
