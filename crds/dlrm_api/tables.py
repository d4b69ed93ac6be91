"""``spec.model.tables``: one embedding table, the ids that it reads, and what the planner may do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, NotBuilt, Rule
from dlrm_api.tiers import Tier

Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")]
ColumnName = Annotated[str, Field(min_length=1, max_length=128)]


class InitializerSpec(ApiModel):
    """Where a row starts: a hash of (seed, table, row, column), the same at any sharding and on any device."""

    kind: Literal["uniform", "zero"] = Field("uniform", description="Distribution of initial values.")
    scale: float | None = Field(
        None, ge=0, le=10, description="Values lie in [-scale, scale); by default 1/sqrt(rows) of the table."
    )


class EmbeddingOptions(ApiModel):
    """How ids become rows, and which rows are kept."""

    hash: Literal["none", "modulo", "mix"] = Field(
        "none",
        description=(
            "none: ids are row numbers below rows, anything else is an error; modulo: id mod rows; "
            "mix: a 64-bit mix of the id, then mod rows (for hexadecimal or unbounded ids)."
        ),
    )
    admission_count: Annotated[int | None, NotBuilt()] = Field(
        None, ge=1, le=1_000_000, description="Times an id must be seen before it gets a row of its own."
    )
    prune_ratio: Annotated[float | None, NotBuilt()] = Field(
        None,
        ge=0,
        le=0.999,
        description="Share of embedding bytes to give up while training (in-training dimension).",
    )


TRACE_KEY = "trace.json"
"""Key of a ConfigMap under which a trace stands."""
REFERENCE = r"^(file:///.+|configmap:[a-z0-9]([a-z0-9.-]*[a-z0-9])?)$"


class DistributionSpec(ApiModel):
    """How often rows are accessed: a named prior, or a trace measured by dlrmctl trace and kept elsewhere."""

    prior: Literal["uniform", "zipf"] | None = Field(
        None, description="Shape of the popularity curve; zipf where neither prior nor reference is given."
    )
    alpha: float = Field(1.05, ge=0, le=3, description="Exponent of the zipf prior.")
    reference: str | None = Field(
        None,
        min_length=1,
        max_length=1_024,
        pattern=REFERENCE,
        description=(
            "Trace of the table, measured by dlrmctl trace: file:///path for dlrmctl, or configmap:NAME for the key "
            f"{TRACE_KEY} of a ConfigMap in the job's namespace, which the operator reads."
        ),
    )

    rules = (
        Rule(
            cel="!(has(self.prior) && has(self.reference))",
            holds=lambda spec: spec.prior is None or spec.reference is None,
            message="prior and reference are two ways to say one thing: give one of them",
        ),
    )


class TablePin(ApiModel):
    """Takes a table's placement out of the planner's hands."""

    sharding: Literal["table", "row", "column", "data", "table-row"] | None = Field(
        None,
        description=(
            "How the table is split over ranks. table: whole on one rank; row: a range of rows on each; column: "
            "column blocks (needs columnBlock); data: a replica on every rank; table-row: a range of rows on each rank "
            "of one node. By default the planner decides."
        ),
    )
    ranks: tuple[Annotated[int, Field(ge=0, le=65_535)], ...] = Field(
        (),
        max_length=1_024,
        description=(
            "Ranks that hold the table's shards: with sharding row each of them, with column as many as there are "
            "blocks for, with table-row all ranks of their node, else those that the planner chooses among them; any "
            "rank where empty."
        ),
    )
    tier: Tier | None = Field(
        None,
        description=(
            "Memory tier that backs the table's rows. hbm: all rows in GPUs' memory; ddr: all rows in host memory; "
            "another one: rows that are not in the slots in host memory lie there."
        ),
    )


def _has_blocks_to_split(table: TableOptions) -> bool:
    block = table.dim if table.column_block is None else table.column_block
    return table.pin is None or table.pin.sharding != "column" or block < table.dim


class TableOptions(ApiModel):
    """Everything of a table but its name and feature: what a group of tables shares."""

    rows: int = Field(ge=1, le=2**40, description="Rows of the table (distinct ids after hashing).")
    dim: int = Field(ge=4, le=4_096, multiple_of=4, description="Columns of a row (elements).")
    pooling: Literal["sum", "mean"] = Field("sum", description="How the rows of one bag become one vector.")
    max_lookups: int = Field(1, ge=1, le=100_000, description="Most ids in one bag; a longer bag is an error.")
    avg_lookups: float | None = Field(
        None, ge=0, le=100_000, description="Mean ids in one bag, for planning; by default maxLookups."
    )
    distribution: DistributionSpec | None = Field(
        None, description="How often rows are accessed, for planning of caches; by default zipf of 1.05."
    )
    dtype: Literal["fp32", "fp16"] = Field(
        "fp32",
        description=(
            "Type of an element. fp16: updates are computed in fp32 and rounded at random without bias, the same way "
            "in every run."
        ),
    )
    initializer: InitializerSpec = Field(InitializerSpec(), description="Values of rows that were never updated.")
    pin: TablePin | None = Field(None, description="Fixes the sharding or the tier that the planner would choose.")
    column_block: int | None = Field(
        None,
        ge=4,
        le=4_096,
        multiple_of=4,
        description=(
            "Columns of a block that has a row state of its own and may live on a rank of its own; must divide dim. "
            "By default dim: one block. A table's snapshots keep its blocks."
        ),
    )
    embedding: EmbeddingOptions = Field(EmbeddingOptions(), description="How ids become rows.")

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
            message="pin.sharding column needs columnBlock below dim: give it, say half of dim for two shards",
        ),
        Rule(
            cel="!has(self.avgLookups) || self.avgLookups <= double(self.maxLookups)",
            holds=lambda table: table.avg_lookups is None or table.avg_lookups <= table.max_lookups,
            message="avgLookups must not exceed maxLookups, the longest bag that there may be: change one of them",
        ),
    )

    @property
    def lookups(self) -> float:
        """Mean ids in one bag, for cost models."""
        return self.max_lookups if self.avg_lookups is None else self.avg_lookups

    @property
    def block_edges(self) -> tuple[int, ...]:
        """Edges of the column blocks: (0, dim) for one."""
        return tuple(range(0, self.dim + 1, self.column_block or self.dim))


class TableSpec(TableOptions):
    """One embedding table."""

    name: Name = Field(description="Name of the table, unique in the model.")
    features: tuple[ColumnName, ...] = Field(
        (),
        max_length=256,
        description=(
            "Source columns of ids (C1 to C26 for criteo-tsv), each pooled on its own; by default the table's name. "
            "Several tables may read one column."
        ),
    )
    weights: tuple[ColumnName, ...] = Field(
        (),
        max_length=256,
        description=(
            "Columns of weights, one for each of features, with a number for each id of a bag: rows are multiplied "
            "by them before they are pooled. Empty: every weight is 1."
        ),
    )

    rules = (
        *TableOptions.rules,
        Rule(
            cel="!has(self.weights) || size(self.weights) == 0 || "
            "size(self.weights) == (has(self.features) && size(self.features) > 0 ? size(self.features) : 1)",
            holds=lambda table: len(table.weights) in (0, len(table.sources)),
            message="weights needs one column for each of features: give as many, or none",
        ),
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns that the table reads."""
        return self.features or (self.name,)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One bag of ids a sample, looked up in one table and pooled to one vector."""

    table: int
    """Number of the table in the model's order."""
    column: str
    """Source of the ids."""
    weights: str | None
    """Source of a weight for each id; None: 1."""
