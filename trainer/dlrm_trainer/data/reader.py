"""Read batches: join a sample order with a source of rows, and turn raw rows into what the model takes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.data import DenseInputSpec
from dlrm_api.errors import BadDataError, DLRMError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_kernels.parsing import GOOD, LONG_BAG, NONE, Ints, check_bags, fill_missing, put_rows_of
from dlrm_stores.locations import find_data_files
from dlrm_trainer.data import criteo, parquet, synthetic
from dlrm_trainer.data.batch_builder import NoSamples, RawRows, RowSource, hashing_of, no_rows
from dlrm_trainer.data.files import SourceRequest, Split
from dlrm_trainer.data.order import SampleOrder
from dlrm_trainer.settings import read_settings
from dlrm_trainer.spans import each_spanned

FINISHED_SHARE = 16
"""One part in so many of the budget is for batches that are ready."""
GROUPS_SHARE = 4
"""One part in so many is for ``MAX_GROUPS`` groups of batches that are made together."""
MAX_GROUPS = 5
"""In memory at a time: that of the batch in use, two of ready ones, one that waits, one that is fetched."""
GROUP_BATCHES = 16
"""Batches that are made together if the budget holds all blocks that they need; more if it does not."""
JOIN_TIMEOUT_S = 30.0
_SHOWN_URIS = 3

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """Open the rows of one ``data.format``."""

    open: Callable[[SourceRequest], RowSource]
    suffixes: tuple[str, ...] = ()
    """Of files that a folder's URI stands for; empty for a format without files."""


READERS: dict[str, FileFormat] = {
    "criteo-tsv": FileFormat(open=criteo.open_criteo, suffixes=criteo.SUFFIXES),
    "parquet": FileFormat(open=parquet.open_parquet, suffixes=parquet.SUFFIXES),
    "synthetic": FileFormat(open=synthetic.open_synthetic),
}
"""The reader of each ``data.format`` of the API."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Hold one rank's slice of one global batch; the slices of ranks 0 to W - 1 in this order are the whole batch.

    ``n`` is the slice's sample count and may be 0; ``F`` counts the model's features (bags a sample), in the order of
    ``ModelSpec.all_features``; feature-major means all bags of one feature, then all of the next.
    """

    number: int
    """Global batch number b; the epoch is ``b // batches_per_epoch``."""
    sample_ids: Tensor
    """(n,) int64 row numbers over all files of the split."""
    dense: Tensor
    """(n, dense features) float32, finite, after the transform."""
    labels: Tensor
    """(n,) float32, each 0 or 1."""
    lengths: Tensor
    """(F, n) int32 ids in each bag; other batches may share them."""
    values: Tensor
    """(sum of lengths,) int64 rows of the tables, feature-major, each in [0, rows) of its table."""
    weights: Tensor | None = None
    """(sum of lengths,) float32, finite, one for each of ``values``; 1 for features without weights, None if no
    feature of the model has any."""

    @property
    def num_bytes(self) -> int:
        """Return the memory of all tensors."""
        tensors = (self.sample_ids, self.dense, self.labels, self.lengths, self.values, self.weights)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def open_reader(
    spec: DLRMJobSpec, split: Split, rank: int, world_size: int, cache_folder: Path | None = None
) -> Reader:
    """Open one rank's view of a split; every rank must open it with the same spec.

    An evaluation split without URIs has no samples. Line indexes are kept in ``cache_folder``; by default in a folder
    of this user's among the temporary files.

    Raises:
        NoInputError: a file is not found.
        NoPermissionError: a file can't be read.
        BadDataError: the data can't be used; the message names the file, the row or column, and the fix.
    """
    data, file_format = spec.data, READERS[spec.data.format]
    uris = data.train.uris if split == "train" else data.eval.uris
    source: RowSource = NoSamples()
    if uris or not file_format.suffixes:
        files = find_data_files(uris, file_format.suffixes, data.s3, read_settings().data_credentials_dir)
        request = SourceRequest(
            spec=spec,
            split=split,
            files=files,
            budget_bytes=source_share(int(data.prefetch_bytes)),
            cache_folder=cache_folder or criteo.default_cache_folder(),
        )
        source = file_format.open(request)
    if split == "train" and not source.num_samples:
        more = len(uris) - _SHOWN_URIS
        shown = ", ".join(uris[:_SHOWN_URIS]) + (f" and {more} more" if more > 0 else "")
        raise BadDataError(f"{shown}: the training data has no rows; check data.train.uris")
    return Reader(source, spec, split, rank, world_size)


