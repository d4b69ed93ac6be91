"""Files to read: Criteo's shape, written as Parquet and as its own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm_kernels.hashing import mix64
from dlrm_trainer.data.synthetic import Popularity

DENSE = tuple(f"I{i}" for i in range(1, 14))
IDS = tuple(f"C{i}" for i in range(1, 27))
ROW_GROUP_ROWS = 65_536
_SIZES: tuple[int, ...] = (1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194)
_SIZES += (27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572)
"""Distinct ids of each column of Criteo's display advertising challenge."""


def write_samples(format_: str, folder: Path, rows: int, data_dir: Path | None) -> Path:
    """Write one file.

    Args:
        format_: of ``spec.data``.
        folder: where it goes.
        rows: of it.
        data_dir: folder of real lines, of which labels and dense values are drawn, and missing fields; None: synthetic.
    """
    labels, dense, missing = _numbers(rows, data_dir)
    ids = [_ids(rows, number, size) for number, size in enumerate(_SIZES)]
    if format_ == "parquet":
        columns: dict[str, Any] = {"label": pa.array(labels)}
        columns |= {name: pa.array(dense[i], mask=missing[i]) for i, name in enumerate(DENSE)}
        columns |= {name: pa.array(ids[i]) for i, name in enumerate(IDS)}
        path = folder / "samples.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=ROW_GROUP_ROWS)
        return path
    columns = {"label": pa.array(labels)}
    columns |= {name: pa.array(dense[i].astype(np.int64), mask=missing[i]) for i, name in enumerate(DENSE)}
    columns |= {name: _hexadecimal(ids[i], missing[13 + i]) for i, name in enumerate(IDS)}
    path = folder / "samples.tsv"
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa.csv.write_csv(pa.table(columns), path, options)
    return path


def _numbers(rows: int, data_dir: Path | None) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.bool_]]:
    random = np.random.default_rng(0)
    if data_dir is None:
        labels = (random.random(rows) < 0.25).astype(np.int8)
        dense = np.floor(random.pareto(0.8, (13, rows)).clip(0, 1e6)).astype(np.float32)
        return labels, dense, random.random((39, rows)) < 0.1
    lines = [line.split("\t") for line in (data_dir / "criteo-1k.tsv").read_text().splitlines()]
    drawn = random.integers(0, len(lines), rows)
    labels = np.array([int(line[0]) for line in lines], np.int8)[drawn]
    dense = np.array([[float(field or 0) for field in line[1:14]] for line in lines], np.float32).T[:, drawn]
    return labels, dense, np.array([[not field for field in line[1:]] for line in lines]).T[:, drawn]


def _ids(rows: int, number: int, size: int) -> NDArray[np.uint32]:
    """32-bit ids, as popular as Zipf's law says."""
    random = np.random.default_rng(number + 1)
    bits = random.integers(0, 2**64, (2, rows), dtype=np.uint64)
    ranks = Popularity.zipf(size, 1.05).ranks(bits[0], bits[1])
    return (mix64(ranks) >> np.uint64(32)).astype(np.uint32)


def _hexadecimal(ids: NDArray[np.uint32], missing: NDArray[np.bool_]) -> Any:
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    places = (ids[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)
    text = np.ascontiguousarray(digits[places]).view("S8")[:, 0]
    return pa.array(text.astype(str), mask=missing)
