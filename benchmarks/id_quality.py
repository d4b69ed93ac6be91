"""Quality of tables for ids without bound: ``python -m benchmarks.id_quality [--quick] [--only PATTERN] [--seeds N]``.

Methods with equal bytes make one pass over samples in order of time. Each batch's loss is taken before it is trained
on: the normalized entropy is that of the second half.
"""

from __future__ import annotations

import argparse
import bisect
import copy
import fnmatch
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import learned_hash
from benchmarks.id_streams import Stream, drifting, movielens
from benchmarks.measure import Line, Pairs, tell
from benchmarks.shapes import on_one_rank
from benchmarks.sides import keys_of_table
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.model import ModelSpec, TableSpec
from dlrm_api.row_optimizers import state_values
from dlrm_api.tiers import ELEMENT_BYTES
from dlrm_planner.tables import part_bytes
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import MaintenancePeriod
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.unique import LookupCounts
from dlrm_trainer.evaluate import binary_entropy
from dlrm_trainer.learner import Learner

OURS: dict[str, dict[str, Any]] = {
    "recent": {"hash": "unique"},
    "frequent": {"hash": "unique", "eviction": {"keep": "frequent"}},
    "useful": {"hash": "unique", "eviction": {"keep": "useful"}},
    "second-sight": {"hash": "unique", "admission": {"count": 2}},
    "double-hash": {"hash": "unique", "admission": {"count": 2}, "unknown": "shared"},
    "mostly-shared": {"hash": "unique", "eviction": {"keep": "frequent"}, "unknown": "shared"},
}
"""``embedding`` of the tables with unbounded ids."""
SHARED_SHARE = {"double-hash": 1 / 8, "mostly-shared": 3}
"""Shared rows of a table, as a share of the others."""
UNLIMITED, MODULO = "unlimited", "modulo"
STATIC = (learned_hash.LEARNED, learned_hash.DOUBLE)
MANAGED = ("mch-lru", "mch-lfu", "mch-distance-lfu")
ToRows = Callable[[TableSpec, Tensor], Tensor]
CAPACITIES = (0.06, 0.12, 0.24)
"""Rows of a table, as a share of its ids."""
QUICK_SAMPLES = 20_000


@dataclass(frozen=True)
class Setting:
    """Describe a line."""

    data: str
    capacity: float
    ours: str
    against: str
    batch: int
    maintenance_steps: int | Literal["auto"]
    seeds: int
    benchmark: ClassVar[str] = "id_quality"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {
            name: getattr(self, name) for name in ("data", "capacity", "ours", "batch", "maintenance_steps", "seeds")
        }


@dataclass(frozen=True)
class Outcome:
    """One pass."""

    ne: float
    rows: int
    """Of the tables with unbounded ids."""
    maintenance_steps: int
    """At the end, of unique tables."""
    without_row: float
    """Share of the lookups in unique tables."""


def job_of(stream: Stream, tables: Mapping[str, Mapping[str, Any]]) -> DLRMJob:
    """Return the job of a stream, with other options of some tables."""
    model = copy.deepcopy(stream.model)
    for table in model["tables"]:
        table |= tables.get(table["name"], {})
    if any(options.get("embedding", {}).get("hash") == "unique" for options in tables.values()):
        model["maintenanceSteps"] = stream.maintenance_steps
    spec = {
        "model": model,
        "training": stream.training,
        "data": {
            "format": "synthetic",
            "synthetic": {"samples": stream.batch, "evalSamples": 0},
            "globalBatchSize": stream.batch,
            "virtualShards": 1,
        },
        "checkpoint": {"uri": "file:///nowhere"},
    }
    return parse_job({"metadata": {"name": "measured"}, "spec": spec})


def with_capacity(stream: Stream, method: str, capacity: float) -> dict[str, dict[str, Any]]:
    """Return the options of the tables with unbounded ids; all methods get the bytes of the default for the capacity.

    The bytes are those that a plan counts: rows, optimizer state, and the directory.
    """
    return {
        table.name: _of_bytes(stream, table, method, max(1, round(capacity * table.rows)))
        for table in job_of(stream, {}).spec.model.all_tables()
        if table.name in stream.unbounded
    }


