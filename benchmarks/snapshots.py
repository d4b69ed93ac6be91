"""What snapshots cost: ``python -m benchmarks.snapshots [--quick] [--only PART]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import restoring, stored_bytes, uploading
from benchmarks.loopback import Service, served
from benchmarks.measure import Line

BUCKET = "snapshots"
PARTS: dict[str, Callable[[Service, bool], Iterator[Line]]] = {
    "bytes": stored_bytes.lines,
    "restoring": restoring.lines,
    "uploading": uploading.lines,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run here?")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args(arguments)
    wanted = [options.only] if options.only else list(PARTS)
    with tempfile.TemporaryDirectory() as name, served(Path(name), BUCKET) as service:
        if service is None:
            return 1
        for part in wanted:
            for line in PARTS[part](service, options.quick):
                line.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
