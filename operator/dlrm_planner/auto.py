"""``trainer.auto``: the number of replicas, chosen by the plans that it would have."""

from __future__ import annotations

from collections.abc import Callable

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_api.trainer import AutoReplicas
from dlrm_planner.sizes import Judged, Sized, choose_size

PATH = "spec.trainer.auto"
SHOWN = 3
"""Sizes beside the chosen one whose prediction is told."""


def plan_sized(
    spec: DLRMJobSpec,
    plan_of: Callable[[DLRMJobSpec], Plan | None],
    refusal_of: Callable[[DLRMJobSpec], InvalidSpecError],
    lacking: Callable[[DLRMJobSpec, Plan], str],
) -> Plan:
    """The plan of the fewest replicas that reach the target; where none does, of those that come closest.

    Args:
        spec: has ``trainer.auto`` and no ``trainer.replicas``.
        plan_of: the plan of a fixed number of replicas; None where there is none.
        refusal_of: why there is none.
        lacking: why a plan has no prediction.

    Raises:
        InfeasiblePlanError: the tables fit no allowed number of replicas; the reasons are those of the largest.
        InvalidSpecError: a target is given, and nothing predicts throughput; or a pin fits no size.
    """
    auto = spec.trainer.auto
    assert auto is not None, "asked for"
    most, target = min(auto.max, spec.most_replicas), auto.target_samples_per_second

    def judge(size: int) -> Judged:
        fixed = spec.with_replicas(size)
        plan = plan_of(fixed)
        if plan is None:
            return Judged(fits=False)
        rate = plan.predicted.samples_per_second
        if rate is None and target > 0:
            raise InvalidSpecError(
                f"{PATH}.targetSamplesPerSecond",
                f"throughput of {size} replicas cannot be predicted: {lacking(fixed, plan)}; measure it, give "
                "trainer.replicas, or a target of 0 for the fewest replicas that hold all tables",
            )
        return Judged(fits=True, rate=rate or 0.0)

    found = choose_size(auto.min, most, target, judge)
    if found.replicas is None:
        raise _refused(auto, most, refusal_of(spec.with_replicas(most)))
    chosen = plan_of(spec.with_replicas(found.replicas))  # once more: to keep all would take memory for two dozen
    assert chosen is not None, "it was judged to fit"
    return chosen.model_copy(update={"reasons": (_reason(spec, auto, most, found), *chosen.reasons)})


def _refused(auto: AutoReplicas, most: int, error: InvalidSpecError) -> InvalidSpecError:
    if not isinstance(error, InfeasiblePlanError):
        return error
    first, *others = error.reasons
    return InfeasiblePlanError(PATH, [f"{_range(auto.min, most)} holds all tables; with {most}: {first}", *others])


def _reason(spec: DLRMJobSpec, auto: AutoReplicas, most: int, found: Sized) -> str:
    assert found.replicas is not None, "something fits"
    size, target = found.replicas, auto.target_samples_per_second
    rate = found.judged[size].rate
    if found.reached and target == 0:
        words = f"trainer.auto: {_replicas(size)}, the fewest from {auto.min} to {most} that hold all tables"
    elif found.reached:
        words = (
            f"trainer.auto: {_replicas(size)}, the fewest from {auto.min} to {most} predicted to reach {target:,.0f} "
            f"samples/s: {rate:,.0f}"
        )
    else:
        words = (
            f"trainer.auto: {_range(auto.min, most)} is predicted to reach {target:,.0f} samples/s; "
            f"{_replicas(size)} with the most, {rate:,.0f}"
        )
    if others := _others(found):
        words += f" ({others})"
    if most < auto.max:
        words += f"; data.virtualShards {spec.data.virtual_shards} allows no more than {most}"
    return words


def _others(found: Sized) -> str:
    """What the sizes nearest to the chosen one would give."""
    assert found.replicas is not None, "something fits"
    chosen = found.replicas
    nearest = sorted((size for size in found.judged if size != chosen), key=lambda size: (abs(size - chosen), size))
    told = []
    for size in sorted(nearest[:SHOWN]):
        judged = found.judged[size]
        told.append(f"{size}: {judged.rate:,.0f}" if judged.rate else f"{size}: {'fits' if judged.fits else 'no room'}")
    return ", ".join(told)


def _range(least: int, most: int) -> str:
    return f"no number of replicas from {least} to {most}"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"
