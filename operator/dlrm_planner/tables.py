"""Size the model: bytes of tables, whole or in part, and of dense parameters, activations and batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlrm_api.dimensions import CUT_COLUMNS_BYTES
from dlrm_api.job import DLRMJobSpec
from dlrm_api.keys import COUNT_ROW_BYTES, ROW_VALUE_BYTES
from dlrm_api.model import ModelSpec, TableOptions, TablePin, TableSpec
from dlrm_api.row_optimizers import ROW_OPTIMIZERS, STATE_BYTES, state_values
from dlrm_api.tiers import CHANGED_BYTES
from dlrm_api.tiers import ELEMENT_BYTES as BYTES_OF
from dlrm_planner.virtual_shards import virtual_shards

ELEMENT_BYTES = 4
"""fp32: what is computed and handed over, whatever the type of the rows."""
NO_PIN = TablePin()
OPTIMIZER_COPIES = {"sgd": 0, "adagrad": 1, "adam": 2}
EXCHANGED_COPIES, MESSAGES = 4, 2
PASSED_MESSAGES = 3
"""Messages of pooled rows on hosts of several ranks: two in the node's memory, and one that goes on to others."""
LONE_ID_BYTES, ID_BYTES = 32, 96
"""Bytes per id of a batch, on one rank and among several. Measured with tables in DDR: 30, and 81 to 95."""
ID_BYTES_AHEAD = 24
"""Bytes per id of a batch that is prefetched: its read, received and slot forms."""
UPDATED_LOOKUP_BYTES = 60
"""Bytes per lookup for updates of rows on a GPU by kernels of our own: lookups in the order of their rows. Counted
operation by operation: 36, and a sort takes more for itself."""
INTERACTION_COPIES = {"cpu": {"dot": 0, "dcn": 3}, "cuda": {"dot": 2, "dcn": 4}}
"""Copies of the interaction's inputs, on top of its layers' outputs: as one tensor, and gradients. The host's compiled
dot products read pooled rows in place."""
MEAN_COPIES, WIDTH_COPIES = 3, 2
"""Copies of pooled rows on the host: if some are means, the sums, their divisors and divided gradients; if they have
several widths, side by side, and gradients apart again."""
PROJECTED_COPIES = 2
"""Copies of the dot interaction's inputs if tables have ``project``: side by side, and gradients."""
FLOPS_PER_WEIGHT = 6
"""A multiply and an add forward, twice that backward (gradients of the input and of the weight)."""


def dense_parameters(model: ModelSpec) -> int:
    """Count the elements of the MLPs, their biases, the cross layers, and the matrices of tables with ``project``."""
    if model.interaction == "dcn":
        features = _joined(model)
        cross = model.cross_layers * (2 * features * model.cross_rank + features)
    else:
        vectors = _vectors(model)
        features, cross = (model.bottom_mlp[-1] if model.bottom_mlp else 0) + vectors * (vectors - 1) // 2, 0
    layers = (*pairwise((len(model.dense_features), *model.bottom_mlp)), *pairwise((features, *model.top_mlp)))
    projected = model.common_width * sum(table.dim for table in model.all_tables() if table.project)
    return projected + cross + sum((inputs + 1) * outputs for inputs, outputs in layers)


