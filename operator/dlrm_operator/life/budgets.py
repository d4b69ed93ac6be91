"""What follows a failed attempt: the budgets of restarts, the wait before the next, the memory that it gets more."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from dlrm_api.job import DLRMJobSpec
from dlrm_api.lifecycle import RestartSpec
from dlrm_api.plan import Device
from dlrm_api.status import DLRMJobStatus, FailureEvidence
from dlrm_operator.facts.conditions import shorten, timestamp
from dlrm_operator.facts.reasons import Quoted, Reason, Word
from dlrm_operator.life.attempts import with_next_attempt
from dlrm_operator.life.restarts import Outcome, Verdict
from dlrm_planner import working_set_bytes

EARLIER_FAILURES = 4
EARLIER_MESSAGE_LENGTH = 1_024
JITTER = 0.25
"""A wait is shortened by up to this share: jobs that one node took down do not come back all at once."""
RESERVE_SHARE = 0.25
"""Of what a pod was to need, once it ran out of memory: the estimate was too small by an amount that nobody knows."""
LEAST_RESERVE = 512 * 2**20
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """The status with the next attempt due; or, where ``fatal`` says why, without one."""

    status: DLRMJobStatus
    reason: Word
    """Of the failed attempt, or of the job's end."""
    fatal: str = ""


def after_failure(status: DLRMJobStatus, verdict: Verdict, spec: DLRMJobSpec, uid: str, now: datetime) -> Aftermath:
    """What follows a failed attempt. Only numbers and evidence change; the caller sets phase and conditions.

    Args:
        status: of the job while the attempt was the current one.
        verdict: on the attempt, with evidence.
        spec: of the job.
        uid: of the job; the wait's jitter is a function of it and the attempt.
        now: moment of the turn.
    """
    evidence, restart = verdict.evidence, spec.lifecycle.restart
    assert evidence is not None, "a failure has evidence"
    status = _with_evidence(status, evidence)
    if verdict.outcome is Outcome.FAIL:
        return Aftermath(status=status, reason=Quoted(evidence.reason), fatal=f"{evidence.reason}: {evidence.message}")
    free = verdict.outcome is Outcome.RESTART_FREE
    used = (status.free_restarts if free else status.charged_restarts) + 1
    most = restart.max_free_restarts if free else restart.max_restarts
    if used > most:
        reason = Reason.FREE_RESTARTS_SPENT if free else Reason.RESTART_BUDGET_SPENT
        words = _spent(status, restart, evidence, most, free=free) + (
            _more_memory(spec) if verdict.out_of_memory else ""
        )
        return Aftermath(status=status, reason=reason, fatal=words)
    wait = timedelta(seconds=wait_s(restart, used, f"{uid}/{status.attempt}"))
    reserve = status.memory_reserve_bytes
    if verdict.out_of_memory and not reserve:
        reserve = memory_reserve(spec, status)
    numbers = {
        "free_restarts" if free else "charged_restarts": used,
        "memory_reserve_bytes": reserve,
        "restart_not_before": timestamp(now + wait),
    }
    following = with_next_attempt(status, evidence.reason)
    return Aftermath(status=following.model_copy(update=numbers), reason=Quoted(evidence.reason))


def wait_s(restart: RestartSpec, used: int, seed: str) -> float:
    """Seconds before the next gang: doubled with each restart without progress, less a jitter that ``seed`` fixes."""
    longest = min(restart.backoff * 2.0 ** min(used - 1, 60), restart.max_backoff)
    draw = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) / 2**64
    return longest * (1 - JITTER * draw)


def memory_reserve(spec: DLRMJobSpec, status: DLRMJobStatus) -> int:
    """Bytes that each pod keeps free besides, after one ran out of memory; a quarter of what it was to need."""
    held = status.plan.bytes_per_tier if status.plan else {}
    tables, device = held.get("ddr", 0), _device(held)
    sized = spec.with_replicas(status.plan.nodes) if status.plan else spec
    needed = working_set_bytes(sized, device) + spec.trainer.processes_per_replica * tables
    return -(-max(LEAST_RESERVE, round(RESERVE_SHARE * needed)) // MIB) * MIB


def _device(bytes_per_tier: Mapping[str, int]) -> Device:
    """Where the ranks of a plan computed, of which its bytes are known."""
    return "cuda" if "hbm" in bytes_per_tier else "cpu"


def _with_evidence(status: DLRMJobStatus, evidence: FailureEvidence) -> DLRMJobStatus:
    """The newest failure whole, a few before it shortened."""
    earlier = status.earlier_failures
    if (last := status.last_failure) is not None:
        brief = last.model_copy(update={"message": shorten(last.message, EARLIER_MESSAGE_LENGTH)})
        earlier = (brief, *earlier)[:EARLIER_FAILURES]
    return status.model_copy(update={"last_failure": evidence, "earlier_failures": earlier})


def _spent(status: DLRMJobStatus, restart: RestartSpec, evidence: FailureEvidence, most: int, *, free: bool) -> str:
    step = status.last_snapshot.step if status.last_snapshot else 0
    what = "restarts after disruptions" if free else "restarts"
    field = "maxFreeRestarts" if free else "maxRestarts"
    since = f"no progress since step {step}: " if restart.progress_resets else ""
    return (
        f"{since}{most} of {most} {what} were used (spec.lifecycle.restart.{field}); "
        f"the last failure was {evidence.reason}: {evidence.message}"
    )


def _more_memory(spec: DLRMJobSpec) -> str:
    limit = spec.trainer.resources.limits.get("memory")
    if limit is not None:
        return f"; raise spec.trainer.resources.limits.memory ({limit}), or give tables less (trainer.tierBudgets.ddr)"
    return "; give pods more (spec.trainer.resources.requests.memory, larger nodes) or tables less (tierBudgets.ddr)"
