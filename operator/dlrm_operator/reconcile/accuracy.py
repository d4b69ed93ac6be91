"""How a plan's prediction compares with the steps that the current attempt measures."""

from __future__ import annotations

from dlrm_api.plan import Plan
from dlrm_api.status import AccuracyStatus, StepFigures
from dlrm_operator.reconcile.findings import RuleResult, rounded
from dlrm_operator.reconcile.state import JobView


def predicted_status(plan: Plan) -> AccuracyStatus:
    """Return what a plan predicts, and no measurements."""
    return AccuracyStatus(predicted=_rounded(StepFigures.of(plan.predicted)))


def without_measurements(known: AccuracyStatus | None) -> AccuracyStatus | None:
    """Return the prediction of an attempt that starts with the same plan."""
    return known and AccuracyStatus(predicted=known.predicted)


def accuracy_rule(view: JobView) -> RuleResult:
    """Take over what the trainer measured of its steps."""
    report = view.gang.polled.trainer
    if report is None or report.measured is None:
        return RuleResult()
    # A plan of an operator that kept no predictions has none.
    known = view.status.accuracy or AccuracyStatus()
    measured = _rounded(StepFigures.of(report.measured))
    return RuleResult(changes={"accuracy": known.model_copy(update={"measured": measured})})


def _rounded(found: StepFigures) -> StepFigures:
    return StepFigures(
        step_seconds=rounded(found.step_seconds),
        samples_per_second=rounded(found.samples_per_second),
        stage_seconds={stage: rounded(seconds) for stage, seconds in found.stage_seconds.items()},
        hit_rates={tier: rounded(rate) for tier, rate in found.hit_rates.items()},
    )
