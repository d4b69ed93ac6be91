"""How fast data is read: ``python -m benchmarks.reading [--quick] [--only PATTERN] [--data-dir FOLDER]``.

Ours are batches in training order, ids turned into rows, as a rank gets them; theirs is the same data, decoded. Where
the order is ``none``, ours are columns too, decoded by as many threads as the reader has for it.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.decoders import DECODERS, FILES_ALONE, Decoded, Origin
from benchmarks.decoders import Columns as Peer
from benchmarks.loopback import Service, served
from benchmarks.measure import Pairs, report, tell
from benchmarks.samples import DENSE, IDS, write_samples
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.model import TableSpec
from dlrm_api.names import Env
from dlrm_stores.data_files import LocalFile
from dlrm_trainer.data import open_reader
from dlrm_trainer.data.batch_builder import hashing_of
from dlrm_trainer.data.files import LOCAL_THREADS
from dlrm_trainer.data.index import index_files
from dlrm_trainer.data.parquet import Columns, ParquetSource, column_indexer

BUCKET = "samples"
VIRTUAL_SHARDS = 8
ORDERS = {"file": 0, "shuffled": 65_536}
"""Rows of a shuffle window."""
COLUMNS_ALONE = "none"
"""In place of an order: what a Parquet file's columns take to decode, before any batch is made of them."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe one line."""

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
        """Return the name that ``--only`` matches."""
        return f"{self.format}/{self.uri}/{self.order}/{self.against}"


def job_spec(format_: str, origin: Origin, window_rows: int, *, hashed: bool) -> DLRMJobSpec:
    """Return a job that reads 13 dense values and 26 ids per sample in batches of 2,048."""
    options = {"rows": 100_000, "embedding": {"hash": "mix"}} if hashed else {"rows": 2**33}
    tables = [{"name": name, "dim": 4, **options} for name in IDS]
    data: dict[str, Any] = {"format": format_, "train": {"uris": [origin.uri]}, "virtualShards": VIRTUAL_SHARDS}
    data["shuffle"] = {"windowRows": window_rows}
    if origin.service is not None:
        data["s3"] = {"endpoint": origin.service.endpoint, "region": origin.service.region}
    spec = {
        "model": {"denseFeatures": list(DENSE), "bottomMlp": [4], "topMlp": [1], "tables": tables},
        "data": data,
        "checkpoint": {"uri": "file:///unused"},
    }
    return parse_job({"metadata": {"name": "reading"}, "spec": spec}).spec


def check_equal(format_: str, origin: Origin, decoded: Decoded) -> None:
    """Compare an epoch's samples with the peer's rows.

    Raises:
        AssertionError: they differ.
    """
    with closing(open_reader(job_spec(format_, origin, ORDERS["shuffled"], hashed=False), "train", 0, 1)) as reader:
        batches = list(reader.iterate(0, reader.batches_per_epoch))
    rows = np.concatenate([batch.sample_ids.numpy() for batch in batches])
    where = np.argsort(rows)
    assert (rows[where] == np.arange(decoded.labels.size)).all()

    def ours(take: Callable[[Any], NDArray[Any]], axis: int = 0) -> NDArray[Any]:
        return np.take(np.concatenate([take(batch) for batch in batches], axis=axis), where, axis=axis)

    assert (ours(lambda batch: batch.labels.numpy()) == decoded.labels).all()
    assert (ours(lambda batch: batch.dense.numpy()) == decoded.dense.T).all()
    assert (ours(lambda batch: batch.values.numpy().reshape(len(IDS), -1), axis=1) == decoded.ids).all()


def read_epoch(spec: DLRMJobSpec) -> int:
    """Count the samples of all batches, dropping each at once."""
    with closing(open_reader(spec, "train", 0, 1)) as reader:
        return sum(batch.labels.numel() for batch in reader.iterate(0, reader.batches_per_epoch))


