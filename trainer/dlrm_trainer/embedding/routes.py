"""Index tables of the exchange, made once from the placement: what goes to which rank, and where it lands.

A *bag unit* is what of a feature's bags one set of parts takes: all its ids, or those of a range of rows. Units
0 to F - 1 are the whole features; those of row ranges follow. A *vector* is what a sample gets from one feature and
one column block; vectors of one width lie side by side, in the model's order, at their *slots*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dlrm_trainer.embedding.placement import Part, PartGroup, Placement

VectorKey = tuple[int, int]
"""Feature, and first column of the block."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Row ranges that a feature's ids are split over."""

    feature: int
    edges: tuple[int, ...]
    """First row of each range, and the table's rows."""


@dataclass(frozen=True, kw_only=True)
class GroupRoute:
    """Where the columns of one group of one rank belong."""

    width: int
    vectors: int
    """Vectors of this width in the whole model."""
    whole: int
    """Its whole columns, which come first."""
    whole_slots: Tensor | slice
    """(C_w,) int64 slots of those; a slice where they follow one another."""
    split_slots: Tensor
    """(C_s,) int64 slots of its other columns, which hold the sums of some of a bag's rows."""
    split_units: Tensor
    """(C_s,) int64 units of those."""

    @property
    def columns(self) -> int:
        """Columns of the group."""
        return self.whole + len(self.split_slots)

    @property
    def in_order(self) -> bool:
        """Whether its whole columns are all vectors of this width, as they lie."""
        return self.whole_slots == slice(0, self.vectors)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """All index tables of one rank."""

    features: int
    splits: tuple[Split, ...]
    units: Tensor
    """(U,) int64 units in the order in which they are sent, rank by rank."""
    unit_counts: tuple[int, ...]
    """Units sent to each rank."""
    unit_owners: Tensor
    """(U,) int64 rank that each of ``units`` goes to."""
    own_columns: Tensor | None
    """(C,) int64 place, among the units sent to this rank, of each of its columns; None where they come in order."""
    groups: tuple[tuple[GroupRoute, ...], ...]
    """Of each rank."""
    replicated: tuple[GroupRoute, ...]
    replicated_features: Tensor
    """(C_d,) int64 features of the data-parallel groups' columns."""
    widths: tuple[int, ...]
    """Widths of vectors, ascending."""
    vector_counts: tuple[int, ...]
    """Vectors of each width."""
    summed: tuple[bool, ...]
    """Whether some vector of that width is the sum of several parts."""
    runs: tuple[tuple[int, int, int], ...]
    """Vectors in the model's order: index of their width, first slot, and how many follow one another there."""


def routes(placement: Placement, rank: int, device: torch.device) -> Routes:
    """The index tables of one rank; ``device`` is that of vectors, and of ``whole_slots``."""

    def route(group: PartGroup) -> GroupRoute:
        return _route(group, slots, unit_of, vectors, device)

    widths, slots = _slots(placement)
    splits, unit_of = _units(placement)
    units: list[int] = []
    counts: list[int] = []
    own: Tensor | None = None
    for owner, groups in enumerate(placement.groups):
        wanted = [unit_of[_unit_key(group.parts[part], feature)] for group in groups for part, feature in group.columns]
        sent = list(dict.fromkeys(wanted))  # column blocks of one rank share their ids
        if owner == rank:
            own = None if sent == wanted else _index(sent.index(unit) for unit in wanted)
        units += sent
        counts.append(len(sent))
    vectors = Counter(width for width, _ in slots.values())
    split_widths = {part.width for parts in placement.parts for part in parts if part.row_split}
    return Routes(
        features=len(placement.features),
        splits=splits,
        units=_index(units),
        unit_counts=tuple(counts),
        unit_owners=torch.repeat_interleave(torch.arange(placement.world_size), _index(counts)),
        own_columns=own,
        groups=tuple(tuple(map(route, groups)) for groups in placement.groups),
        replicated=tuple(map(route, placement.replicated_groups)),
        replicated_features=_index(feature for group in placement.replicated_groups for _, feature in group.columns),
        widths=widths,
        vector_counts=tuple(vectors[width] for width in widths),
        summed=tuple(width in split_widths for width in widths),
        runs=_runs(placement, widths, slots),
    )


def _index(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _slice(values: Sequence[int]) -> Tensor | slice:
    """The values as a slice where they follow one another."""
    first = values[0] if values else 0
    if list(values) == list(range(first, first + len(values))):
        return slice(first, first + len(values))
    return _index(values)


def _vectors(placement: Placement) -> list[tuple[VectorKey, int]]:
    """Every vector with its width, in the model's order."""
    return [
        ((number, first), last - first)
        for number, feature in enumerate(placement.features)
        for first, last in pairwise(placement.tables[feature.table].block_edges)
    ]


def _slots(placement: Placement) -> tuple[tuple[int, ...], dict[VectorKey, tuple[int, int]]]:
    """Widths, and each vector's width and slot."""
    used: dict[int, int] = {}
    slots = {}
    for key, width in _vectors(placement):
        slots[key] = (width, used.get(width, 0))
        used[width] = used.get(width, 0) + 1
    return tuple(sorted(used)), slots


def _unit_key(part: Part, feature: int) -> tuple[int, int, int]:
    return (feature, part.row_start, part.row_end) if part.row_split else (feature, 0, 0)


def _units(placement: Placement) -> tuple[tuple[Split, ...], dict[tuple[int, int, int], int]]:
    """How each feature's ids are split, and the number of each unit."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for parts in placement.parts:
        for part in parts:
            if part.row_split:
                ranges.setdefault((part.table, part.column_start), []).append((part.row_start, part.row_end))
    edges: dict[int, set[tuple[int, ...]]] = {}
    for (table, _), found in ranges.items():
        edges.setdefault(table, set()).add((0, *(end for _, end in sorted(found))))
    unit_of = {(feature, 0, 0): feature for feature in range(len(placement.features))}
    splits: list[Split] = []
    following = len(placement.features)
    for number, feature in enumerate(placement.features):
        for cuts in sorted(edges.get(feature.table, ())):
            splits.append(Split(feature=number, edges=cuts))
            for place, (start, end) in enumerate(pairwise(cuts)):
                unit_of.setdefault((number, start, end), following + place)
            following += len(cuts) - 1
    return tuple(splits), unit_of


def _route(
    group: PartGroup,
    slots: Mapping[VectorKey, tuple[int, int]],
    unit_of: Mapping[tuple[int, int, int], int],
    vectors: Mapping[int, int],
    device: torch.device,
) -> GroupRoute:
    columns = [(group.parts[part], feature) for part, feature in group.columns]
    at = [slots[feature, part.column_start][1] for part, feature in columns]
    units = [unit_of[_unit_key(part, feature)] for part, feature in columns]
    whole = group.whole_columns
    whole_slots = _slice(at[:whole])
    return GroupRoute(
        width=group.width,
        vectors=vectors[group.width],
        whole=whole,
        whole_slots=whole_slots if isinstance(whole_slots, slice) else whole_slots.to(device),
        split_slots=_index(at[whole:]),
        split_units=_index(units[whole:]),
    )


def _runs(
    placement: Placement, widths: Sequence[int], slots: dict[VectorKey, tuple[int, int]]
) -> tuple[tuple[int, int, int], ...]:
    runs: list[tuple[int, int, int]] = []
    for key, _ in _vectors(placement):
        width, slot = slots[key]
        number = widths.index(width)
        if runs and runs[-1][0] == number and runs[-1][1] + runs[-1][2] == slot:
            runs[-1] = (number, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((number, slot, 1))
    return tuple(runs)
