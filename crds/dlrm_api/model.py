"""``spec.model``: the dense features, the MLPs, the interaction and the embedding tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, NotBuilt, Rule

MAX_TABLES = 5_000
MAX_FEATURES = 10_000
Width = Annotated[int, Field(ge=1, le=65_536)]
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
    tier: Annotated[Literal["hbm", "ddr", "cxl", "scm", "block"] | None, NotBuilt(("ddr", "cxl", "scm", "block"))] = (
        Field(
            None,
            description=(
                "Memory tier that backs the table's rows. ddr: all rows in host memory; another one: rows that "
                "are not in the slots in host memory lie there."
            ),
        )
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
        None, ge=0, le=100_000, description="Mean ids in one bag, for planning; by default max_lookups."
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


class TableGroup(ApiModel):
    """``count`` alike tables, named ``<name>-0`` onwards, so that manifests of many tables stay small."""

    name: Annotated[
        str, Field(min_length=1, max_length=56, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
    ] = Field(description="Prefix of the tables' names; table i is <name>-<i> and reads the feature of that name.")
    count: int = Field(ge=1, le=MAX_TABLES, description="Number of tables.")
    template: TableOptions = Field(description="What the tables share.")


_WIDTH = (
    "has(self.bottomMlp) && size(self.bottomMlp) > 0 ? self.bottomMlp[size(self.bottomMlp) - 1] : "
    "has(self.tables) && size(self.tables) > 0 ? self.tables[0].dim : self.tableGroups[0].template.dim"
)
"""The one width of the dot interaction, in CEL; it is read only where there is a table or a group."""


def _widths_end_in_one(model: ModelSpec) -> bool:
    return model.top_mlp[-1] == 1


def _dims_agree(model: ModelSpec) -> bool:
    dims = {table.dim for table in model.tables} | {group.template.dim for group in model.table_groups}
    dims |= set(model.bottom_mlp[-1:])
    return model.interaction != "dot" or len(dims) <= 1


class ModelSpec(ApiModel):
    """A deep-learning recommendation model: bottom MLP, embedding tables, interaction, top MLP."""

    dense_features: tuple[ColumnName, ...] = Field(
        (), max_length=10_000, description="Source columns of the dense features (I1 to I13 for criteo-tsv)."
    )
    bottom_mlp: tuple[Width, ...] = Field(
        (),
        max_length=64,
        description="Widths of the bottom MLP's layers; the last equals the tables' dim for dot.",
    )
    top_mlp: tuple[Width, ...] = Field(
        (512, 256, 1),
        min_length=1,
        max_length=64,
        description="Widths of the top MLP's layers; the last is 1, the logit.",
    )
    interaction: Literal["dot", "dcn"] = Field(
        "dot", description="dot: pairwise dot products; dcn: low-rank cross layers (DCN v2)."
    )
    cross_layers: int = Field(3, ge=1, le=32, description="Cross layers of the dcn interaction.")
    cross_rank: int = Field(64, ge=1, le=16_384, description="Rank of each cross layer's matrix.")
    precision: Annotated[Literal["fp32", "bf16"], NotBuilt(("fp32",))] = Field(
        "fp32", description="Compute type of MLPs and interaction; weights stay fp32."
    )
    tables: tuple[TableSpec, ...] = Field((), max_length=MAX_TABLES, description="Embedding tables.")
    table_groups: tuple[TableGroup, ...] = Field((), max_length=256, description="Groups of alike tables.")

    rules = (
        Rule(
            cel="size(self.topMlp) > 0 && self.topMlp[size(self.topMlp) - 1] == 1",
            holds=_widths_end_in_one,
            message="topMlp must end in 1: its last layer is the logit",
        ),
        Rule(
            cel=(
                "(has(self.denseFeatures) && size(self.denseFeatures) > 0) == "
                "(has(self.bottomMlp) && size(self.bottomMlp) > 0)"
            ),
            holds=lambda model: bool(model.dense_features) == bool(model.bottom_mlp),
            message="denseFeatures and bottomMlp go together: give both, or neither",
        ),
        Rule(
            cel=(
                "(has(self.tables) && size(self.tables) > 0) || (has(self.tableGroups) && size(self.tableGroups) > 0)"
            ),
            holds=lambda model: bool(model.tables or model.table_groups),
            message="tables and tableGroups are both empty: a recommendation model needs at least one table",
        ),
        Rule(
            cel=(
                "self.interaction != 'dot' || "
                f"((!has(self.tables) || self.tables.all(t, t.dim == ({_WIDTH}))) && "
                f"(!has(self.tableGroups) || self.tableGroups.all(g, g.template.dim == ({_WIDTH}))))"
            ),
            holds=_dims_agree,
            message=(
                "interaction dot needs one width: make the dim of every table and the last of bottomMlp equal, "
                "or use interaction dcn"
            ),
        ),
    )

    def all_tables(self) -> tuple[TableSpec, ...]:
        """Every table, groups written out; the order is the model's and the format's."""
        grouped = (
            TableSpec(
                name=f"{group.name}-{i}",
                **{key: getattr(group.template, key) for key in type(group.template).model_fields},
            )
            for group in self.table_groups
            for i in range(group.count)
        )
        return (*self.tables, *grouped)

    def all_features(self) -> tuple[Feature, ...]:
        """Every feature, table by table; the order of bags and of pooled vectors."""
        return tuple(
            Feature(table=number, column=column, weights=weights)
            for number, table in enumerate(self.all_tables())
            for column, weights in zip(table.sources, table.weights or (None,) * len(table.sources), strict=True)
        )