def _of_bytes(stream: Stream, table: TableSpec, method: str, default_rows: int) -> dict[str, Any]:
    budget, more = _bytes(table, OURS["recent"], default_rows), 0
    if method in MANAGED:
        from benchmarks.managed_collisions import map_bytes

        more = map_bytes(method)
    history = _history(stream, table.name) if method in STATIC else None

    def used(rows: int) -> int:
        ids = 0 if history is None else learned_hash.mapped_ids(history, method, rows)
        return _bytes(table, _embedding(method, rows), rows) + rows * more + ids * learned_hash.ID_BYTES

    rows = bisect.bisect_right(range(1, budget // (ELEMENT_BYTES["fp32"] * table.dim)), budget, key=used)
    return {"rows": rows, "embedding": _embedding(method, rows)}


def _embedding(method: str, rows: int) -> Mapping[str, Any]:
    embedding = OURS.get(method, {"hash": "modulo" if method == MODULO else "none"})
    if embedding.get("unknown") == "shared":
        return embedding | {"sharedRows": max(1, round(rows * SHARED_SHARE[method]))}
    return embedding


def _bytes(table: TableSpec, embedding: Mapping[str, Any], rows: int) -> int:
    options = {"name": table.name, "rows": rows, "dim": table.dim, "embedding": embedding}
    sized, state = TableSpec.model_validate(options), ELEMENT_BYTES["fp32"] * state_values("rowwise-adagrad", table.dim)
    return part_bytes(sized, state, sized.held_rows, sized.dim).resident


def train(stream: Stream, method: str, capacity: float) -> Outcome:
    """Make one pass."""
    options = {} if method == UNLIMITED else with_capacity(stream, method, capacity)
    job = job_of(stream, options)
    model, learner = job.spec.model, _learner(job)
    to_rows = _mapping(stream, method, model, learner)
    period, found, losses = MaintenancePeriod.begin(model.maintenance_steps, None), LookupCounts(), []
    batches = stream.batches()
    for step, batch in enumerate(batches, start=1):
        losses.append(_step(learner, model, batch, to_rows))
        if period.is_due(step):
            found = found.plus(learner.embeddings.lookups)
            period = learner.embeddings.maintain(step, period)
    second = len(losses) // 2
    rate = float(torch.cat([batch.labels for batch in batches[second:]]).mean())
    return Outcome(
        ne=float(np.mean(losses[second:])) / binary_entropy(rate),
        rows=sum(table["rows"] for table in options.values()),
        maintenance_steps=period.steps,
        without_row=found.without_row / max(1, found.lookups),
    )


def _learner(job: DLRMJob) -> Learner:
    learner = Learner(job.spec, on_one_rank(job.spec.model), Collectives(0, 1, lambda: ""))
    learner.start(job.spec.training.seed)
    return learner


def _step(learner: Learner, model: ModelSpec, batch: Batch, to_rows: ToRows) -> float:
    """Train on a batch and return its loss before that."""
    ids = torch.split(batch.values, batch.lengths.sum(dim=1).tolist())
    rows = [to_rows(table, each) for table, each in zip(model.all_tables(), ids, strict=True)]
    lengths = [
        each if found.ndim == 1 else (found != learned_hash.NO_ROW).sum(dim=1, dtype=each.dtype)
        for each, found in zip(batch.lengths, rows, strict=True)
    ]
    values = torch.cat([each[each != learned_hash.NO_ROW] for each in rows])
    prepared = learner.prepare(learner.send(replace(batch, lengths=torch.stack(lengths), values=values)))
    computed = learner.compute(prepared, len(batch.labels))
    learner.apply(computed, factor=1.0)
    return computed.loss.item()


def _history(stream: Stream, table: str) -> NDArray[np.int64]:
    """Return the ids of a table's lookups that static maps are made of."""
    bags = stream.features[table]
    return bags.ids[: bags.lengths[: round(learned_hash.HISTORY * len(bags.lengths))].sum()]


def _static_map(stream: Stream, method: str, table: TableSpec, vectors: Mapping[str, Tensor]) -> Tensor:
    ids, learned = _history(stream, table.name), vectors[table.name].numpy()
    if method == learned_hash.LEARNED:
        return torch.from_numpy(learned_hash.learned_rows(ids, learned, table.rows, stream.seed))
    return torch.from_numpy(learned_hash.double_rows(ids, len(learned), table.rows, stream.seed))


def _vectors(stream: Stream) -> dict[str, Tensor]:
    """Return rows of few columns that the history trains, one for each id of the tables with unbounded ids."""
    job = job_of(stream, {name: {"dim": learned_hash.COLUMNS} for name in stream.unbounded})
    learner, batches = _learner(job), stream.batches()
    for batch in batches[: round(learned_hash.HISTORY * len(batches))]:
        _step(learner, job.spec.model, batch, lambda _, ids: ids)
    return {part.table.name: part.weight for part in learner.embeddings.local if isinstance(part, ResidentPart)}


def _mapping(stream: Stream, method: str, model: ModelSpec, learner: Learner) -> ToRows:
    """Return what turns the ids of a batch into rows or keys of a table, or into (n, rows of an id) rows to add."""
    if method in STATIC:
        vectors = _vectors(stream)
        maps = {
            table.name: _static_map(stream, method, table, vectors)
            for table in model.all_tables()
            if table.name in stream.unbounded
        }
        return lambda table, ids: maps[table.name][ids] if table.name in maps else ids
    if method in MANAGED:
        from benchmarks.managed_collisions import ManagedCollisions

        managed = ManagedCollisions(method, stream.unbounded, learner)
        return lambda table, ids: managed.rows(table.name, ids) if table.name in stream.unbounded else ids

    def hashed(table: TableSpec, ids: Tensor) -> Tensor:
        if table.is_unique:
            return torch.from_numpy(keys_of_table(ids.numpy(), stream.seed, table.name))
        return ids % table.rows

    return hashed


def lines(
    name: str, streams: Callable[[int], Stream], period: int | Literal["auto"], seeds: int, only: str
) -> Iterator[Line]:
    """Train each method on the same samples, with a stream for each seed, and compare ours with the others."""
    found: dict[tuple[float, str], list[Outcome]] = {}
    others = (MODULO, *STATIC, *MANAGED)
    pairs = [(method, UNLIMITED) for method in (*OURS, *others)] + list(itertools.product(OURS, others))
    chosen = [pair for pair in pairs if fnmatch.fnmatch("/".join((name, *pair)), only)]
    methods = dict.fromkeys(method for pair in chosen for method in pair)
    batch = 0
    for seed in range(seeds if chosen else 0):
        stream = replace(streams(seed), maintenance_steps=period)
        batch = stream.batch
        unlimited = train(stream, UNLIMITED, 1.0)
        for capacity in CAPACITIES:
            for method in methods:
                outcome = unlimited if method == UNLIMITED else train(stream, method, capacity)
                change = outcome.ne / unlimited.ne - 1
                tell(f"{name}, seed {seed}, {capacity:.0%} of ids, {method}: NE {outcome.ne:.5f} ({change:+.3%})")
                found.setdefault((capacity, method), []).append(outcome)
    for capacity in CAPACITIES if chosen else ():
        for ours, against in chosen:
            mine, theirs = found[capacity, ours], found[capacity, against]
            nes = Pairs([each.ne for each in mine], [each.ne for each in theirs])
            changes = 100 * (np.array(nes.ours) / np.array(nes.theirs) - 1)
            yield Line(
                setting=Setting(name, capacity, ours, against, batch, period, seeds),
                metric="normalized_entropy",
                pairs=nes,
                measured={
                    "change_percent": float(changes.mean()),
                    "standard_deviation": float(changes.std(ddof=1)) if seeds > 1 else 0.0,
                    "rows": mine[0].rows,
                    "their_rows": theirs[0].rows,
                    "maintenance_steps_at_end": [each.maintenance_steps for each in mine if ours in OURS],
                    "without_row": float(np.mean([each.without_row for each in mine])),
                },
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print.

    Returns:
        1 where something could not be measured, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.id_quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, one seed: does it run here?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="DATA/OURS/AGAINST, such as drifting/*/modulo")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--maintenance-steps", type=int, help="model.maintenanceSteps (default: auto)")
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"), help="with the folder ml-100k")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    made_up = partial(drifting, samples=QUICK_SAMPLES) if options.quick else drifting
    sources = {"drifting": made_up, "ml-100k": partial(movielens, folder=options.data_dir / "ml-100k")}
    period: int | Literal["auto"] = options.maintenance_steps or "auto"
    failed = False
    for name, streams in sources.items():
        try:
            for line in lines(name, streams, period, 1 if options.quick else options.seeds, options.only):
                line.show()
        except (OSError, ImportError) as error:
            failed = True
            tell(f"NOT MEASURED: {name}: {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
