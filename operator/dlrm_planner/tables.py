"""The model's tables: what each takes to hold and to hand over, whole or in part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import ModelSpec, TableSpec
from dlrm_api.row_optimizers import STATE_BYTES, state_values
from dlrm_api.tiers import CHANGED_BYTES
from dlrm_api.tiers import ELEMENT_BYTES as BYTES_OF

OPTIMIZER_COPIES = {"sgd": 0, "adagrad": 1, "adam": 2}
EXCHANGED_COPIES, MESSAGES = 4, 2
LONE_ID_BYTES, ID_BYTES = 32, 96
"""Of each id of a batch, alone and among ranks. Measured, with tables in DDR: 30, and 81 to 95."""
ID_BYTES_AHEAD = 24
"""Of each id of a batch whose rows are fetched ahead: as it was read, as it came, and its slot."""
UPDATED_ELEMENT_BYTES, UPDATED_ROW_BYTES = 48, 100
"""Of each element of the rows looked up, and of each row, where torch's operations update them on a GPU: gradients of
lookups and of rows, rows and states before and after, and whose they are. Counted operation by operation: 39 and 89,
under Adam 48 and 97."""
INTERACTION_COPIES = {"cpu": {"dot": 0, "dcn": 3}, "cuda": {"dot": 2, "dcn": 4}}
"""Of what goes into the interaction, beside what its layers give: as one tensor, and gradients under way. The host's
compiled loops of dot products take pooled rows as they lie."""
MEAN_COPIES, WIDTH_COPIES = 3, 2
"""On the host, of pooled rows where some are means: the sums, what they are divided by, and gradients divided so; and
where they are of several widths: side by side, and gradients apart again."""
FLOPS_PER_WEIGHT = 6
"""A multiply and an add forward, twice that backward (gradients of the input and of the weight)."""


def dense_parameters(model: ModelSpec) -> int:
    """Elements of the MLPs, their biases, and the cross layers."""
    bottom = _mlp(len(model.dense_features), model.bottom_mlp)
    width = model.bottom_mlp[-1] if model.bottom_mlp else 0
    if model.interaction == "dot":
        vectors = len(model.all_features()) + bool(width)
        return bottom + _mlp(width + vectors * (vectors - 1) // 2, model.top_mlp)
    features = width + _pooled(model)
    cross = model.cross_layers * (2 * features * model.cross_rank + features)
    return bottom + cross + _mlp(features, model.top_mlp)


def dense_cut_bytes(spec: DLRMJobSpec) -> int:
    """Dense parameters and their optimizer state, as one rank hands them over."""
    copies = 1 + OPTIMIZER_COPIES[spec.training.dense_optimizer.kind]
    return ELEMENT_BYTES * copies * dense_parameters(spec.model)


def step_flops(spec: DLRMJobSpec, samples: int) -> float:
    """Floating-point operations of one step over ``samples``, forward and backward."""
    vectors = len(spec.model.all_features()) + bool(spec.model.bottom_mlp)
    dot = vectors * vectors * spec.model.all_tables()[0].dim if spec.model.interaction == "dot" else 0
    return float(FLOPS_PER_WEIGHT * samples * (dense_parameters(spec.model) + dot))


def largest_slice(spec: DLRMJobSpec) -> int:
    """Samples of one step on the rank that takes most of the batch: it reads whole virtual shards."""
    shards = -(-spec.data.virtual_shards // spec.world_size)
    return shards * (spec.data.global_batch_size // spec.data.virtual_shards)


def held_samples(spec: DLRMJobSpec) -> int:
    """Samples of a rank whose activations are held at a time."""
    samples = largest_slice(spec)
    return min(samples, spec.training.micro_batch_size or samples)


def activation_bytes(spec: DLRMJobSpec) -> int:
    """Activations and their gradients of one rank.

    What goes into the dense part, pooled rows too, is held of its whole slice; the rest of a micro batch.
    """
    model, samples, held = spec.model, largest_slice(spec), held_samples(spec)
    inputs = len(model.dense_features) + _pooled(model)
    joined = INTERACTION_COPIES["cpu"][model.interaction] * _joined(model) * held
    copies = MEAN_COPIES * _has_means(model) + WIDTH_COPIES * _has_widths(model)
    copied = copies * _pooled(model) * samples
    return ELEMENT_BYTES * (2 * (inputs * samples + _inner(model) * held) + joined + copied)


def device_activation_bytes(spec: DLRMJobSpec) -> int:
    """The same on a GPU, where each of torch's operations makes a tensor. Counted operation by operation.

    Most is taken as the interaction's gradients are made, or as those of pooled rows are divided among their tables.
    """
    model, samples, held = spec.model, largest_slice(spec), held_samples(spec)
    pooled, means = _pooled(model), _has_means(model)
    joined = INTERACTION_COPIES["cuda"][model.interaction] * _joined(model) * held
    made = (2 + means + (held < samples)) * pooled * samples + joined
    divided = (4 + 2 * means) * pooled * samples
    inputs = 2 * len(model.dense_features) * samples
    return ELEMENT_BYTES * (inputs + max(made + 2 * _inner(model) * held, divided))


def _inner(model: ModelSpec) -> int:
    """Elements that a sample's MLPs and interaction give."""
    vectors = len(model.all_features()) + bool(model.bottom_mlp)
    crossed = (_joined(model) + model.cross_rank) * model.cross_layers
    interaction = vectors * vectors if model.interaction == "dot" else crossed
    return sum(model.bottom_mlp) + sum(model.top_mlp) + interaction


