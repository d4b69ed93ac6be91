"""``spec.model``: the dense features, the MLPs, the interaction, and groups of embedding tables."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, Rule
from dlrm_api.tables import TRACE_KEY, ColumnName, DistributionSpec, Feature, InitializerSpec, TableOptions, TableSpec

__all__ = [
    "MAX_FEATURES",
    "MAX_TABLES",
    "TRACE_KEY",
    "ColumnName",
    "DistributionSpec",
    "Feature",
    "InitializerSpec",
    "ModelSpec",
    "TableGroup",
    "TableSpec",
]

MAX_TABLES = 5_000
MAX_FEATURES = 10_000
Width = Annotated[int, Field(ge=1, le=65_536)]


class TableGroup(ApiModel):
    """Declare ``count`` equal tables named ``<name>-0``, ``<name>-1`` and so on, to keep manifests small."""

    name: Annotated[
        str, Field(min_length=1, max_length=56, pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
    ] = Field(description="Prefix of the tables' names. Table i is <name>-<i> and reads the feature of that name.")
    count: int = Field(ge=1, le=MAX_TABLES, description="Number of tables.")
    template: TableOptions = Field(description="Options of each table.")


_WIDTH = (
    "has(self.bottomMlp) && size(self.bottomMlp) > 0 ? self.bottomMlp[size(self.bottomMlp) - 1] : "
    "has(self.tables) && size(self.tables) > 0 ? self.tables[0].dim : self.tableGroups[0].template.dim"
)
"""Width of the dot interaction, in CEL. Evaluated only if there is a table or a group."""


def _widths_end_in_one(model: ModelSpec) -> bool:
    return model.top_mlp[-1] == 1


def _dims_agree(model: ModelSpec) -> bool:
    dims = {table.dim for table in model.tables} | {group.template.dim for group in model.table_groups}
    dims |= set(model.bottom_mlp[-1:])
    return model.interaction != "dot" or len(dims) <= 1


def _few_enough(model: ModelSpec) -> bool:
    return len(model.tables) + sum(group.count for group in model.table_groups) <= MAX_TABLES


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
        description="Widths of the bottom MLP's layers. For interaction dot the last one must equal the tables' dim.",
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
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Compute type of MLPs and interaction; weights stay fp32. bf16 computes in fp32 on CPUs where bf16 "
        "would be slower: those without AMX (Intel) or AVX-512 BF16 (others).",
    )
    tables: tuple[TableSpec, ...] = Field((), max_length=MAX_TABLES, description="Embedding tables.")
    table_groups: tuple[TableGroup, ...] = Field((), max_length=256, description="Groups of equal tables.")

    rules = (
        Rule(
            cel="size(self.topMlp) > 0 && self.topMlp[size(self.topMlp) - 1] == 1",
            holds=_widths_end_in_one,
            message="topMlp must end in 1: the last layer is the logit",
        ),
        Rule(
            cel="(has(self.denseFeatures) && size(self.denseFeatures) > 0) == (has(self.bottomMlp) && "
            "size(self.bottomMlp) > 0)",
            holds=lambda model: bool(model.dense_features) == bool(model.bottom_mlp),
            message="denseFeatures and bottomMlp must be set together: set both or neither",
        ),
        Rule(
            cel=(
                "(has(self.tables) && size(self.tables) > 0) || (has(self.tableGroups) && size(self.tableGroups) > 0)"
            ),
            holds=lambda model: bool(model.tables or model.table_groups),
            message="tables and tableGroups are both empty: add at least one table",
        ),
        Rule(
            cel="(has(self.tables) ? size(self.tables) : 0) + "
            f"(has(self.tableGroups) ? self.tableGroups.map(g, g.count).sum() : 0) <= {MAX_TABLES}",
            holds=_few_enough,
            message=f"expected at most {MAX_TABLES} tables, with the counts of tableGroups included",
        ),
        Rule(
            cel="self.interaction != 'dot' || "
            f"((!has(self.tables) || self.tables.all(t, t.dim == ({_WIDTH}))) && "
            f"(!has(self.tableGroups) || self.tableGroups.all(g, g.template.dim == ({_WIDTH}))))",
            holds=_dims_agree,
            message="interaction dot needs equal widths: make the dim of every table and the last bottomMlp width "
            "equal, or use interaction dcn",
        ),
        Rule(
            cel="self.interaction != 'dot' || (has(self.bottomMlp) && size(self.bottomMlp) > 0) || (has(self.tables) "
            "&& self.tables.exists(t, has(t.features) && size(t.features) > 1)) || (has(self.tableGroups) && "
            "self.tableGroups.exists(g, g.count > 1)) || (has(self.tables) ? size(self.tables) : 0) + "
            "(has(self.tableGroups) ? size(self.tableGroups) : 0) != 1",
            holds=_has_a_pair,
            message="interaction dot needs at least two vectors: add denseFeatures or a second feature, or use "
            "interaction dcn",
        ),
    )

    def all_tables(self) -> tuple[TableSpec, ...]:
        """Return every table with groups expanded, in the order of the model and of the snapshot format."""
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
        """Return every feature, table by table, in the order of bags and pooled vectors."""
        return tuple(
            Feature(table=number, column=column, weights=weights)
            for number, table in enumerate(self.all_tables())
            for column, weights in zip(table.sources, table.weights or (None,) * len(table.sources), strict=True)
        )
