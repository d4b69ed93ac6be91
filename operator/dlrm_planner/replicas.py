"""Choose the number of replicas for ``trainer.auto`` by the plans of few sizes.

Between two neighbours of the grid the answer is assumed to change once, from no to yes; and throughput that has fallen
over several larger sizes is assumed not to rise above its peak again. Neither holds in general (a table may split badly
over one size and well over the next), so up to ``MAX_EXACT`` sizes are all judged, and nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_api.trainer import AutoReplicas

PATH = "spec.trainer.auto"
MAX_EXACT = 16
"""Up to so many sizes are judged one by one."""
GRID_SIZES = 12
"""Of more sizes so many are judged first, each larger by the same factor."""
FALLING_SIZES = 3
"""Sizes in a row below the best one, after which larger ones are skipped."""
SHOWN_SIZES = 3
"""Number of sizes next to the chosen one with a shown prediction."""


@dataclass(frozen=True, kw_only=True)
class JudgedSize:
    """Hold what one number of replicas gives."""

    fits: bool
    rate: float = 0.0
    """Predicted throughput (samples/s)."""

    def reaches(self, target: float) -> bool:
        """Return whether the size is enough."""
        return self.fits and self.rate >= target


@dataclass(frozen=True, kw_only=True)
class ChosenSize:
    """Hold how the search ended."""

    replicas: int | None
    """The fewest that reach the target; else those of the highest throughput; None if nothing fits."""
    reached: bool
    judged: Mapping[int, JudgedSize]
    """Every size that was judged: at most ``GRID_SIZES`` and twelve more."""


def choose_replicas(fewest: int, most: int, target: float, judge: Callable[[int], JudgedSize]) -> ChosenSize:
    """Return the fewest replicas from ``fewest`` to ``most`` that reach ``target``, else the best of those judged."""
    judged: dict[int, JudgedSize] = {}

    def is_enough(size: int) -> bool:
        if size not in judged:
            judged[size] = judge(size)
        return judged[size].reaches(target)

    before = fewest - 1
    for size in size_grid(fewest, most):
        if is_enough(size):
            return ChosenSize(replicas=_first_enough(before, size, is_enough), reached=True, judged=judged)
        if most - fewest >= MAX_EXACT and _is_falling(judged):
            break
        before = size
    fitting = {size: found.rate for size, found in judged.items() if found.fits}
    best = max(fitting, key=lambda size: (fitting[size], -size), default=None)
    return ChosenSize(replicas=best, reached=False, judged=judged)


def size_grid(fewest: int, most: int) -> list[int]:
    """Return the sizes to judge first, ascending, with both ends."""
    if most - fewest < MAX_EXACT:
        return list(range(fewest, most + 1))
    steps = (round(fewest * (most / fewest) ** (i / (GRID_SIZES - 1))) for i in range(GRID_SIZES))
    return sorted({fewest, most, *steps})


def _first_enough(low: int, high: int, is_enough: Callable[[int], bool]) -> int:
    """Bisect between ``low``, which is not enough, and ``high``, which is."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _is_falling(judged: Mapping[int, JudgedSize]) -> bool:
    rates = [found.rate for _, found in sorted(judged.items()) if found.fits]
    return len(rates) > FALLING_SIZES and max(rates[-FALLING_SIZES:]) < max(rates[:-FALLING_SIZES])


def plan_auto(
    spec: DLRMJobSpec,
    plan_of: Callable[[DLRMJobSpec], Plan | None],
    refusal_of: Callable[[DLRMJobSpec], InvalidSpecError],
    missing_rates: Callable[[DLRMJobSpec, Plan], str],
) -> Plan:
    """Return the plan of the fewest replicas that reach the target, else of those that come closest.

    Args:
        spec: has ``trainer.auto`` and no ``trainer.replicas``.
        plan_of: the plan of a fixed number of replicas; None if nothing fits.
        refusal_of: why nothing fits.
        missing_rates: why a plan has no prediction.

    Raises:
        InfeasiblePlanError: the tables fit no allowed number of replicas; the reasons are those of the largest.
        InvalidSpecError: a target is given, and nothing predicts throughput; or a pin fits no size.
    """
    auto = spec.trainer.auto
    assert auto is not None
    most, target = min(auto.max, spec.max_replicas), auto.target_samples_per_second

    def judge(size: int) -> JudgedSize:
        fixed = spec.with_replicas(size)
        plan = plan_of(fixed)
        if plan is None:
            return JudgedSize(fits=False)
        rate = plan.predicted.samples_per_second
        if rate is None and target > 0:
            raise InvalidSpecError(
                f"{PATH}.targetSamplesPerSecond",
                f"throughput of {size} replicas cannot be predicted: {missing_rates(fixed, plan)}; measure it, give "
                "trainer.replicas, or a target of 0 for the fewest replicas that hold all tables",
            )
        return JudgedSize(fits=True, rate=rate or 0.0)

    found = choose_replicas(auto.min, most, target, judge)
    if found.replicas is None:
        raise _refusal(auto, most, refusal_of(spec.with_replicas(most)))
    # Planned once more: keeping all plans would take the memory of two dozen.
    chosen = plan_of(spec.with_replicas(found.replicas))
    assert chosen is not None
    return chosen.model_copy(update={"reasons": (_reason(spec, auto, most, found), *chosen.reasons)})


def _refusal(auto: AutoReplicas, most: int, error: InvalidSpecError) -> InvalidSpecError:
    if not isinstance(error, InfeasiblePlanError):
        return error
    first, *others = error.reasons
    return InfeasiblePlanError(PATH, [f"{_no_size(auto.min, most)} holds all tables; with {most}: {first}", *others])


def _reason(spec: DLRMJobSpec, auto: AutoReplicas, most: int, found: ChosenSize) -> str:
    assert found.replicas is not None
    size, target = found.replicas, auto.target_samples_per_second
    rate = found.judged[size].rate
    if found.reached and target == 0:
        reason = f"trainer.auto: {_replicas(size)}, the fewest from {auto.min} to {most} that hold all tables"
    elif found.reached:
        reason = (
            f"trainer.auto: {_replicas(size)}, the fewest from {auto.min} to {most} predicted to reach {target:,.0f} "
            f"samples/s: {rate:,.0f}"
        )
    else:
        reason = (
            f"trainer.auto: {_no_size(auto.min, most)} is predicted to reach {target:,.0f} samples/s; "
            f"{_replicas(size)} with the most, {rate:,.0f}"
        )
    if others := _others(found.judged, size):
        reason += f" ({others})"
    if most < auto.max:
        reason += f"; data.virtualShards {spec.data.virtual_shards} allows no more than {most}"
    return reason


def _others(judged: Mapping[int, JudgedSize], chosen: int) -> str:
    """Show what the sizes nearest to the chosen one give."""
    nearest = sorted((size for size in judged if size != chosen), key=lambda size: (abs(size - chosen), size))
    shown = []
    for size in sorted(nearest[:SHOWN_SIZES]):
        known = judged[size]
        verdict = "fits" if known.fits else "does not fit"
        shown.append(f"{size}: {known.rate:,.0f}" if known.rate else f"{size}: {verdict}")
    return ", ".join(shown)


def _no_size(fewest: int, most: int) -> str:
    return f"no number of replicas from {fewest} to {most}"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"
