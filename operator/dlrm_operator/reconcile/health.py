"""Read what pods report: progress, snapshots, hangs and stragglers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from dlrm_api.plan import Plan
from dlrm_api.progress import CheckpointerProgress, Progress, SlowestRank, TrainerPhase
from dlrm_api.status import (
    ConditionType,
    DLRMJobStatus,
    FailureEvidence,
    PlanStatus,
    ProgressStatus,
    SnapshotStatus,
    StragglerStatus,
)
from dlrm_operator.reconcile.attempts import (
    CRASH_LOOP,
    Outcome,
    Verdict,
)
from dlrm_operator.reconcile.findings import (
    MESSAGE_LENGTH,
    RATIO,
    Reason,
    shorten,
    timestamp,
    with_truth,
)
from dlrm_operator.reconcile.state import Gang, Observed, PodSeen, RequestStacks, StacksSeen

_RANK = re.compile(r"^rank (\d{1,9}), process \d{1,9}$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
MEETING_PLACES = ("dlrm_trainer/distributed/collectives.py", "dlrm_trainer/distributed/rendezvous.py")
"""Where a rank waits for others."""
MOST_FRAMES = 6
FOLDERS = 2
"""Of a file's path, its last names are shown."""


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """One rank's stacks."""

    rank: int
    waits: bool
    """Whether a thread of it is in a collective; the rank to blame is in none."""
    place: str
    """The innermost calls of its main thread, the newest first; empty where it said nothing."""


def read_stacks(text: str) -> list[RankStack]:
    """The ranks of one pod from what its ``/stacks`` answered; whatever stands there, reading never raises."""
    parts = _RANK.split(text)
    return [_rank(int(number), body) for number, body in zip(parts[1::2], parts[2::2], strict=True)]


def _rank(number: int, body: str) -> RankStack:
    threads = _THREAD.split(body)[1:]
    waits = any(frame["file"].endswith(MEETING_PLACES) for thread in threads for frame in _FRAME.finditer(thread))
    return RankStack(rank=number, waits=waits, place=" < ".join(_calls(threads[-1])) if threads else "")


def _calls(thread: str) -> Iterator[str]:
    """A thread's innermost calls; Python writes the main thread's last."""
    for count, frame in enumerate(_FRAME.finditer(thread)):
        if count == MOST_FRAMES:
            return
        file = "/".join(frame["file"].split("/")[-FOLDERS:])
        yield f"{frame['function']} ({file}:{frame['line']})"


LEAST_S = 0.001
"""And longer than it by this: below, clocks and schedulers decide."""
FOR_S = 300.0
"""It is named once it has lagged for so long."""


def lags(slowest: SlowestRank) -> bool:
    """Whether the slowest rank is far slower than the others."""
    more = slowest.seconds - slowest.median_seconds
    return slowest.seconds >= RATIO * slowest.median_seconds and more >= LEAST_S


