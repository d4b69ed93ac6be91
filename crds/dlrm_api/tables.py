"""``spec.model.tables``: one embedding table, its input features, and its placement options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, NotBuilt, Rule
from dlrm_api.tiers import Tier

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")]
ColumnName = Annotated[str, Field(min_length=1, max_length=128)]


class InitializerSpec(ApiModel):
    """Configure initial row values: a hash of (seed, table, row, column), equal at any sharding and on any device."""

    kind: Literal["uniform", "zero"] = Field("uniform", description="Distribution of initial values.")
    scale: float | None = Field(None, ge=0, le=10, description="Values lie in [-scale, scale). Default: 1/sqrt(rows).")


class EmbeddingOptions(ApiModel):
    """Configure how ids map to rows and which rows are kept."""

    hash: Literal["none", "modulo", "mix"] = Field(
        "none",
        description="none: ids are row numbers below rows; any other id is an error. modulo: id mod rows. mix: a "
        "64-bit hash of the id, then mod rows (for hexadecimal or unbounded ids).",
    )
    admission_count: Annotated[int | None, NotBuilt()] = Field(
        None, ge=1, le=1_000_000, description="Number of times an id must be seen before it gets its own row."
    )
    prune_ratio: Annotated[float | None, NotBuilt()] = Field(
        None, ge=0, le=0.999, description="Share of embedding bytes to prune during training (in-training dimension)."
    )


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

    rules = (
        Rule(
            cel="!(has(self.prior) && has(self.reference))",
            holds=lambda spec: spec.prior is None or spec.reference is None,
            message="prior and reference are mutually exclusive: set one of them",
        ),
    )


class TablePin(ApiModel):
    """Fix the placement of a table instead of leaving it to the planner."""

    sharding: Literal["table", "row", "column", "data", "table-row"] | None = Field(
        None,
        description="Sharding of the table. table: whole on one rank; row: a range of rows on each rank; column: "
        "column blocks (needs columnBlock); data: a replica on every rank; table-row: a range of rows on each rank of "
        "one node. Default: the planner decides.",
    )
    ranks: tuple[Annotated[int, Field(ge=0, le=65_535)], ...] = Field(
        (),
        max_length=1_024,
        description="Ranks that may hold the table's shards. Sharding row uses each of them, column as many as there "
        "are blocks, table-row all ranks of their node; otherwise the planner chooses among them. Empty: any rank.",
    )
    tier: Tier | None = Field(
        None,
        description="Memory tier that backs the table's rows. hbm: all rows in GPU memory; ddr: all rows in host "
        "memory; a slower tier: all rows that are not in host memory slots.",
    )


def _has_blocks_to_split(table: TableOptions) -> bool:
    block = table.dim if table.column_block is None else table.column_block
    return table.pin is None or table.pin.sharding != "column" or block < table.dim


class TableOptions(ApiModel):
    """Configure everything of a table except its name and features."""

    rows: int = Field(ge=1, le=2**40, description="Rows of the table (distinct ids after hashing).")
    dim: int = Field(ge=4, le=4_096, multiple_of=4, description="Columns of a row (elements).")
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
    column_block: int | None = Field(
        None,
        ge=4,
        le=4_096,
        multiple_of=4,
        description="Columns of a column block, which has its own row optimizer state and is never split over ranks; "
        "must divide dim. Default: dim (one block). It cannot change while the job has snapshots.",
    )
    embedding: EmbeddingOptions = Field(EmbeddingOptions(), description="How ids map to rows.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.columnBlock) || self.dim % self.columnBlock == 0",
            holds=lambda table: table.column_block is None or table.dim % table.column_block == 0,
            message="columnBlock must divide dim: change one of them",
        ),
        Rule(
            cel="!has(self.pin) || !has(self.pin.sharding) || self.pin.sharding != 'column' || "
            "(has(self.columnBlock) && self.columnBlock < self.dim)",
            holds=_has_blocks_to_split,
            message="pin.sharding column needs columnBlock below dim: set it, for example to dim / 2 for two shards",
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
    def block_edges(self) -> tuple[int, ...]:
        """Return the edges of the column blocks: (0, dim) for one block."""
        return tuple(range(0, self.dim + 1, self.column_block or self.dim))


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
    column: str
    """Source column of the ids."""
    weights: str | None
    """Source column of the weights; None: all weights are 1."""
