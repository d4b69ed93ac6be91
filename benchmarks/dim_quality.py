"""Quality of pruned dimensions: ``python -m benchmarks.dim_quality [--quick] [--only PATTERN] [--seeds N]``.

Tables of 64 columns give up columns or rows in several ways until all take equal bytes, and are compared with tables
that keep all columns, by normalized entropy. On ``drifting`` each batch's loss is taken before it is trained on, and
the second half counts; ``ml-100k`` is trained as ``examples/movielens`` is, and its last fifth is evaluated.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from benchmarks.id_quality import QUICK_SAMPLES, job_of
from benchmarks.id_streams import SAMPLES, Bags, Stream, drifting, movielens
from benchmarks.measure import Line, Pairs, tell
from benchmarks.pruned_rows import (
    HELD_ROW_BYTES,
    PLAIN_ROW_BYTES,
    PRUNED_ROW_BYTES,
    VALUE_BYTES,
    Chunks,
    Layout,
    Prefixes,
    PrefixPruning,
    Pruning,
    Rows,
)
from dlrm_api.job import DLRMJobSpec
from dlrm_trainer.data import Batch
from dlrm_trainer.evaluate import binary_entropy
from dlrm_trainer.model.dense import DenseParameters
from dlrm_trainer.model.dlrm import build_model, global_mean_loss

DIM = 64
CHUNKS = {"free-chunks": 16, "whole-rows": DIM}
"""Columns that are kept or given up together."""
WARMUP_PERIODS = 4
STEP = 4
"""Of dims."""
MIXED_EXPONENT = -0.3
COLUMNS = (0.25, 0.125)
"""Share of the columns that prefixes keep if no row is without any: it says how many bytes every method gets."""
FULL, OURS = "full", "prefixes"
PREFIXES = {
    OURS: PrefixPruning(),
    "from-half": PrefixPruning(start=-2),
    "steepness-4": PrefixPruning(steepness=4),
    "over-all": PrefixPruning(over_all=True),
}
OTHERS = ("free-chunks", "whole-rows", "mixed-dims", "uniform-dims", *(each for each in PREFIXES if each != OURS))
EPOCHS = 3


@dataclass(frozen=True)
class Setting:
    """Describe a line."""

    data: str
    columns: float
    against: str
    batch: int
    maintenance_steps: int
    seeds: int
    benchmark: ClassVar[str] = "dim_quality"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {name: getattr(self, name) for name in ("data", "columns", "batch", "maintenance_steps", "seeds")}


@dataclass(frozen=True)
class Outcome:
    """One run."""

    ne: float
    bytes: int
    """Mean over the second half of the steps, of tables that give up columns."""
    max_bytes: int
    """In the second half of the steps."""
    rows: Rows


@dataclass(frozen=True)
class Data:
    """Hold what is trained on and what is evaluated then, all methods alike."""

    stream: Stream
    pruned: tuple[str, ...]
    """Tables."""
    maintenance_steps: int
    train: list[Step]
    evaluation: list[Step]
    """Empty: the losses of the second half of ``train`` count."""

    @property
    def rows(self) -> list[int]:
        """Return the rows of the tables that give up columns."""
        return [table["rows"] for table in self.stream.model["tables"] if table["name"] in self.pruned]


@dataclass(frozen=True)
class Step:
    """Hold a batch of n samples and T tables; rows of all tables are numbered one after the other."""

    batch: Batch
    looked_up: Tensor
    """(lookups,) rows, by table and then by sample."""
    starts: Tensor
    """(T * n,) of bags."""
    weights: Tensor | None
    """(lookups,); None: each bag has one lookup, of weight 1."""
    bags: Tensor
    """(lookups,) place of each lookup's bag; without weights, its own."""
    distinct: tuple[Tensor, Tensor, Tensor]
    """(U,) rows, (lookups,) their places, and (U,) how often they are looked up."""


