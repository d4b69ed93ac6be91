"""Make the jobs and the data that ``dlrm_cli.loops`` times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_api.hardware import ReaderFormat
from dlrm_api.job import CRITEO_DENSE, CRITEO_SPARSE, DLRMJobSpec, parse_job
from dlrm_api.wire import Codec
from dlrm_planner import virtual_shards

SMALL = 16
"""Columns of rows in steps of next to no arithmetic."""
ON_GPUS: dict[str, Any] = {"tierBudgets": {"hbm": "64Gi"}, "cache": {"lookahead": 0}}
"""Without a profile a plan is for GPUs if the job asks for their memory."""
READER_FEATURES = len(CRITEO_SPARSE)
READER_SAMPLES, READER_BATCHES, FEW_SAMPLES = 1_024, 16, 64
FILE_ROWS = 4 * READER_SAMPLES
"""Rows of a file for each rank."""


class Read(NamedTuple):
    """Give the shape of batches that a reader makes."""

    samples: int = READER_SAMPLES
    lookups: int = 1
    dense: int = 1


FEW, SINGLE, DENSE, VARYING, SEVERAL = Read(FEW_SAMPLES), Read(), Read(dense=65), Read(lookups=2), Read(lookups=6)
LINE = Read(dense=len(CRITEO_DENSE))
READS: Mapping[ReaderFormat, tuple[Read, ...]] = {
    "synthetic": (FEW, SINGLE, DENSE, VARYING, SEVERAL),
    "parquet": (FEW, SINGLE, DENSE, VARYING, SEVERAL),
    "criteo-tsv": (LINE._replace(samples=FEW_SAMPLES), LINE, LINE, LINE, LINE),
}
"""By format: few samples, one id a bag, many dense values, about two ids a bag, and several. Lines of text have one
shape, and all of their time is that of bags."""


def write_data(folder: Path, data_format: ReaderFormat, rows: int, read: Read) -> Mapping[str, Any]:
    """Return ``spec.data`` that reads a file of such rows; batches of other sizes share the file."""
    file = folder / f"{read.lookups}-{read.dense}.{data_format}"
    if not file.exists():
        WRITERS[data_format](file, rows, read)
    return {"format": data_format, "train": {"uris": [file.as_uri()]}}


def _write_parquet(file: Path, rows: int, read: Read) -> None:
    """Write random rows of a label, dense values, and bags of ``READER_FEATURES`` features."""
    random, varies = np.random.default_rng(0), read.lookups > 1
    columns: dict[str, Any] = {"label": random.integers(0, 2, rows)}
    columns |= {f"I{number}": random.random(rows, np.float32) for number in range(1, 1 + read.dense)}
    for number in range(1, 1 + READER_FEATURES):
        sizes = random.integers(0, 2 * read.lookups, rows, endpoint=True) if varies else np.ones(rows, np.int64)
        ids = random.integers(0, 2**40, int(sizes.sum()))
        columns[f"C{number}"] = pa.ListArray.from_arrays(np.append(0, np.cumsum(sizes)), ids) if varies else ids
    pq.write_table(pa.table(columns), file)


def _write_lines(file: Path, rows: int, _read: Read) -> None:
    """Write lines of Criteo's text: the same ones again and again, because to make them takes long."""
    random = np.random.default_rng(0)
    integers = random.integers(0, 1_000, (READER_SAMPLES, len(CRITEO_DENSE)))
    ids = random.integers(0, 2**32, (READER_SAMPLES, len(CRITEO_SPARSE)))
    pairs = zip(integers.tolist(), ids.tolist(), strict=True)
    lines = ("\t".join(["1", *map(str, some), *(f"{each:08x}" for each in others)]) for some, others in pairs)
    file.write_text("".join(f"{line}\n" for line in lines) * (rows // READER_SAMPLES))


WRITERS: Mapping[ReaderFormat, Callable[[Path, int, Read], None]] = {
    "parquet": _write_parquet,
    "criteo-tsv": _write_lines,
}


def make_job(
    ranks: int,
    tables: int,
    *,
    on_host: bool = True,
    rows: int = 1_000,
    dim: int = SMALL,
    lookups: int = 1,
    batch: int = FEW_SAMPLES,
    codec: Codec = "fp32",
    dense: int = 1,
    top: Sequence[int] = (1,),
    alpha: float = 1.05,
    data: Mapping[str, Any] | None = None,
) -> DLRMJobSpec:
    """Return a job of equal tables and the smallest dense part, on the host or on GPUs.

    By default its data is synthetic. Features have the names of Criteo's columns.
    """
    most = 2 * lookups if lookups > 1 else 1
    template: dict[str, Any] = {"rows": rows, "dim": dim, "avgLookups": lookups, "maxLookups": most, "pooling": "sum"}
    if data is None:
        synthetic = {"samples": batch * READER_BATCHES, "evalSamples": 0, "alpha": alpha}
        data = {"format": "synthetic", "synthetic": synthetic}
    else:
        template["embedding"] = {"hash": "mix"}
    model = {
        "denseFeatures": [f"I{number}" for number in range(1, 1 + dense)],
        "bottomMlp": [dim],
        "topMlp": list(top),
        # Tables are spread over ranks by count, and never replicated.
        "tables": [
            template | {"name": f"C{number + 1}", "pin": {"sharding": "table", "ranks": [number * ranks // tables]}}
            for number in range(tables)
        ],
    }
    spec = parse_job(
        {
            "metadata": {"name": "loops"},
            "spec": {
                "model": model,
                "data": {**data, "globalBatchSize": batch},
                "training": {"communication": {"forward": codec}},
                "trainer": {"replicas": 1, "processesPerReplica": ranks, **({} if on_host else ON_GPUS)},
                "checkpoint": {"uri": "file:///nowhere"},
            },
        }
    ).spec
    return spec.with_virtual_shards(virtual_shards(spec))