def source_share(budget_bytes: int) -> int:
    """Return what a reader's batches leave of its budget for blocks of rows that its source holds."""
    return budget_bytes - budget_bytes // FINISHED_SHARE - budget_bytes // GROUPS_SHARE


def sample_order(spec: DLRMJobSpec, split: Split, num_samples: int) -> SampleOrder:
    """Return the order of a split: shuffled for training, the files' own for evaluation."""
    return SampleOrder(
        num_samples=num_samples,
        batch_size=spec.data.global_batch_size,
        virtual_shards=spec.data.virtual_shards,
        window_rows=spec.data.shuffle.window_rows if split == "train" else 0,
        block_rows=spec.data.shuffle.block_rows,
        seed=spec.training.seed,
    )


@dataclass(frozen=True)
class _Group:
    """Hold rows of batches that are made together."""

    numbers: range
    slices: Sequence[Ints]
    """Sample ids of each batch."""
    raws: Iterable[RawRows]
    """Of the slices that are not empty."""


class Reader:
    """Read one rank's view of one split. Any batch can be read at any time: there is no position to keep.

    Args:
        source: of all rows of the split.
        spec: of the job.
        split: decides the order.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, source: RowSource, spec: DLRMJobSpec, split: Split, rank: int, world_size: int) -> None:
        self._source, self._dense = source, spec.data.dense
        self._order = sample_order(spec, split, source.num_samples)
        self._rank, self._world_size = rank, world_size
        tables, features = spec.model.all_tables(), spec.model.all_features()
        self._bags = tuple((tables[feature.table], feature.column) for feature in features)
        self._hashings = [hashing_of(table) for table, _ in self._bags]
        hashed = [hashing.kind != NONE for hashing in self._hashings]
        self._to_hash = [] if source.hashed else np.flatnonzero(hashed).tolist()
        self._rows = np.where(hashed, 0, [table.rows for table, _ in self._bags])
        self._max_lookups = np.array([table.max_lookups for table, _ in self._bags], dtype=np.int64)
        is_weighted = any(each.weights for each in features)
        self._nothing = no_rows(len(features), len(spec.model.dense_features), is_weighted)
        self._budget = int(spec.data.prefetch_bytes)
        self._max_group_batches = 1
        self.waited_s = 0.0
        """Time that those who iterate have waited."""
        self.num_samples = self._order.num_samples
        self.batch_size = self._order.batch_size
        self.batches_per_epoch = self._order.batches_per_epoch

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return a JSON document of all that batch numbers mean: equal ones give equal batches for one model."""
        order = {
            "globalBatchSize": self._order.batch_size,
            "virtualShards": self._order.virtual_shards,
            "windowRows": self._order.window_rows,
            "blockRows": self._order.block_rows,
            "seed": self._order.seed,
        }
        dense = {"transform": self._dense.transform, "missing": self._dense.missing}
        return {"samples": self.num_samples, **self._source.fingerprint, "dense": dense, "order": order}

    def global_count(self, batch: int) -> int:
        """Return the samples of a global batch over all ranks."""
        return self._order.global_count(batch)

    def read(self, batch: int) -> Batch:
        """Read this rank's slice of a global batch: a pure function of ``batch``.

        Raises:
            BadDataError: a row can't be used; the message names the file, the row, the column or table and the fix.
        """
        sample_ids = self._sample_ids(batch)
        raw = next(iter(self._source.batches([sample_ids]))) if sample_ids.size else self._nothing
        return self._batch(batch, sample_ids, raw)

    def iterate(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Yield batches ``start`` to ``stop - 1`` in order, read ahead in threads; close it to stop early."""
        made = self._made(start, stop)
        with closing(prefetched(made, self._budget // FINISHED_SHARE, lambda batch: batch.num_bytes, "read")) as ahead:
            while True:
                began = time.monotonic()
                batch = next(ahead, None)
                self.waited_s += time.monotonic() - began
                if batch is None:
                    return
                yield batch

    def close(self) -> None:
        """Close the source's files."""
        self._source.close()

    def _made(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield batches in order, made of rows that another thread fetches at most one group ahead."""
        with closing(prefetched(self._fetched(start, stop), 1, lambda _: 1, "fetch")) as groups:
            for group in groups:
                raws = iter(group.raws)
                for number, sample_ids in zip(group.numbers, group.slices, strict=True):
                    batch = self._batch(number, sample_ids, next(raws) if sample_ids.size else self._nothing)
                    group_bytes = self._budget // GROUPS_SHARE // MAX_GROUPS
                    self._max_group_batches = max(1, group_bytes // max(1, batch.num_bytes))
                    yield batch
        self._source.rest()

    def _fetched(self, start: int, stop: int) -> Iterator[_Group]:
        """Yield rows of several batches at a time: the blocks that they need are then decoded once for all of them."""
        count, remade = 1, 0
        slices = [self._sample_ids(number) for number in range(start, min(start + count, stop))]
        while start < stop:
            numbers = range(start, start + len(slices))
            count = count if self._source.remade is None else min(2 * count, self._max_group_batches)
            ahead = [self._sample_ids(number) for number in range(numbers.stop, min(numbers.stop + count, stop))]
            yield from self._groups(numbers, slices, ahead)
            start, slices = numbers.stop, ahead
            if (self._source.remade or 0) == remade:
                count = min(count, GROUP_BATCHES)
            remade = self._source.remade or 0

    def _groups(self, numbers: range, slices: Sequence[Ints], ahead: Sequence[Ints]) -> Iterator[_Group]:
        filled = [each for each in slices if each.size]
        try:
            raws = self._source.batches(filled, np.concatenate(ahead) if ahead else None) if filled else ()
        except DLRMError:
            # The batches before the bad one are good.
            if len(numbers) > 1:
                for number, sample_ids in zip(numbers, slices, strict=True):
                    yield from self._groups(range(number, number + 1), [sample_ids], [])
            raise
        yield _Group(numbers, slices, raws)

    def _sample_ids(self, batch: int) -> Ints:
        return self._order.sample_ids(batch, self._rank, self._world_size)

    def _batch(self, number: int, sample_ids: Ints, raw: RawRows) -> Batch:
        self._hash(raw)
        self._check(raw, sample_ids)
        return Batch(
            number=number,
            sample_ids=torch.from_numpy(sample_ids),
            dense=torch.from_numpy(dense_inputs(raw.dense, self._dense)),
            labels=torch.from_numpy(raw.labels),
            lengths=torch.from_numpy(raw.lengths),
            values=torch.from_numpy(raw.ids),
            weights=None if raw.weights is None else torch.from_numpy(raw.weights),
        )

    def _hash(self, raw: RawRows) -> None:
        """Turn ids into rows of their tables in place, unless the source has done so."""
        if self._to_hash:
            edges = [0, *np.cumsum(raw.lengths.sum(axis=1, dtype=np.int64)).tolist()]
            for feature in self._to_hash:
                ids = raw.ids[edges[feature] : edges[feature + 1]]
                put_rows_of(ids, self._hashings[feature], ids)

    def _check(self, raw: RawRows, sample_ids: Ints) -> None:
        finding, number, place = check_bags(raw.ids, raw.lengths, self._rows, self._max_lookups)
        if finding == GOOD:
            return
        table, column = self._bags[number]
        if finding == LONG_BAG:
            self._refuse_bag(table, column, int(raw.lengths[number, place]), int(sample_ids[place]))
        stops = np.cumsum(raw.lengths, dtype=np.int64)
        sample = int(np.searchsorted(stops, place, side="right")) - number * sample_ids.size
        first = int(stops[number * sample_ids.size] - raw.lengths[number, 0])
        largest = int(raw.ids[first : int(stops[(number + 1) * sample_ids.size - 1])].max())
        self._refuse_id(table, column, int(raw.ids[place]), largest, int(sample_ids[sample]))

    def _refuse_bag(self, table: TableSpec, column: str, length: int, sample_id: int) -> NoReturn:
        raise BadDataError(
            f"{self._source.where(sample_id)}: invalid bag of table {table.name} (column {column}): expected at most "
            f"{table.max_lookups} ids (maxLookups of the table), got {length}"
        )

    def _refuse_id(self, table: TableSpec, column: str, value: int, largest: int, sample_id: int) -> NoReturn:
        fix = f"raise rows to at least {largest + 1}, or set" if value >= 0 else "correct the data, or set"
        raise BadDataError(
            f"{self._source.where(sample_id)}: invalid id of table {table.name} (column {column}): expected 0 to "
            f"{table.rows - 1}, got {value}; {fix} embedding.hash: mix on the table"
        )


def dense_inputs(values: NDArray[np.float32], spec: DenseInputSpec) -> NDArray[np.float32]:
    """Fill missing (NaN) values in, in place, and apply the transform: (n, F) float32 to the same, finite."""
    fill_missing(values.reshape(-1), np.float32(spec.missing))
    return np.log1p(np.maximum(values, np.float32(0))) if spec.transform == "log1p" else values


class _Queue(Generic[T]):
    """Hold items that are ready, as many as their sizes allow."""

    def __init__(self, budget_bytes: int, size_of: Callable[[T], int]) -> None:
        self._budget, self._size_of = budget_bytes, size_of
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._held = 0
        self._ended = False
        self._error: BaseException | None = None
        self._stopped = False

    def put(self, item: T) -> bool:
        """Add an item once it fits, or none is waiting; False after ``stop``."""
        size = self._size_of(item)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._items or self._held + size <= self._budget)
            if self._stopped:
                return False
            self._items.append(item)
            self._held += size
            self._changed.notify_all()
            return True

    def end(self, error: BaseException | None = None) -> None:
        """Add no more items; ``error`` ended them."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no more items."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def get(self) -> tuple[T] | None:
        """Return the next item, None at the end.

        Raises:
            BaseException: what ended the items.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items) or self._ended)
            if self._items:
                item = self._items.popleft()
                self._held -= self._size_of(item)
                self._changed.notify_all()
                return (item,)
            if self._error is not None:
                raise self._error
            return None


def prefetched(
    items: Iterable[T], budget_bytes: int, size_of: Callable[[T], int], stage: str
) -> Generator[T, None, None]:
    """Yield ``items`` in order, made ahead in a thread: as many as ``budget_bytes`` hold, and at least one.

    ``stage`` names the thread, and the making of each item in a trace. An error in making an item reaches the consumer
    in that item's place. Closing the iterator stops the thread after the item that it is making.
    """
    queue: _Queue[T] = _Queue(budget_bytes, size_of)
    worker = threading.Thread(target=_fill, args=(each_spanned(items, stage), queue), name=f"dlrm-{stage}", daemon=True)
    worker.start()
    try:
        while (item := queue.get()) is not None:
            yield item[0]
    finally:
        queue.stop()
        worker.join(JOIN_TIMEOUT_S)


def _fill(items: Iterable[T], queue: _Queue[T]) -> None:
    try:
        for item in items:
            if not queue.put(item):
                return
        queue.end()
    except BaseException as error:
        queue.end(error)
