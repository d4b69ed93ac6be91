"""Sweep what sizes a model, measured beside predicted: ``python -m benchmarks.characterize [--out FOLDER]``.

One size of a base model changes at a time: dense and sparse features, batch, rows, lookups, width and depth of the
MLPs, and where tables are. Each setting trains on two ranks of this machine as in ``planner_error``, 50 steps after 20,
in turn with all others; predictions are by what ``dlrmctl profile measure`` found before. ``--out`` writes
``characterization.csv`` and a plot of each sweep, ``images/characterization.svg``.

Source: Acun et al., "Understanding Training Efficiency of Deep Learning Recommendation Models at Scale", HPCA 2021.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import tell
from benchmarks.planner_error import MAX_TABLE_BYTES, Run, make_job, measure_profile, plan_within, tier_budgets, train
from benchmarks.scratch import Scratch
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob

RANKS, DIM, REPEATS = 2, 64, 3
HANDOFF_BYTES = 2 * MAX_TABLE_BYTES
ACROSS = 4
"""Plots in a line."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe one model and batch."""

    dense: int = 64
    """Dense features."""
    sparse: int = 16
    """Sparse features, each with a table of its own."""
    batch: int = 1_024
    rows: int = 100_000
    lookups: int = 8
    width: int = 256
    """Of each layer of both MLPs, but their last ones."""
    depth: int = 2
    placement: str = "planned"
    """``table``, ``row`` or ``column``: all tables that way; ``N% in ddr``: the rest in block storage."""

    def job(self, folder: Path, ddr_bytes: int | None = None) -> DLRMJob:
        """Return the job of a setting."""
        template: dict[str, Any] = {
            "rows": self.rows,
            "dim": DIM,
            "avgLookups": self.lookups,
            "maxLookups": self.lookups,
            "pooling": "sum",
        }
        if self.placement in ("table", "row", "column"):
            template |= {"pin": {"sharding": self.placement}, "columnBlock": DIM // RANKS}
        layers = [self.width] * self.depth
        model = {
            "denseFeatures": [f"I{number}" for number in range(self.dense)],
            "bottomMlp": [*layers, DIM],
            "topMlp": [*layers, 1],
            "tableGroups": [{"name": "table", "count": self.sparse, "template": template}],
        }
        return make_job(
            model, self.batch, folder, ranks=RANKS, handoff_bytes=HANDOFF_BYTES, trainer=tier_budgets(ddr_bytes)
        )

    @property
    def ddr_share(self) -> float | None:
        """Return the share of rows that DDR has room for; None: all of them."""
        return float(self.placement.partition("%")[0]) / 100 if self.placement.endswith("in ddr") else None

    def ddr_bytes(self, profile: HardwareProfile, folder: Path) -> int | None:
        """Return the DDR that its share of rows takes with all that must be there; None: whatever the machine has."""
        if self.ddr_share is None:
            return None
        rest_bytes = int(self.ddr_share * self.sparse * self.rows * DIM * 4)
        job, _ = plan_within(partial(self.job, folder), HANDOFF_BYTES, rest_bytes, profile)
        return job.spec.trainer.tier_budgets.ddr


BASE = Setting()
SWEEPS: Mapping[str, tuple[int | str, ...]] = {
    "dense": (16, 64, 256, 1_024),
    "sparse": (4, 16, 64),
    "batch": (256, 1_024, 4_096),
    "rows": (10_000, 100_000, 200_000),
    "lookups": (1, 8, 32),
    "width": (64, 256, 1_024),
    "depth": (1, 2, 4),
    "placement": ("planned", "table", "row", "column", "50% in ddr", "10% in ddr"),
}
TITLES: Mapping[str, str] = {
    "dense": "dense features",
    "sparse": "sparse features",
    "batch": "samples of a batch",
    "rows": "rows of a table",
    "lookups": "lookups of a bag",
    "width": "width of the MLPs",
    "depth": "depth of the MLPs",
    "placement": "placement",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Hold a setting with its predicted and measured step."""

    sweep: str
    setting: Setting
    measured_s: float
    predicted_s: float
    spread: float
    """Range of the runs' steps over their median."""
    bound: str

    @property
    def cells(self) -> dict[str, Any]:
        """Return what a line of the CSV says."""
        return {
            "sweep": self.sweep,
            **vars(self.setting),
            "measured_ms": round(self.measured_s * 1e3, 2),
            "predicted_ms": round(self.predicted_s * 1e3, 2),
            "error": round(self.predicted_s / self.measured_s - 1, 3),
            "measured_samples_per_s": round(self.setting.batch / self.measured_s),
            "predicted_samples_per_s": round(self.setting.batch / self.predicted_s),
            "spread": round(self.spread, 3),
            "bound": self.bound,
        }


def settings_of(sweep: str) -> list[Setting]:
    """Return the settings of a sweep, in its order."""
    return [Setting(**{**vars(BASE), sweep: value}) for value in SWEEPS[sweep]]


def measure(settings: Sequence[Setting], repeats: int, profile: Path, folder: Path) -> dict[Setting, list[Run]]:
    """Train every setting ``repeats`` times, all in turn."""
    hardware, found = measure_profile(profile, folder), dict[Setting, list[Run]]()
    ddr = {setting: setting.ddr_bytes(hardware, folder) for setting in settings}
    for repeat in range(repeats):
        for number, setting in enumerate(settings):
            with tempfile.TemporaryDirectory(dir=folder) as name:
                run = train(setting.job(Path(name), ddr[setting]), profile, Path(name))
            found.setdefault(setting, []).append(run)
            done = repeat * len(settings) + number + 1
            tell(f"run {done} of {repeats * len(settings)}: {run.step_s * 1e3:.1f} ms, {setting}")
    return found


def make_line(sweep: str, setting: Setting, runs: Sequence[Run]) -> Line:
    """Return a setting's line; the prediction is that of the plan that was run."""
    steps = np.array([run.step_s for run in runs])
    bounds = sorted(run.bound for run in runs)
    return Line(
        sweep=sweep,
        setting=setting,
        measured_s=float(np.median(steps)),
        predicted_s=runs[0].plan.predicted.step_seconds or math.nan,
        spread=float(np.ptp(steps) / np.median(steps)),
        bound=bounds[len(bounds) // 2],
    )


def draw(lines: Sequence[Line]) -> str:
    """Return an SVG with samples/s of every sweep, measured and predicted."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sweeps = list(dict.fromkeys(line.sweep for line in lines))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dlrm", "font.size": 8}):
        figure = Figure(figsize=(12, 3 * math.ceil(len(sweeps) / ACROSS)), layout="constrained")
        for number, sweep in enumerate(sweeps):
            axes = figure.add_subplot(math.ceil(len(sweeps) / ACROSS), ACROSS, number + 1)
            own = [line for line in lines if line.sweep == sweep]
            names, x = [str(getattr(line.setting, sweep)) for line in own], range(len(own))
            joins = "" if sweep == "placement" else "-"
            axes.plot(x, [line.setting.batch / line.measured_s for line in own], f"o{joins}", label="measured")
            axes.plot(x, [line.setting.batch / line.predicted_s for line in own], f"s{joins * 2}", label="predicted")
            axes.set_xticks(x, names, rotation=30 if sweep == "placement" else 0)
            axes.set_title(TITLES[sweep], loc="left")
            axes.set_ylim(bottom=0)
            axes.set_ylabel("samples/s")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def write(lines: Sequence[Line], folder: Path) -> None:
    """Write the CSV and the plot."""
    text = io.StringIO()
    table = csv.DictWriter(text, lines[0].cells, lineterminator="\n")
    table.writeheader()
    table.writerows(line.cells for line in lines)
    (folder / "characterization.csv").write_text(text.getvalue())
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images" / "characterization.svg").write_text(draw(lines))


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SWEEPS), nargs="+", default=list(SWEEPS), help="sweeps [all]")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of every setting [3]")
    parser.add_argument("--out", type=Path, help="existing folder for the CSV and the plot")
    options = parser.parse_args()
    with Scratch(Path(tempfile.gettempdir())) as scratch:
        settings = list(dict.fromkeys(each for sweep in options.only for each in settings_of(sweep)))
        runs = measure(settings, options.repeats, scratch.path / "profile.yaml", scratch.path)
    lines = [make_line(sweep, each, runs[each]) for sweep in options.only for each in settings_of(sweep)]
    for line in lines:
        print(json.dumps({"benchmark": "characterize", **line.cells}), flush=True)
    errors = np.abs([line.cells["error"] for line in lines])
    summary = {"median_error": round(float(np.median(errors)), 3), "worst_error": round(float(errors.max()), 3)}
    print(json.dumps({"benchmark": "characterize", "settings": len(settings), **summary}), flush=True)
    if options.out is not None:
        write(lines, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
