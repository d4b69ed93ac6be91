"""What fewer bits on the wire cost in quality: ``python -m benchmarks.accuracy [--seeds N] [--samples N]``.

Trains the model of ``examples/quickstart.yaml`` on two ranks by ``dlrmctl run``, for each seed once with each number
format (pooled rows, their gradients and dense gradients alike), on the same data and from the same start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml

from benchmarks.measure import tell
from dlrm_api.wire import Codec

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
DLRMCTL = str(Path(sys.executable).with_name("dlrmctl"))
EVAL_SAMPLES = 50_000
LAST_SHARE = 0.25
"""Share of the steps, the last ones, whose losses are compared."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    ne: float
    """Normalized entropy of the evaluation set at the end."""
    losses: Any
    """(steps,) training losses."""


def job(codec: Codec, seed: int, samples: int, folder: Path) -> dict[str, Any]:
    """Return the example job with a codec and a seed."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    spec = document["spec"]
    spec["data"]["synthetic"] = {"samples": samples, "evalSamples": EVAL_SAMPLES}
    spec["training"] |= {"seed": seed, "communication": dict.fromkeys(("forward", "backward", "dense"), codec)}
    spec["checkpoint"] |= {"uri": f"file://{folder}/snapshots", "intervalSteps": 1_000_000}
    return document


def train(codec: Codec, seed: int, samples: int) -> Outcome:
    """Run one job to its end.

    Raises:
        subprocess.CalledProcessError: the run failed; its output is on stderr.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(job(codec, seed, samples, folder)))
        command = [DLRMCTL, "run", str(folder / "job.yaml"), "--workdir", str(folder / "work")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            tell(done.stdout[-2_000:] + done.stderr[-4_000:])
            done.check_returncode()
        result = json.loads((folder / "work" / "result.json").read_text())
        steps = [json.loads(line) for line in (folder / "work" / "progress.jsonl").read_text().splitlines()]
    losses = np.array([step["loss"] for step in steps if "loss" in step])
    return Outcome(result["eval"]["ne"], losses)


def main() -> None:
    """One line a format: the quality that it loses against fp32, beside what another seed changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200_000, help="to train on")
    options = parser.parse_args()
    runs: dict[str, list[Outcome]] = {codec: [] for codec in get_args(Codec)}
    for seed in range(options.seeds):
        for codec in get_args(Codec):
            tell(f"seed {seed}, {codec}")
            runs[codec].append(train(codec, seed, options.samples))
    exact = runs["fp32"]
    noise = float(np.std([run.ne for run in exact], ddof=1))
    for codec, found in runs.items():
        gaps = [run.ne - other.ne for run, other in zip(found, exact, strict=True)]
        tail = int(len(exact[0].losses) * LAST_SHARE)
        losses = [np.mean(run.losses[-tail:] - other.losses[-tail:]) for run, other in zip(found, exact, strict=True)]
        line = {
            "benchmark": "accuracy",
            "setting": {"codec": codec, "ranks": 2, "samples": options.samples},
            "metric": "normalized_entropy",
            "ours": round(float(np.mean([run.ne for run in found])), 5),
            "against": "fp32",
            "mean_gap": round(float(np.mean(gaps)), 6),
            "largest_gap": round(float(np.max(np.abs(gaps))), 6),
            "loss_gap_of_last_quarter": round(float(np.mean(losses)), 6),
            "seed_noise": round(noise, 6),
            "seeds": options.seeds,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
