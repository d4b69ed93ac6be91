"""Define what a rank hands over at a cut: plain data, independent of how the tables are sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np
from numpy.typing import NDArray

from dlrm_api.dimensions import MAX_SIZES
from dlrm_api.errors import SnapshotError
from dlrm_api.keys import KEY_END, MAX_BUCKETS, key_buckets
from dlrm_api.model import RowValue


@dataclass(frozen=True, order=True)
class SnapshotName:
    """Name a snapshot of a store by the step of its cut and the attempt that made it, in this order."""

    step: int
    attempt: int

    @property
    def recency(self) -> tuple[int, int]:
        """Return a key that orders snapshots by commit: a newer attempt may begin at an earlier step."""
        return self.attempt, self.step

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> Self | None:
        """Parse the result of ``asdict``, or None."""
        return None if value is None else cls(step=int(value["step"]), attempt=int(value["attempt"]))


@dataclass(frozen=True)
class ShardId:
    """Name a rectangle of a table: rows [row_start, row_end) and columns [column_start, column_end)."""

    table: str
    row_start: int
    row_end: int
    column_start: int
    column_end: int

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.column_end - self.column_start

    def __str__(self) -> str:
        return f"{self.table}[{self.row_start}:{self.row_end}, {self.column_start}:{self.column_end}]"


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """Hold rows of one shard with their optimizer state.

    ``row_ids`` (N,) int64 are global row numbers, strictly ascending and inside the shard;
    ``rows`` (N, width) float32; ``state`` (N, S) float32, the values of each column block of the shard side by side
    (row-wise Adagrad over a whole table: S = 1; SGD: S = 0), followed by ``TableMeta.values_beside``. In a unique table
    row numbers are keys, which a cut holds in any order.
    """

    shard: ShardId
    row_ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    state: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the three arrays."""
        return self.row_ids.nbytes + self.rows.nbytes + self.state.nbytes

    @property
    def state_values(self) -> int:
        """Return the number of state values per row."""
        return int(self.state.shape[1])

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """Copy rows [start, end); see ``CutRowSource``."""
        rows[:], state[:] = self.rows[start:end], self.state[start:end]

    def part(self, start: int, end: int) -> ShardRows:
        """Return rows [start, end) of these, counted from 0, as views."""
        span = slice(start, end)
        return ShardRows(shard=self.shard, row_ids=self.row_ids[span], rows=self.rows[span], state=self.state[span])


@dataclass(frozen=True, kw_only=True)
class GoneRows:
    """Hold keys of one shard of a unique table that left it since the cut's parent and were not updated again."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    """(N,) different keys inside the shard, in any order."""


class CutRowSource(Protocol):
    """Provide rows of one shard of a cut, wherever the trainer keeps them; ``ShardRows`` does it too."""

    @property
    def shard(self) -> ShardId:
        """Return the shard."""

    @property
    def state_values(self) -> int:
        """Return the number of state values per row, ``TableMeta.values_beside`` included."""

    @property
    def row_ids(self) -> NDArray[np.int64]:
        """Return the (N,) global row numbers inside the shard, strictly ascending unless they are keys."""

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """Copy rows [start, end) of these, counted from 0, into (end - start, width) and (end - start, S)."""


@dataclass(frozen=True, kw_only=True)
class CutRows:
    """Describe rows of one shard before they are copied."""

    shard: ShardId
    count: int
    state_values: int
    """State values per row."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, its number and its state."""
        return 8 + 4 * (self.shard.width + self.state_values)


def copy_rows(source: CutRowSource, start: int, allocate: Callable[[CutRows], ShardRows | None]) -> int:
    """Copy rows from ``start`` on into allocated memory; return how many it had space for."""
    count = len(source.row_ids) - start
    target = allocate(CutRows(shard=source.shard, count=count, state_values=source.state_values))
    if target is None:
        return 0
    end = start + len(target.row_ids)
    target.row_ids[:] = source.row_ids[start:end]
    source.copy(start, end, target.rows, target.state)
    return end - start


def load_rows(source: CutRowSource) -> ShardRows:
    """Load the rows of a source into memory."""
    count = len(source.row_ids)
    rows = np.empty((count, source.shard.width), np.float32)
    state = np.empty((count, source.state_values), np.float32)
    source.copy(0, count, rows, state)
    return ShardRows(shard=source.shard, row_ids=source.row_ids, rows=rows, state=state)


@dataclass(frozen=True, kw_only=True)
class CutSize:
    """Bound what a rank's part of a cut takes in the hand-off directory."""

    row_bytes: int
    """Bytes of all rows; see ``CutRows.row_bytes``."""
    pieces: int
    """Pieces in which they are copied."""


