"""What a rank hands over at a cut: plain data, the same whichever way the tables are sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import SnapshotError


@dataclass(frozen=True, order=True)
class SnapshotName:
    """A snapshot of a store: the step of its cut and the store's attempt that made it; order is step, attempt."""

    step: int
    attempt: int

    @property
    def recency(self) -> tuple[int, int]:
        """Greater for what a job commits later: a newer attempt may begin at an earlier step."""
        return self.attempt, self.step

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> Self | None:
        """Read ``asdict``'s form, or nothing."""
        return None if value is None else cls(step=int(value["step"]), attempt=int(value["attempt"]))


@dataclass(frozen=True, kw_only=True)
class ShardId:
    """A rectangle of a table: rows [row_start, row_end) and columns [column_start, column_end)."""

    table: str
    row_start: int
    row_end: int
    column_start: int
    column_end: int

    @property
    def width(self) -> int:
        """Columns of the rectangle."""
        return self.column_end - self.column_start

    def __str__(self) -> str:
        return f"{self.table}[{self.row_start}:{self.row_end}, {self.column_start}:{self.column_end}]"


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """Some rows of one shard, with their optimizer state.

    ``row_ids`` (N,) int64 are global row numbers, strictly ascending and inside the shard;
    ``rows`` (N, width) float32; ``state`` (N, S) float32, the values of each column block of the shard side by side
    (row-wise Adagrad over a whole table: S = 1; SGD: S = 0).
    """

    shard: ShardId
    row_ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    state: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return self.row_ids.nbytes + self.rows.nbytes + self.state.nbytes

    @property
    def state_values(self) -> int:
        """Values of a row's state."""
        return int(self.state.shape[1])

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """Copy rows [start, end); see ``CutRowSource``."""
        rows[:], state[:] = self.rows[start:end], self.state[start:end]

    def part(self, start: int, end: int) -> ShardRows:
        """Rows [start, end) of these, counted from 0; views."""
        span = slice(start, end)
        return ShardRows(shard=self.shard, row_ids=self.row_ids[span], rows=self.rows[span], state=self.state[span])

    def check(self, table: TableMeta) -> None:
        """Refuse arrays that don't belong together or to their table.

        Raises:
            ValueError: names the shard and what is wrong with it.
            SnapshotError: the shard cuts a column block in two.
        """
        shard, count = self.shard, self.row_ids.shape[0]
        values = len(table.state_of(shard.column_start, shard.column_end))
        wanted = {"row_ids": (count,), "rows": (count, shard.width), "state": (count, values)}
        types = {"row_ids": np.int64, "rows": np.float32, "state": np.float32}
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != types[name]:
                raise ValueError(f"{shard}: {name} is {array.dtype}{array.shape}, not {types[name].__name__}{shape}")
        check_rows(self, table)


class CutRowSource(Protocol):
    """Rows of one shard of a cut, wherever the trainer keeps them; ``ShardRows`` are such rows too."""

    @property
    def shard(self) -> ShardId:
        """Return the shard."""

    @property
    def state_values(self) -> int:
        """Return the number of state values per row."""

    @property
    def row_ids(self) -> NDArray[np.int64]:
        """Return the (N,) global row numbers, strictly ascending and inside the shard."""

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


def load_rows(source: CutRowSource) -> ShardRows:
    """Copy rows from where they are."""
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
MAX_NAME = 63
MAX_ROWS, MAX_COLUMNS = 2**40, 4_096
"""Of a table: the bounds of ``spec.model.tables``, which are the format's too."""
MAX_STEPS, MAX_ATTEMPTS, MAX_RANKS = 10**16, 10**8, 10**6
"""What keys have digits for."""


