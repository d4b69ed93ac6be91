"""Read batches: join a sample order with a source of rows, and turn them into what the model takes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import BadDataError, DLRMError, InvalidSpecError
from dlrm_api.fields import is_s3
from dlrm_api.job import DLRMJobSpec
from dlrm_api.keys import KEY_END
from dlrm_checkpointer import DataIndex
from dlrm_kernels.hashing import ids_of_keys, random_bits, shuffle, stream_key
from dlrm_kernels.parsing import GOOD, LONG_BAG, MIX, MODULO, Ints, check_bags, fill_missing, put_rows_of
from dlrm_stores.data_files import DataFile
from dlrm_stores.locations import Listing, Places, TableVersion, find_data_files
from dlrm_trainer.data import criteo, parquet, synthetic
from dlrm_trainer.data.bad_rows import MAX_NAMED, Marks, find_bad, select
from dlrm_trainer.data.batch_builder import NoSamples, RawRows, RowSource, hashing_of
from dlrm_trainer.data.files import SourceRequest, Split
from dlrm_trainer.data.index import Indexer, index_files
from dlrm_trainer.settings import read_settings
from dlrm_trainer.spans import each_spanned

logger = logging.getLogger(__name__)

FINISHED_SHARE = 16
"""One part in so many of the budget is for batches that are ready. What batches leave is for blocks of rows."""
GROUPS_SHARE = 4
"""One part in so many is for ``MAX_GROUPS`` groups of batches that are made together."""
MAX_GROUPS = 5
"""In memory at a time: that of the batch in use, two of ready ones, one that waits, one that is fetched."""
GROUP_BATCHES = 16
"""Batches that are made together if the budget holds all blocks that they need; more if it does not."""
JOIN_TIMEOUT_S = 30.0
_SHOWN_URIS = 3

T = TypeVar("T")
TableFinder: TypeAlias = Callable[[Places, str, int | None], tuple[TableVersion, list[DataFile]]]
"""List the files of the table that a URI names, at a version, by default the newest."""


def _read_whole(sizes: Ints, _blocks: float, _is_remote: bool) -> int:
    return sizes.size


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """Open the rows of one ``data.format``."""

    open: Callable[[SourceRequest], RowSource]
    suffixes: tuple[str, ...] = ()
    """Of files that a folder's URI stands for; empty for a format without files."""
    indexer: Callable[[DLRMJobSpec], Indexer] | None = None
    """Return what finds the rows of files; None for a format without files."""
    count_reads: Callable[[Ints, float, bool], int] = _read_whole
    """Count the reads of an epoch by the bytes of files, their mean number of blocks of rows, and whether they are
    remote; by default one of each file."""
    load_finder: Callable[[], TableFinder] | None = None
    """Import what finds the files of a table; None for a format without tables."""


def _load_delta() -> TableFinder:
    from dlrm_stores.delta import find_delta

    return find_delta


def _load_iceberg() -> TableFinder:
    from dlrm_stores.iceberg import find_iceberg

    return find_iceberg


