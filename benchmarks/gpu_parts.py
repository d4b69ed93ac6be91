"""The parts of ``benchmarks.gpu_check`` that compute: ``python -m benchmarks.gpu_parts PART``, a line of JSON a result.

A result that has not passed makes the exit code 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Pairs, alternate, tell
from benchmarks.shapes import Batches, Shape, job_of, on_one_rank, popularity_of
from benchmarks.sides import Rates, Trained
from dlrm_api.row_optimizers import RowOptimizerKind
from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_checkpointer import load_rows
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_kernels.row_updates import table_key
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding import Placement
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.table_batch import HostKernel, Kernel, RowUpdate, Tables

Result = dict[str, Any]
PACKAGES = (
    "torch",
    "triton",
    "fbgemm-gpu",
    "torchrec",
    "numpy",
    "numba",
    "pyarrow",
    "pydantic",
    "pytest",
    "hypothesis",
)
SMALL = Shape(tables=4, rows=20_000, dim=64, batch=1_024, bottom=(32, 64), top=(32, 1))
MANY_ROWS = replace(SMALL, rows=200_000)
LARGE = Shape(rows=1_000_000, dim=128, batch=65_536, bottom=(512, 256, 128), top=(1_024, 1_024, 512, 256, 1))
CACHED = 0.1
"""Share of the rows in HBM."""
STEPS = 50
MAX_GAPS: Mapping[str, float] = {"fp32": 1e-3, "bf16": 2e-2}
"""Largest relative difference of a loss to that of the CPU, by precision."""
SAME = 1e-4
"""Relative difference of fbgemm's rows, which are summed in no fixed order."""
WARM, TIMED_STEPS, REPEATS, PROFILED = 5, 5, 5, 5
NAMED = 10
"""Kernels, and gaps, that a profile names."""


def gpu() -> torch.device:
    """Return the GPU that parts run on."""
    return torch.device("cuda", 0)


def placed(shape: Shape, rows: str, lookahead: int = 1) -> Placement:
    """Place the rows of all tables: ``host``, ``hbm``, or ``cached`` (a tenth in HBM, over DDR)."""
    model, share = job_of(shape).spec.model, {"hbm": 1.0, "cached": CACHED}
    levels: list[dict[str, Any]] = []
    if rows in share:
        levels.append({"tier": "hbm", "rows": max(1, round(share[rows] * shape.rows))})
    if rows == "cached":
        levels.append({"tier": "ddr", "rows": shape.rows})
    stacks = [{"levels": levels}] * shape.tables if levels else []
    return on_one_rank(model, stacks, lookahead if rows == "cached" else 0)


def drawn_from(shape: Shape) -> Batches:
    """Return batches of a shape."""
    return Batches(shape, popularity_of("zipf-1.05", shape.rows, Path()))


def versions() -> Iterator[Result]:
    """Tell what is installed, and which GPU there is."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    yield {"gpu": card, "cuda": torch.version.cuda, "python": platform.python_version(), "packages": found}
    if card is not None:
        importlib.import_module("fbgemm_gpu")
        major, minor = torch.cuda.get_device_capability(0)
        free, total = torch.cuda.mem_get_info(0)
        yield {"capability": f"{major}.{minor}", "gpu_bytes": total, "free_bytes": free}


def kernels(device: torch.device) -> Iterator[Result]:
    """Compare updates with those of the host: bit for bit those of our kernels, nearly those of fbgemm."""
    cases: list[tuple[RowOptimizerKind, RowDtype, bool]]
    cases = [(kind, dtype, True) for kind in ("rowwise-adagrad", "sgd", "adam") for dtype in ("fp32", "fp16")]
    cases += [("rowwise-adagrad", "fp32", False), ("sgd", "fp32", False)]
    for (kind, dtype, exact), dim in itertools.product(cases, (4, 64, 128, 1_024)):
        gap = _update_gap(device, kind, dtype, dim, exact=exact)
        case = {"kernel": "ours" if exact else "fbgemm", "optimizer": kind, "rows": dtype, "dim": dim}
        yield {**case, "gap": gap, "passed": gap <= (0.0 if exact else SAME)}


def _update_gap(device: torch.device, kind: RowOptimizerKind, dtype: RowDtype, dim: int, *, exact: bool) -> float:
    """Return the largest relative difference of rows and states after three updates."""
    from dlrm_trainer.embedding.gpu.tables import DeviceKernel

    generator, shapes, features = np.random.default_rng(dim), ((5_000, dim), (7, dim)), (0, 0, 1)
    keys = [table_key(0, name) for name in ("a", "b")] if dtype == "fp16" else []
    theirs = Tables(
        shapes=shapes,
        features=features,
        optimizer=RowOptimizerSpec(kind=kind),
        dtype=dtype,
        device=device,
        keys=np.array(keys, np.uint64),
        first_columns=(0, 0),
        deterministic=exact,
    )
    pairs: list[tuple[Kernel, torch.device]] = [
        (HostKernel(replace(theirs, device=HOST)), HOST),
        (DeviceKernel(theirs), device),
    ]
    for kernel, _ in pairs:
        for number, weight in enumerate(kernel.weights):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    samples = 300
    for step in range(3):
        lengths = generator.integers(0, 9, (len(features), samples)).astype(np.int32)
        counts = lengths.sum(axis=1)
        # Most lookups are of few rows.
        ids = np.concatenate(
            [generator.zipf(1.3, n) % shapes[table][0] for table, n in zip(features, counts, strict=True)]
        )
        weights = torch.from_numpy(generator.normal(size=len(ids)).astype(np.float32))
        gradient = torch.from_numpy(generator.normal(size=(samples, dim * len(features))).astype(np.float32))
        for kernel, where in pairs:
            bags = Bags(
                lengths=torch.from_numpy(lengths).to(where),
                ids=torch.from_numpy(ids).to(where),
                weights=weights.to(where),
                sizes=torch.from_numpy(counts.astype(np.int64)),
            )
            kernel.pool(bags, True)
            kernel.update(bags, gradient.to(where), bags.ids, RowUpdate(0.1 / (step + 1), step))
    host, found = ((*kernel.weights, *kernel.states) for kernel, _ in pairs)
    return max(_gap(ours, theirs) for ours, theirs in zip(found, host, strict=True))


def _gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value; 0 only for equal bits."""
    ours, theirs = found.float().cpu(), expected.float().cpu()
    difference = (ours - theirs).abs().max() if ours.numel() else torch.zeros(())
    return float(difference / theirs.abs().max().clamp(min=1e-30)) if float(difference) > 0 else 0.0


