"""Test reading ahead: a budget in bytes, errors in their place, unchanged files, no thread left."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_trainer.data import Batch, Reader, criteo, open_reader
from dlrm_trainer.data.batch_builder import RawRows, RowSource
from dlrm_trainer.data.files import BlockCache, SourceRequest
from dlrm_trainer.data.parquet import index_parquet, open_parquet
from dlrm_trainer.data.reader import FINISHED_SHARE, GROUPS_SHARE, READERS, FileFormat, prefetched

Write = Callable[..., str]
ROWS, GROUP_ROWS = 3_000, 50
LINE = "\t".join(["1", *["7"] * 13, *["0a1b2c3d"] * 26]) + "\n"


@dataclass(frozen=True)
class Piece:
    number: int
    num_bytes: int


class Maker:
    """Make pieces of some sizes, count them, and wait where asked."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.made = sizes, list[int]()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, number: int) -> Piece:
        self.go.wait(10)
        self.made.append(number)
        return Piece(number, self.sizes[number])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 11), max_size=8), max_size=6),
    st.integers(0, 120),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_blocks_are_the_right_ones_and_stay_within_the_budget(
    sizes: list[int], stretches: list[list[int]], budget: int, threads: int
) -> None:
    blocks = BlockCache(Maker(sizes), budget, threads)
    asked = [sorted({number % len(sizes) for number in stretch}) for stretch in stretches]

    for now, ahead in pairwise([*asked, []]):
        blocks.plan([*now, *ahead])
        for number in now:
            assert blocks.take(number).number == number
            assert blocks.held_bytes <= max(budget, max(sizes))
    blocks.close()

    assert blocks.held_bytes == 0


def test_a_block_is_made_once_if_it_fits_the_budget_and_again_if_not() -> None:
    roomy, narrow = Maker([10] * 4), Maker([10] * 4)
    large, small = BlockCache(roomy, 40), BlockCache(narrow, 20)

    for _ in range(3):
        for number in range(4):
            large.take(number)
            small.take(number)

    assert roomy.made == [0, 1, 2, 3]
    assert large.remade == 0
    assert len(narrow.made) == 12
    assert small.remade == 8


def test_blocks_are_made_ahead_as_many_as_fit_the_budget() -> None:
    maker = Maker([10] * 8)
    blocks = BlockCache(maker, 40)
    blocks.take(0)

    blocks.plan(range(1, 8))
    blocks._pool.shutdown(wait=True)  # what was begun is done

    assert 1 in maker.made
    assert len(maker.made) <= 5
    assert blocks.held_bytes <= 40


def test_a_block_that_fails_ahead_is_told_to_who_takes_it_alone() -> None:
    def make(number: int) -> Piece:
        if number == 1:
            raise BadDataError("rows 50 to 99 are damaged")
        return Piece(number, 10)

    blocks = BlockCache(make, 100)
    blocks.take(0)
    blocks.plan([0, 1, 2])

    assert blocks.take(0).number == 0
    with pytest.raises(BadDataError, match="rows 50 to 99"):
        blocks.take(1)
    assert blocks.take(2).number == 2


def test_items_ahead_hold_no_more_bytes_than_the_budget() -> None:
    held, most = [0], [0]

    def items() -> Iterator[int]:
        for size in [30, 10, 50, 10, 20, 40] * 20:
            held[0] += size
            most[0] = max(most[0], held[0])
            yield size

    for size in prefetched(items(), 100, int, "read"):
        held[0] -= size

    assert held[0] == 0
    assert most[0] <= 100 + 2 * 50  # one that is made and one that was just taken


def test_an_item_above_the_budget_comes_all_the_same() -> None:
    assert list(prefetched([500, 600], 100, int, "read")) == [500, 600]


@pytest.fixture
def open_rows(make_spec: Any, write_parquet: Write) -> Iterator[Callable[..., Reader]]:
    opened = []

    def open_with(columns: dict[str, Any] | None = None, **data: Any) -> Reader:
        random = np.random.default_rng(0)
        held = {
            "label": random.integers(0, 2, ROWS),
            "price": random.random(ROWS),
            "user": np.arange(ROWS),
            "films": [random.integers(0, 9, random.integers(0, 4)).tolist() for _ in range(ROWS)],
        }
        path = write_parquet(held | (columns or {}), row_group_size=GROUP_ROWS)
        tables = [{"name": "user", "rows": ROWS, "dim": 4}, {"name": "films", "rows": 9, "dim": 4, "maxLookups": 3}]
        document = {"format": "parquet", "train": {"uris": [path]}, "globalBatchSize": 120, "virtualShards": 6}
        opened.append(open_reader(make_spec(document | data, tables, ["price"]), "train", 0, 1))
        return opened[-1]

    yield open_with
    for reader in opened:
        reader.close()


def same(left: Batch, right: Batch) -> bool:
    fields = ("sample_ids", "dense", "labels", "lengths", "values")
    return all(torch.equal(getattr(left, field), getattr(right, field)) for field in fields)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 20_000, "1Gi"])
