"""How far the losses of the quick-start agree at 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Result, tell

RANKS = 1, 2, 4
SEEDS = 4
STEPS = 200
JOB = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
FIRST_STEPS, MAX_FIRST_DIFFERENCE = 10, 1e-6
"""Before rounding has had time to grow."""


def agreement(is_quick: bool) -> Iterator[Result]:
    """Compare the losses of all pairs of runs of one seed, relative to the run of fewer ranks."""
    for seed in range(1 if is_quick else SEEDS):
        steps = 30 if is_quick else STEPS
        tell(f"losses: seed {seed}, {steps} steps at {', '.join(map(str, RANKS))} ranks")
        losses = [_losses(ranks, seed, steps) for ranks in RANKS]
        pairs = [(i, j) for j in range(len(RANKS)) for i in range(j)]
        differences = np.array([np.abs(losses[j] / losses[i] - 1) for i, j in pairs]).max(axis=0)
        setting = {"seed": seed, "ranks": RANKS, "steps": steps}
        above = {f"first_step_above_{limit:g}": _first_above(differences, limit) for limit in (1e-6, 1e-5, 1e-3)}
        yield Result(
            metric="relative_difference_of_losses",
            value=float(differences[:FIRST_STEPS].max()),
            limit=MAX_FIRST_DIFFERENCE,
            setting=setting | {"first_steps": FIRST_STEPS},
            measured=above | {"at_step_100": float(differences[99:100].sum()), "largest": float(differences.max())},
        )


def _first_above(differences: NDArray[np.float64], limit: float) -> int | None:
    above = np.flatnonzero(differences > limit)
    return int(above[0]) + 1 if len(above) else None


def _losses(ranks: int, seed: int, steps: int) -> NDArray[np.float64]:
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "trainer.processesPerReplica": ranks,
            "training.seed": seed,
            "training.maxSteps": steps,
            "checkpoint.uri": f"file://{folder}/snapshots",
        }
        options = [part for field, value in changes.items() for part in ("--set", f"spec.{field}={value}")]
        command = [sys.executable, "-m", "dlrm_cli", "run", str(JOB), "--workdir", f"{folder}/run", *options]
        subprocess.run(command, check=True, capture_output=True)
        lines = map(json.loads, Path(folder, "run", "progress.jsonl").read_text().splitlines())
        losses = np.array([line["loss"] for line in lines if line.get("loss") is not None])
    assert len(losses) == steps, f"{len(losses)} losses of {steps} steps"
    return losses
