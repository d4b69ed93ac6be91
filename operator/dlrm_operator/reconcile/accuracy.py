"""How a plan's prediction compares with the steps that the current attempt measures."""

from __future__ import annotations

from functools import partial

from dlrm_api.plan import Plan
from dlrm_api.status import AccuracyStatus, ConditionType, StepFigures
from dlrm_operator.reconcile.findings import Finding, Reason, RuleResult, find_condition, rounded
from dlrm_operator.reconcile.health import TRAINING
from dlrm_operator.reconcile.state import JobView

MAX_RATIO = 1.25
"""A prediction holds while a step takes at most this many times as long..."""
MAX_SLOW_S = 600.0
"""... and fails after so much training time beyond."""
_plan_accurate = partial(Finding, ConditionType.PLAN_ACCURATE)


def predicted_status(plan: Plan) -> AccuracyStatus:
    """Return what a plan predicts, and no measurements."""
    return AccuracyStatus(predicted=_rounded(StepFigures.of(plan.predicted)))


def without_measurements(known: AccuracyStatus | None) -> AccuracyStatus | None:
    """Return the prediction of an attempt that starts with the same plan."""
    return known and AccuracyStatus(predicted=known.predicted)


def accuracy_rule(view: JobView) -> RuleResult:
    """Take over what the trainer measured of its steps, and judge the prediction by it.

    Time counts as the trainer counts it: neither cuts, evaluations and restarts, nor the absence of an operator.
    """
    report = view.gang.polled.trainer
    if report is None or report.phase not in TRAINING:
        return RuleResult()
    # A plan of an operator that kept no predictions has none.
    known = view.status.accuracy or AccuracyStatus()
    if known.predicted.step_seconds is None:
        missing = "the plan predicts no step time: its HardwareProfile lacks rates; see dlrmctl profile measure"
        judged = _plan_accurate("Unknown", Reason.NOT_PREDICTED, missing)
    elif (plan := view.status.plan) and plan.uncalibrated:
        missing = f"HardwareProfile {plan.hardware} has no {', '.join(plan.uncalibrated)}; see dlrmctl profile measure"
        judged = _plan_accurate("Unknown", Reason.NOT_CALIBRATED, f"times of GPUs are not calibrated: {missing}")
    else:
        judged = _plan_accurate("Unknown", Reason.MEASURING, "the first steps of the attempt are not measured")
    if (found := report.measured) is None:
        return RuleResult(findings=(judged,))
    measured, slow_from_s = _rounded(StepFigures.of(found)), None
    if known.predicted.step_seconds is not None and judged.reason is Reason.MEASURING:
        if found.step_seconds > MAX_RATIO * known.predicted.step_seconds:
            slow_from_s = found.trained_seconds if known.slow_from_seconds is None else known.slow_from_seconds
        judged = _judge(known.predicted, measured, slow_from_s, found.trained_seconds)
    changed = AccuracyStatus(predicted=known.predicted, measured=measured, slow_from_seconds=rounded(slow_from_s))
    previous = find_condition(view.status.conditions, ConditionType.PLAN_ACCURATE)
    # Slow steps of a moment say nothing against a prediction that held.
    keeps = judged.reason is Reason.MEASURING and previous is not None and previous.status == "True"
    return RuleResult(findings=() if keeps else (judged,), changes={"accuracy": changed})


def _judge(predicted: StepFigures, measured: StepFigures, slow_from_s: float | None, trained_s: float) -> Finding:
    assert predicted.step_seconds is not None
    assert measured.step_seconds is not None
    ratio = measured.step_seconds / max(predicted.step_seconds, 1e-9)
    steps = f"a step takes {_ms(measured.step_seconds)}, {ratio:.2f}x the predicted {_ms(predicted.step_seconds)}"
    if slow_from_s is None:
        return _plan_accurate("True", Reason.AS_PREDICTED, steps)
    if trained_s - slow_from_s < MAX_SLOW_S:
        return _plan_accurate("Unknown", Reason.MEASURING, f"{steps}, for less than ten minutes")
    stage, found_s, predicted_s = largest_difference(predicted, measured)
    differs = f"the stage that differs most is {stage}: {_ms(found_s)}, predicted {_ms(predicted_s)}"
    return _plan_accurate("False", Reason.SLOWER_THAN_PREDICTED, f"{steps}, for over ten minutes; {differs}")


def largest_difference(predicted: StepFigures, measured: StepFigures) -> tuple[str, float, float]:
    """Return the stage that takes most more than predicted, its measured and its predicted seconds."""
    both = {
        stage: (seconds, predicted.stage_seconds.get(stage, 0.0)) for stage, seconds in measured.stage_seconds.items()
    }
    stage = max(both, key=lambda name: both[name][0] - both[name][1], default="unknown")
    return (stage, *both.get(stage, (0.0, 0.0)))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"


def _rounded(found: StepFigures) -> StepFigures:
    return StepFigures(
        step_seconds=rounded(found.step_seconds),
        samples_per_second=rounded(found.samples_per_second),
        stage_seconds={stage: rounded(seconds) for stage, seconds in found.stage_seconds.items()},
        hit_rates={tier: rounded(rate) for tier, rate in found.hit_rates.items()},
    )
