"""How fast data is read: ``python -m benchmarks.reading [--quick] [--only PATTERN] [--data-dir FOLDER]``.

Ours are batches in training order, ids turned into rows, as a rank gets them; theirs is the same data, decoded.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.decoders import DECODERS, Columns, Decoded
from benchmarks.measure import Pairs, report, tell
from benchmarks.samples import DENSE, IDS, write_samples
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_trainer.data import Reader, open_reader

ORDERS = {"file": 0, "shuffled": 65_536}
"""Rows of a shuffle window."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Of one line."""

    format: str
    uri: str
    order: str
    against: str
    benchmark: ClassVar[str] = "reading"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"format": self.format, "uri": self.uri, "order": self.order}

    @property
    def name(self) -> str:
        """For choosing lines by a pattern."""
        return f"{self.format}/{self.uri}/{self.order}/{self.against}"


def job_spec(format_: str, path: Path, window_rows: int, *, hashed: bool) -> DLRMJobSpec:
    """A job that reads 13 dense values and 26 ids a sample, 2,048 samples a batch."""
    options = {"rows": 100_000, "embedding": {"hash": "mix"}} if hashed else {"rows": 2**33}
    tables = [{"name": name, "dim": 4, **options} for name in IDS]
    data = {"format": format_, "train": {"uris": [str(path)]}, "shuffle": {"windowRows": window_rows}}
    spec = {
        "model": {"denseFeatures": list(DENSE), "bottomMlp": [4], "topMlp": [1], "tables": tables},
        "data": data,
        "checkpoint": {"uri": "file:///unused"},
    }
    return parse_job({"metadata": {"name": "reading"}, "spec": spec}).spec


def check_equal(format_: str, path: Path, decoded: Decoded) -> None:
    """Compare an epoch's samples with the peer's rows.

    Raises:
        AssertionError: they differ.
    """
    with closing(open_reader(job_spec(format_, path, ORDERS["shuffled"], hashed=False), "train", 0, 1)) as reader:
        batches = list(reader.iterate(0, reader.batches_per_epoch))
    rows = np.concatenate([batch.sample_ids.numpy() for batch in batches])
    where = np.argsort(rows)
    assert (rows[where] == np.arange(decoded.labels.size)).all()

    def ours(take: Callable[[Any], NDArray[Any]], axis: int = 0) -> NDArray[Any]:
        return np.take(np.concatenate([take(batch) for batch in batches], axis=axis), where, axis=axis)

    assert (ours(lambda batch: batch.labels.numpy()) == decoded.labels).all()
    assert (ours(lambda batch: batch.dense.numpy()) == decoded.dense.T).all()
    assert (ours(lambda batch: batch.values.numpy().reshape(len(IDS), -1), axis=1) == decoded.ids).all()


def read_epoch(reader: Reader) -> int:
    """Samples of all batches, each of which is let go of at once."""
    return sum(batch.labels.numel() for batch in reader.iterate(0, reader.batches_per_epoch))


def measure_lines(format_: str, path: Path, repeats: int, chosen: Callable[[Setting], bool]) -> None:
    """Print the lines of one format."""
    peers = {name: decode for name, decode in DECODERS[format_].items() if _known(name)}
    for name, decode in peers.items():
        check_equal(format_, path, decode(path).contents())
        tell(f"{format_}: {name} and we read the same")
    for order, window_rows in ORDERS.items():
        settings = [Setting(format=format_, uri="file", order=order, against=name) for name in peers]
        settings = [setting for setting in settings if chosen(setting)]
        pairs = {setting.against: Pairs() for setting in settings}
        if not pairs:
            continue
        spec = job_spec(format_, path, window_rows, hashed=True)
        for taken in alternated(spec, path, {name: peers[name] for name in pairs}, repeats):
            for name, pair in pairs.items():
                pair.add(taken["ours"], taken[name])
        for setting in settings:
            report(setting, "rows_per_s", pairs[setting.against])


def alternated(
    spec: DLRMJobSpec, path: Path, peers: Mapping[str, Callable[[Path], Columns]], repeats: int
) -> Iterator[dict[str, float]]:
    """Rows a second of each side by turns, the order turned round each time; the first repeat warms up."""

    def ours() -> int:
        with closing(open_reader(spec, "train", 0, 1)) as reader:
            return read_epoch(reader)

    sides: dict[str, Callable[[], int]] = {"ours": ours}
    sides |= {name: functools.partial(_decoded_rows, decode, path) for name, decode in peers.items()}
    for repeat in range(repeats + 1):
        taken = {}
        for name in sides if repeat % 2 == 0 else reversed(sides):
            began = time.perf_counter()
            rows = sides[name]()
            taken[name] = rows / (time.perf_counter() - began)
        if repeat:
            yield taken


def _decoded_rows(decode: Callable[[Path], Columns], path: Path) -> int:
    return decode(path).num_rows


def _known(name: str) -> bool:
    try:
        __import__(name)
    except ModuleNotFoundError:
        tell(f"NOT MEASURED: {name} is not installed: pip install 'dlrm-operator[bench]'")
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows: does it run here?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="FORMAT/URI/ORDER/AGAINST")
    parser.add_argument("--data-dir", type=Path, help="folder with criteo-1k.tsv: its lines are drawn from")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    rows, repeats = (50_000, 2) if options.quick else (options.rows, options.repeats)
    missing = [name for name in ("polars", "duckdb") if not _known(name)]
    with tempfile.TemporaryDirectory() as folder:
        for format_ in DECODERS:
            tell(f"{format_}: writing {rows:,} rows")
            path = write_samples(format_, Path(folder), rows, options.data_dir)
            measure_lines(format_, path, repeats, lambda setting: fnmatch.fnmatch(setting.name, options.only))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
