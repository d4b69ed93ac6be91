"""``spec.model``: dense features, MLPs, interaction, and embedding tables with their placement."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from dlrm_api.base import ApiModel, Rule, exclusive
from dlrm_api.dimensions import MAX_SIZES, SlabBytes, default_sizes
from dlrm_api.fields import INT_OR_STRING
from dlrm_api.keys import BUCKET_ROWS, MAX_BUCKET_ROWS, MAX_BUCKETS, KeyBuckets, key_buckets
from dlrm_api.tiers import Tier

Precision = Literal["fp32", "tf32", "bf16"]
"""Number format of dense products."""

MAX_TABLES = 5_000
MAX_FEATURES = 10_000
NAME_PATTERN = r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$"
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)]
ColumnName = Annotated[str, Field(min_length=1, max_length=128)]
Columns = Annotated[int, Field(ge=4, le=4_096, multiple_of=4)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Hash = Literal["none", "modulo", "mix", "unique"]
RowValue = Literal["touched", "score", "utility"]
Buckets = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
MAX_MAINTENANCE_STEPS = 64
MAX_COMPANION_NAME = 56
"""Snapshots name a table's counters, and its shared rows, after it."""
MAX_COMPANION_GROUP = MAX_COMPANION_NAME - len(f"-{MAX_TABLES - 1}")


def parse_maintenance_steps(value: Any) -> Any:
    """Check ``auto`` or a number of steps.

    Raises:
        ValueError: it is neither.
    """
    if value == "auto" or (
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_MAINTENANCE_STEPS
    ):
        return value
    raise ValueError(f"expected auto or an integer from 1 to {MAX_MAINTENANCE_STEPS}, got {value!r}")


MaintenanceSteps = Annotated[
    Literal["auto"] | int,
    BeforeValidator(parse_maintenance_steps),
    WithJsonSchema(
        {**INT_OR_STRING, "minimum": 1, "maximum": MAX_MAINTENANCE_STEPS, "maxLength": 4, "pattern": "^auto$"}
    ),
]


class InitializerSpec(ApiModel):
    """Configure initial row values: a hash of (seed, table, row, column), equal at any sharding and on any device."""

    kind: Literal["uniform", "zero"] = Field("uniform", description="Distribution of initial values.")
    scale: float | None = Field(None, ge=0, le=10, description="Values lie in [-scale, scale). Default: 1/sqrt(rows).")


Samples = Annotated[int, Field(ge=1, le=2**53)]


class EvictionSpec(ApiModel):
    """Configure which rows leave a full bucket, and which leave by their age."""

    keep: Literal["recent", "frequent", "useful"] = Field(
        "recent",
        description="Rows that stay. recent: those looked up last. frequent: those with the most lookups "
        "for each step since the last one; better where ids that leave come back. useful: the same with the norms of "
        "gradients in place of lookups. For the last two, what a lookup counts halves every halfLifeSamples, and a row "
        "takes 12 more bytes of host memory.",
    )
    half_life_samples: Samples | None = Field(
        None,
        description="Samples after which a lookup counts half, with keep frequent or useful. Default: 20 lookups per "
        "row, at least 100 steps.",
    )
    max_age_samples: tuple[Samples, ...] = Field(
        (),
        max_length=100,
        description="Samples after its last lookup at which a row leaves, even if there is space: one number, or one "
        "for each of the table's features; the feature with the latest end counts. A row leaves up to a sixteenth "
        "later. Default: never.",
    )

    rules = (
        Rule(
            cel="!has(self.halfLifeSamples) || (has(self.keep) && self.keep != 'recent')",
            holds=lambda eviction: eviction.half_life_samples is None or eviction.keep != "recent",
            message="halfLifeSamples needs keep frequent or useful: set keep, or remove halfLifeSamples",
        ),
    )