def straggler(gang: Gang) -> StragglerStatus | None:
    """The rank that has kept the others waiting for long, with the pod and the node that it is on."""
    said = gang.trainer
    if said is None or said.slowest is None or not gang.size or gang.slow_s < FOR_S or not lags(said.slowest):
        return None
    pod = gang.pods.get(said.slowest.rank * gang.size // said.world_size)
    if pod is None:
        return None
    return StragglerStatus(
        rank=said.slowest.rank,
        pod=pod.name,
        node=pod.node,
        seconds=said.slowest.seconds,
        median_seconds=said.slowest.median_seconds,
    )


SHOWN_DIGITS = 5
"""Of figures that move all the time: kubectl prints every digit that is there."""
KIND_LENGTH = 32
URI_LENGTH = 4_096


def with_progress(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """The status with what pod 0 last said; unchanged where it said nothing, or nothing new since the last write."""
    word = gang.last_word
    if word is None:
        return status
    said, known = _progress(word, straggler(gang), now), status.progress
    if known is not None and said.model_copy(update={"eta": known.eta, "time": known.time}) == known:
        return status
    return status.model_copy(update={"progress": said})


def with_snapshot(
    status: DLRMJobStatus, words: Iterable[CheckpointerProgress | None], *, heals: bool, may_go_back: bool = True
) -> DLRMJobStatus:
    """The status with the newest committed snapshot; a newer step than before makes the budgets of restarts whole.

    Args:
        status: Of the job.
        words: What its checkpointers say.
        heals: Whether progress makes the budgets whole.
        may_go_back: Whether an older step than the known one counts: the current gang may have restored from an older
            snapshot, but pods of other attempts that are still there say what was the newest in their time.
    """
    telling = [word for word in words if word is not None and word.last_snapshot is not None]
    said = max(telling, key=lambda word: word.last_snapshot.step if word.last_snapshot else -1, default=None)
    if said is None or said.last_snapshot is None:
        return status
    known, found = status.last_snapshot, said.last_snapshot
    if known is not None and known.step == found.step and known.uri == found.uri:
        return status
    if known is not None and found.step < known.step and not may_go_back:
        return status
    moment = datetime.fromtimestamp(found.time, UTC)
    snapshot = SnapshotStatus(
        step=found.step,
        time=timestamp(moment),
        kind=shorten(found.kind, KIND_LENGTH),
        bits=found.bits,
        bytes=found.bytes,
        uri=shorten(found.uri, URI_LENGTH),
    )
    advanced = heals and (known is None or found.step > known.step)
    healed = {"charged_restarts": 0, "free_restarts": 0} if advanced else {}
    return status.model_copy(update={"last_snapshot": snapshot, **healed})


def with_final_step(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """The status of a finished gang: its last word, at the step that the trainers ended with."""
    status = with_progress(status, gang, now)
    known = status.progress or ProgressStatus()
    step = max(gang.final_step, known.step)
    final = known.model_copy(update={"step": step, "eta": None, "time": timestamp(now)})
    return status.model_copy(update={"progress": final})


def plan_status(plan: Plan) -> PlanStatus:
    """The plan in brief."""
    tiers = sorted({tier for rank in plan.ranks for tier in rank.bytes_per_tier})
    return PlanStatus(
        world_size=plan.world_size,
        nodes=plan.nodes,
        hardware=plan.hardware,
        bytes_per_tier={tier: max(rank.bytes_per_tier.get(tier, 0) for rank in plan.ranks) for tier in tiers},
        predicted_samples_per_second=plan.predicted.samples_per_second,
        price_per_billion_samples=plan.predicted.price_per_billion_samples,
    )


def _progress(said: Progress, slow: StragglerStatus | None, now: datetime) -> ProgressStatus:
    evaluation = said.evaluation
    eta = None if said.eta_seconds is None else now + timedelta(seconds=min(said.eta_seconds, 10 * 365 * 86_400))
    return ProgressStatus(
        step=said.step,
        total_steps=said.total_steps,
        samples=said.samples,
        epoch=said.epoch,
        loss=_shown(said.loss),
        ne=_shown(evaluation.ne) if evaluation else None,
        auc=_shown(evaluation.auc) if evaluation else None,
        samples_per_second=_shown(said.samples_per_second),
        eta=timestamp(eta) if eta else None,
        straggler=slow,
        time=timestamp(now),
    )


def _shown(figure: float | None) -> float | None:
    """A figure as readers want it."""
    return None if figure is None else float(f"{figure:.{SHOWN_DIGITS}g}")


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
        reason=Reason.HANG_DETECTED,
        message=shorten("; ".join(words), MESSAGE_LENGTH),
        time=timestamp(now),
    )


def _who(pod: PodSeen, stack: RankStack) -> str:
    return f"rank {stack.rank} in pod {pod.name} on node {pod.node}"


def _where(stack: RankStack) -> str:
    return shorten(stack.place or "nowhere that it says", PLACE_LENGTH)


TRAINING = frozenset(TrainerPhase) - {TrainerPhase.STARTING, TrainerPhase.RESTORING}


def with_store_health(status: DLRMJobStatus, gang: Gang, now: datetime) -> DLRMJobStatus:
    """Whether snapshots reach the store, as the checkpointer of pod 0 says."""
    word, kind = gang.checkpointer, ConditionType.SNAPSHOT_HEALTHY
    for pod in gang.pods.values():
        sidecar = pod.checkpointer
        if sidecar is not None and pod.training and sidecar.waiting_reason == CRASH_LOOP:
            words = (
                f"{pod.name}/{sidecar.name} ended with exit code {sidecar.last_exit_code} again and again: see its log"
            )
            return with_truth(status, kind, "False", Reason.CHECKPOINTER_CRASH_LOOP, words, now=now)
    if word is None:
        return status
    if word.store_error:
        return with_truth(status, kind, "False", Reason.STORE_UNAVAILABLE, word.store_error, now=now)
    return with_truth(status, kind, "True", Reason.STORE_AVAILABLE, now=now)