def staged_bytes(spec: DLRMJobSpec) -> int:
    """Host memory of one rank for what a batch sends to its device beside ids: features and labels of all in flight."""
    each = ELEMENT_BYTES * (len(spec.model.dense_features) + 1)
    return (spec.trainer.cache.lookahead + 1) * largest_slice(spec) * each


def lookup_bytes(spec: DLRMJobSpec) -> int:
    """Memory of one rank for ids, on the host, and on a GPU that computes: as they are read, travel and are looked up.

    A rank looks up as many ids as its slice of the batch has, where the cost of tables is even.
    """
    ids = sum(table.lookups * len(table.sources) for table in spec.model.all_tables())
    each = (LONE_ID_BYTES if spec.world_size == 1 else ID_BYTES) + ID_BYTES_AHEAD * spec.trainer.cache.lookahead
    return math.ceil(ids * largest_slice(spec)) * each


def update_bytes(spec: DLRMJobSpec) -> int:
    """Memory of a GPU that updates of rows take: none where fbgemm's kernels make them, which do fp32 without Adam.

    Tables of one width and type are updated at a time; a rank looks up as many rows as its slice of the batch has.
    """
    adam, taken = spec.training.row_optimizer.kind == "adam", Counter[tuple[int, str]]()
    for table in spec.model.all_tables():
        if adam or table.dtype != "fp32":
            width = table.column_block or table.dim
            rows = math.ceil(table.lookups * len(table.sources) * largest_slice(spec)) * table.dim // width
            taken[width, table.dtype] += rows * (UPDATED_ELEMENT_BYTES * width + UPDATED_ROW_BYTES)
    return max(taken.values(), default=0)


def exchange_bytes(spec: DLRMJobSpec) -> int:
    """What travels between ranks, of one of them, at its largest.

    Of evenly spread columns a rank pools as many elements as its slice of the batch takes: those, their gradients, and
    the message that leaves and the one that comes.
    """
    if spec.world_size == 1:
        return 0
    return EXCHANGED_COPIES * ELEMENT_BYTES * _pooled(spec.model) * largest_slice(spec)


def message_bytes(spec: DLRMJobSpec) -> int:
    """Of ``exchange_bytes`` the messages alone: a GPU's pooled rows and gradients are among its activations."""
    return exchange_bytes(spec) * MESSAGES // EXCHANGED_COPIES


def _pooled(model: ModelSpec) -> int:
    """Elements of a sample's pooled vectors."""
    return sum(table.dim * len(table.sources) for table in model.all_tables())


def _joined(model: ModelSpec) -> int:
    """Elements of a sample that go into the interaction."""
    return _pooled(model) + (model.bottom_mlp[-1] if model.bottom_mlp else 0)


def _has_means(model: ModelSpec) -> bool:
    return any(table.pooling == "mean" for table in model.all_tables())


def _has_widths(model: ModelSpec) -> bool:
    return len({table.column_block or table.dim for table in model.all_tables()}) > 1


def _mlp(inputs: int, widths: Sequence[int]) -> int:
    return sum((a + 1) * b for a, b in zip((inputs, *widths), widths, strict=False))


ROW_ID_BYTES = 8
"""Of each row of a cut."""
CUT_PIECE_ROWS, CUT_HEADER_BYTES = 65_536, 512
"""A cut lists its pieces; a piece of fewer rows than this would be waste, and its entry is shorter than that."""

RANGE_COPIES, SENT_COPIES = 2, 2
"""Of a global batch's pooled rows, on a rank with a range of the table's: they and their gradients; and of those of
bags that have ids there, picked and in a message."""
RANGES = tuple(2**power for power in range(1, 13))
"""Numbers of ranges by which the most that one takes is found."""


