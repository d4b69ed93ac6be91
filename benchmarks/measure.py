"""Two sides on the same batches in turn: what each took, their ratio, and how far it spreads."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

if TYPE_CHECKING:
    # Programs that only tell what they do start without torch.
    from benchmarks.shapes import Batches
    from dlrm_trainer.data import Batch


class Side(Protocol):
    """Run what is measured."""

    def run(self, batches: Sequence[Batch]) -> float:
        """Seconds in which it trains as many batches as it is given."""


class Described(Protocol):
    """Describe the setting of a line by the names that the output uses."""

    @property
    def benchmark(self) -> str:
        """Return the program's name."""

    @property
    def against(self) -> str:
        """Return the peer's name."""

    @property
    def shown(self) -> dict[str, Any]:
        """Return the setting without the peer."""


@dataclass(frozen=True)
class Setting:
    """Describe a line about tiers."""

    backing: str
    trace: str
    cache: float = 0.1
    against: str = "all-in-ddr"
    benchmark: ClassVar[str] = "tiers"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``Described``."""
        return {"backing": self.backing, "cache": self.cache, "trace": self.trace}

    @property
    def name(self) -> str:
        """Return the name that ``--only`` matches."""
        return f"{self.backing}/{self.cache}/{self.trace}/{self.against}"


@dataclass
class Pairs:
    """Hold what two sides measured, repeat by repeat."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def add(self, ours: float, theirs: float) -> None:
        """One repeat."""
        self.ours.append(ours)
        self.theirs.append(theirs)

    def inverted(self, factor: float) -> Pairs:
        """Return the repeats as a rate: ``factor`` / what was measured."""
        return Pairs([factor / value for value in self.ours], [factor / value for value in self.theirs])

    def scaled(self, factor: float) -> Pairs:
        """Return the repeats in another unit."""
        return Pairs([factor * value for value in self.ours], [factor * value for value in self.theirs])

    @property
    def ratio(self) -> float:
        """Return the median over repeats of ours / theirs."""
        return float(np.median(self._ratios))

    @property
    def spread(self) -> float:
        """Interquartile range of the ratio."""
        low, high = np.percentile(self._ratios, [25, 75])
        return float(high - low)

    @property
    def _ratios(self) -> Any:
        return np.array(self.ours) / np.array(self.theirs)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One result, to be printed by ``show``."""

    setting: Described
    metric: str
    pairs: Pairs
    measured: Mapping[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        """Print it."""
        report(self.setting, self.metric, self.pairs, **self.measured)


def report(setting: Described, metric: str, pairs: Pairs, **more: Any) -> None:
    """Print one line; ``more`` is put beside under ``measured``."""
    line: dict[str, Any] = {
        "benchmark": setting.benchmark,
        "setting": setting.shown,
        "metric": metric,
        "ours": _short(float(np.median(pairs.ours))),
        "against": setting.against,
        "theirs": _short(float(np.median(pairs.theirs))),
        "ratio": _short(pairs.ratio),
        "spread": _short(pairs.spread),
        "repeats": len(pairs.ours),
    }
    if more:
        line["measured"] = _shortened(more)
    print(json.dumps(line), flush=True)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A figure without a peer, and the limit that it should keep."""

    metric: str
    value: float
    limit: float | None = None
    """At most so much; None: the figure is only told."""
    setting: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What else was seen."""

    def show(self, benchmark: str, part: str) -> None:
        """Print it as one line."""
        line: dict[str, Any] = {"benchmark": benchmark, "setting": {"part": part, **self.setting}}
        line |= {"metric": self.metric, "ours": _short(self.value)}
        if self.limit is not None:
            line["limit"] = self.limit
        if self.measured:
            line["measured"] = _shortened(self.measured)
        print(json.dumps(line), flush=True)


def tell(words: str) -> None:
    """Say what is going on, beside the lines."""
    print(words, file=sys.stderr, flush=True)


def alternate(
    sides: Mapping[str, Side],
    batches: Batches,
    first: int,
    steps: int,
    repeats: int,
    after: Callable[[dict[str, float]], None],
) -> int:
    """Run every side in turn on the same batches, in reverse order every other repeat.

    Args:
        sides: by name.
        batches: drawn ahead of each repeat, outside what is timed.
        first: number of the first batch.
        steps: batches of a repeat.
        repeats: how often.
        after: told of each repeat's milliseconds a step, by side.

    Returns:
        The number of the batch after the last.
    """
    names = list(sides)
    for repeat in range(repeats):
        drawn = batches.draw(first, first + steps)
        first += steps
        taken = {}
        for name in names if repeat % 2 == 0 else names[::-1]:
            taken[name] = sides[name].run(drawn) * 1000 / steps
        after(taken)
    return first


def take_turns(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int, clock: Callable[[], float]
) -> Pairs:
    """Return the seconds of each side by ``clock``, in reverse order every other repeat, after one run that is not."""
    pairs, sides = Pairs(), (ours, theirs)
    for side in sides:
        side()
    for repeat in range(repeats):
        taken = [0.0, 0.0]
        for number in (0, 1) if repeat % 2 == 0 else (1, 0):
            taken[number] = seconds_of(sides[number], clock)
        pairs.add(*taken)
    return pairs


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long a call takes."""
    started = clock()
    work()
    return clock() - started


def memory(name: str) -> int:
    """Return bytes that the kernel counts for this process, such as ``VmRSS``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def _shortened(more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _short(value) if isinstance(value, float) else value for name, value in more.items()}


def _short(value: float) -> float:
    return float(f"{value:.4g}")
