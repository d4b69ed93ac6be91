"""The reader: joins a sample order with a source of rows, and turns raw rows into what the model takes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.data import DenseInputSpec
from dlrm_api.errors import BadDataError, DLRMError, InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import ModelSpec, TableSpec
from dlrm_api.objects import is_s3
from dlrm_kernels.parsing import GOOD, LONG_BAG, NONE, check_bags, fill_missing, put_rows_of
from dlrm_stores.locations import find_data_files
from dlrm_trainer.data.batch_builder import NoSamples, RawRows, RowSource, hashing_of, no_rows
from dlrm_trainer.data.criteo import SUFFIXES as CRITEO_SUFFIXES
from dlrm_trainer.data.criteo import CriteoSource, default_cache_folder
from dlrm_trainer.data.order import SampleOrder
from dlrm_trainer.data.parquet import SUFFIXES as PARQUET_SUFFIXES
from dlrm_trainer.data.parquet import Columns, ParquetSource
from dlrm_trainer.data.synthetic import SyntheticSource
from dlrm_trainer.settings import read_settings
from dlrm_trainer.spans import each_spanned


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's slice of one global batch; the slices of ranks 0 to W - 1 in this order are the whole batch.

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
    """(sum of lengths,) float32, finite, one for each of ``values``; 1 for features without weights, None where no
    feature of the model has any."""


T = TypeVar("T")

_JOIN_S = 30.0


class _Queue(Generic[T]):
    """Items that are ready, as many as their sizes allow."""

    def __init__(self, budget_bytes: int, size_of: Callable[[T], int]) -> None:
        self._budget, self._size_of = budget_bytes, size_of
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._held = 0
        self._ended = False
        self._error: BaseException | None = None
        self._stopped = False

    def put(self, item: T) -> bool:
        """Add an item once there is room for it, or none is waiting; False when the consumer is gone."""
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
        """Say that no more items come."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Say that no more items are wanted."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def get(self) -> tuple[T] | None:
        """The next item, None at the end.

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

    ``stage`` names the thread, and the making of each item in a trace.
    An error in making an item reaches the consumer in that item's place. Closing the iterator, or dropping it, stops
    the thread after the item that it is making.
    """
    queue: _Queue[T] = _Queue(budget_bytes, size_of)
    worker = threading.Thread(target=_fill, args=(each_spanned(items, stage), queue), name=f"dlrm-{stage}", daemon=True)
    worker.start()
    try:
        while (item := queue.get()) is not None:
            yield item[0]
    finally:
        queue.stop()
        worker.join(_JOIN_S)


def _fill(items: Iterable[T], queue: _Queue[T]) -> None:
    try:
        for item in items:
            if not queue.put(item):
                return
        queue.end()
    except BaseException as error:
        queue.end(error)


Split = Literal["train", "eval"]

FINISHED_SHARE = 16
"""Of the budget, one part in so many is for batches that are ready and wait."""
TOGETHER_SHARE = 4
"""And one part in so many for batches that are made together: of ``GROUPS`` groups."""
GROUPS = 5
"""In memory at a time: that of the batch in use, two of ready ones, one that waits, one that is fetched."""
TOGETHER = 16
"""Batches that are made together where the budget has room for all blocks that they need; else more."""


Slices = Sequence[NDArray[np.int64]]
"""Sample ids of each of some batches."""


def source_share(budget_bytes: int) -> int:
    """What a reader's batches leave of its budget, for blocks of rows that its source has read or decoded."""
    return budget_bytes - budget_bytes // FINISHED_SHARE - budget_bytes // TOGETHER_SHARE


@dataclass(frozen=True)
class _Group:
    """Rows of batches that are made together."""

    numbers: range
    slices: Slices
    raws: Iterable[RawRows]
    """Of the slices that are not empty."""