class AdmissionSpec(ApiModel):
    """Configure which ids get a row. Rare ids that get one push out others."""

    count: int | None = Field(
        None,
        ge=1,
        le=15,
        description="Sight at which an id gets a row; sights since the last maintenance do not count yet. Counters "
        "take 3.4 bytes of host memory per row. Ids may share them, and they halve before most are shared: an id that "
        "comes back seldom is forgotten. Default: 1, the first sight.",
    )
    probability: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the batches with an id that has no row in which the id gets one. The draw depends on the "
        "seed, the id and the step alone. Default: 1.",
    )

    rules = (
        exclusive("count", "probability"),
        Rule(
            cel="!has(self.probability) || self.probability > 0.0",
            holds=lambda admission: admission.probability is None or admission.probability > 0,
            message="probability must be above 0: with 0 no id would get a row",
        ),
    )


class DimensionSpec(ApiModel):
    """Configure how many columns rows keep: those looked up often and with great gradients more, others fewer."""

    keep_bytes: float = Field(
        ge=0,
        le=1,
        description="Share of the table's row bytes to keep: of those of all rows with all columns, optimizer state "
        "included. What rows of several sizes take besides columns counts too. The budget of all tables is spent where "
        "it earns most. 1: rows never lose columns.",
    )
    sizes: tuple[Columns, ...] = Field(
        (),
        max_length=MAX_SIZES,
        description="Numbers of columns that a row may have, ascending; the last one is dim. The columns that a row "
        "lacks read as zeros. It starts with dim, or with fewer where new rows would take more than keepBytes allows. "
        "Default: a quarter, half and all of dim, rounded to multiples of 4.",
    )

    rules = (
        Rule(
            cel="self.keepBytes > 0.0",
            holds=lambda dimension: dimension.keep_bytes > 0,
            message="keepBytes must be above 0: with 0 no row would hold anything",
        ),
        Rule(
            cel="!has(self.sizes) || self.sizes.isSorted() && "
            "self.sizes.all(columns, self.sizes.exists_one(other, other == columns))",
            holds=lambda dimension: all(one < other for one, other in pairwise(dimension.sizes)),
            message="sizes must be ascending, each number once: sort them",
        ),
    )


class EmbeddingOptions(ApiModel):
    """Configure how ids map to rows and which rows are kept."""

    hash: Hash = Field(
        "none",
        description="none: ids are row numbers below rows; any other id is an error. modulo: id mod rows. mix: a "
        "64-bit hash of the id, then mod rows (for hexadecimal ids). unique: each id has a row "
        "of its own, at most rows of them at a time (for ids without bound: any integer, or text in Parquet).",
    )
    admission: AdmissionSpec | None = Field(
        None, description="Which ids get a row of a unique table. Default: each at first sight."
    )
    eviction: EvictionSpec | None = Field(
        None, description="Which rows of a unique table make room for new ids. Default: keep recent."
    )
    buckets: Buckets | None = Field(
        None,
        description="Ranges of hashed ids of a unique table, each with an equal share of its rows. A table is split "
        "over at most so many ranks; many small buckets evict before the table is full. It cannot change while the job "
        f"has snapshots. Default: the power of two nearest to rows / {BUCKET_ROWS}, from 1 to {MAX_BUCKETS}.",
    )
    unknown: Literal["zero", "shared"] = Field(
        "zero",
        description="What an id without a row of a unique table reads. zero: zeros. shared: the sum of two of "
        "sharedRows rows, chosen by two hashes of the id, which its gradient updates (double hashing).",
    )
    shared_rows: int | None = Field(
        None,
        ge=1,
        le=MAX_BUCKET_ROWS,
        description="Rows that ids without a row share, with unknown shared: a multiple of buckets. They are in host "
        "memory, besides rows. It cannot change while the job has snapshots.",
    )
    dimension: DimensionSpec | None = Field(
        None, description="Rows of several numbers of columns, to take less host memory. Default: all have dim."
    )

    rules = (
        Rule(
            cel="self.hash == 'unique' || !(has(self.admission) || has(self.eviction) || has(self.buckets))",
            holds=lambda options: (
                options.hash == "unique" or (options.admission or options.eviction or options.buckets) is None
            ),
            message="admission, eviction and buckets need hash unique: set it, or remove them",
        ),
        Rule(
            cel="self.hash == 'unique' || !(has(self.sharedRows) || (has(self.unknown) && self.unknown == 'shared'))",
            holds=lambda options: (
                options.hash == "unique" or (options.unknown == "zero" and options.shared_rows is None)
            ),
            message="unknown shared and sharedRows need hash unique: set it, or remove them",
        ),
        Rule(
            cel="has(self.sharedRows) == (has(self.unknown) && self.unknown == 'shared')",
            holds=lambda options: (options.shared_rows is not None) == (options.unknown == "shared"),
            message="unknown shared and sharedRows must be set together: set both or neither",
        ),
    )

    @property
    def has_counts(self) -> bool:
        """Return whether sights of ids without a row are counted."""
        return self.admission is not None and (self.admission.count or 1) > 1

    @property
    def row_values(self) -> tuple[RowValue, ...]:
        """Return what snapshots store of each row beside weights and optimizer state."""
        has_score = self.eviction is not None and self.eviction.keep != "recent"
        kept: dict[RowValue, bool] = {
            "touched": self.hash == "unique",
            "score": has_score,
            "utility": self.dimension is not None,
        }
        return tuple(value for value, is_kept in kept.items() if is_kept)