def exactness(device: torch.device, steps: int = STEPS) -> Iterator[Result]:
    """Train the same batches on the CPU and on the GPU, with all rows in HBM and a tenth, and compare losses."""
    for precision, pooling in (("fp32", 1), ("fp32", 5), ("bf16", 1)):
        shape = replace(SMALL, precision=precision, pooling=pooling)
        batches = drawn_from(shape).draw(0, steps)
        expected = np.array(_losses(shape, "host", HOST, batches))
        for rows in ("hbm", "cached"):
            found = np.array(_losses(shape, rows, device, batches))
            gap = float(np.abs(found / expected - 1).max())
            setting = {"precision": precision, "lookups": pooling, "rows": rows, "steps": steps}
            yield {**setting, "gap": gap, "limit": MAX_GAPS[precision], "passed": gap <= MAX_GAPS[precision]}


def _losses(shape: Shape, rows: str, device: torch.device, batches: Sequence[Any]) -> list[float]:
    side = Trained(shape, placed(shape, rows, 0), None, device=device)
    side.learner.start(shape.seed)
    try:
        return side.losses(batches)
    finally:
        side.close()


def cut(device: torch.device, shape: Shape = MANY_ROWS) -> Iterator[Result]:
    """Cut changed rows, restore them into another learner, and compare what both hold, and the next losses."""
    batches = drawn_from(shape).draw(0, 12)
    for rows in ("hbm", "cached"):
        first, second = (Trained(shape, placed(shape, rows, 0), None, device=device) for _ in range(2))
        for side in (first, second):
            side.learner.start(shape.seed)
        first.losses(batches[:6])
        saved = first.learner.embeddings.saved
        _wait(device)
        began = time.perf_counter()
        saved.begin_cut(6, None)
        begun_s = time.perf_counter() - began
        pieces = [load_rows(each) for each in saved.changed_rows()]
        copied_s = time.perf_counter() - began
        second.learner.dense.restore(first.learner.dense.arrays())
        second.learner.embeddings.settle()
        for part in second.learner.embeddings.local:
            part.restore(code_rows(each, 32)[0] for each in pieces if each.shard == part.shard)
        losses = [np.array(side.losses(batches[6:])) for side in (first, second)]
        gap = float(np.abs(losses[0] / losses[1] - 1).max())
        count, size = sum(len(each.row_ids) for each in pieces), sum(each.nbytes for each in pieces)
        figures = {"changed_rows": count, "bytes": size, "begin_ms": 1e3 * begun_s, "copy_ms": 1e3 * copied_s}
        yield {"rows": rows, **figures, "gap": gap, "passed": gap <= SAME and count > 0}
        for side in (first, second):
            side.close()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Describe a line of times next to torchrec's."""

    precision: str
    rows: str
    against: str = "torchrec"
    benchmark: ClassVar[str] = "gpu-check"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``benchmarks.measure.Described``."""
        return {"precision": self.precision, "rows": self.rows}


def all_in_hbm(device: torch.device) -> Iterator[Result]:
    """Time steps with all rows in HBM."""
    for precision in ("bf16", "tf32", "fp32"):
        yield _timed(Timed(precision=precision, rows="hbm"), replace(LARGE, precision=precision), device)


def cached(device: torch.device) -> Iterator[Result]:
    """Time steps with a tenth of the rows in HBM, next to torchrec's UVM caching."""
    yield _timed(Timed(precision="fp32", rows="cached"), LARGE, device)


