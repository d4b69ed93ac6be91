"""What restores from few bits, and of lost shards alone, cost: ``python -m benchmarks.restores [--quick] [--seeds N]``.

For each seed a model is trained once without any restore, and once with each number of restores at each number of bits:
training stops at evenly spaced steps, rows that changed since the last restore are replaced by what their codes stand
for, as a snapshot gives them back, and training goes on. Data, order and start are the same. Then, at 32 bits, half of
the tables go back to what they were a snapshot's interval before each failure, and the others and the dense part do not
(``partialRestore``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from scipy import stats

from benchmarks.measure import Line, Pairs, tell
from benchmarks.shapes import Shape, job_of, split_placement
from dlrm_api.checkpoint import Bits
from dlrm_api.job import DLRMJobSpec
from dlrm_checkpointer.codec.rows import CodedRows, code_rows
from dlrm_checkpointer.types import ShardId, load_rows
from dlrm_checkpointer.write.policy import bits_for
from dlrm_trainer.data import Batch, open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.evaluate import measure
from dlrm_trainer.learner import Learner

SHAPE = Shape(tables=8, rows=50_000, batch=1_024, bottom=(64, 64), top=(64, 1))
ROW_RATE, DENSE_RATE = 0.05, 0.02
SAMPLES, EVAL_SAMPLES = 400_000, 100_000
BITS: tuple[Bits, ...] = (2, 3, 4, 8)
RESTORES = (0, 1, 3, 20)
SEEDS = 5
CONFIDENCE = 0.95
SNAPSHOTS = 40
"""In the epoch: a failure just before the next one costs the lost shards an interval."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a line about restores."""

    bits: Bits
    restores: int
    samples: int
    against: str = "uninterrupted-fp32"
    benchmark: ClassVar[str] = "restores"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"bits": self.bits, "restores": self.restores, "dim": SHAPE.dim, "samples": self.samples}


