"""Specs that this version of the operator cannot read, or not in full.

The API server accepted such a spec, so its CustomResourceDefinition is probably newer than the operator. A gang that
exists was created from a spec that was understood: it runs to its own end. No attempt starts from such a spec, because
an ignored field could make it train something other than requested.
"""

from __future__ import annotations

from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.status import Condition, ConditionType, Phase
from dlrm_operator.reconcile.findings import (
    Finding,
    ForeignReason,
    Reason,
    RuleResult,
    find_condition,
    unknown_fields_message,
)
from dlrm_operator.reconcile.state import Gang, JobView

CONTINUES = "the current attempt continues"


def invalid_spec_rule(problem: InvalidSpecError, running: Condition | None, settle_at: datetime | None) -> RuleResult:
    """Report an invalid spec next to a gang's condition Running, if all of its pods exist.

    The gang has not ended; it must be judged again at ``settle_at``.
    """
    message = f"{problem}; fix it, or upgrade the operator if it is older than the CustomResourceDefinition"
    finding = Finding(ConditionType.RUNNING, "False", Reason.INVALID_SPEC, message)
    return RuleResult(findings=(_appended(running, message) if running else finding,), wake_at=settle_at)


def failed_gang_rule(problem: InvalidSpecError, gang: Gang, ending: str) -> RuleResult:
    """Report a failed gang with an unreadable restart policy, in a phase in which the spec may change."""
    ended = f"attempt {gang.attempt} ended ({ending})"
    message = f"{ended}, and the spec that says what follows is invalid: {problem}; fix it"
    finding = Finding(ConditionType.RUNNING, "False", Reason.INVALID_SPEC, message, Phase.PENDING)
    return RuleResult(findings=(finding,))


def unknown_fields_rule(view: JobView) -> RuleResult:
    """Report unknown fields next to what the status, as folded so far, says of an existing gang."""
    message = unknown_fields_message(view.job.unknown_fields)
    running = find_condition(view.status.conditions, ConditionType.RUNNING)
    if not message or running is None or message in running.message or not view.gang.pods:
        return RuleResult()
    return RuleResult(findings=(_appended(running, message),))


def _appended(running: Condition, message: str) -> Finding:
    text = "; ".join(part for part in (running.message, message, CONTINUES) if part)
    return Finding(ConditionType.RUNNING, running.status, ForeignReason(running.reason), text)