@pytest.mark.parametrize("window", [0, 64])
def test_batches_are_the_same_whatever_is_held_ahead(budget: Any, window: int, open_rows: Any) -> None:
    reader = open_rows(prefetchBytes=budget, shuffle={"windowRows": window, "blockRows": 16})

    ahead = list(reader.iterate(0, 2 * reader.batches_per_epoch))

    assert [batch.number for batch in ahead] == list(range(2 * reader.batches_per_epoch))
    assert all(same(batch, reader.read(batch.number)) for batch in ahead)
    assert reader.waited_s > 0


class Thrashing:
    """Make some blocks again for each batch; count the samples that answers keep in memory."""

    num_samples, hashed, fingerprint = 20_000, False, MappingProxyType({"format": "thrashing"})
    remade = held = most = 0

    def batches(self, slices: Sequence[NDArray[np.int64]], ahead: NDArray[np.int64] | None = None) -> list[RawRows]:
        del ahead
        self.remade += 1
        every = np.concatenate(slices)
        self.held += len(every)
        self.most = max(self.most, self.held)
        weakref.finalize(every, self.let_go, len(every))
        edges = [0, *np.cumsum([len(each) for each in slices]).tolist()]
        return [self.rows(every[start:stop]) for start, stop in pairwise(edges)]

    def let_go(self, count: int) -> None:
        self.held -= count

    def rows(self, ids: NDArray[np.int64]) -> RawRows:
        count = len(ids)
        nothing = np.zeros(count, np.float32)
        return RawRows(dense=nothing[:, None], labels=nothing, lengths=np.ones((1, count), np.int32), ids=ids)

    def where(self, sample_id: int) -> str:
        return f"sample {sample_id}"

    problem = where

    def rest(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is open."""


def test_batches_made_together_keep_within_their_share_of_the_budget(make_spec: Any) -> None:
    tables = [{"name": "user", "rows": 20_000, "dim": 4}]
    sample_bytes, budget = 8 + 4 + 4 + 4 + 8, 400_000
    document = {"format": "parquet", "train": {"uris": ["x"]}, "globalBatchSize": 100, "virtualShards": 4}
    document["prefetchBytes"] = budget
    spec, source = make_spec(document, tables, ["price"]), Thrashing()
    reader = Reader(source, spec, "train", 0, 1)

    for batch in reader.iterate(0, 200):
        assert len(batch.labels) == 100
        time.sleep(0.001)

    assert source.remade < 100
    assert source.most * sample_bytes <= budget // GROUPS_SHARE


def test_row_groups_and_batches_have_no_more_than_the_budget_between_them(
    open_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, budget = [], 160_000

    def open_source(request: SourceRequest) -> RowSource:
        given.append(request.budget_bytes)
        return open_parquet(request)

    monkeypatch.setitem(READERS, "parquet", FileFormat(open=open_source, suffixes=(".parquet",), indexer=index_parquet))
    open_rows(prefetchBytes=budget)

    assert sum(given) + budget // FINISHED_SHARE + budget // GROUPS_SHARE == budget


def test_a_bad_row_is_told_in_the_place_of_its_batch(open_rows: Any) -> None:
    prices = np.zeros(ROWS)
    prices[ROWS - 1] = np.inf
    reader = open_rows({"price": prices}, shuffle={"windowRows": 0}, virtualShards=1)
    batches = reader.iterate(0, reader.batches_per_epoch)

    read = [next(batches) for _ in range(reader.batches_per_epoch - 1)]
    with pytest.raises(BadDataError, match=f"row {ROWS - 1}: invalid column price: .*inf"):
        next(batches)

    assert len(read) == reader.batches_per_epoch - 1


def test_closing_a_reader_ends_its_threads(open_rows: Any) -> None:
    before = set(threading.enumerate())
    reader = open_rows()
    batches = reader.iterate(0, reader.batches_per_epoch)
    next(batches)

    batches.close()
    reader.close()

    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("dlrm-")]


CHANGES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "shrunk": (lambda path: os.truncate(path, 100), BadDataError, r"data\.parquet: changed .* to 100 bytes"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\n"), BadDataError, r"data\.parquet: changed"),
    "gone": (lambda path: path.unlink(), NoInputError, r"file not found: .*data\.parquet"),
}


@pytest.mark.parametrize("format_", ["parquet", "criteo-tsv"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_file_that_changes_while_training_is_named(
    case: str, format_: str, make_spec: Any, write_parquet: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, error, message = CHANGES[case]
    path = tmp_path / "data.parquet"
    data = {"format": format_, "train": {"uris": [str(path)]}, "globalBatchSize": 8, "virtualShards": 1}
    if format_ == "parquet":
        write_parquet({"label": [0, 1] * 20, "user": [1] * 40}, row_group_size=4)
        spec = make_spec(data, [{"name": "user", "rows": 9, "dim": 4}], [])
    else:
        path.write_text(LINE * 40)
        monkeypatch.setattr(criteo, "CELL_BYTES", 4 * len(LINE))
        spec = make_spec(data)
    reader = open_reader(spec, "train", 0, 1)
    reader.read(0)
    change(path)

    with pytest.raises(error, match=message):
        list(map(reader.read, range(reader.batches_per_epoch)))