@dataclass(frozen=True, kw_only=True)
class PartialSetting:
    """Describe a line about restores of lost shards alone."""

    failures: int
    samples: int
    against: str = "uninterrupted-fp32"
    benchmark: ClassVar[str] = "restores"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        shape = {"lost_tables": SHAPE.tables // 2, "tables": SHAPE.tables, "snapshots": SNAPSHOTS}
        return {"failures": self.failures, **shape, "dim": SHAPE.dim, "samples": self.samples}


@dataclass(frozen=True)
class Data:
    """Drawn once for all runs of a seed."""

    train: Sequence[Batch]
    evaluation: Sequence[Batch]


def spec_of(seed: int, samples: int, eval_samples: int) -> DLRMJobSpec:
    """Return the job: row-wise Adagrad, labels from a hidden teacher."""
    spec = job_of(SHAPE).spec
    training, data = spec.training, spec.data
    rows = training.row_optimizer.model_copy(update={"learning_rate": ROW_RATE})
    dense = training.dense_optimizer.model_copy(update={"learning_rate": DENSE_RATE})
    training = training.model_copy(update={"row_optimizer": rows, "dense_optimizer": dense, "seed": seed})
    synthetic = data.synthetic.model_copy(update={"samples": samples, "eval_samples": eval_samples})
    data = data.model_copy(update={"synthetic": synthetic})
    return spec.model_copy(update={"training": training, "data": data})


def draw(spec: DLRMJobSpec) -> Data:
    """Draw all batches of an epoch and of the evaluation set."""
    found = []
    for split in ("train", "eval"):
        with closing(open_reader(spec, split, 0, 1)) as reader:
            found.append(list(reader.iterate(0, reader.batches_per_epoch)))
    return Data(*found)


def started(spec: DLRMJobSpec) -> Learner:
    """Return a learner before its first step."""
    learner = Learner(spec, split_placement(SHAPE, 1, "table"), Collectives(0, 1, lambda: ""))
    learner.start(spec.training.seed)
    return learner


def stops_of(data: Data, restores: int) -> list[int]:
    """Return the steps at which training stops, evenly spaced, from 0 to the last."""
    return [len(data.train) * number // (restores + 1) for number in range(restores + 2)]


def steps(learner: Learner, batches: Sequence[Batch]) -> None:
    """Train."""
    for batch in batches:
        prepared = learner.prepare(learner.send(batch))
        learner.apply(learner.compute(prepared, len(batch.labels)), factor=1.0)


def train(spec: DLRMJobSpec, data: Data, bits: Bits, restores: int) -> float:
    """Return the normalized entropy after an epoch with so many restores."""
    learner = started(spec)
    before: int | None = None
    for begin, end in pairwise(stops_of(data, restores)):
        steps(learner, data.train[begin:end])
        if end < len(data.train):
            restore(learner, end, before, bits)
            before = end
    return finish(learner, data)


def train_partially(spec: DLRMJobSpec, data: Data, failures: int) -> float:
    """Return the normalized entropy with so many failures, each setting half of the tables back by an interval."""
    learner = started(spec)
    gone = [part for part in learner.embeddings.local if isinstance(part, ResidentPart)][: SHAPE.tables // 2]
    assert len(gone) == SHAPE.tables // 2, "tables are whole, and in memory"
    for begin, end in pairwise(stops_of(data, failures)):
        snapshot = max(begin, end - len(data.train) // SNAPSHOTS)
        steps(learner, data.train[begin:snapshot])
        kept = [(part.weight.clone(), part.state.clone()) for part in gone]
        steps(learner, data.train[snapshot:end])
        if end < len(data.train):
            for part, (weight, state) in zip(gone, kept, strict=True):
                part.weight.copy_(weight)
                part.state.copy_(state)
    return finish(learner, data)


def finish(learner: Learner, data: Data) -> float:
    """Return the normalized entropy of the evaluation set; closes the learner."""
    logits = torch.cat([learner.logits(batch) for batch in data.evaluation]).double().numpy()
    labels = torch.cat([batch.labels for batch in data.evaluation]).double().numpy()
    learner.embeddings.close()
    entropy = measure(logits, labels, len(data.train)).ne
    assert entropy is not None, "there are labels of both kinds"
    return entropy


def restore(learner: Learner, step: int, before: int | None, bits: Bits) -> None:
    """Give each row that changed since the last restore the value of its codes; others have theirs already."""
    learner.embeddings.saved.begin_cut(step, before)
    pieces: dict[ShardId, list[CodedRows]] = {}
    for place in learner.embeddings.saved.changed_rows():
        pieces.setdefault(place.shard, []).extend(code_rows(load_rows(place), bits))
    for part in learner.embeddings.local:
        part.restore(pieces.get(part.shard, ()))


def lines(quick: bool, seeds: int = SEEDS) -> Iterator[Line]:
    """Train all runs, then say for each number of bits and of restores what quality it lost against fp32.

    Args:
        quick: few samples and seeds.
        seeds: of data, start and all.
    """
    samples, eval_samples = (30_000, 5_000) if quick else (SAMPLES, EVAL_SAMPLES)
    found: dict[tuple[Bits, int], list[float]] = {(bits, count): [] for bits in BITS for count in RESTORES}
    partial: dict[int, list[float]] = {failures: [] for failures in RESTORES if failures}
    exact: list[float] = []
    for seed in range(2 if quick else seeds):
        spec = spec_of(seed, samples, eval_samples)
        data = draw(spec)
        exact.append(train(spec, data, 32, 0))
        tell(f"seed {seed}: normalized entropy {exact[-1]:.5f}")
        assert train(spec, data, 32, max(RESTORES)) == exact[-1], "a restore at 32 bits changes nothing"
        for (bits, restores), entropies in found.items():
            entropies.append(train(spec, data, bits, restores) if restores else exact[-1])
        for failures, entropies in partial.items():
            entropies.append(train_partially(spec, data, failures))
    noise = 100 * float(np.std(exact, ddof=1) / np.mean(exact))
    for (bits, restores), entropies in found.items():
        measured = lost(entropies, exact) | {"seed_noise_percent": noise, "rule_chooses_bits": bits_for(restores)}
        setting = Setting(bits=bits, restores=restores, samples=samples)
        yield Line(setting=setting, metric="normalized_entropy", pairs=Pairs(entropies, exact), measured=measured)
    for failures, entropies in partial.items():
        told = PartialSetting(failures=failures, samples=samples)
        measured = lost(entropies, exact) | {"seed_noise_percent": noise}
        yield Line(setting=told, metric="normalized_entropy", pairs=Pairs(entropies, exact), measured=measured)


def lost(entropies: Sequence[float], exact: Sequence[float]) -> dict[str, float]:
    """Return the mean increase of the entropies over seeds, and its margin of error."""
    gaps = 100 * (np.array(entropies) / np.array(exact) - 1)
    factor = stats.t.ppf((1 + CONFIDENCE) / 2, len(gaps) - 1)
    return {"gap_percent": float(gaps.mean()), "gap_percent_error": float(factor * stats.sem(gaps))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples and seeds: does it run here?")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args(arguments)
    for line in lines(options.quick, options.seeds):
        line.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