def dense_layers(model: ModelSpec) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return inputs and outputs of every layer that runs before, and after, pooled rows are at hand.

    A matrix of a table with ``project`` comes once for each of the table's features.
    """
    bottom = [*pairwise((len(model.dense_features), *model.bottom_mlp))]
    if model.interaction == "dcn":
        features, crossed = _joined(model), model.cross_layers
        cross = [(features, model.cross_rank), (model.cross_rank, features)] * crossed
    else:
        vectors = _vectors(model)
        features, cross = (model.bottom_mlp[-1] if model.bottom_mlp else 0) + vectors * (vectors - 1) // 2, []
    projected = [(each.dim, model.common_width) for each in model.all_tables() if each.project for _ in each.sources]
    return bottom, [*projected, *cross, *pairwise((features, *model.top_mlp))]


def pair_values(model: ModelSpec) -> int:
    """Count the columns of all pairs of vectors that interact in a sample; 0 without the dot interaction."""
    vectors = _vectors(model)
    return vectors * (vectors - 1) // 2 * model.common_width if model.interaction == "dot" else 0


def dense_cut_bytes(spec: DLRMJobSpec) -> int:
    """Return the bytes of dense parameters and their optimizer state, as one rank hands them over."""
    copies = 1 + OPTIMIZER_COPIES[spec.training.dense_optimizer.kind]
    return ELEMENT_BYTES * copies * dense_parameters(spec.model)


def step_flops(spec: DLRMJobSpec, samples: int) -> float:
    """Count the floating-point operations of one step over ``samples``, forward and backward."""
    model = spec.model
    dot = _vectors(model) ** 2 * model.common_width if model.interaction == "dot" else 0
    # A table's matrix is used once for each of its features.
    again = sum(table.dim * (len(table.sources) - 1) for table in model.all_tables() if table.project)
    return float(FLOPS_PER_WEIGHT * samples * (dense_parameters(model) + dot + again * model.common_width))


def largest_slice(spec: DLRMJobSpec) -> int:
    """Count the samples of one step on the rank with most of the batch: ranks read whole virtual shards."""
    count = virtual_shards(spec)
    return -(-count // spec.world_size) * (spec.data.global_batch_size // count)


def held_samples(spec: DLRMJobSpec) -> int:
    """Count the samples of a rank that have activations in memory at a time."""
    samples = largest_slice(spec)
    return min(samples, spec.training.micro_batch_size or samples)


def activation_bytes(spec: DLRMJobSpec) -> int:
    """Return the bytes of activations and their gradients of one rank.

    Inputs of the dense part, pooled rows too, are held for its whole slice of the batch; the rest for a micro batch.
    """
    model, samples, held = spec.model, largest_slice(spec), held_samples(spec)
    inputs = len(model.dense_features) + _pooled(model)
    joined = (INTERACTION_COPIES["cpu"][model.interaction] * _joined(model) + _projected(model)) * held
    has_widths = len({table.column_block or table.dim for table in model.all_tables()}) > 1
    copies = MEAN_COPIES * _has_means(model) + WIDTH_COPIES * has_widths
    return ELEMENT_BYTES * (2 * (inputs * samples + _inner(model) * held) + joined + copies * _pooled(model) * samples)


def device_activation_bytes(spec: DLRMJobSpec) -> int:
    """Return the same on a GPU, where each of torch's operations makes a tensor.

    Counted operation by operation. The peak is where the interaction's gradients are made, or where those of pooled
    rows are packed. The pooled rows of the step before are kept until its loss is known to be finite.
    """
    model, samples, held = spec.model, largest_slice(spec), held_samples(spec)
    pooled, means = _pooled(model), _has_means(model)
    joined = (INTERACTION_COPIES["cuda"][model.interaction] * _joined(model) + _projected(model)) * held
    made = (1 + means + 2 * (held < samples)) * pooled * samples + joined
    packed = (3 + 2 * means) * pooled * samples
    inputs = 2 * len(model.dense_features) * samples
    return ELEMENT_BYTES * (inputs + max(made + 2 * _inner(model) * held, packed))


def _projected(model: ModelSpec) -> int:
    """Count a sample's elements of vectors that tables with ``project`` add: the gradients of pooled rows too."""
    pooled = sum(table.dim * len(table.sources) for table in model.all_tables() if table.project)
    return PROJECTED_COPIES * _joined(model) + pooled if pooled else 0


def _inner(model: ModelSpec) -> int:
    crossed = (_joined(model) + model.cross_rank) * model.cross_layers
    interaction = _vectors(model) ** 2 if model.interaction == "dot" else crossed
    return sum(model.bottom_mlp) + sum(model.top_mlp) + interaction


def staged_bytes(spec: DLRMJobSpec) -> int:
    """Return the host bytes of one rank for features and labels of all batches on their way to its device."""
    each = ELEMENT_BYTES * (len(spec.model.dense_features) + 1)
    return (spec.trainer.cache.lookahead + 1) * largest_slice(spec) * each


def lookup_bytes(spec: DLRMJobSpec) -> int:
    """Return a rank's bytes for ids, on the host and on a GPU: as many ids as its slice of the batch has."""
    ids = sum(table.lookups * len(table.sources) for table in spec.model.all_tables())
    each = (LONE_ID_BYTES if spec.world_size == 1 else ID_BYTES) + ID_BYTES_AHEAD * spec.trainer.cache.lookahead
    return math.ceil(ids * largest_slice(spec)) * each


