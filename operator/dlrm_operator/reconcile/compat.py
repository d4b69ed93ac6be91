"""Specs that this version of the operator cannot read, or not in full.

The API server accepted such a spec, so its CustomResourceDefinition is probably newer than the operator. A gang that
exists was created from a spec that was understood: it runs to its own end. No attempt starts from such a spec, because
an ignored field could make it train something other than requested.
"""

from __future__ import annotations

from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.status import Condition, ConditionType, Phase
from dlrm_operator.reconcile import findings
from dlrm_operator.reconcile.state import Gang, JobView

CONTINUES = "the current attempt continues"


def invalid_spec_rule(
    problem: InvalidSpecError, running: Condition | None, settle_at: datetime | None
) -> findings.RuleResult:
    """Report an invalid spec next to a gang's condition Running, if all of its pods exist.

    The gang has not ended; it must be judged again at ``settle_at``.
    """
    message = f"{problem}; fix it, or upgrade the operator if it is older than the CustomResourceDefinition"
    finding = findings.Finding(ConditionType.RUNNING, "False", findings.Reason.INVALID_SPEC, message)
    return findings.RuleResult(findings=(_appended(running, message) if running else finding,), wake_at=settle_at)


def failed_gang_rule(problem: InvalidSpecError, gang: Gang, ending: str) -> findings.RuleResult:
    """Report a failed gang with an unreadable restart policy, in a phase in which the spec may change."""
    ended = f"attempt {gang.attempt} ended ({ending})"
    message = f"{ended}, and the spec that says what follows is invalid: {problem}; fix it"
    finding = findings.Finding(ConditionType.RUNNING, "False", findings.Reason.INVALID_SPEC, message, Phase.PENDING)
    return findings.RuleResult(findings=(finding,))


def unknown_fields_rule(view: JobView) -> findings.RuleResult:
    """Report unknown fields next to what the status, as folded so far, says of an existing gang."""
    message = findings.unknown_fields_message(view.job.unknown_fields)
    running = findings.find_condition(view.status.conditions, ConditionType.RUNNING)
    if not message or running is None or message in running.message or not view.gang.pods:
        return findings.RuleResult()
    return findings.RuleResult(findings=(_appended(running, message),))


def _appended(running: Condition, message: str) -> findings.Finding:
    text = "; ".join(part for part in (running.message, message, CONTINUES) if part)
    return findings.Finding(ConditionType.RUNNING, running.status, findings.ForeignReason(running.reason), text)
