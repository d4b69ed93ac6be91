"""Run inside a built image: import its packages, look for what may not be there; prints one line of JSON.

The argument is JSON: ``packages`` of the project, all of whose modules are imported; names that are ``absent``; and
``device``: whether the image needs a GPU to be imported whole.
"""

import errno
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NEEDS_DEVICE = "dlrm_trainer"
"""Imports kernels that load on a machine with a GPU alone, in the variant for GPUs."""


def modules(package: str) -> Iterator[str]:
    """Names of a package's modules, but for programs."""
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            yield module.name


def refuses_files(folder: str) -> bool:
    """Return whether the directory is on a read-only file system."""
    try:
        Path(folder, "probe").touch()
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def cache_misses() -> int:
    """Loops that had to be compiled to code and decode some rows at every number of bits that packs codes."""
    from dlrm_checkpointer.codec.rows import code_rows, decode_rows
    from dlrm_checkpointer.types import ShardId, ShardRows
    from dlrm_kernels import packing, quantize

    shard = ShardId(table="t", row_start=0, row_end=9, column_start=0, column_end=8)
    draw = np.random.default_rng(0)
    rows = draw.normal(0, 1, (9, 8)).astype(np.float32)
    rows.flags.writeable = False  # as those of a hand-off folder
    piece = ShardRows(shard=shard, row_ids=np.arange(9), rows=rows, state=np.ones((9, 1), np.float32))
    for bits in (2, 3, 4, 8):
        for coded in code_rows(piece, bits):
            decode_rows(coded)
    loops: tuple[Any, ...] = (quantize.code_rows, packing.decode)
    return sum(count for loop in loops for count in loop.stats.cache_misses.values())


def main(packages: list[str], absent: list[str], device: bool) -> None:
    """Print what was found, or end with the first thing that does not hold."""
    assert os.getuid() == os.getgid() == 65_532, (os.getuid(), os.getgid())
    assert not Path("/run/secrets").exists() or not any(Path("/run/secrets").iterdir()), "a secret of the build is left"
    for folder in ("/", "/opt/dlrm/project", sys.prefix):
        assert refuses_files(folder), f"{folder} can be written"
    there = [name for name in absent if importlib.util.find_spec(name)]
    assert not there, f"belongs to other packages: {there}"
    names = [name for package in packages for name in modules(package) if not (device and package == NEEDS_DEVICE)]
    for name in names:
        importlib.import_module(name)
    missed = cache_misses() if "dlrm_checkpointer" in packages else 0
    assert missed == 0, f"{missed} loops were compiled that the image should hold"
    version = importlib.metadata.version("dlrm-operator")
    print(json.dumps({"version": version, "modules": len(names), "cache_misses": missed}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