def _timed(setting: Timed, shape: Shape, device: torch.device) -> Result:
    """Time ours and torchrec's steps in turn; without torchrec ours alone."""
    batches, ours = drawn_from(shape), Trained(shape, placed(shape, setting.rows), None, device=device)
    ours.fill()
    sides: dict[str, Any] = {"ours": ours}
    absent = ""
    try:
        from benchmarks.torchrec_side import PipelinedSide

        sides["theirs"] = PipelinedSide(shape, device, CACHED if setting.rows == "cached" else None)
    except ImportError as error:
        absent = f"{type(error).__name__}: {error}"
        tell(f"torchrec is not measured: {absent}")
    warm = WARM if setting.rows == "hbm" else 3 * WARM
    for side in sides.values():
        side.run(batches.draw(0, warm))
    rates, pairs = Rates(ours) if setting.rows == "cached" else None, Pairs()
    alternate(
        sides, batches, warm, TIMED_STEPS, REPEATS, lambda ms: pairs.add(ms["ours"], ms.get("theirs", float("nan")))
    )
    for side in sides.values():
        side.close()
    gc.collect()
    torch.cuda.empty_cache()
    ours_ms = float(np.median(pairs.ours))
    found: Result = {"setting": setting.shown, "metric": "step_ms", "ours": ours_ms, "against": setting.against}
    found |= {"samples_per_second": shape.batch * 1e3 / ours_ms, **({} if rates is None else rates.measured())}
    if absent:
        return {**found, "theirs": None, "reason": absent}
    return {**found, "theirs": float(np.median(pairs.theirs)), "ratio": pairs.ratio, "spread": pairs.spread}


def profile(device: torch.device) -> Iterator[Result]:
    """Profile steps with all rows in HBM: busy and idle time of the GPU, its longest kernels and gaps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    for precision in ("fp32", "bf16"):
        shape = replace(LARGE, precision=precision)
        batches, side = drawn_from(shape), Trained(shape, placed(shape, "hbm"), None, device=device)
        side.fill()
        side.run(batches.draw(0, WARM))
        drawn = batches.draw(WARM, WARM + PROFILED)
        with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            side.run(drawn)
        events = [
            (each.name, each.time_range.start, each.time_range.end)
            for each in seen.events()
            if each.device_type.name == "CUDA"
        ]
        yield {"precision": precision, **profiled(events, PROFILED)}
        side.close()


def profiled(events: Sequence[tuple[str, float, float]], steps: int) -> Result:
    """Return busy and idle time of a step, its launches, and the longest kernels and gaps.

    Args:
        events: name, start and end (us) of what the GPU did.
        steps: in which it did so.
    """
    ordered = sorted(events, key=lambda each: each[1])
    gaps, busy_us, end = list[tuple[float, str, str]](), 0.0, None
    before, by_name = "", dict[str, float]()
    for name, start, stop in ordered:
        if end is not None and start > end:
            gaps.append((start - end, before, name))
        busy_us += max(0.0, stop - max(start, start if end is None else end))
        if end is None or stop > end:
            end, before = stop, name
        by_name[name] = by_name.get(name, 0.0) + stop - start
    idle_us = sum(gap for gap, *_ in gaps)
    longest = sorted(by_name, key=lambda name: -by_name[name])[:NAMED]
    return {
        "busy_ms": busy_us / 1e3 / steps,
        "idle_ms": idle_us / 1e3 / steps,
        "launches": len(ordered) / steps,
        "kernels_ms": {name: by_name[name] / 1e3 / steps for name in longest},
        "gaps": [
            {"us": gap, "after": after, "until": until}
            for gap, after, until in sorted(gaps, key=lambda each: -each[0])[:NAMED]
        ],
    }


ON_GPUS: Mapping[str, Callable[[torch.device], Iterator[Result]]] = {
    "kernels": kernels,
    "exactness": exactness,
    "cut": cut,
    "all-in-hbm": all_in_hbm,
    "cached": cached,
    "profile": profile,
}


def main() -> int:
    """Run a part; print its results as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["versions", *ON_GPUS])
    part = parser.parse_args().part
    failed = False
    for found in versions() if part == "versions" else ON_GPUS[part](gpu()):
        failed |= not found.get("passed", True)
        print(json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