def update_bytes(spec: DLRMJobSpec) -> int:
    """Return the bytes of a GPU for updates of rows: none for tables that fbgemm's fused kernels update alone.

    Tables of one width and type are updated at a time; a rank looks up as many rows as its slice of the batch has.
    """
    training, taken = spec.training, Counter[tuple[int, str]]()
    fused = ROW_OPTIMIZERS[training.row_optimizer.kind].is_fused_on_gpu
    fused = fused and training.row_regularizer is None and not training.deterministic
    for table in spec.model.all_tables():
        if not fused or table.dtype != "fp32":
            width = table.column_block or table.dim
            rows = math.ceil(table.lookups * len(table.sources) * largest_slice(spec)) * table.dim // width
            taken[width, table.dtype] += rows * UPDATED_LOOKUP_BYTES
    return max(taken.values(), default=0)


def exchange_bytes(spec: DLRMJobSpec) -> int:
    """Return the peak bytes of one rank for the exchange between ranks.

    With evenly spread columns a rank pools as many elements as its slice of the batch needs: those, their gradients,
    the message sent and the one received; in a job of several nodes with several ranks each also ``PASSED_MESSAGES``.
    """
    copies = EXCHANGED_COPIES * (spec.world_size > 1) + PASSED_MESSAGES * has_two_levels(spec)
    return copies * _vector_bytes(spec)


def has_two_levels(spec: DLRMJobSpec) -> bool:
    """Return whether messages of hosts go through the memory of nodes first, then between nodes."""
    return 1 < spec.trainer.processes_per_replica < spec.world_size


def message_bytes(spec: DLRMJobSpec) -> int:
    """Return the messages of ``exchange_bytes`` to and from other ranks: a GPU's pooled rows are activations."""
    return MESSAGES * _vector_bytes(spec) * (spec.world_size - 1) // spec.world_size


def _vector_bytes(spec: DLRMJobSpec) -> int:
    return ELEMENT_BYTES * _pooled(spec.model) * largest_slice(spec)


def _pooled(model: ModelSpec) -> int:
    return sum(table.dim * len(table.sources) for table in model.all_tables())


def _joined(model: ModelSpec) -> int:
    if model.interaction == "dot":
        return _vectors(model) * model.common_width
    return _pooled(model) + (model.bottom_mlp[-1] if model.bottom_mlp else 0)


def _vectors(model: ModelSpec) -> int:
    return sum(len(table.sources) for table in model.all_tables()) + bool(model.bottom_mlp)


def _has_means(model: ModelSpec) -> bool:
    return any(table.pooling == "mean" for table in model.all_tables())


ROW_ID_BYTES = 8  # of each row of a cut
CUT_PIECE_ROWS, CUT_HEADER_BYTES = 65_536, 512
"""A cut lists its pieces: rows of a piece at least, and bytes of its entry at most."""
RANGE_COPIES = SENT_COPIES = 2
"""Copies of a global batch's pooled rows on a rank with a range of a table's rows: they and their gradients; and of
those of bags with ids in the range, picked and in a message."""
RANGES = tuple(2**power for power in range(1, 13))
"""Numbers of ranges among which the largest need is searched."""


@dataclass(frozen=True)
class PartBytes:
    """Hold the bytes of rows of columns, as Python integers: 5,000 tables of 2**54 bytes overflow int64."""

    row: int
    """A row and its state, as the kernels hold them; all columns, if rows have several sizes."""
    directory: int
    """Host memory of a unique table's directory, of lists of its keys for cuts, and of its shared rows."""
    resident: int
    """Rows, row state, change bits and directory; of rows of several sizes, those that ``keepBytes`` keeps."""
    handoff: int
    """All rows with their ids and state, as a full cut hands them over, headers included."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Hold all tables in the model's order; every tuple has one entry for each."""

    specs: tuple[TableSpec, ...]
    paths: tuple[str, ...]
    """Path of each table in the manifest: ``spec.model.tables[3]``."""
    block_state_bytes: tuple[int, ...]
    """Row state of one column block."""
    whole: tuple[PartBytes, ...]  # all rows and columns
    vector_bytes: tuple[int, ...]
    """Bytes of each table's pooled rows of a global batch; 0 if they are not in host memory."""
    handoff_budget: int | None
    """Bytes of each pod's hand-off; None if it is sized to hold a full cut."""

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """Return the host memory of each table, and of its part of a hand-off that holds a full cut."""
        return tuple(size.resident + (size.handoff if self.handoff_budget is None else 0) for size in self.whole)

    def range_bytes(self, table: int, share: float, ranges: int, width: float = 1.0) -> int:
        """Return the bytes of a step on one range of a table's rows, beyond its share of the table's.

        Each range has pooled rows and gradients of every bag of a global batch; those of bags with ids are copied and
        sent. ``width`` is its share of the columns, which are split into so many ``ranges``.
        """
        lookups = self.specs[table].lookups
        copies = RANGE_COPIES + SENT_COPIES * (1.0 - math.pow(1.0 - share, lookups)) - EXCHANGED_COPIES / ranges
        return math.ceil(self.vector_bytes[table] * width * max(copies, 0.0))

    @cached_property
    def rows(self) -> NDArray[np.float64]:
        """Return the (T,) rows of each table in memory."""
        return np.array([table.held_rows for table in self.specs], np.float64)

    @cached_property
    def block_width(self) -> NDArray[np.float64]:
        """Return the (T,) columns of a block of each table."""
        return np.array([table.column_block or table.dim for table in self.specs], np.float64)

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """Return a (T,) number for each block width and row type."""
        of_table = [(table.column_block or table.dim, table.dtype) for table in self.specs]
        number = {kind: i for i, kind in enumerate(dict.fromkeys(of_table))}
        return np.array([number[kind] for kind in of_table], np.int64)

    @cached_property
    def max_range_bytes(self) -> tuple[int, ...]:
        """Return the largest ``range_bytes`` of each table over all numbers of even ranges."""
        # Of 5,000 tables many are alike, and a variant of a problem has new ``Tables``.
        kinds = [(table.lookups, size) for table, size in zip(self.specs, self.vector_bytes, strict=True)]
        example = {kind: i for i, kind in enumerate(kinds)}
        most = {kind: max(self.range_bytes(i, 1 / n, n) for n in RANGES) for kind, i in example.items()}
        return tuple(most[kind] for kind in kinds)


