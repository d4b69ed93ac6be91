"""What a step of training takes: ``python -m benchmarks.training [--quick] [--only PATTERN] [--repeats N]``."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from benchmarks.gang import Gang, GangError
from benchmarks.measure import Pairs, report, tell
from benchmarks.shapes import Shape, quick

THREADS = 2
"""Of all ranks of a side together."""
COMPARED = 6
"""Steps whose losses must agree before time is taken."""
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
"""Largest difference of losses, relative. Their bf16 rounds at other places than ours."""
WARM = 20
PARTS_OF_A_STEP = ("dense-only", "flop-bound")
"""Against which no loss can be compared. The second is not beside our step but beside its dense half."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a line about training."""

    pooling: int
    precision: str = "fp32"
    ranks: int = 1
    sharding: str = "table"
    codec: str = "fp32"
    against: str = "torchrec"
    benchmark: ClassVar[str] = "training"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {
            "ranks": self.ranks,
            "sharding": self.sharding,
            "precision": self.precision,
            "pooling": self.pooling,
            "codec": self.codec,
        }

    @property
    def name(self) -> str:
        """Return the name that ``--only`` matches."""
        return f"{self.ranks}/{self.sharding}/{self.precision}/{self.pooling}/{self.codec}/{self.against}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say how much is measured."""

    shape: Shape
    steps: int
    """Batches of a repeat."""
    repeats: int


def ours(shape: Shape, rank: int, ranks: int, port: int, sharding: str) -> Any:
    """Make our trainer, in a process of its own."""
    from benchmarks.ranks import trained

    return trained(shape, rank, ranks, port, sharding)


def torchrec(shape: Shape, rank: int, ranks: int, port: int, sharding: str, our_dense: bool) -> Any:
    """torchrec, likewise."""
    from benchmarks.ranks import torchrec_side

    return torchrec_side(shape, rank, ranks, port, sharding, our_dense)


def dense_only(shape: Shape, _rank: int, _ranks: int, _port: int) -> Any:
    """Make our dense half alone, in a process of its own."""
    from benchmarks.dense_side import DenseSide

    return DenseSide(shape)


def products(shape: Shape, _rank: int, _ranks: int, _port: int) -> Any:
    """Return the multiplications of our dense half alone, in a process of their own."""
    from benchmarks.dense_side import Products

    return Products(shape)


def measure(options: Options, setting: Setting) -> None:
    """Ours and the peer in turn.

    Raises:
        GangError: a rank failed, or losses differ.
    """
    shape = replace(
        options.shape,
        pooling=setting.pooling,
        precision=setting.precision,
        codec=setting.codec,
        blocks=setting.ranks if setting.sharding in ("column", "mixed") else 1,
    )
    plain = replace(shape, precision="fp32", codec="fp32")
    makers: dict[str, Callable[..., Any]] = {
        "torchrec": partial(torchrec, sharding=setting.sharding, our_dense=False),
        "torchrec-our-dense": partial(torchrec, sharding=setting.sharding, our_dense=True),
        "dense-only": dense_only,
        "flop-bound": products,
        "fp32": partial(ours, sharding=setting.sharding),
    }
    with ExitStack() as stack:
        sides = [
            stack.enter_context(closing(_gang(make, each, setting.ranks)))
            for make, each in (
                (dense_only if setting.against == "flop-bound" else partial(ours, sharding=setting.sharding), shape),
                (makers[setting.against], plain if setting.against == "fp32" else shape),
            )
        ]
        first = COMPARED
        if setting.against not in PARTS_OF_A_STEP:
            _compare(sides, setting)
        for side in sides:
            side.draw(first, first + WARM)
            side.run()
        first += WARM
        pairs, sent = Pairs(), Pairs()
        for repeat in range(options.repeats):
            taken = {}
            for number in (0, 1) if repeat % 2 == 0 else (1, 0):
                sides[number].draw(first, first + options.steps)
                before = sides[number].bytes_sent()
                seconds = sides[number].run()
                taken[number] = (seconds * 1000 / options.steps, (sides[number].bytes_sent() - before) / options.steps)
            first += options.steps
            pairs.add(taken[0][0], taken[1][0])
            sent.add(taken[0][1], taken[1][1])
    rates = pairs.inverted(shape.batch * 1000)
    more = {"our_step_ms": float(np.median(pairs.ours)), "their_step_ms": float(np.median(pairs.theirs))}
    if setting.against in PARTS_OF_A_STEP:
        report(setting, "step_ms", pairs)
    else:
        report(setting, "samples_per_s", rates, **more)
    if setting.ranks > 1:
        report(setting, "wire_bytes", sent)


def _gang(make: Callable[..., Any], shape: Shape, ranks: int) -> Gang:
    return Gang(make, shape, ranks, max(1, THREADS // ranks))


def _compare(sides: list[Gang], setting: Setting) -> None:
    for side in sides:
        side.draw(0, COMPARED)
    mine, theirs = (np.array(side.losses()) for side in sides)
    worst = float(np.abs(mine / theirs - 1).max())
    lossy = "bf16" if "bf16" in (setting.precision, setting.codec) or setting.codec != "fp32" else "fp32"
    if worst > TOLERANCE[lossy]:
        raise GangError(f"{setting.name}: losses differ by {worst:.1e}: {mine} and {theirs}")
    tell(f"{setting.name}: losses of {COMPARED} steps agree within {worst:.1e}")


def settings() -> Iterator[Setting]:
    """Yield the setting of every line."""
    for precision in ("fp32", "bf16"):
        for pooling in (1, 20):
            for against in ("torchrec", "torchrec-our-dense"):
                yield Setting(pooling=pooling, precision=precision, against=against)
        yield Setting(pooling=1, precision=precision, against="dense-only")
    yield Setting(pooling=1, against="flop-bound")
    yield Setting(pooling=1, precision="bf16", against="fp32")
    for sharding in ("table", "row", "column", "mixed"):
        yield Setting(pooling=1, ranks=2, sharding=sharding)
    for codec in ("fp16", "bf16", "int8"):
        yield Setting(pooling=1, ranks=2, codec=codec, against="fp32")


def main() -> int:
    """Measure what was asked for.

    Returns:
        1 where something could not be measured, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run here?")
    parser.add_argument("--only", default="*", help="lines whose RANKS/SHARDING/PRECISION/POOLING/CODEC/AGAINST match")
    parser.add_argument("--repeats", type=int, default=None)
    arguments = parser.parse_args()
    shape = Shape(rows=100_000)
    options = Options(shape=shape, steps=20, repeats=arguments.repeats or 15)
    if arguments.quick:
        options = Options(shape=quick(shape), steps=5, repeats=arguments.repeats or 3)
    failed = False
    for setting in settings():
        if not fnmatch.fnmatch(setting.name, arguments.only):
            continue
        try:
            measure(options, setting)
        except (GangError, ImportError) as error:
            failed = True
            tell(f"NOT MEASURED: {setting.name}: {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