PEERS_TIMEOUT_S = 20.0
"""Longest wait for other pods' parts once the gang broke. Leaving loses nothing: of the sidecars that store parts of
one cut, the last finds all of them and commits it."""
Dtype = Literal["fp32", "fp16"]
Ids = Literal["rows", "unique"]
MAX_NAME = 63
MAX_ROWS, MAX_COLUMNS = 2**40, 4_096
"""Bounds of a table, in the format as in ``spec.model.tables``."""
MAX_STEPS, MAX_ATTEMPTS, MAX_RANKS = 10**16, 10**8, 10**6
"""Bounds set by the number of digits in keys."""


@dataclass(frozen=True, kw_only=True)
class TableMeta:
    """Describe a table to readers: the entry of ``CutMeta.model["tables"]``."""

    name: str
    rows: int
    """Of a unique table the most that it has at a time, but for what its buckets round up."""
    dim: int
    seed: int
    """Seed of the initializer (``initializer.initial_rows``)."""
    scale: float
    """Scale of the initializer, a float32 value; 0 for tables that start at zero (``initializer.table_scale``)."""
    column_blocks: tuple[tuple[int, int], ...]
    """Columns [start, end) of each block with its own row optimizer state; contiguous from 0 to dim."""
    state_columns: tuple[int, ...] = ()
    """float32 values of row optimizer state per block; 1 each by default."""
    dtype: Dtype = "fp32"
    """Type of the trainer's rows; all values of a fp16 table, initial ones included, are fp16 values."""
    ids: Ids = "rows"
    """``unique``: global row numbers are keys below ``KEY_END``, and a row without a key does not exist."""
    buckets: int = 1
    """Ranges of keys of one size that a unique table is made of; no shard splits one."""
    row_values: tuple[RowValue, ...] = ()
    """Values of each row that follow its optimizer state: in a table of unique ids ``touched``, the step of its last
    touch, a uint32 in the bits of a float32, and maybe its ``score`` then, at least 0; in one of several sizes
    ``utility``, as the step at which it will have decayed to 1."""
    sizes: tuple[int, ...] = ()
    """Numbers of columns that rows may have, ascending up to ``dim``; empty: all rows have all columns.

    A row has its first columns and reads as 0 in the others. In cuts its number of columns, a uint32, is the last value
    of its state. Only in a table of row numbers it may be 0: the row was pruned."""
    counts_of: str = ""
    """Table of which this one has counters, as its rows' state: part of the trainer's state, not of the model."""
    shared_of: str = ""
    """Table of unique ids of which those without a row read two of these rows."""

    def __post_init__(self) -> None:
        if not self.state_columns:
            object.__setattr__(self, "state_columns", (1,) * len(self.column_blocks))

    def to_json(self) -> dict[str, Any]:
        """Return the table as the format writes it."""
        return {
            "name": self.name,
            "rows": self.rows,
            "dim": self.dim,
            "seed": self.seed,
            "scale": self.scale,
            "columnBlocks": [list(block) for block in self.column_blocks],
            "stateColumns": list(self.state_columns),
            "dtype": self.dtype,
            **({"ids": self.ids, "buckets": self.buckets} if self.is_unique else {}),
            **({"sizes": list(self.sizes)} if self.sizes else {}),
            **({"rowValues": list(self.row_values)} if self.is_unique or self.sizes else {}),
            **({"countsOf": self.counts_of} if self.counts_of else {}),
            **({"sharedOf": self.shared_of} if self.shared_of else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the value is invalid or out of bounds; names the table.
        """
        table = cls(
            name=str(value["name"]),
            rows=int(value["rows"]),
            dim=int(value["dim"]),
            seed=int(value["seed"]),
            scale=float(value["scale"]),
            column_blocks=tuple((int(start), int(end)) for start, end in value["columnBlocks"]),
            state_columns=tuple(int(values) for values in value.get("stateColumns", ())),
            dtype=value.get("dtype", "fp32"),
            ids=value.get("ids", "rows"),
            buckets=int(value.get("buckets", 1)),
            row_values=tuple(value.get("rowValues", ())),
            sizes=tuple(int(size) for size in value.get("sizes", ())),
            counts_of=str(value.get("countsOf", "")),
            shared_of=str(value.get("sharedOf", "")),
        )
        if problem := table._problem():
            raise ValueError(f"table {table.name[:MAX_NAME]!r}: {problem}")
        return table

    def _problem(self) -> str:
        """Describe what exceeds the bounds of the format; empty if nothing does."""
        if not 1 <= len(self.name) <= MAX_NAME or "\0" in self.name:
            return f"expected a name of 1 to {MAX_NAME} characters without NUL"
        if not (1 <= self.rows <= MAX_ROWS and 1 <= self.dim <= MAX_COLUMNS):
            return f"expected at most {MAX_ROWS} rows x {MAX_COLUMNS} columns, got {self.rows} x {self.dim}"
        edges = [0, *(end for _, end in self.column_blocks)]
        if [start for start, _ in self.column_blocks] != edges[:-1] or edges[-1] != self.dim:
            return f"expected contiguous column blocks from 0 to {self.dim}"
        widths = [end - start for start, end in self.column_blocks]
        if min(widths) < 1 or len(self.state_columns) != len(widths):
            return "expected column blocks of at least one column, with one number of state values each"
        if any(not 0 <= values <= 4 * width + 4 for values, width in zip(self.state_columns, widths, strict=True)):
            return "expected 0 to 4 w + 4 state values for a block of w columns"
        if not 0 <= self.scale < math.inf or not -(2**63) <= self.seed < 2**63:
            return f"invalid initializer: scale {self.scale}, seed {self.seed}"
        if self.dtype not in get_args(Dtype):
            return f"expected dtype fp32 or fp16, got {self.dtype!r}"
        return self._unique_problem() or self._values_problem()

    def _unique_problem(self) -> str:
        if self.ids not in get_args(Ids):
            return f"expected ids rows or unique, got {self.ids!r}"
        if self.buckets not in range(1, MAX_BUCKETS + 1) or self.buckets & (self.buckets - 1):
            return f"expected a power of two of at most {MAX_BUCKETS} buckets, got {self.buckets}"
        if not self.is_unique:
            return "" if self.buckets == 1 else "expected buckets in a table of unique ids only"
        return "" if len(self.column_blocks) == 1 else "expected one column block in a table of unique ids"

    def _values_problem(self) -> str:
        known, values = ("touched", "score") if self.is_unique else (), self.row_values
        if self.sizes:
            if len(self.column_blocks) > 1 or self.sizes[-1] != self.dim or len(self.sizes) > MAX_SIZES:
                return f"expected at most {MAX_SIZES} sizes up to its {self.dim} columns, in one column block"
            if any(size <= below for below, size in pairwise((0, *self.sizes))):
                return f"expected ascending sizes, got {list(self.sizes)}"
            values = values[:-1] if values[-1:] == ("utility",) else values
        return "" if values == known[: len(values)] else f"invalid row values {list(self.row_values)}"

    @property
    def is_unique(self) -> bool:
        """Return whether global row numbers are keys."""
        return self.ids == "unique"

    @property
    def needs_version_3(self) -> bool:
        """Return whether only version 3 of the format has such tables."""
        return self.is_unique or bool(self.sizes)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Return the numbers of columns that rows may have, unless all have ``dim``; 0 is that of a pruned row."""
        return (0, *self.sizes) if self.sizes and not self.is_unique else self.sizes

    @property
    def capacity(self) -> int:
        """Return the most rows that there can be."""
        if not self.is_unique:
            return self.rows
        buckets = key_buckets(self.rows, self.buckets)
        return buckets.count * buckets.quota

    @property
    def end(self) -> int:
        """Return the number after the greatest global row number."""
        return KEY_END if self.is_unique else self.rows

    def whole(self) -> ShardId:
        """Return the rectangle that covers the table."""
        return ShardId(self.name, 0, self.end, 0, self.dim)

    def blocks_of(self, column_start: int, column_end: int) -> range:
        """Return the indices of the column blocks that make up these columns.

        Raises:
            SnapshotError: the columns cut a block in two; its state cannot be split.
        """
        starts, ends = map(list, zip(*self.column_blocks, strict=True))
        if column_start not in starts or column_end not in ends:
            raise SnapshotError(
                f"table {self.name}: columns {column_start}:{column_end} cut its column blocks "
                f"{[list(block) for block in self.column_blocks]}: shard along the blocks"
            )
        return range(starts.index(column_start), ends.index(column_end) + 1)

    def rounded(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Round rows to the values that the trainer has: the nearest fp16 values for an fp16 table."""
        return rows.astype(np.float16).astype(np.float32) if self.dtype == "fp16" else rows

    @property
    def state_width(self) -> int:
        """Return the number of row optimizer state values of a whole row, with those beside it, as cuts have them."""
        return sum(self.state_columns) + self.values_beside

    @property
    def values_beside(self) -> int:
        """Return how many values follow a row's optimizer state in cuts: ``row_values``, then its number of columns."""
        return len(self.row_values) + bool(self.sizes)

    def state_of(self, column_start: int, column_end: int) -> range:
        """Return the positions, in a whole row's state, of the values that belong to these columns.

        Raises:
            SnapshotError: the columns cut a block in two.
        """
        blocks = self.blocks_of(column_start, column_end)
        start, stop = sum(self.state_columns[: blocks.start]), sum(self.state_columns[: blocks.stop])
        # Only tables with one block have them.
        return range(start, stop + self.values_beside)


def check_gone(gone: GoneRows, table: TableMeta) -> None:
    """Check that keys that left belong to their table.

    Raises:
        ValueError: names the shard and what is wrong with it.
    """
    if not table.is_unique:
        raise ValueError(f"{gone.shard}: rows of table {table.name} cannot leave it: its ids are not unique")
    _check_shard(gone.shard, table)
    _check_inside(gone.shard, gone.row_ids)


def check_rows(place: CutRowSource, table: TableMeta) -> None:
    """Check that rows belong to their table.

    Raises:
        ValueError: names the shard and what is wrong with it.
        SnapshotError: the shard cuts a column block in two.
    """
    shard, ids = place.shard, place.row_ids
    _check_shard(shard, table)
    values = len(table.state_of(shard.column_start, shard.column_end))
    if place.state_values != values:
        raise ValueError(f"{shard}: rows have {place.state_values} values of state, not {values}")
    if table.is_unique:
        _check_inside(shard, ids)
        return
    if len(ids) and not (shard.row_start <= ids[0] and ids[-1] < shard.row_end):
        raise ValueError(f"{shard}: row ids {ids[0]} to {ids[-1]} lie outside the shard")
    if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(f"{shard}: row ids are not strictly ascending")


def _check_shard(shard: ShardId, table: TableMeta) -> None:
    if shard.table != table.name or shard.row_end > table.end or shard.column_end > table.dim:
        raise ValueError(f"{shard}: lies outside table {table.name} of {table.end} rows x {table.dim} columns")


def _check_inside(shard: ShardId, keys: NDArray[np.int64]) -> None:
    if len(keys) and not (shard.row_start <= keys.min() and keys.max() < shard.row_end):
        raise ValueError(f"{shard}: keys {keys.min()} to {keys.max()} lie outside the shard")


@dataclass(frozen=True, kw_only=True)
class CutMeta:
    """Describe what is the same on all ranks of a cut; the dicts hold JSON types only."""

    step: int
    """Steps done."""
    samples: int
    """Samples that the job has trained on, over all attempts."""
    world_size: int
    attempt: int
    """The store's attempt number, from ``claim_attempt``."""
    parent: SnapshotName | None = None
    """Only rows updated since this snapshot are handed over; None: all rows ever updated."""
    time: float = 0.0
    """Time of the cut by rank 0's clock (Unix seconds)."""
    reader: dict[str, Any] = field(default_factory=dict)
    """``next_batch`` (global batch number), ``fingerprint`` of the data and ``seed``."""
    model: dict[str, Any] = field(default_factory=dict)
    """Compared by restore: ``tables`` (``TableMeta.to_json`` each, in the model's order) and what the trainer adds
    (shapes of dense parameters, kinds of optimizers)."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Quality at the last evaluation, for information only."""

    @property
    def virtual_shards(self) -> int | None:
        """Return the number of virtual shards of the training data; None if the cut does not say."""
        found = self.reader.get("fingerprint", {}).get("order", {}).get("virtualShards")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def tables(self) -> tuple[TableMeta, ...]:
        """Return the model's tables, in its order, with shared rows and then counters behind them."""
        return tuple(TableMeta.from_json(table) for table in self.model.get("tables", ()))

    @property
    def model_tables(self) -> tuple[TableMeta, ...]:
        """Return the tables that the model reads: all but those of counters."""
        return tuple(table for table in self.tables if not table.counts_of)

    def to_json(self) -> dict[str, Any]:
        """Return the cut as the format writes it."""
        value = asdict(self)
        value["worldSize"] = value.pop("world_size")
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the value is invalid or out of bounds.
        """
        cut = cls(
            step=int(value["step"]),
            samples=int(value["samples"]),
            world_size=int(value["worldSize"]),
            attempt=int(value["attempt"]),
            parent=SnapshotName.from_json(value["parent"]),
            time=float(value["time"]),
            reader=dict(value["reader"]),
            model=dict(value["model"]),
            metrics=dict(value["metrics"]),
        )
        if not (0 <= cut.step < MAX_STEPS and 0 <= cut.attempt < MAX_ATTEMPTS and 1 <= cut.world_size <= MAX_RANKS):
            raise ValueError(f"out of bounds: step {cut.step}, attempt {cut.attempt}, {cut.world_size} ranks")
        if cut.samples < 0 or not math.isfinite(cut.time):
            raise ValueError(f"out of bounds: {cut.samples} samples, time {cut.time}")
        return cut
