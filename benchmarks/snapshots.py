"""What snapshots cost: ``python -m benchmarks.snapshots [--quick] [--only PART]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import quantizing, restores, restoring, stalling, stored_bytes, uploading
from benchmarks.loopback import Service, served
from benchmarks.measure import Line

BUCKET = "snapshots"


def coding_lines(quick: bool) -> Iterator[Line]:
    """Those of ``quantizing``, which has torch use one thread."""
    threads = torch.get_num_threads()
    for line in quantizing.lines(quick):
        yield Line(setting=line.setting, metric=line.metric, pairs=line.pairs, measured=line.measured)
    torch.set_num_threads(threads)


def stall_lines(quick: bool) -> Iterator[Line]:
    """Those of ``stalling``."""
    for line in stalling.lines(quick):
        yield Line(setting=line.setting, metric=stalling.METRIC, pairs=line.pairs, measured=line.measured)


LOCAL: dict[str, Callable[[bool], Iterator[Line]]] = {
    "stalling": stall_lines,
    "quantizing": coding_lines,
    "restores": restores.lines,
}
STORED: dict[str, Callable[[Service, bool], Iterator[Line]]] = {
    "bytes": stored_bytes.lines,
    "restoring": restoring.lines,
    "uploading": uploading.lines,
    "slowed": uploading.slow_lines,
}
"""Parts that need an S3 server."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run here?")
    parser.add_argument("--only", choices=[*STORED, *LOCAL], help="one part")
    options = parser.parse_args(arguments)
    wanted = [options.only] if options.only else [*STORED, *LOCAL]
    missing = False
    for part in wanted:
        if part in LOCAL:
            for line in LOCAL[part](options.quick):
                line.show()
            continue
        with tempfile.TemporaryDirectory() as name, served(Path(name), BUCKET) as service:
            missing = missing or service is None
            for line in STORED[part](service, options.quick) if service else ():
                line.show()
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