def read_tables(spec: DLRMJobSpec) -> Tables:
    """Size every table of a job."""
    specs, optimizer = spec.model.all_tables(), spec.training.row_optimizer.kind
    blocks = tuple(STATE_BYTES * state_values(optimizer, table.column_block or table.dim) for table in specs)
    return Tables(
        specs=specs,
        paths=table_paths(spec),
        block_state_bytes=blocks,
        whole=tuple(part_bytes(t, block, t.held_rows, t.dim) for t, block in zip(specs, blocks, strict=True)),
        vector_bytes=tuple(ELEMENT_BYTES * t.dim * len(t.sources) * spec.data.global_batch_size for t in specs),
        handoff_budget=spec.checkpoint.handoff_budget,
    )


def part_bytes(table: TableOptions, block_state: int, rows: int, columns: int) -> PartBytes:
    """Size so many rows of so many columns, which are whole blocks: each is stored separately."""
    width = table.column_block or table.dim
    blocks = columns // width
    row = BYTES_OF[table.dtype] * width + block_state
    cut_row, directory, cut_rows = ELEMENT_BYTES * width + block_state + ROW_ID_BYTES, 0, rows
    handoff = 0
    if (buckets := table.key_buckets) is not None:
        count = rows // buckets.quota
        shared, counts = count * buckets.shared_rows, count * buckets.count_rows
        directory, cut_rows = count * buckets.directory_bytes + shared * (row + CHANGED_BYTES), count * buckets.quota
        handoff = _cut_bytes(shared, cut_row) + _cut_bytes(counts, COUNT_ROW_BYTES + ROW_ID_BYTES)
    cut_row += ROW_VALUE_BYTES * len(table.embedding.row_values) + CUT_COLUMNS_BYTES * table.has_sizes
    handoff += _cut_bytes(cut_rows, cut_row)
    slabs = table.slab_bytes(block_state)
    kept = blocks * rows * row if slabs is None else slabs.planned(rows)
    resident = kept + blocks * rows * CHANGED_BYTES + directory
    return PartBytes(blocks * row, directory, resident, blocks * handoff)


def _cut_bytes(rows: int, row: int) -> int:
    return rows * row + CUT_HEADER_BYTES * -(-rows // CUT_PIECE_ROWS)


def table_paths(spec: DLRMJobSpec) -> tuple[str, ...]:
    """Return the manifest path of each table of ``spec.model.all_tables()``."""
    own = tuple(f"spec.model.tables[{i}]" for i in range(len(spec.model.tables)))
    groups = enumerate(spec.model.table_groups)
    return own + tuple(f"spec.model.tableGroups[{i}].template" for i, group in groups for _ in range(group.count))


def replica_bytes(tables: Tables, replicated: Iterable[int]) -> int:
    """Return a rank's bytes of replicas: tables and the gradients that are all-reduced, with row counts."""
    specs = tables.specs
    return sum(tables.whole[i].resident + specs[i].rows * ELEMENT_BYTES * (specs[i].dim + 1) for i in replicated)