_PARQUET = FileFormat(
    open=parquet.open_parquet, suffixes=parquet.SUFFIXES, indexer=parquet.index_parquet, count_reads=parquet.count_reads
)
READERS: dict[str, FileFormat] = {
    "criteo-tsv": FileFormat(
        open=criteo.open_criteo, suffixes=criteo.SUFFIXES, indexer=criteo.index_criteo, count_reads=criteo.count_reads
    ),
    "delta": replace(_PARQUET, load_finder=_load_delta),
    "iceberg": replace(_PARQUET, load_finder=_load_iceberg),
    "parquet": _PARQUET,
    "synthetic": FileFormat(open=synthetic.open_synthetic),
}
"""The reader of each ``data.format`` of the API."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Hold one rank's slice of a global batch: those of ranks 0 to W - 1 in order are the whole batch.

    ``n`` is the slice's sample count without bad rows, and may be 0; ``F`` counts the model's features (bags a sample),
    in the order of ``ModelSpec.all_features``; feature-major means all bags of one feature, then all of the next.
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
    """(sum of lengths,) int64, feature-major: rows in [0, rows) of their table, or keys of a unique one."""
    weights: Tensor | None = None
    """(sum of lengths,) float32, finite, one for each of ``values``; 1 for features without weights, None if no
    feature of the model has any."""
    skipped: int = 0
    """Bad rows of the slice, which are left out."""
    truncated: int = 0
    """Samples of which a bag was shortened."""

    @property
    def num_bytes(self) -> int:
        """Return the memory of all tensors."""
        tensors = (self.sample_ids, self.dense, self.labels, self.lengths, self.values, self.weights)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def list_data(spec: DLRMJobSpec, split: Split, versions: Mapping[str, int] | None = None) -> Listing:
    """List the files of a split; none for a format without files, or an evaluation split without URIs.

    Tables are read at the ``versions`` of their URIs, by default at their newest.

    Raises:
        InvalidSpecError: the package for a table format is not installed.
        DLRMError: as ``find_data_files`` and the finders of tables raise.
    """
    data, file_format = spec.data, READERS[spec.data.format]
    uris = data.train.uris if split == "train" else data.eval.uris
    if not uris or not file_format.suffixes:
        return Listing()
    keys = read_settings().data_credentials_dir
    if file_format.load_finder is None:
        return find_data_files(uris, file_format.suffixes, data.s3, keys)
    try:
        find = file_format.load_finder()
    except ImportError as error:
        fix = f"pip install 'dlrm-operator[{data.format}]'"
        raise InvalidSpecError("spec.data.format", f"{data.format} needs the package {error.name}: {fix}") from error
    places, wanted = Places(data.s3, keys), versions or {}
    found = [find(places, uri, wanted.get(uri)) for uri in dict.fromkeys(uris)]
    files = {file.path: file for _, some in found for file in some}
    tables = tuple(table for table, _ in found)
    return Listing(files=tuple(file for _, file in sorted(files.items())), tables=tables)


def open_reader(
    spec: DLRMJobSpec,
    split: Split,
    rank: int,
    world_size: int,
    files: Sequence[DataFile] | None = None,
    index: DataIndex | None = None,
) -> Reader:
    """Open one rank's view of a split; every rank must open it with the same spec and files.

    ``files`` are those that ``list_data`` finds, or some of them; by default all. ``index`` is theirs; by default each
    file is read for it. An evaluation split without URIs has no samples.

    Raises:
        NoInputError: a file is not found.
        NoPermissionError: a file can't be read.
        BadDataError: the data can't be used; the message names the file, the row or column, and the fix.
    """
    data, file_format = spec.data, READERS[spec.data.format]
    files = list_data(spec, split).files if files is None else files
    source: RowSource = NoSamples()
    if files or not file_format.suffixes:
        if index is None and file_format.indexer:
            indexer = file_format.indexer(spec)
            index = index_files(indexer, files, indexer.reads(files))
        budget, uris = int(data.prefetch_bytes), data.train.uris if split == "train" else data.eval.uris
        source = file_format.open(
            SourceRequest(
                spec=spec,
                split=split,
                files=files,
                index=index or DataIndex.empty(""),
                is_remote=any(map(is_s3, uris)),
                budget_bytes=budget - budget // FINISHED_SHARE - budget // GROUPS_SHARE,
            )
        )
    if split == "train" and not source.num_samples:
        uris = data.train.uris
        more = len(uris) - _SHOWN_URIS
        shown = ", ".join(uris[:_SHOWN_URIS]) + (f" and {more} more" if more > 0 else "")
        raise BadDataError(f"{shown}: the training data has no rows; check data.train.uris")
    return Reader(source, spec, split, rank, world_size, files)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Order samples by a pure function of (seed, epoch), the same at every world size.

    The rows are cut into V virtual shards of equal size to within one. Batch j of an epoch takes positions
    [j * B / V, (j + 1) * B / V) of each shard, shards in order, so that only an epoch's last batch is short. Rank r
    reads a contiguous run of shards: the ranks' slices concatenate to the same batch whatever the world size.
    """

    num_samples: int
    batch_size: int
    """Samples of a global batch; a multiple of ``virtual_shards``."""
    virtual_shards: int
    window_rows: int = 0
    """Rows of a virtual shard that are mixed together; 0 keeps the file's order."""
    block_rows: int = 1
    """Rows of a virtual shard that stay together when blocks are permuted, before windows are mixed."""
    seed: int = 0

    @property
    def share(self) -> int:
        """Return the samples that a full batch takes from each virtual shard."""
        return self.batch_size // self.virtual_shards

    @cached_property
    def batches_per_epoch(self) -> int:
        """Return the batches of an epoch, a short last one included."""
        largest = -(-self.num_samples // self.virtual_shards)
        return -(-largest // self.share)

    def global_count(self, batch: int) -> int:
        """Return the samples of a batch over all ranks."""
        last = batch % self.batches_per_epoch == self.batches_per_epoch - 1
        return self.num_samples - (self.batches_per_epoch - 1) * self.batch_size if last else self.batch_size

    def rows(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the first row of one rank's virtual shards, and the end of the last one."""
        shards = (each * self.virtual_shards // world_size for each in (rank, rank + 1))
        first, stop = (shard * self.num_samples // self.virtual_shards for shard in shards)
        return first, stop

    def sample_ids(self, batch: int, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Return row numbers of one rank's slice of a batch, in order: (n,) int64, n may be 0."""
        epoch, index = divmod(batch, self.batches_per_epoch)
        mine = range(rank * self.virtual_shards // world_size, (rank + 1) * self.virtual_shards // world_size)
        # The first row of each shard: floor(shard * num_samples / V) without overflow.
        shards = np.arange(mine.start, mine.stop + 1, dtype=np.int64)
        whole, rest = divmod(self.num_samples, self.virtual_shards)
        bounds = shards * whole + shards * rest // self.virtual_shards
        sizes = np.diff(bounds)
        first = index * self.share
        counts = np.clip(sizes - first, 0, self.share)
        row = np.arange(first, first + self.share, dtype=np.int64)
        # Nearly all batches take a full share of each shard.
        is_full = bool((counts == self.share).all())
        offsets = np.tile(row, sizes.size) if is_full else np.concatenate([row[:0], *(row[:count] for count in counts)])
        if self.window_rows and offsets.size:
            each_size, keys = sizes.view(np.uint64).repeat(counts), _shard_keys(self.seed, epoch, mine).repeat(counts)
            window, block = np.uint64(self.window_rows), np.uint64(self.block_rows)
            offsets = shuffle(offsets.view(np.uint64), each_size, keys, window, block).view(np.int64)
        return np.repeat(bounds[:-1], counts) + offsets


@lru_cache(maxsize=4)
def _shard_keys(seed: int, epoch: int, shards: range) -> NDArray[np.uint64]:
    """Return the keys of each shard's permutations in an epoch."""
    return random_bits(stream_key("order", seed, epoch), np.arange(shards.start, shards.stop, dtype=np.uint64))


_Group: TypeAlias = tuple[range, Sequence[Ints], Iterable[RawRows]]
"""Numbers of batches that are made together, the sample ids of each, and the rows of those that are not empty."""


class Reader:
    """Read one rank's view of one split. Any batch can be read at any time: there is no position to keep.

    Training data is shuffled; evaluation data keeps the files' own order.
    """

    def __init__(
        self,
        source: RowSource,
        spec: DLRMJobSpec,
        split: Split,
        rank: int,
        world_size: int,
        files: Sequence[DataFile] = (),
    ) -> None:
        self._source, self._dense, self._bad_rows = source, spec.data.dense, spec.data.bad_rows
        self.problems: list[tuple[int, str]] = []
        """Batch and description of the first bad rows that were skipped or truncated."""
        self.files = files
        self._order = SampleOrder(
            num_samples=source.num_samples,
            batch_size=spec.data.global_batch_size,
            virtual_shards=spec.virtual_shards,
            window_rows=spec.data.shuffle.window_rows if split == "train" else 0,
            block_rows=spec.data.shuffle.block_rows,
            seed=spec.training.seed,
        )
        self._rank, self._world_size = rank, world_size
        tables, features = spec.model.all_tables(), spec.model.all_features()
        self._bags = tuple((tables[feature.table], feature.column) for feature in features)
        self._hashings = [hashing_of(table, spec.training.seed) for table, _ in self._bags]
        kinds = [hashing.kind for hashing in self._hashings]
        self._to_hash = [] if source.hashed else np.flatnonzero(kinds).tolist()
        self._rows = np.array([KEY_END if table.is_unique else table.rows for table, _ in self._bags], np.int64)
        self._rows[[kind in (MODULO, MIX) for kind in kinds]] = 0
        self._max_lookups = np.array([table.max_lookups for table, _ in self._bags], dtype=np.int64)
        nothing = np.empty(0, dtype=np.float32)
        self._nothing = RawRows(
            dense=np.empty((0, len(spec.model.dense_features)), dtype=np.float32),
            labels=nothing,
            lengths=np.empty((len(features), 0), dtype=np.int32),
            ids=np.empty(0, dtype=np.int64),
            weights=nothing if any(each.weights for each in features) else None,
        )
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
        order = {"globalBatchSize": self._order.batch_size, "virtualShards": self._order.virtual_shards}
        order |= {"windowRows": self._order.window_rows, "blockRows": self._order.block_rows, "seed": self._order.seed}
        dense = {"transform": self._dense.transform, "missing": self._dense.missing}
        return {"samples": self.num_samples, **self._source.fingerprint, "dense": dense, "order": order}

    def global_count(self, batch: int) -> int:
        """Return the samples of a global batch over all ranks."""
        return self._order.global_count(batch)

    def own_files(self, index: DataIndex) -> range:
        """Return which of the files hold samples of this rank, by the index of all."""
        first, stop = self._order.rows(self._rank, self._world_size)
        if first == stop or not self.files:
            return range(0)
        blocks = np.searchsorted(np.cumsum(index.rows), [first, stop - 1], side="right")
        place, last = (np.searchsorted(index.firsts, blocks, side="right") - 1).tolist()
        return range(place, last + 1)

    def read(self, batch: int) -> Batch:
        """Read this rank's slice of a batch, a pure function of ``batch``; BadDataError names a bad row."""
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
            for numbers, slices, rows in groups:
                raws = iter(rows)
                for number, sample_ids in zip(numbers, slices, strict=True):
                    batch = self._batch(number, sample_ids, next(raws) if sample_ids.size else self._nothing)
                    group_bytes = self._budget // GROUPS_SHARE // MAX_GROUPS
                    self._max_group_batches = max(1, group_bytes // max(1, batch.num_bytes))
                    yield batch
        self._source.rest()

    def _fetched(self, start: int, stop: int) -> Iterator[_Group]:
        """Yield rows of several batches at a time: their blocks are then decoded once for all of them."""
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
        yield numbers, slices, raws

    def _sample_ids(self, batch: int) -> Ints:
        return self._order.sample_ids(batch, self._rank, self._world_size)

    def _batch(self, number: int, sample_ids: Ints, raw: RawRows) -> Batch:
        if self._to_hash:
            edges = [0, *np.cumsum(raw.lengths.sum(axis=1, dtype=np.int64)).tolist()]
            for feature in self._to_hash:
                ids = raw.ids[edges[feature] : edges[feature + 1]]
                put_rows_of(ids, self._hashings[feature], ids)
        skipped = truncated = 0
        if self._bad_rows.action == "fail":
            self._check(raw, sample_ids)
        elif raw.bad is not None or check_bags(raw.ids, raw.lengths, self._rows, self._max_lookups)[0] != GOOD:
            bad, long = self._find_bad(number, raw, sample_ids)
            raw, sample_ids = select(raw, ~bad, self._max_lookups), sample_ids[~bad]
            skipped, truncated = int(bad.sum()), int(long.sum())
        fill_missing(raw.dense.reshape(-1), np.float32(self._dense.missing))
        is_log = self._dense.transform == "log1p"
        return Batch(
            number=number,
            sample_ids=torch.from_numpy(sample_ids),
            dense=torch.from_numpy(np.log1p(np.maximum(raw.dense, np.float32(0))) if is_log else raw.dense),
            labels=torch.from_numpy(raw.labels),
            lengths=torch.from_numpy(raw.lengths),
            values=torch.from_numpy(raw.ids),
            weights=None if raw.weights is None else torch.from_numpy(raw.weights),
            skipped=skipped,
            truncated=truncated,
        )

    def _find_bad(self, number: int, raw: RawRows, sample_ids: Ints) -> tuple[Marks, Marks]:
        """Return which samples to leave out and which to shorten; describe the first ones."""
        bad, long = find_bad(raw, self._rows, self._max_lookups, truncate=self._bad_rows.action == "truncate")
        for place in np.flatnonzero(bad | long)[: MAX_NAMED - len(self.problems)].tolist():
            problem = self._problem(raw, sample_ids, place)
            self.problems.append((number, problem))
            logger.warning("bad row", extra={"truncated": bool(long[place]), "error": problem})
        return bad, long

    def _problem(self, raw: RawRows, sample_ids: Ints, place: int) -> str:
        if raw.bad is not None and raw.bad[place]:
            return self._source.problem(int(sample_ids[place]))
        one = np.arange(sample_ids.size) == place
        try:
            self._check(select(raw, one, None), sample_ids[one])
        except BadDataError as error:
            return str(error)
        raise AssertionError(f"{self._source.where(int(sample_ids[place]))}: a good row was found to be bad")

    def _check(self, raw: RawRows, sample_ids: Ints) -> None:
        finding, number, place = check_bags(raw.ids, raw.lengths, self._rows, self._max_lookups)
        if finding == GOOD:
            return
        table, column = self._bags[number]
        if finding == LONG_BAG:
            raise BadDataError(
                f"{self._source.where(int(sample_ids[place]))}: invalid bag of table {table.name} (column {column}): "
                f"expected at most {table.max_lookups} ids (maxLookups of the table), got {raw.lengths[number, place]}"
            )
        stops = np.cumsum(raw.lengths, dtype=np.int64)
        sample = int(np.searchsorted(stops, place, side="right")) - number * sample_ids.size
        where = f"{self._source.where(int(sample_ids[sample]))}: invalid id of table {table.name} (column {column})"
        if table.is_unique:
            [id_] = ids_of_keys(raw.ids[place : place + 1].view(np.uint64), self._hashings[number].rows).tolist()
            raise BadDataError(f"{where}: id {id_} has no key: give its rows another id, or change training.seed")
        first = int(stops[number * sample_ids.size] - raw.lengths[number, 0])
        largest = int(raw.ids[first : int(stops[(number + 1) * sample_ids.size - 1])].max())
        fix = f"raise rows to at least {largest + 1}" if raw.ids[place] >= 0 else "correct the data"
        raise BadDataError(
            f"{where}: expected 0 to {table.rows - 1}, got {raw.ids[place]}; {fix}, "
            "or set embedding.hash: unique or mix on the table"
        )


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

    def fill(self, items: Iterable[T]) -> None:
        """Add all items, and then the error in making them, if any."""
        error = None
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as caught:
            error = caught
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
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

    def stop(self) -> None:
        """Take no more items."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def get(self) -> tuple[T] | None:
        """Return the next item, None at the end; raise the error that ended them."""
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
    """Yield ``items`` in order, made ahead in a thread: as many as the budget holds, and at least one.

    ``stage`` names the thread, and the making of each item in a trace. An error in making an item reaches the consumer
    in that item's place. Closing the iterator stops the thread after the item that it is making.
    """
    queue: _Queue[T] = _Queue(budget_bytes, size_of)
    worker = threading.Thread(target=queue.fill, args=(each_spanned(items, stage),), name=f"dlrm-{stage}", daemon=True)
    worker.start()
    try:
        while (item := queue.get()) is not None:
            yield item[0]
    finally:
        queue.stop()
        worker.join(JOIN_TIMEOUT_S)
