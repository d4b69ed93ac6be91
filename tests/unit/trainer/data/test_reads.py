"""Files, rows and reads are counted without reading all files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_api.progress import DataFiles
from dlrm_trainer.data.reads import PROBED_FILES, count_files

TABLES = [{"name": "C1", "rows": 100, "dim": 4}]


def write(path: Path, rows: int, group_rows: int) -> None:
    columns = {"label": np.zeros(rows, np.int8), "C1": np.arange(rows) % 100}
    pq.write_table(pa.table(columns), path, row_group_size=group_rows)


@pytest.mark.parametrize("files", [1, PROBED_FILES])
def test_rows_and_row_groups_of_few_files_are_exact(make_spec: Any, tmp_path: Path, files: int) -> None:
    for number in range(files):
        write(tmp_path / f"{number:02}.parquet", 100 + number, 50)
    spec = make_spec({"format": "parquet", "train": {"uris": [str(tmp_path)]}}, TABLES, [])

    counts = count_files(spec)

    groups = [-(-(100 + number) // 50) for number in range(files)]
    assert counts == DataFiles(files=files, rows=100 * files + sum(range(files)), reads=files + sum(groups))


def test_rows_of_many_files_are_counted_by_their_bytes(make_spec: Any, tmp_path: Path) -> None:
    for number in range(100):
        write(tmp_path / f"{number:02}.parquet", 200, 200)
    spec = make_spec({"format": "parquet", "train": {"uris": [str(tmp_path)]}}, TABLES, [])

    assert count_files(spec) == DataFiles(files=100, rows=20_000, reads=200)


def test_lines_are_counted_by_blocks(make_spec: Any, tmp_path: Path) -> None:
    line = "1" + "\t7" * 13 + "\t0000002a" * 26 + "\n"
    (tmp_path / "day.tsv").write_text(line * 10_000)
    spec = make_spec({"format": "criteo-tsv", "train": {"uris": [str(tmp_path)]}}, None, None)

    assert count_files(spec) == DataFiles(files=1, rows=10_000, reads=-(-10_000 * len(line) // 2**20))