TRACE_KEY = "trace.json"
"""Key of a ConfigMap that holds a trace."""
REFERENCE = r"^(file:///.+|configmap:[a-z0-9]([a-z0-9.-]*[a-z0-9])?)$"


class DistributionSpec(ApiModel):
    """Describe how often rows are accessed: a named prior, or a trace measured by dlrmctl trace."""

    prior: Literal["uniform", "zipf"] | None = Field(
        None, description="Shape of the popularity curve. Default without reference: zipf."
    )
    alpha: float = Field(1.05, ge=0, le=3, description="Exponent of the zipf prior.")
    reference: str | None = Field(
        None,
        min_length=1,
        max_length=1_024,
        pattern=REFERENCE,
        description="Trace of the table, measured by dlrmctl trace: file:///path for dlrmctl, or configmap:NAME for "
        f"key {TRACE_KEY} of a ConfigMap in the job's namespace.",
    )

    rules = (exclusive("prior", "reference"),)


class TablePin(ApiModel):
    """Fix the placement of a table instead of leaving it to the planner."""

    sharding: Literal["table", "row", "column", "data", "table-row", "grid"] | None = Field(
        None,
        description="Sharding of the table. table: whole on one rank; row: a range of rows on each rank; column: "
        "column blocks (needs columnBlock); data: a replica on every rank; table-row: a range of rows on each rank of "
        "one node; grid: column blocks on several nodes (needs columnBlock), on each a range of rows on each rank. "
        "Default: the planner decides.",
    )
    ranks: tuple[Annotated[int, Field(ge=0, le=65_535)], ...] = Field(
        (),
        max_length=1_024,
        description="Ranks that may hold the table's shards. Sharding row uses each of them, column as many as there "
        "are blocks, table-row all ranks of their node, grid all ranks of as many of their nodes as there are blocks; "
        "otherwise the planner chooses among them. Empty: any rank.",
    )
    tier: Tier | None = Field(
        None,
        description="Memory tier that backs the table's rows. hbm: all rows in GPU memory; ddr: all rows in host "
        "memory; a slower tier: all rows that are not in host memory slots.",
    )


def _has_blocks_to_split(table: TableOptions) -> bool:
    block = table.dim if table.column_block is None else table.column_block
    return table.pin is None or table.pin.sharding not in ("column", "grid") or block < table.dim


def _fits_its_buckets(table: TableOptions) -> bool:
    buckets = table.embedding.buckets
    return buckets is None or buckets <= table.rows <= buckets * MAX_BUCKET_ROWS


_DIMENSION = "has(self.embedding.dimension)"
_ON_SEVERAL_RANKS = ("data", "column", "grid")
"""Shardings that put a row on several ranks."""


def _lies_in_ddr(table: TableOptions) -> bool:
    pin = table.pin
    return not (table.has_sizes and pin) or (pin.sharding not in _ON_SEVERAL_RANKS and pin.tier in (None, "ddr"))


