"""What the row regularizer saves of a restore from few bits: ``python -m benchmarks.regularizer --data-dir FOLDER``.

For each seed the model of ``examples/movielens`` is trained without a regularizer and with each setting of one, aimed
at 2 bits, on MovieLens 100K. Then its rows are replaced by what their codes stand for: those of a snapshot, which
search a row's range, and evenly spaced ones over the whole range.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from benchmarks.measure import Line, Pairs, tell
from dlrm_api.checkpoint import Bits
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_checkpointer.codec.rows import code_rows, decode_rows
from dlrm_checkpointer.types import ShardId, ShardRows
from dlrm_planner import plan_job
from dlrm_trainer.data import Batch, open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.evaluate import measure
from dlrm_trainer.learner import Learner
from dlrm_trainer.metrics.progress import make_schedule

EXAMPLE = Path(__file__).parents[1] / "examples" / "movielens"
EPOCHS = 3
BITS: tuple[Bits, ...] = (4, 3, 2)
OFF = (0.0, 0)
SETTINGS = ((0.05, 157), (0.1, 157), (0.2, 71))
"""Strengths, and the last steps of 471 that they act in."""
Rows = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a line."""

    strength: float
    last_steps: int
    codes: str = "stored"
    benchmark: ClassVar[str] = "regularizer"
    against: ClassVar[str] = "off"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        setting = {"bits": 2, "strength": self.strength, "last_steps": self.last_steps, "codes": self.codes}
        return setting | {"data": "ml-100k", "epochs": EPOCHS}


@dataclass(frozen=True)
class Quality:
    """Hold what a model predicts."""

    ne: float
    """Normalized entropy of the evaluation set."""
    train_ne: float
    """Of the training set."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold one run."""

    trained: Quality
    restored: dict[str, Quality]
    """From 2 bits, by the kind of codes."""
    errors: dict[str, dict[Bits, float]]
    """Relative L2 error of all rows, by the kind of codes."""


def stored(rows: Rows, bits: Bits) -> Rows:
    """Return rows as a snapshot gives them back."""
    found, shard = np.empty_like(rows), ShardId("table", 0, len(rows), 0, rows.shape[1])
    piece = ShardRows(shard=shard, row_ids=np.arange(len(rows)), rows=rows, state=np.empty((len(rows), 0), np.float32))
    for coded in code_rows(piece, bits):
        decoded = decode_rows(coded)
        found[decoded.row_ids] = decoded.rows
    return found


def whole_range(rows: Rows, bits: Bits) -> Rows:
    """Return the nearest of evenly spaced values from a row's least element to its largest."""
    low = rows.min(axis=1, keepdims=True)
    spacing = (rows.max(axis=1, keepdims=True) - low) / (2**bits - 1)
    codes = np.rint((rows - low) / np.where(spacing > 0, spacing, 1))
    return np.asarray(low + codes * spacing, np.float32)


CODES: dict[str, Callable[[Rows, Bits], Rows]] = {"stored": stored, "whole-range": whole_range}


def prepare(data_dir: Path, folder: Path) -> None:
    """Write the example's files.

    Raises:
        subprocess.CalledProcessError: MovieLens 100K is not in ``data_dir``.
    """
    command = [sys.executable, str(EXAMPLE / "prepare.py"), str(data_dir / "ml-100k"), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def spec_of(folder: Path, seed: int, strength: float, last_steps: int) -> DLRMJobSpec:
    """Return the example on one rank."""
    document = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    spec = document["spec"]
    for split in ("train", "eval"):
        spec["data"][split]["uris"] = [str(folder / f"{split}.parquet")]
    spec["data"]["epochs"] = EPOCHS
    spec["trainer"]["processesPerReplica"] = 1
    spec["checkpoint"]["bits"] = 2
    regularizer = {"bits": 2, "strength": strength, "lastSteps": last_steps} if strength else None
    spec["training"] |= {"seed": seed, "rowRegularizer": regularizer}
    return parse_job(document).spec


def run(folder: Path, seed: int, strength: float, last_steps: int) -> Outcome:
    """Train a model, then restore it."""
    spec = spec_of(folder, seed, strength, last_steps)
    plan = plan_job(spec, None)
    spec = spec.with_virtual_shards(plan.virtual_shards)
    learner = Learner(spec, place(spec.model, plan, 1), Collectives(0, 1, lambda: ""))
    learner.start(seed)
    with ExitStack() as stack:
        train, evaluation = (stack.enter_context(closing(open_reader(spec, name, 0, 1))) for name in ("train", "eval"))
        schedule = make_schedule(spec, train.num_samples, train.batches_per_epoch)
        for step, batch in enumerate(train.iterate(0, schedule.total_steps)):
            computed = learner.compute(learner.prepare(learner.send(batch)), len(batch.labels))
            learner.apply(computed, schedule.factor(step), schedule.regularizer_at(step))
        sets = [list(each.iterate(0, each.batches_per_epoch)) for each in (evaluation, train)]
    trained = Quality(*(entropy(learner, batches) for batches in sets))
    weights = [part.weight.numpy() for part in learner.embeddings.local if isinstance(part, ResidentPart)]
    rows = [weight.copy() for weight in weights]
    size = sum(float(np.square(each, dtype=np.float64).sum()) for each in rows)
    restored: dict[str, Quality] = {}
    errors: dict[str, dict[Bits, float]] = {name: {} for name in CODES}
    for name, codes in CODES.items():
        # Those of 2 bits last: they are evaluated.
        for bits in BITS:
            for weight, exact in zip(weights, rows, strict=True):
                weight[:] = codes(exact, bits)
            missed = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in zip(weights, rows, strict=True))
            errors[name][bits] = (missed / size) ** 0.5
        restored[name] = Quality(*(entropy(learner, batches) for batches in sets))
    learner.embeddings.close()
    return Outcome(trained=trained, restored=restored, errors=errors)