def step_of(batch: Batch, first_rows: Tensor, means: Tensor) -> Step:
    """Prepare a batch; ``means``: (T,) whether a table's bags are averaged."""
    tables, samples = batch.lengths.shape
    lengths = batch.lengths.long()
    bags = torch.repeat_interleave(torch.arange(tables * samples), lengths.flatten())
    looked_up = batch.values + first_rows[bags // samples]
    weights = torch.where(means[:, None], 1 / lengths.clamp(min=1), torch.ones(lengths.shape)).flatten()[bags]
    return Step(
        batch=batch,
        looked_up=looked_up,
        starts=lengths.flatten().cumsum(0) - lengths.flatten(),
        weights=None if bool((lengths == 1).all()) else weights,
        bags=bags,
        distinct=torch.unique(looked_up, return_inverse=True, return_counts=True),
    )


def progressive(stream: Stream, maintenance_steps: int) -> Data:
    """Train on a stream once, in order of time; all its tables give up columns."""
    names = tuple(table["name"] for table in stream.model["tables"])
    return Data(stream, names, maintenance_steps, _steps(stream, stream.batches()), [])


def in_epochs(stream: Stream, maintenance_steps: int) -> Data:
    """Train on the first four fifths of a stream in several random orders, evaluate the rest."""
    draw, samples = np.random.default_rng(stream.seed), len(stream.labels)
    known = samples * 4 // 5
    train = [batch for _ in range(EPOCHS) for batch in reordered(stream, draw.permutation(np.arange(known))).batches()]
    evaluation = reordered(stream, np.arange(known, samples)).batches()
    return Data(stream, stream.unbounded, maintenance_steps, _steps(stream, train), _steps(stream, evaluation))


def reordered(stream: Stream, chosen: np.ndarray[Any, np.dtype[np.int64]]) -> Stream:
    """Return the chosen samples in the order given."""
    features = {}
    for name, bags in stream.features.items():
        starts, lengths = (np.cumsum(bags.lengths) - bags.lengths)[chosen], bags.lengths[chosen]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        features[name] = Bags(ids=bags.ids[np.repeat(starts, lengths) + within], lengths=lengths)
    return replace(stream, dense=stream.dense[chosen], labels=stream.labels[chosen], features=features)


def _steps(stream: Stream, batches: Sequence[Batch]) -> list[Step]:
    tables = stream.model["tables"]
    rows = torch.tensor([table["rows"] for table in tables])
    means = torch.tensor([table.get("pooling") == "mean" for table in tables])
    return [step_of(batch, rows.cumsum(0) - rows, means) for batch in batches]


def budget_of(rows: Sequence[int], columns: float) -> int:
    """Return the bytes of prefixes that keep a share of the columns."""
    row_bytes = PRUNED_ROW_BYTES + HELD_ROW_BYTES + round(VALUE_BYTES * DIM * columns)
    return sum(rows) * row_bytes


def uniform_dims(rows: Sequence[int], budget: int) -> list[int]:
    """Return the largest dim that all tables can have."""
    return [min(DIM, _largest(budget // sum(rows))) for _ in rows]


def mixed_dims(rows: Sequence[int], budget: int) -> list[int]:
    """Return dims in proportion to a power of the rows, the largest that fit."""
    for factor in np.geomspace(64, 1, 1_000):
        nearest = STEP * np.rint(factor * DIM * np.array(rows) ** MIXED_EXPONENT / STEP)
        dims = np.clip(nearest, STEP, DIM).astype(int)
        if np.array(rows) @ (VALUE_BYTES * dims + PLAIN_ROW_BYTES) <= budget:
            break
    return [int(dim) for dim in dims]


def _largest(row_bytes: int) -> int:
    return (row_bytes - PLAIN_ROW_BYTES) // VALUE_BYTES // STEP * STEP


def run(data: Data, method: str, columns: float) -> Outcome:
    """Train a model whose tables take the bytes of ``columns`` by one of the methods."""
    tables, budget = data.stream.model["tables"], budget_of(data.rows, columns)
    static = {"mixed-dims": mixed_dims, "uniform-dims": uniform_dims}
    dims = static[method](data.rows, budget) if method in static else [DIM] * len(data.rows)
    of_pruned = dict(zip(data.pruned, dims, strict=True))
    options = {name: {"dim": dim, "embedding": {"hash": "none"}} for name, dim in of_pruned.items()}
    spec = job_of(data.stream, options).spec
    layout = Layout(
        rows=[table["rows"] for table in tables],
        dims=[of_pruned.get(table["name"], table["dim"]) for table in tables],
        pruned=[table["name"] in data.pruned for table in tables],
    )
    given = (layout, spec.training.row_optimizer.learning_rate, spec.training.row_optimizer.eps)
    warmup = WARMUP_PERIODS * data.maintenance_steps
    rows: Rows
    if method in PREFIXES:
        rows = Prefixes(*given, replace(PREFIXES[method], warmup_steps=warmup), budget, data.stream.batch)
    elif method in CHUNKS:
        rows = Chunks(*given, Pruning(warmup_steps=warmup), budget, CHUNKS[method])
    else:
        rows = Rows(*given)
    return train(data, spec, rows)


def train(data: Data, spec: DLRMJobSpec, rows: Rows) -> Outcome:
    """Train a model with these rows."""
    model = build_model(spec.model, spec.training.seed)
    gradient = torch.zeros(DenseParameters.elements(model))
    dense = DenseParameters(model, spec.training.dense_optimizer, gradient)

    def loss_of(step: Step, features: Tensor) -> Tensor:
        return global_mean_loss(model(step.batch.dense, features), step.batch.labels, len(step.batch.labels))

    losses, taken = [], []
    for number, step in enumerate(data.train, start=1):
        features = _pooled(step, rows).requires_grad_()
        gradient.zero_()
        loss = loss_of(step, features)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        assert features.grad is not None
        distinct, _, counts = step.distinct
        rows.update(distinct, _of_rows(step, rows, features.grad), counts, number)
        dense.update(1.0)
        if number % data.maintenance_steps == 0:
            taken.append(rows.bytes)
            rows.maintain(number)
            taken.append(rows.bytes)
    counted = data.evaluation or data.train[len(losses) // 2 :]
    if data.evaluation:
        with torch.no_grad():
            losses = [loss_of(step, _pooled(step, rows)).item() for step in counted]
    rate = float(torch.cat([step.batch.labels for step in counted]).mean())
    second = taken[len(taken) // 2 :]
    ne = float(np.mean(losses[-len(counted) :])) / binary_entropy(rate)
    return Outcome(ne, int(np.mean(second)), max(second), rows)


def _pooled(step: Step, rows: Rows) -> Tensor:
    """(n, sum of dims)."""
    pooled = embedding_bag(step.looked_up, rows.weight, step.starts, mode="sum", per_sample_weights=step.weights)
    of_tables = pooled.view(len(rows.layout.dims), -1, rows.dim)
    return torch.cat([each[:, :dim] for each, dim in zip(of_tables, rows.layout.dims, strict=True)], dim=1)


def _of_rows(step: Step, rows: Rows, gradient: Tensor) -> Tensor:
    """Sum the gradient of pooled rows over the lookups of each row: (U, D)."""
    distinct, places, _ = step.distinct
    of_bags = torch.zeros(len(rows.layout.dims), len(gradient), rows.dim)
    for each, part in zip(of_bags, torch.split(gradient, list(rows.layout.dims), dim=1), strict=True):
        each[:, : part.shape[1]] = part
    of_lookups = of_bags.view(-1, rows.dim)
    if step.weights is not None:
        of_lookups = of_lookups[step.bags] * step.weights[:, None]
    return torch.zeros(len(distinct), rows.dim).index_add_(0, places, of_lookups)


def lines(name: str, sources: Callable[[int], Data], seeds: int, only: str) -> Iterator[Line]:
    """Train with each method on the same samples, with a stream for each seed, and compare prefixes with the others."""
    others = [other for other in (FULL, *OTHERS) if fnmatch.fnmatch(f"{name}/{other}", only)]
    found: dict[tuple[float, str], list[Outcome]] = {}
    batch = period = 0
    for seed in range(seeds if others else 0):
        data = sources(seed)
        batch, period = data.stream.batch, data.maintenance_steps
        full = run(data, FULL, 1.0)
        tell(f"{name}, seed {seed}, {FULL}: NE {full.ne:.5f}")
        for columns in COLUMNS:
            found.setdefault((columns, FULL), []).append(full)
            for method in (OURS, *others):
                if method == FULL:
                    continue
                outcome = run(data, method, columns)
                change, share = outcome.ne / full.ne - 1, outcome.bytes / full.bytes
                tell(f"{name}, seed {seed}, {columns:.1%}, {method}: {share:.1%} of bytes, NE {change:+.3%}")
                found.setdefault((columns, method), []).append(outcome)
    for columns in COLUMNS if others else ():
        for other in others:
            ours, theirs, full_ne = (
                np.array([each.ne for each in found[columns, method]]) for method in (OURS, other, FULL)
            )
            yield Line(
                setting=Setting(name, columns, other, batch, period, seeds),
                metric="normalized_entropy",
                pairs=Pairs(ours.tolist(), theirs.tolist()),
                measured={
                    "change_percent": 100 * float((ours / full_ne - 1).mean()),
                    "standard_deviation": _deviation(100 * ours / full_ne),
                    "their_change_percent": 100 * float((theirs / full_ne - 1).mean()),
                    "their_standard_deviation": _deviation(100 * theirs / full_ne),
                    "deviation_of_full_percent": _deviation(100 * full_ne / full_ne.mean()),
                    "wins": int((ours < theirs).sum()),
                    "bytes_of_full": _share(found[columns, OURS], found[columns, FULL]),
                    "their_bytes_of_full": _share(found[columns, other], found[columns, FULL]),
                },
            )


def _deviation(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _share(outcomes: Sequence[Outcome], full: Sequence[Outcome]) -> float:
    return float(np.mean([each.bytes / whole.bytes for each, whole in zip(outcomes, full, strict=True)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print.

    Returns:
        1 where something could not be measured, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dim_quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, one seed: does it run here?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="DATA/AGAINST, such as drifting/free-chunks")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"), help="with the folder ml-100k")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    samples = QUICK_SAMPLES if options.quick else SAMPLES
    sources: dict[str, Callable[[int], Data]] = {
        "drifting": lambda seed: progressive(drifting(seed, samples), 8),
        "ml-100k": lambda seed: in_epochs(movielens(seed, options.data_dir / "ml-100k"), 32),
    }
    failed = False
    for name, source in sources.items():
        try:
            for line in lines(name, source, 1 if options.quick else options.seeds, options.only):
                line.show()
        except OSError as error:
            failed = True
            tell(f"NOT MEASURED: {name}: {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
