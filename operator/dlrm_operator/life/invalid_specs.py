"""A spec that can't be read: the job fails where it has no gang, and a gang that is there goes on to its own end.

The API server took the spec, so one of a gang that was made of another is mostly newer than this operator.
"""

from __future__ import annotations

from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.lifecycle import RestartSpec
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.facts.gang import Gang, current_gang
from dlrm_operator.facts.observed import Observed
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.absorbing import with_final_step, with_progress, with_snapshot
from dlrm_operator.life.course import Decision
from dlrm_operator.life.endings import failed, succeeded
from dlrm_operator.life.phases import in_phase, of_whole_gang, with_store_health, with_truth
from dlrm_operator.life.restarts import Outcome, Verdict, judge
from dlrm_operator.life.unknown_fields import beside_running


def without_spec(observed: Observed, problem: InvalidSpecError, status: DLRMJobStatus, now: datetime) -> Decision:
    """What a job comes to of which only the gang can be judged: that one ends well, or what follows it waits."""
    gang = current_gang(observed, status)
    if not gang.pods:
        return Decision(status=failed(status, Reason.INVALID_SPEC, str(problem), now))
    status = with_snapshot(status, gang.checkpoints, heals=False)  # whether progress resets budgets is not known
    status = with_store_health(with_progress(status, gang, now), gang, now)
    verdict = judge(gang, RestartSpec(), now)
    if verdict.outcome is Outcome.SUCCEEDED:
        return Decision(status=succeeded(with_final_step(status, gang, now), now))
    words = f"{problem}: mend it, or upgrade the operator where it is older than the CustomResourceDefinition"
    if verdict.outcome is Outcome.ONGOING:
        return Decision(status=_at_work(status, gang, words, now), wake=verdict.settle_at)
    return Decision(status=_broken(status, gang, verdict, words, now))


def _at_work(status: DLRMJobStatus, gang: Gang, words: str, now: datetime) -> DLRMJobStatus:
    if gang.whole and gang.size is not None:
        return beside_running(of_whole_gang(status, gang, now), words, now)
    return with_truth(status, ConditionType.RUNNING, "False", Reason.INVALID_SPEC, words, now=now)


def _broken(status: DLRMJobStatus, gang: Gang, verdict: Verdict, words: str, now: datetime) -> DLRMJobStatus:
    """The gang failed, and is judged by its pods once the spec says how: till then in a phase that lets that change."""
    evidence = verdict.evidence
    assert evidence is not None, "a failure has evidence"
    why = f"attempt {gang.attempt} ended ({evidence.reason}), and what follows is asked of the spec: {words}"
    status = with_truth(status, ConditionType.RUNNING, "False", Reason.INVALID_SPEC, why, now=now)
    return in_phase(status, Phase.PENDING)