@dataclass(frozen=True, kw_only=True)
class TableMeta:
    """All that a reader must know of a table: the entry of ``CutMeta.model["tables"]``."""

    name: str
    rows: int
    dim: int
    seed: int
    """Seed of the initializer (``initializer.initial_rows``)."""
    scale: float
    """Scale of the initializer, a float32 value; 0 for tables that start at zero (``initializer.table_scale``)."""
    column_blocks: tuple[tuple[int, int], ...]
    """Columns [start, end) of each block that has a row optimizer state of its own; contiguous from 0 to dim."""
    state_columns: tuple[int, ...] = ()
    """float32 values of row optimizer state of each block; 1 each where it is left out."""
    dtype: Dtype = "fp32"
    """Type of the trainer's rows: a row of fp16 takes no other values, its initial ones included."""

    def __post_init__(self) -> None:
        if not self.state_columns:
            object.__setattr__(self, "state_columns", (1,) * len(self.column_blocks))

    def to_json(self) -> dict[str, Any]:
        """The table as the format writes it."""
        return {
            "name": self.name,
            "rows": self.rows,
            "dim": self.dim,
            "seed": self.seed,
            "scale": self.scale,
            "columnBlocks": [list(block) for block in self.column_blocks],
            "stateColumns": list(self.state_columns),
            "dtype": self.dtype,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read ``to_json``'s form.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is none, or says what no table has; names the table.
        """
        blocks = tuple((int(start), int(end)) for start, end in value["columnBlocks"])
        table = cls(
            name=str(value["name"]),
            rows=int(value["rows"]),
            dim=int(value["dim"]),
            seed=int(value["seed"]),
            scale=float(value["scale"]),
            column_blocks=blocks,
            state_columns=tuple(int(values) for values in value.get("stateColumns", ())),
            dtype=value.get("dtype", "fp32"),
        )
        if problem := table._problem():
            raise ValueError(f"table {table.name[:MAX_NAME]!r}: {problem}")
        return table

    def _problem(self) -> str:
        """What is beyond the bounds of the format, in words; empty where nothing is."""
        if not 1 <= len(self.name) <= MAX_NAME or "\0" in self.name:
            return f"a name has from 1 to {MAX_NAME} characters, and no zero among them"
        if not (1 <= self.rows <= MAX_ROWS and 1 <= self.dim <= MAX_COLUMNS):
            return f"{self.rows} rows x {self.dim} columns, and a table has at most {MAX_ROWS} x {MAX_COLUMNS}"
        edges = [0, *(end for _, end in self.column_blocks)]
        if [start for start, _ in self.column_blocks] != edges[:-1] or edges[-1] != self.dim:
            return f"its column blocks don't go from 0 to {self.dim}"
        widths = [end - start for start, end in self.column_blocks]
        if min(widths) < 1 or len(self.state_columns) != len(widths):
            return "column blocks have a column and more, and a number of state values each"
        if any(not 0 <= values <= 4 * width + 4 for values, width in zip(self.state_columns, widths, strict=True)):
            return "a block of w columns has from 0 to 4 w + 4 values of state"
        if not 0 <= self.scale < math.inf or not -(2**63) <= self.seed < 2**63:
            return f"scale {self.scale} or seed {self.seed} is none of an initializer"
        return "" if self.dtype in get_args(Dtype) else f"dtype {self.dtype!r} is neither fp32 nor fp16"

    def whole(self) -> ShardId:
        """The rectangle that is the whole table."""
        return ShardId(table=self.name, row_start=0, row_end=self.rows, column_start=0, column_end=self.dim)

    def blocks_of(self, column_start: int, column_end: int) -> range:
        """Indices of the column blocks that make up these columns.

        Raises:
            SnapshotError: the columns cut a block in two, whose state can't be split.
        """
        starts = [start for start, _ in self.column_blocks]
        ends = [end for _, end in self.column_blocks]
        if column_start not in starts or column_end not in ends:
            raise SnapshotError(
                f"table {self.name}: columns {column_start}:{column_end} cut its column blocks "
                f"{[list(block) for block in self.column_blocks]}: shard along the blocks"
            )
        return range(starts.index(column_start), ends.index(column_end) + 1)

    def rounded(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows as the trainer has them: of an fp16 table the nearest fp16 values."""
        return rows.astype(np.float16).astype(np.float32) if self.dtype == "fp16" else rows

    @property
    def state_width(self) -> int:
        """Values of row optimizer state that a whole row has."""
        return sum(self.state_columns)

    def state_of(self, column_start: int, column_end: int) -> range:
        """Places, in a whole row's state, of the values that belong to these columns.

        Raises:
            SnapshotError: the columns cut a block in two.
        """
        blocks = self.blocks_of(column_start, column_end)
        return range(sum(self.state_columns[: blocks.start]), sum(self.state_columns[: blocks.stop]))


def check_rows(place: CutRowSource, table: TableMeta) -> None:
    """Refuse rows that are not of their table.

    Raises:
        ValueError: names the shard and what is wrong with it.
        SnapshotError: the shard cuts a column block in two.
    """
    shard, ids = place.shard, place.row_ids
    if shard.table != table.name or shard.row_end > table.rows or shard.column_end > table.dim:
        raise ValueError(f"{shard}: is no part of table {table.name} of {table.rows} rows x {table.dim} columns")
    values = len(table.state_of(shard.column_start, shard.column_end))
    if place.state_values != values:
        raise ValueError(f"{shard}: rows have {place.state_values} values of state, not {values}")
    if len(ids) and not (shard.row_start <= ids[0] and ids[-1] < shard.row_end):
        raise ValueError(f"{shard}: row ids {ids[0]} to {ids[-1]} lie outside the shard")
    if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(f"{shard}: row ids are not strictly ascending")


@dataclass(frozen=True, kw_only=True)
class CutMeta:
    """What is the same on all ranks of a cut; JSON types only in the dicts."""

    step: int
    """Steps done."""
    samples: int
    """Samples trained on in the job's life."""
    world_size: int
    attempt: int
    """The store's attempt number, from ``claim_attempt``."""
    parent: SnapshotName | None = None
    """Rows that no update touched since this snapshot are not handed over; None: since the initial values."""
    time: float = 0.0
    """When the cut was made, by rank 0's clock (Unix seconds)."""
    reader: dict[str, Any] = field(default_factory=dict)
    """``next_batch`` (global batch number), ``fingerprint`` of the data and ``seed``."""
    model: dict[str, Any] = field(default_factory=dict)
    """What restore must check: ``tables`` (``TableMeta.to_json`` each, in the model's order) and whatever the
    trainer adds (shapes of dense parameters, kinds of optimizers); compared as it is."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Quality at the last evaluation; informative."""

    @property
    def tables(self) -> tuple[TableMeta, ...]:
        """The model's tables, in its order."""
        return tuple(TableMeta.from_json(table) for table in self.model.get("tables", ()))

    def to_json(self) -> dict[str, Any]:
        """The cut as the format writes it."""
        value = asdict(self)
        value["worldSize"] = value.pop("world_size")
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read ``to_json``'s form.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is none, or says what no cut has.
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
            raise ValueError(f"step {cut.step}, attempt {cut.attempt} and {cut.world_size} ranks are those of no cut")
        if cut.samples < 0 or not math.isfinite(cut.time):
            raise ValueError(f"{cut.samples} samples and time {cut.time} are those of no cut")
        return cut