@dataclass(frozen=True)
class PartBytes:
    """What some rows of some columns take; Python integers, since 5,000 tables of 2**54 bytes overflow int64."""

    row: int
    """A row and its state, as the kernels hold them."""
    resident: int
    """Rows, row state and what tells that rows changed."""
    handoff: int
    """All rows with their ids and state, as a full cut hands them over, headers included."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All tables in the model's order; every tuple has one entry for each."""

    specs: tuple[TableSpec, ...]
    paths: tuple[str, ...]
    """Where kubectl shows each table: ``spec.model.tables[3]``."""
    block_state_bytes: tuple[int, ...]
    """Row state of one column block."""
    whole: tuple[PartBytes, ...]
    """Of all rows and columns."""
    held_bytes: tuple[int, ...]
    """What a pod's memory gives for each table: the table, and its part of a hand-off that holds a full cut."""
    vector_bytes: tuple[int, ...]
    """Of each table's pooled rows of a global batch; 0 where they lie in no host's memory."""
    handoff_budget: int | None
    """Bytes of each pod's hand-off, where it is not sized to hold a full cut."""

    def sliced(self, budget: int) -> Tables:
        """The same tables, their cuts handed over in slices that take turns in a budget."""
        return replace(self, held_bytes=tuple(size.resident for size in self.whole), handoff_budget=budget)

    def range_bytes(self, table: int, share: float, ranges: int) -> int:
        """What a step takes for one of so many ranges of a table's rows, beyond a like part of what the table takes.

        Each range has the pooled rows and gradients of every bag of a global batch, be it without an id there; those of
        bags that have ids are copied and sent.
        """
        lookups = self.specs[table].lookups
        copies = RANGE_COPIES + SENT_COPIES * (1.0 - math.pow(1.0 - share, lookups)) - EXCHANGED_COPIES / ranges
        return math.ceil(self.vector_bytes[table] * max(copies, 0.0))

    @cached_property
    def most_range_bytes(self) -> tuple[int, ...]:
        """The most of it, however many even ranges there are."""
        each = range(len(self.specs))
        return tuple(max(self.range_bytes(i, 1 / ranges, ranges) for ranges in RANGES) for i in each)


def read_tables(spec: DLRMJobSpec) -> Tables:
    """Size every table."""
    specs, optimizer = spec.model.all_tables(), spec.training.row_optimizer.kind
    blocks = tuple(STATE_BYTES * state_values(optimizer, table.column_block or table.dim) for table in specs)
    budget = spec.checkpoint.handoff_budget
    sizes = [part_bytes(t, block, 0, t.rows, 0, t.dim) for t, block in zip(specs, blocks, strict=True)]
    return Tables(
        specs=specs,
        paths=table_paths(spec),
        block_state_bytes=blocks,
        whole=tuple(sizes),
        held_bytes=tuple(size.resident + (size.handoff if budget is None else 0) for size in sizes),
        vector_bytes=tuple(ELEMENT_BYTES * t.dim * len(t.sources) * spec.data.global_batch_size for t in specs),
        handoff_budget=budget,
    )


def part_bytes(table: TableSpec, block_state: int, row_start: int, row_end: int, start: int, end: int) -> PartBytes:
    """Bytes of rows [row_start, row_end) of columns [start, end), which are whole blocks: each is held by itself."""
    width = table.column_block or table.dim
    rows, blocks = row_end - row_start, (end - start) // width
    row = BYTES_OF[table.dtype] * width + block_state
    pieces = CUT_HEADER_BYTES * -(-rows // CUT_PIECE_ROWS)
    handoff = rows * (ELEMENT_BYTES * width + block_state + ROW_ID_BYTES) + pieces
    return PartBytes(blocks * row, blocks * rows * (row + CHANGED_BYTES), blocks * handoff)


def table_paths(spec: DLRMJobSpec) -> tuple[str, ...]:
    """Where each table of ``spec.model.all_tables()`` stands in the manifest."""
    own = (f"spec.model.tables[{i}]" for i in range(len(spec.model.tables)))
    grouped = (
        f"spec.model.tableGroups[{i}].template" for i, g in enumerate(spec.model.table_groups) for _ in range(g.count)
    )
    return (*own, *grouped)


ELEMENT_BYTES = 4
"""fp32: what is computed and handed over, whatever the type of the rows."""


def replica_bytes(tables: Tables, index: int) -> int:
    """Bytes of one replica on one rank: the table, and the gradient that is all-reduced, with a count of each row."""
    table = tables.specs[index]
    return tables.whole[index].resident + table.rows * ELEMENT_BYTES * (table.dim + 1)