class Reader:
    """One rank's view of one split. Any batch can be read at any time; there is no position to keep."""

    def __init__(
        self,
        source: RowSource,
        order: SampleOrder,
        model: ModelSpec,
        features: int,
        dense: DenseInputSpec,
        rank: int,
        world_size: int,
        budget_bytes: int,
    ) -> None:
        self._source = source
        self._order = order
        tables = model.all_tables()
        self._bags = tuple((tables[feature.table], feature.column) for feature in model.all_features())
        self._dense = dense
        of_features = [table for table, _ in self._bags]
        self._hashings = [hashing_of(table) for table in of_features]
        hashed = [hashing.kind != NONE for hashing in self._hashings]
        self._to_hash = [] if source.hashed else [number for number, hashes in enumerate(hashed) if hashes]
        self._rows = np.where(hashed, 0, [table.rows for table in of_features])
        self._longest = np.array([table.max_lookups for table in of_features], dtype=np.int64)
        self._nothing = no_rows(len(self._bags), features, any(each.weights for each in model.all_features()))
        self._budget = budget_bytes
        self._most_together = 1
        self.waited_s = 0.0
        """Seconds for which those who iterate have waited."""
        self._rank = rank
        self._world_size = world_size
        self.num_samples = order.num_samples
        self.batch_size = order.batch_size
        self.batches_per_epoch = order.batches_per_epoch

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON document of all that batch numbers mean: of one model, equal fingerprints give equal batches."""
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
        """Samples of a global batch over all ranks."""
        return self._order.global_count(batch)

    def read(self, batch: int) -> Batch:
        """This rank's slice of a global batch: a pure function of ``batch``.

        Raises:
            BadDataError: a row can't be used; the message names the file, the row, the column or table and the mend.
        """
        sample_ids = self._sample_ids(batch)
        raw = next(iter(self._source.batches([sample_ids]))) if sample_ids.size else self._nothing
        return self._batch(batch, sample_ids, raw)

    def iterate(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches ``start`` to ``stop - 1`` in order, read ahead in threads; close it to stop early."""
        ahead = prefetched(self._made(start, stop), self._budget // FINISHED_SHARE, _bytes_of, "read")
        with closing(ahead):
            while True:
                began = time.monotonic()
                batch = next(ahead, None)
                self.waited_s += time.monotonic() - began
                if batch is None:
                    return
                yield batch

    def close(self) -> None:
        """Let go of the source's files."""
        self._source.close()

    def _made(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches in order, made of rows that another thread fetches: of no more than one group ahead."""
        with closing(prefetched(self._fetched(start, stop), 1, lambda _: 1, "fetch")) as groups:
            for group in groups:
                raws = iter(group.raws)
                for number, sample_ids in zip(group.numbers, group.slices, strict=True):
                    batch = self._batch(number, sample_ids, next(raws) if sample_ids.size else self._nothing)
                    self._most_together = max(1, self._budget // TOGETHER_SHARE // GROUPS // max(1, _bytes_of(batch)))
                    yield batch
        self._source.rest()

    def _fetched(self, start: int, stop: int) -> Iterator[_Group]:
        """Rows of batches in order, several at a time: what they need is then read and decoded once for all of them."""
        together, remade = 1, 0
        slices = [self._sample_ids(number) for number in range(start, min(start + together, stop))]
        while start < stop:
            numbers = range(start, start + len(slices))
            together = together if self._source.remade is None else min(2 * together, self._most_together)
            ahead = [self._sample_ids(number) for number in range(numbers.stop, min(numbers.stop + together, stop))]
            yield from self._some(numbers, slices, ahead)
            start, slices = numbers.stop, ahead
            if (self._source.remade or 0) == remade:
                together = min(together, TOGETHER)
            remade = self._source.remade or 0

    def _some(self, numbers: range, slices: Slices, ahead: Slices) -> Iterator[_Group]:
        filled = [each for each in slices if each.size]
        try:
            raws = self._source.batches(filled, np.concatenate(ahead) if ahead else None) if filled else ()
        except DLRMError:
            if len(numbers) > 1:  # batches before the bad one are good
                for number, sample_ids in zip(numbers, slices, strict=True):
                    yield from self._some(range(number, number + 1), [sample_ids], [])
            raise
        yield _Group(numbers, slices, raws)

    def _sample_ids(self, batch: int) -> NDArray[np.int64]:
        return self._order.sample_ids(batch, self._rank, self._world_size)

    def _batch(self, number: int, sample_ids: NDArray[np.int64], raw: RawRows) -> Batch:
        self._hash(raw, sample_ids)
        return Batch(
            number=number,
            sample_ids=torch.from_numpy(sample_ids),
            dense=torch.from_numpy(dense_inputs(raw.dense, self._dense)),
            labels=torch.from_numpy(raw.labels),
            lengths=torch.from_numpy(raw.lengths),
            values=torch.from_numpy(raw.ids),
            weights=None if raw.weights is None else torch.from_numpy(raw.weights),
        )

    def _hash(self, raw: RawRows, sample_ids: NDArray[np.int64]) -> None:
        """Turn ids into rows of their tables, in place, and check them."""
        if self._to_hash:
            edges = [0, *np.cumsum(raw.lengths.sum(axis=1, dtype=np.int64)).tolist()]
            for feature in self._to_hash:
                ids = raw.ids[edges[feature] : edges[feature + 1]]
                put_rows_of(ids, self._hashings[feature], ids)
        problem, number, place = check_bags(raw.ids, raw.lengths, self._rows, self._longest)
        if problem == GOOD:
            return
        table, column = self._bags[number]
        if problem == LONG_BAG:
            self._refuse_bag(table, column, int(raw.lengths[number, place]), int(sample_ids[place]))
        stops = np.cumsum(raw.lengths, dtype=np.int64)
        sample = int(np.searchsorted(stops, place, side="right")) - number * sample_ids.size
        first = int(stops[number * sample_ids.size] - raw.lengths[number, 0])
        largest = int(raw.ids[first : int(stops[(number + 1) * sample_ids.size - 1])].max())
        self._refuse_id(table, column, int(raw.ids[place]), largest, int(sample_ids[sample]))

    def _refuse_bag(self, table: TableSpec, column: str, length: int, sample_id: int) -> NoReturn:
        raise BadDataError(
            f"{self._source.where(sample_id)}: the bag of table {table.name} (column {column}) has {length} ids, "
            f"more than maxLookups {table.max_lookups}: raise maxLookups of the table, or shorten the bag"
        )

    def _refuse_id(self, table: TableSpec, column: str, value: int, largest: int, sample_id: int) -> NoReturn:
        mend = (
            f"raise rows to at least {largest + 1}, or set embedding.hash: mix on the table"
            if value >= 0
            else "ids without a hash start at 0: mend the data, or set embedding.hash: mix on the table"
        )
        raise BadDataError(
            f"{self._source.where(sample_id)}: id {value} of table {table.name} (column {column}) "
            f"is no row of its {table.rows} rows: {mend}"
        )


def dense_inputs(values: NDArray[np.float32], spec: DenseInputSpec) -> NDArray[np.float32]:
    """Fill missing (NaN) values in, in place, and apply the transform: (n, F) float32 to the same, finite."""
    fill_missing(values.reshape(-1), np.float32(spec.missing))
    return np.log1p(np.maximum(values, np.float32(0))) if spec.transform == "log1p" else values


def sample_order(spec: DLRMJobSpec, split: Split, num_samples: int) -> SampleOrder:
    """The order of a split: shuffled for training, the files' own for evaluation."""
    return SampleOrder(
        num_samples=num_samples,
        batch_size=spec.data.global_batch_size,
        virtual_shards=spec.data.virtual_shards,
        window_rows=spec.data.shuffle.window_rows if split == "train" else 0,
        block_rows=spec.data.shuffle.block_rows,
        seed=spec.training.seed,
    )


def _bytes_of(batch: Batch) -> int:
    tensors = (batch.sample_ids, batch.dense, batch.labels, batch.lengths, batch.values, batch.weights)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


LOCAL_THREADS, REMOTE_THREADS = 2, 4
NAMED = 3
"""URIs of many that a message names."""


def open_reader(
    spec: DLRMJobSpec, split: Split, rank: int, world_size: int, cache_folder: Path | None = None
) -> Reader:
    """Open one rank's view of a split; every rank must open it with the same spec.

    An evaluation split without URIs has no samples. Line indexes are kept in ``cache_folder``; by default in a folder
    of this user's among the temporary files.

    Raises:
        NoInputError: a file is not there.
        NoPermissionError: a file can't be read.
        BadDataError: the data can't be used; the message names the file, the row or column, and the mend.
    """
    source = _source(spec, split, cache_folder or default_cache_folder())
    if split == "train" and not source.num_samples:
        raise BadDataError(f"{_first_few(spec.data.train.uris)}: the training data has no rows: check data.train.uris")
    return Reader(
        source,
        sample_order(spec, split, source.num_samples),
        spec.model,
        len(spec.model.dense_features),
        spec.data.dense,
        rank,
        world_size,
        int(spec.data.prefetch_bytes),
    )


def _source(spec: DLRMJobSpec, split: Split, cache_folder: Path) -> RowSource:
    data = spec.data
    if data.format == "synthetic":
        return SyntheticSource(spec, split)
    uris = data.train.uris if split == "train" else data.eval.uris
    if not uris:
        return NoSamples()
    dense, features = spec.model.dense_features, spec.model.all_features()
    tables = spec.model.all_tables()
    bags, weights = [each.column for each in features], [each.weights for each in features]
    budget = source_share(int(data.prefetch_bytes))
    if data.format == "criteo-tsv":
        files = find_data_files(uris, CRITEO_SUFFIXES, data.s3, read_settings().data_credentials_dir)
        return CriteoSource(files, dense, bags, data.lenient, cache_folder, budget, _threads(uris))
    _check_renames(data.columns.rename, {*dense, *bags, *filter(None, weights)})
    rename = data.columns.rename
    columns = Columns(
        label=data.columns.label,
        dense=[rename.get(name, name) for name in dense],
        bags=[rename.get(name, name) for name in bags],
        weights=[rename.get(name, name) if name else None for name in weights],
        hashings=[hashing_of(tables[each.table]) for each in features],
    )
    files = find_data_files(uris, PARQUET_SUFFIXES, data.s3, read_settings().data_credentials_dir)
    return ParquetSource(files, columns, budget, _threads(uris))


def _first_few(uris: Sequence[str]) -> str:
    rest = len(uris) - NAMED
    return ", ".join(uris[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _threads(uris: Sequence[str]) -> int:
    """That make blocks ahead. More where files are elsewhere: they mostly wait for answers."""
    return REMOTE_THREADS if any(map(is_s3, uris)) else LOCAL_THREADS


def _check_renames(rename: Mapping[str, str], features: Set[str]) -> None:
    unknown = sorted(set(rename) - features)
    if unknown:
        raise InvalidSpecError(
            f"spec.data.columns.rename.{unknown[0]}",
            f"the model has no feature {unknown[0]}: it has {', '.join(sorted(features)[:20])}",
        )
