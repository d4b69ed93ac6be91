"""Packs tables into memory that is tight, splitting by rows those that fit nowhere whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.costs import Costs
from dlrm_planner.needs import Needs, NoPlacement
from dlrm_planner.sharding import may_split
from dlrm_planner.shards import Split
from dlrm_planner.splitting import Splitter
from dlrm_planner.tables import Tables


def pack(
    spec: DLRMJobSpec, tables: Tables, costs: Costs, needs: Needs, which: Sequence[int]
) -> dict[int, Split] | NoPlacement:
    """A place for every table: best fit by bytes, largest first; what fits nowhere whole is split by rows.

    Returns:
        The split of each table, of kind ``table`` where it is whole; its shards keep to the nodes' room.
    """
    splitter, held = Splitter(spec, tables, costs, needs), needs.held
    crowded = f"beside other tables no {needs.holder} has room for it whole"
    for i in which:
        splitter.add(i, splitter.as_pinned(i))
    choices = np.array([len(splitter.allowed(i)) for i in which])
    order = np.lexsort((np.arange(len(which)), np.array([-float(held[i]) for i in which]), choices))
    for i in (which[k] for k in order if which[k] not in splitter.splits):
        allowed = splitter.allowed(i)
        room = splitter.room[allowed // splitter.sharing]
        open_ = room >= held[i]
        if open_.any():
            allowed, room = allowed[open_], room[open_]
            rank = int(allowed[np.lexsort((allowed, splitter.load[allowed], room))[0]])
            splitter.put(i, rank)
            continue
        chosen = splitter.choose(i, 1) if may_split(tables.specs[i]) else None
        split = splitter.by_rows(i, *chosen, crowded) if chosen else None
        if split is None:
            return no_room(splitter, i, held[i], tables)
        splitter.add(i, split)
    if needs.bounded and int(splitter.room.min()) < 0:
        node = int(np.argmin(splitter.room))
        there = (
            i for i, split in splitter.splits.items() if node in {rank // splitter.sharing for rank in split.ranks}
        )
        i = max(there, key=lambda i: held[i])
        return no_room(splitter, i, held[i], tables)
    return splitter.splits


def no_room(splitter: Splitter, i: int, held: int, tables: Tables) -> NoPlacement:
    """Why a table has no place beside those that have."""
    allowed = splitter.allowed(i)
    room = splitter.room[allowed // splitter.sharing]
    best = int(np.argmax(room))
    nodes = np.unique(allowed // splitter.sharing)
    if len(nodes) == 1 or not may_split(tables.specs[i]):
        return NoPlacement(table=i, rank=int(allowed[best]), held=held, room=int(room[best]), alone=False)
    total = int(np.maximum(splitter.room[nodes], 0).sum())
    return NoPlacement(table=i, rank=int(allowed[best]), held=held, room=total, alone=False, spread=len(nodes))