def _shares_evenly(table: TableOptions) -> bool:
    shared, buckets = table.embedding.shared_rows, table.key_buckets
    return shared is None or buckets is None or shared % buckets.count == 0


_POWERS = [2**power for power in range(1, MAX_BUCKETS.bit_length())]


class TableOptions(ApiModel):
    """Configure everything of a table except its name and features."""

    rows: int = Field(
        ge=1,
        le=2**40,
        description="Rows of the table (distinct ids after hashing). With embedding.hash unique: most rows at a time.",
    )
    dim: Columns = Field(description="Columns of a row (elements).")
    project: bool = Field(
        False,
        description="Multiply pooled vectors by a trained matrix, so that dim may differ from the common width of "
        "interaction dot: the last bottomMlp width or, without a bottom MLP, the largest dim.",
    )
    pooling: Literal["sum", "mean"] = Field("sum", description="How the rows of one bag are combined into one vector.")
    max_lookups: int = Field(1, ge=1, le=100_000, description="Most ids in one bag; a longer bag is an error.")
    avg_lookups: float | None = Field(
        None, ge=0, le=100_000, description="Mean number of ids in one bag, for planning. Default: maxLookups."
    )
    distribution: DistributionSpec | None = Field(
        None, description="How often rows are accessed, for cache planning. Default: zipf with alpha 1.05."
    )
    dtype: Literal["fp32", "fp16"] = Field(
        "fp32",
        description="Type of an element. fp16: updates are computed in fp32 and rounded stochastically, reproducibly "
        "in every run.",
    )
    initializer: InitializerSpec = Field(InitializerSpec(), description="Initial row values.")
    pin: TablePin | None = Field(None, description="Fixed sharding or tier, instead of the planner's choice.")
    column_block: Columns | None = Field(
        None,
        description="Columns of a column block, which has its own row optimizer state and is never split over ranks; "
        "must divide dim. Default: dim (one block). It cannot change while the job has snapshots.",
    )
    embedding: EmbeddingOptions = Field(EmbeddingOptions(), description="How ids map to rows.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.embedding.hash != 'unique' || !has(self.pin) || !has(self.pin.sharding) || "
            "!(self.pin.sharding in ['data', 'column', 'grid'])",
            holds=lambda table: not (table.is_unique and table.pin and table.pin.sharding in _ON_SEVERAL_RANKS),
            message="pin.sharding data, column and grid do not work with embedding.hash unique: use table, row or "
            "table-row",
        ),
        Rule(
            cel="self.embedding.hash != 'unique' || !has(self.columnBlock) || self.columnBlock == self.dim",
            holds=lambda table: not table.is_unique or table.column_block in (None, table.dim),
            message="embedding.hash unique needs whole rows: remove columnBlock",
        ),
        Rule(
            cel="!has(self.embedding.buckets) || (self.embedding.buckets <= self.rows && "
            f"self.rows <= self.embedding.buckets * {MAX_BUCKET_ROWS})",
            holds=_fits_its_buckets,
            message="embedding.buckets must not exceed rows, nor give a bucket over 2^31 rows: change one of them",
        ),
        Rule(
            # A multiple of the default buckets, a power of two, is one of each lower power.
            cel="!has(self.embedding.sharedRows) || (has(self.embedding.buckets) ? "
            f"self.embedding.sharedRows % self.embedding.buckets == 0 : {_POWERS}.all(buckets, "
            f"self.rows < buckets * {BUCKET_ROWS * 3 // 4} || self.embedding.sharedRows % buckets == 0))",
            holds=_shares_evenly,
            message="embedding.sharedRows must be a multiple of embedding.buckets, by default the power of two nearest "
            f"to rows / {BUCKET_ROWS}: change one of them",
        ),
        Rule(
            cel=f"!{_DIMENSION} || !has(self.embedding.dimension.sizes) || size(self.embedding.dimension.sizes) == 0 "
            "|| self.embedding.dimension.sizes[size(self.embedding.dimension.sizes) - 1] == self.dim",
            holds=lambda table: not table.has_sizes or table.sizes[-1] == table.dim,
            message="the last of embedding.dimension.sizes must be dim: change one of them",
        ),
        Rule(
            cel=f"!{_DIMENSION} || !has(self.columnBlock) || self.columnBlock == self.dim",
            holds=lambda table: not table.has_sizes or table.column_block in (None, table.dim),
            message="embedding.dimension needs whole rows: remove columnBlock",
        ),
        Rule(
            cel=f"!{_DIMENSION} || !has(self.dtype) || self.dtype == 'fp32'",
            holds=lambda table: not table.has_sizes or table.dtype == "fp32",
            message="embedding.dimension does not work with dtype fp16: use fp32",
        ),
        Rule(
            cel=f"!{_DIMENSION} || !has(self.pin) || (!has(self.pin.sharding) || "
            "!(self.pin.sharding in ['data', 'column', 'grid'])) && (!has(self.pin.tier) || self.pin.tier == 'ddr')",
            holds=_lies_in_ddr,
            message="embedding.dimension needs rows in host memory of one rank each: use pin.sharding table, row or "
            "table-row, and pin.tier ddr",
        ),
        Rule(
            cel="!has(self.columnBlock) || self.dim % self.columnBlock == 0",
            holds=lambda table: table.column_block is None or table.dim % table.column_block == 0,
            message="columnBlock must divide dim: change one of them",
        ),
        Rule(
            cel="!has(self.pin) || !has(self.pin.sharding) || !(self.pin.sharding in ['column', 'grid']) || "
            "(has(self.columnBlock) && self.columnBlock < self.dim)",
            holds=_has_blocks_to_split,
            message="pin.sharding column and grid need columnBlock below dim: set it, for example to dim / 2 for two "
            "shards",
        ),
        Rule(
            cel="!has(self.avgLookups) || self.avgLookups <= double(self.maxLookups)",
            holds=lambda table: table.avg_lookups is None or table.avg_lookups <= table.max_lookups,
            message="avgLookups must not exceed maxLookups: change one of them",
        ),
    )

    @property
    def lookups(self) -> float:
        """Return the mean number of ids in one bag, for the cost model."""
        return self.max_lookups if self.avg_lookups is None else self.avg_lookups

    @property
    def is_unique(self) -> bool:
        """Return whether each id has a row of its own."""
        return self.embedding.hash == "unique"

    @property
    def has_sizes(self) -> bool:
        """Return whether rows have several numbers of columns."""
        return self.embedding.dimension is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of columns that a row may have, ascending; empty if all have ``dim``."""
        dimension = self.embedding.dimension
        return () if dimension is None else dimension.sizes or default_sizes(self.dim)

    def slab_bytes(self, state_bytes: int) -> SlabBytes | None:
        """Return how many bytes the rows take if they have several numbers of columns; else None.

        Args:
            state_bytes: Optimizer state of a row.
        """
        if (dimension := self.embedding.dimension) is None:
            return None
        least = self.sizes[0] if self.is_unique else 0
        return SlabBytes(dim=self.dim, state_bytes=state_bytes, keep=dimension.keep_bytes, least_columns=least)

    @property
    def key_buckets(self) -> KeyBuckets | None:
        """Return the buckets of a unique table; None for any other."""
        if not self.is_unique:
            return None
        options = self.embedding
        has_scores = "score" in options.row_values
        return key_buckets(
            self.rows,
            options.buckets,
            has_scores=has_scores,
            has_counts=options.has_counts,
            shared_rows=options.shared_rows or 0,
        )

    @property
    def held_rows(self) -> int:
        """Return the rows in memory: of a unique table, those of all buckets."""
        buckets = self.key_buckets
        return self.rows if buckets is None else buckets.count * buckets.quota

    @property
    def unit_rows(self) -> int:
        """Return the rows of a range that is never split over ranks: a bucket's, or 1."""
        buckets = self.key_buckets
        return 1 if buckets is None else buckets.quota

    @property
    def block_edges(self) -> tuple[int, ...]:
        """Return the edges of the column blocks: (0, dim) for one block."""
        return tuple(range(0, self.dim + 1, self.column_block or self.dim))