def decode_columns(path: str) -> int:
    """Decode all columns of a Parquet file, each row group of which is let go of at once."""
    hashings = [hashing_of(TableSpec(name=name, rows=2**33, dim=4), 0) for name in IDS]
    columns = Columns(label="label", dense=DENSE, bags=IDS, weights=[None] * len(IDS), hashings=hashings)
    files, indexer = ([LocalFile(Path(path))], column_indexer(columns))
    source = ParquetSource(files, index_files(indexer, files, ""), columns, budget_bytes=0)
    with ThreadPoolExecutor(LOCAL_THREADS) as pool:
        return sum(pool.map(lambda number: int(source.row_group(number).num_rows), range(source.num_row_groups)))


def measure_lines(format_: str, origin: Origin, repeats: int, chosen: Callable[[Setting], bool]) -> None:
    """Print the lines of one file."""
    uri = "file" if origin.service is None else "s3"
    peers = {name: decode for name, decode in DECODERS[format_].items() if _known(name)}
    if origin.service is not None:
        peers = {name: decode for name, decode in peers.items() if name not in FILES_ALONE}
    orders = [*ORDERS, *([COLUMNS_ALONE] if (format_, uri) == ("parquet", "file") else [])]
    wanted = [Setting(format=format_, uri=uri, order=order, against=name) for order in orders for name in peers]
    wanted = [setting for setting in wanted if chosen(setting)]
    for name in {setting.against for setting in wanted}:
        check_equal(format_, origin, peers[name](origin).contents())
        tell(f"{format_}, {uri}: {name} and we read the same")
    for order in orders:
        settings = [setting for setting in wanted if setting.order == order]
        if not settings:
            continue
        pairs = {setting.against: Pairs() for setting in settings}
        ours = functools.partial(decode_columns, origin.uri)
        if order != COLUMNS_ALONE:
            ours = functools.partial(read_epoch, job_spec(format_, origin, ORDERS[order], hashed=True))
        for taken in alternated(ours, origin, {name: peers[name] for name in pairs}, repeats):
            for name, pair in pairs.items():
                pair.add(taken["ours"], taken[name])
        for setting in settings:
            report(setting, "rows_per_s", pairs[setting.against])


def alternated(
    ours: Callable[[], int], origin: Origin, peers: Mapping[str, Callable[[Origin], Peer]], repeats: int
) -> Iterator[dict[str, float]]:
    """Rows a second of each side by turns, the order turned round each time; the first repeat warms up."""
    sides: dict[str, Callable[[], int]] = {"ours": ours}
    sides |= {name: functools.partial(_decoded_rows, decode, origin) for name, decode in peers.items()}
    for repeat in range(repeats + 1):
        taken = {}
        for name in sides if repeat % 2 == 0 else reversed(sides):
            began = time.perf_counter()
            rows = sides[name]()
            taken[name] = rows / (time.perf_counter() - began)
        if repeat:
            yield taken


def _decoded_rows(decode: Callable[[Origin], Peer], origin: Origin) -> int:
    return decode(origin).num_rows


def upload(path: Path, service: Service) -> Origin:
    """Put a file into the bucket."""
    service.store().put(path.name, path.read_bytes())
    return Origin(f"s3://{service.bucket}/{path.name}", service)


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
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    rows, repeats = (50_000, 2) if options.quick else (options.rows, options.repeats)
    missing = [name for name in ("polars", "duckdb") if not _known(name)]
    with tempfile.TemporaryDirectory() as name, served(Path(name), BUCKET) as service:
        folder = Path(name)
        if service:
            os.environ[Env.DATA_CREDENTIALS_DIR] = str(service.keys)
        for format_ in DECODERS:
            tell(f"{format_}: writing {rows:,} rows")
            path = write_samples(format_, folder, rows, options.data_dir)
            origins = [Origin(str(path))] + ([upload(path, service)] if service else [])
            for origin in origins:
                measure_lines(format_, origin, repeats, lambda setting: fnmatch.fnmatch(setting.name, options.only))
        missing += [] if service else ["s3"]
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