def entropy(learner: Learner, batches: Sequence[Batch]) -> float:
    """Return the normalized entropy of a model on a set."""
    logits = torch.cat([learner.logits(batch) for batch in batches]).double().numpy()
    labels = torch.cat([batch.labels for batch in batches]).double().numpy()
    found = measure(logits, labels).ne
    assert found is not None, "there are labels of both kinds"
    return found


def lines(setting: tuple[float, int], off: Sequence[Outcome], found: Sequence[Outcome]) -> Iterator[Line]:
    """Compare a setting with runs without a regularizer, seed by seed."""

    def pairs(of: Callable[[Outcome], float]) -> Pairs:
        return Pairs([of(each) for each in found], [of(each) for each in off])

    def gaps(runs: Sequence[Outcome], of: Callable[[Outcome, Outcome], tuple[float, float]]) -> dict[str, float]:
        percents = [100 * (a / b - 1) for a, b in (of(*each) for each in zip(runs, off, strict=True))]
        return {"percent": float(np.mean(percents)), "sd": float(np.std(percents, ddof=1))}

    strength, last_steps = setting
    trained = Setting(strength=strength, last_steps=last_steps, codes="none")
    noise = [each.trained.ne for each in off]
    measured: dict[str, Any] = {"gap": gaps(found, lambda one, base: (one.trained.ne, base.trained.ne))}
    measured["seed_noise_percent"] = float(100 * np.std(noise, ddof=1) / np.mean(noise))
    yield Line(setting=trained, metric="normalized_entropy", pairs=pairs(lambda one: one.trained.ne), measured=measured)
    for codes in CODES:
        described = Setting(strength=strength, last_steps=last_steps, codes=codes)
        by_bits = {bits: pairs(lambda one, c=codes, b=bits: one.errors[c][b]) for bits in BITS}  # type: ignore[misc]
        others = {f"ratio_at_{bits}_bits": each.ratio for bits, each in by_bits.items() if bits != 2}
        yield Line(setting=described, metric="l2_error", pairs=by_bits[2], measured=others)
        measured = {}
        for name, runs in (("ours", found), ("theirs", off)):
            measured |= {
                f"{name}_above_{what}": gaps(runs, of)
                for what, of in (
                    ("fp32_without", lambda one, base, c=codes: (one.restored[c].ne, base.trained.ne)),
                    ("own_fp32", lambda one, _, c=codes: (one.restored[c].ne, one.trained.ne)),
                    ("own_fp32_in_training", lambda one, _, c=codes: (one.restored[c].train_ne, one.trained.train_ne)),
                )
            }
        restored = pairs(lambda one, c=codes: one.restored[c].ne)  # type: ignore[misc]
        yield Line(setting=described, metric="restored_normalized_entropy", pairs=restored, measured=measured)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder that holds ml-100k")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(options.data_dir, Path(name))
        found: dict[tuple[float, int], list[Outcome]] = {setting: [] for setting in (OFF, *SETTINGS)}
        for seed in range(options.seeds):
            tell(f"seed {seed}")
            for setting, runs in found.items():
                runs.append(run(Path(name), seed, *setting))
    for setting in SETTINGS:
        for line in lines(setting, found[OFF], found[setting]):
            line.show()


if __name__ == "__main__":
    main()