_HAS_AGES = "has({0}.embedding.eviction) && has({0}.embedding.eviction.maxAgeSamples)"


def _ages(table: TableOptions) -> tuple[int, ...]:
    eviction = table.embedding.eviction
    return () if eviction is None else eviction.max_age_samples


def _has_companions(table: TableOptions) -> bool:
    admission = table.embedding.admission
    return table.embedding.shared_rows is not None or (admission is not None and admission.count is not None)


class TableSpec(TableOptions):
    """Configure one embedding table."""

    name: Name = Field(description="Name of the table, unique in the model.")
    features: tuple[ColumnName, ...] = Field(
        (),
        max_length=256,
        description="Source columns of ids (C1 to C26 for criteo-tsv), each pooled separately. Default: the table's "
        "name. Several tables may read the same column.",
    )
    weights: tuple[ColumnName, ...] = Field(
        (),
        max_length=256,
        description="Weight columns, one per feature, with one weight per id of a bag: rows are multiplied by it "
        "before pooling. Empty: all weights are 1.",
    )

    rules = (
        *TableOptions.rules,
        Rule(
            cel="!has(self.weights) || size(self.weights) == 0 || "
            "size(self.weights) == (has(self.features) && size(self.features) > 0 ? size(self.features) : 1)",
            holds=lambda table: len(table.weights) in (0, len(table.sources)),
            message="weights must have one column per feature, or none",
        ),
        Rule(
            cel=f"!({_HAS_AGES.format('self')}) || size(self.embedding.eviction.maxAgeSamples) <= 1 || "
            "(has(self.features) && size(self.embedding.eviction.maxAgeSamples) == size(self.features))",
            holds=lambda table: len(_ages(table)) in (0, 1, len(table.sources)),
            message="embedding.eviction.maxAgeSamples must have one number, or one per feature",
        ),
        Rule(
            cel="!(has(self.embedding.sharedRows) || has(self.embedding.admission) && "
            f"has(self.embedding.admission.count)) || size(self.name) <= {MAX_COMPANION_NAME}",
            holds=lambda table: not _has_companions(table) or len(table.name) <= MAX_COMPANION_NAME,
            message="embedding.sharedRows and embedding.admission.count need a name of at most "
            f"{MAX_COMPANION_NAME} characters",
        ),
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the columns that the table reads."""
        return self.features or (self.name,)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Describe one feature: a bag of ids per sample, looked up in one table and pooled to one vector."""

    table: int
    """Index of the table in the model's order."""
    column: str  # source column of the ids
    weights: str | None
    """Source column of the weights; None: all weights are 1."""


class TableGroup(ApiModel):
    """Declare ``count`` equal tables named ``<name>-0``, ``<name>-1`` and so on, to keep manifests small."""

    name: str = Field(
        min_length=1,
        max_length=56,
        pattern=NAME_PATTERN,
        description="Prefix of the tables' names. Table i is <name>-<i> and reads the feature of that name.",
    )
    count: int = Field(ge=1, le=MAX_TABLES, description="Number of tables.")
    template: TableOptions = Field(description="Options of each table.")

    rules = (
        Rule(
            cel=f"!({_HAS_AGES.format('self.template')}) || size(self.template.embedding.eviction.maxAgeSamples) <= 1",
            holds=lambda group: len(_ages(group.template)) <= 1,
            message="template.embedding.eviction.maxAgeSamples must have one number: each table has one feature",
        ),
        Rule(
            cel="!(has(self.template.embedding.sharedRows) || has(self.template.embedding.admission) && "
            f"has(self.template.embedding.admission.count)) || size(self.name) <= {MAX_COMPANION_GROUP}",
            holds=lambda group: not _has_companions(group.template) or len(group.name) <= MAX_COMPANION_GROUP,
            message="template.embedding.sharedRows and admission.count need a name of at most "
            f"{MAX_COMPANION_GROUP} characters",
        ),
    )


_WIDTH = (
    "has(self.bottomMlp) && size(self.bottomMlp) > 0 ? self.bottomMlp[size(self.bottomMlp) - 1] : "
    "((has(self.tables) ? self.tables.map(t, t.dim) : []) + "
    "(has(self.tableGroups) ? self.tableGroups.map(g, g.template.dim) : [])).max()"
)
""":attr:`ModelSpec.common_width`, in CEL. An error without tables, which another rule reports."""


def has_unique(model: str) -> str:
    """Return the CEL expression of :attr:`ModelSpec.has_unique`; ``model``: the expression of the model."""
    return _any_embedding(model, "{0}.hash == 'unique'")


def has_sizes(model: str) -> str:
    """Return the CEL expression of :attr:`ModelSpec.has_sizes`; ``model``: the expression of the model."""
    return _any_embedding(model, "has({0}.dimension)")


def _any_embedding(model: str, condition: str) -> str:
    return (
        f"(has({model}.tables) && {model}.tables.exists(t, {condition.format('t.embedding')}) || "
        f"has({model}.tableGroups) && {model}.tableGroups.exists(g, {condition.format('g.template.embedding')}))"
    )


def _dims_agree(model: ModelSpec) -> bool:
    width = model.common_width
    return model.interaction != "dot" or all(table.project or table.dim == width for table in model.declared_tables)


def _has_a_pair(model: ModelSpec) -> bool:
    vectors = sum(len(table.sources) for table in model.tables) + sum(group.count for group in model.table_groups)
    return model.interaction != "dot" or vectors + bool(model.bottom_mlp) != 1


class ModelSpec(ApiModel):
    """Configure the model: bottom MLP, embedding tables, interaction, top MLP."""

    dense_features: tuple[ColumnName, ...] = Field(
        (), max_length=10_000, description="Source columns of the dense features (I1 to I13 for criteo-tsv)."
    )
    bottom_mlp: tuple[Width, ...] = Field(
        (),
        max_length=64,
        description="Widths of the bottom MLP's layers. For interaction dot the last one must equal the dim of tables "
        "without project.",
    )
    top_mlp: tuple[Width, ...] = Field(
        (512, 256, 1),
        min_length=1,
        max_length=64,
        description="Widths of the top MLP's layers. The last one is 1, the logit.",
    )
    interaction: Literal["dot", "dcn"] = Field(
        "dot", description="dot: pairwise dot products; dcn: low-rank cross layers (DCN v2)."
    )
    cross_layers: int = Field(3, ge=1, le=32, description="Cross layers of the dcn interaction.")
    cross_rank: int = Field(64, ge=1, le=16_384, description="Rank of each cross layer's matrix.")
    precision: Precision = Field(
        "fp32",
        description="Compute type of MLPs and interaction; weights stay fp32. tf32 rounds what GPUs multiply to 10 "
        "bits of fraction, and is fp32 on CPUs. bf16 computes in fp32 on CPUs where it would be slower: those without "
        "AMX (Intel) or AVX-512 BF16 (others).",
    )
    tables: tuple[TableSpec, ...] = Field((), max_length=MAX_TABLES, description="Embedding tables.")
    table_groups: tuple[TableGroup, ...] = Field((), max_length=256, description="Groups of equal tables.")
    maintenance_steps: MaintenanceSteps = Field(
        "auto",
        description="Training steps between two evictions from full buckets of unique tables, and between two moments "
        "when rows with embedding.dimension gain or lose columns. auto: starts at 8; halves if over 1 % of lookups "
        "find their bucket full or wait to be admitted, or if new rows would not find space, doubles if under 0.1 % do "
        "and twice as many new rows would.",
    )

    rules = (
        Rule(
            cel="size(self.topMlp) > 0 && self.topMlp[size(self.topMlp) - 1] == 1",
            holds=lambda model: model.top_mlp[-1] == 1,
            message="topMlp must end in 1: the last layer is the logit",
        ),
        Rule(
            cel="(has(self.denseFeatures) && size(self.denseFeatures) > 0) == "
            "(has(self.bottomMlp) && size(self.bottomMlp) > 0)",
            holds=lambda model: bool(model.dense_features) == bool(model.bottom_mlp),
            message="denseFeatures and bottomMlp must be set together: set both or neither",
        ),
        Rule(
            cel="(has(self.tables) && size(self.tables) > 0) || (has(self.tableGroups) && size(self.tableGroups) > 0)",
            holds=lambda model: bool(model.tables or model.table_groups),
            message="tables and tableGroups are both empty: add at least one table",
        ),
        Rule(
            cel="(has(self.tables) ? size(self.tables) : 0) + "
            f"(has(self.tableGroups) ? self.tableGroups.map(g, g.count).sum() : 0) <= {MAX_TABLES}",
            holds=lambda model: len(model.tables) + sum(group.count for group in model.table_groups) <= MAX_TABLES,
            message=f"expected at most {MAX_TABLES} tables, with the counts of tableGroups included",
        ),
        Rule(
            # The list of one width is its name: computed once, not for each table.
            cel=f"self.interaction != 'dot' || [{_WIDTH}].all(width, "
            "(!has(self.tables) || self.tables.all(t, t.project || t.dim == width)) && "
            "(!has(self.tableGroups) || self.tableGroups.all(g, g.template.project || g.template.dim == width)))",
            holds=_dims_agree,
            message="interaction dot needs equal widths: make the dim of every table and the last bottomMlp width "
            "equal, set project: true in tables of another dim, or use interaction dcn",
        ),
        Rule(
            cel="self.interaction == 'dot' || !((has(self.tables) && self.tables.exists(t, t.project)) || "
            "(has(self.tableGroups) && self.tableGroups.exists(g, g.template.project)))",
            holds=lambda model: model.interaction == "dot" or not any(table.project for table in model.declared_tables),
            message="project needs interaction dot: remove it, since interaction dcn takes tables of any dim",
        ),
        Rule(
            cel="self.interaction != 'dot' || (has(self.bottomMlp) && size(self.bottomMlp) > 0) || "
            "(has(self.tables) && self.tables.exists(t, has(t.features) && size(t.features) > 1)) || "
            "(has(self.tableGroups) && self.tableGroups.exists(g, g.count > 1)) || "
            "(has(self.tables) ? size(self.tables) : 0) + (has(self.tableGroups) ? size(self.tableGroups) : 0) != 1",
            holds=_has_a_pair,
            message="interaction dot needs at least two vectors: add denseFeatures or a second feature, or use "
            "interaction dcn",
        ),
        Rule(
            cel=f"self.maintenanceSteps == 'auto' || {has_unique('self')} || {has_sizes('self')}",
            holds=lambda model: model.maintenance_steps == "auto" or model.has_unique or model.has_sizes,
            message="maintenanceSteps needs a table with embedding.hash unique or embedding.dimension: remove it",
        ),
    )

    @property
    def declared_tables(self) -> tuple[TableOptions, ...]:
        """Return the options of each table and of each group."""
        return (*self.tables, *(group.template for group in self.table_groups))

    @property
    def common_width(self) -> int:
        """Return the width of the vectors that interaction dot multiplies; 0 without tables."""
        return self.bottom_mlp[-1] if self.bottom_mlp else max((table.dim for table in self.declared_tables), default=0)

    @property
    def has_unique(self) -> bool:
        """Return whether any table gives each id a row of its own."""
        return any(table.is_unique for table in self.declared_tables)

    @property
    def has_sizes(self) -> bool:
        """Return whether rows of any table have several numbers of columns."""
        return any(table.has_sizes for table in self.declared_tables)

    def all_tables(self) -> tuple[TableSpec, ...]:
        """Return every table with groups expanded, in the order of the model and of the snapshot format."""
        grouped = (
            TableSpec(name=f"{group.name}-{i}", **dict(group.template))
            for group in self.table_groups
            for i in range(group.count)
        )
        return (*self.tables, *grouped)

    def all_features(self) -> tuple[Feature, ...]:
        """Return every feature, table by table, in the order of bags and pooled vectors."""
        return tuple(
            Feature(table=number, column=column, weights=weights)
            for number, table in enumerate(self.all_tables())
            for column, weights in zip(table.sources, table.weights or (None,) * len(table.sources), strict=True)
        )
