"""The watch for gangs that hang: alive, answering, and without a step for longer than steps take."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from dlrm_api.progress import Progress, TrainerPhase
from dlrm_api.status import DLRMJobStatus, FailureEvidence
from dlrm_operator.facts.actions import RequestStacks
from dlrm_operator.facts.conditions import MESSAGE_LENGTH, shorten, timestamp
from dlrm_operator.facts.gang import Gang
from dlrm_operator.facts.observed import Observed, PodSeen, StacksSeen
from dlrm_operator.facts.reasons import Reason
from dlrm_operator.life.restarts import Outcome, Verdict
from dlrm_operator.life.stack_dumps import RankStack, read_stacks

WATCHED = frozenset({TrainerPhase.TRAINING, TrainerPhase.EVALUATING})
"""Starts, restores, cuts and the end wait for stores and peers, under deadlines of the trainer's own."""
LONGEST_STEPS = 20.0
"""A gang hangs that takes so many times its longest recent step."""
FLOOR_S = 300.0
FIRST_S = 1_800.0
"""The same where no step tells: the first of an attempt compiles, the end of an evaluation sorts all its scores."""
LEAST_WAKE_S = 5.0
MOST_NAMED = 3
PLACE_LENGTH = 800


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What the watch comes to."""

    ask: RequestStacks | None = None
    wake: datetime | None = None
    """When to look again, though nothing may have changed."""
    verdict: Verdict | None = None
    """The gang hangs, and its stacks were taken."""


def watch(observed: Observed, status: DLRMJobStatus, gang: Gang, hang_timeout: float | None, now: datetime) -> Watch:
    """Judge a gang whose attempt goes on. Silence is no hang: only answers that stand still count.

    Args:
        observed: All facts.
        status: The job's.
        gang: The current attempt's.
        hang_timeout: ``spec.lifecycle.hangTimeout`` (s).
        now: Moment of the turn.
    """
    said, place = gang.trainer, gang.place
    if said is None or place is None or said.phase not in WATCHED or not gang.complete:
        return Watch()
    if status.halt is not None:
        return Watch()  # it is to end anyway, and has a deadline for that
    if not all(pod.training and not pod.deleting for pod in gang.pods.values()):
        return Watch()
    left_s = allowed_s(said, hang_timeout) - gang.still_s
    if left_s > 0:
        wake = now + timedelta(seconds=max(left_s, LEAST_WAKE_S))
        return Watch(wake=wake if gang.still_s > 0 else None)  # the resync finds out where it stands
    stacks = observed.stacks
    if stacks is None or stacks.place != place:
        ips = {pod.name: pod.ip for pod in gang.pods.values() if pod.ip}
        return Watch(ask=RequestStacks(key=observed.job.key, place=place, ips=ips))
    evidence = hung_evidence(gang, said, stacks, hang_timeout, now)
    return Watch(verdict=Verdict(outcome=Outcome.RESTART, evidence=evidence))


def allowed_s(said: Progress, hang_timeout: float | None) -> float:
    """Longest time without a step, or a batch of an evaluation, by the user's word or by measured steps."""
    longest = said.longest_step_seconds
    if longest is None:
        return max(FIRST_S, hang_timeout or 0.0)
    if hang_timeout is not None:
        return hang_timeout
    return max(FIRST_S if said.phase is TrainerPhase.EVALUATING else FLOOR_S, LONGEST_STEPS * longest)


def hung_evidence(
    gang: Gang, said: Progress, stacks: StacksSeen, hang_timeout: float | None, now: datetime
) -> FailureEvidence:
    """Which rank is to blame, by the stacks, and where it stood."""
    found = [(pod, stack) for pod in gang.pods.values() for stack in read_stacks(stacks.texts.get(pod.name, ""))]
    silent = [pod for pod in gang.pods.values() if not stacks.texts.get(pod.name)]
    suspects = [(pod, stack) for pod, stack in found if not stack.waits]
    waiting = [(pod, stack) for pod, stack in found if stack.waits]
    blamed = suspects[0][0] if suspects else silent[0] if silent else gang.pods[0]
    what = "batch of the evaluation" if said.phase is TrainerPhase.EVALUATING else "step"
    limit = f"spec.lifecycle.hangTimeout, {hang_timeout:g} s" if hang_timeout else "far longer than recent steps took"
    words = [f"no {what} after step {said.step} for {allowed_s(said, hang_timeout):.0f} s ({limit})"]
    words += [f"{_who(pod, stack)} is in no collective, but at {_where(stack)}" for pod, stack in suspects[:MOST_NAMED]]
    words += [f"pod {pod.name} on node {pod.node} does not show its stacks" for pod in silent[:MOST_NAMED]]
    if waiting:
        pod, stack = waiting[0]
        words.append(f"one of {len(waiting)} that wait: {_who(pod, stack)} at {_where(stack)}")
    return FailureEvidence(
        attempt=gang.attempt,
        pod=blamed.name,
        rank=suspects[0][1].rank if suspects else None,
        node=blamed.node,
        reason=Reason.HUNG,
        message=shorten("; ".join(words), MESSAGE_LENGTH),
        time=timestamp(now),
    )


def _who(pod: PodSeen, stack: RankStack) -> str:
    return f"rank {stack.rank} in pod {pod.name} on node {pod.node}"


def _where(stack: RankStack) -> str:
    return shorten(stack.place or "nowhere that it says", PLACE_LENGTH)
