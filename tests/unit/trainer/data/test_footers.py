"""Test footers of Parquet files: kept within a budget, dropped and read again beyond it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_api.errors import BadDataError
from dlrm_api.model import TableSpec
from dlrm_stores.data_files import LocalFile
from dlrm_trainer.data import parquet
from dlrm_trainer.data.batch_builder import hashing_of
from dlrm_trainer.data.files import FileSet
from dlrm_trainer.data.index import index_files
from dlrm_trainer.data.parquet import CHUNK_BYTES, Columns, Footers, ParquetSource, column_indexer

Write = Callable[..., str]
USER = hashing_of(TableSpec(name="user", rows=10, dim=4), 0)
COLUMNS = Columns(label="label", dense=[], bags=["user"], weights=[None], hashings=[USER])
ROWS = (10, 0, 1, 25, 9)
"""Of each file; a row group has up to ten."""
FOOTER_BYTES = 3 * 2 * CHUNK_BYTES
"""Of the largest."""


def columns_of(rows: int) -> dict[str, Any]:
    return {"label": np.zeros(rows, np.int8), "user": np.zeros(rows, np.int64)}


@pytest.fixture
def files(write_parquet: Write) -> list[LocalFile]:
    return [
        LocalFile(Path(write_parquet(columns_of(rows), f"{number}.parquet", 10))) for number, rows in enumerate(ROWS)
    ]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[LocalFile]:
    """Files whose footer was read again."""
    again: list[LocalFile] = []
    real = parquet._read_footer

    def read(file: Any) -> Any:
        again.append(file)
        return real(file)

    monkeypatch.setattr(parquet, "_read_footer", read)
    return again


@pytest.mark.parametrize("budget", [0, FOOTER_BYTES, 2 * FOOTER_BYTES, 1 << 30])
def test_every_row_group_has_its_place_whatever_is_kept(files: list[LocalFile], budget: int) -> None:
    index = index_files(column_indexer(COLUMNS), files, "")
    found, held = Footers(files, budget), FileSet(files, index)
    source = ParquetSource(files, index, COLUMNS, budget)

    assert held.bounds.tolist() == [0, *accumulate(ROWS)]
    for number, (first, end) in enumerate(pairwise(held.blocks.tolist())):
        file, group = source.place(number)
        assert found.of(file).row_group(group).num_rows == end - first
        assert first == end or held.locate(first) == (files[file], 10 * group)
        assert found._kept_bytes <= max(budget, FOOTER_BYTES)
        assert found._kept_bytes == sum(map(parquet._bytes_of, found._kept.values()))


def test_kept_footers_are_not_read_again_and_the_oldest_are_dropped(
    files: list[LocalFile], reads: list[LocalFile]
) -> None:
    found = Footers(files, FOOTER_BYTES + 2 * CHUNK_BYTES)  # the last two files'

    for file in (4, 3, 4, 0):
        found.of(file)

    assert list(found._kept) == [4, 0]
    assert reads == [files[4], files[3], files[0]]


def test_a_footer_that_goes_leaves_no_memory_to_the_collector(
    files: list[LocalFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[int] = []
    real = parquet._read_checked_footer

    def checked(file: Any, opened: Any, columns: Columns) -> Any:
        footer = real(file, opened, columns)
        weakref.finalize(footer, gone.append, 1)
        return footer

    monkeypatch.setattr(parquet, "_read_checked_footer", checked)
    gc.disable()
    try:
        index_files(column_indexer(COLUMNS), files, "")
    finally:
        gc.enable()

    assert len(gone) == len(files)


def test_a_file_that_was_changed_is_told_when_its_footer_is_read_again(
    files: list[LocalFile], write_parquet: Write
) -> None:
    found = Footers(files, 0)
    write_parquet(columns_of(11), "0.parquet", 10)

    with pytest.raises(BadDataError, match=r"0\.parquet: changed"):
        found.of(0)
