"""Model of how a job ends: small, written from the documented rules and not from the operator's code.

A job has a list of fates, one for the gang of each attempt. Attempts are numbered from 1; each ends by its fate, and
the next begins with the next fate. The rules (``docs/design/operator.md``, "How an attempt ends" and
"Graceful shutdown"):

1. A newly committed step restores both budgets (unless ``progressResets`` is off).
2. The user's rules by exit code come first, for a trainer's code.
3. What only the user can fix ends the job at once, under the reason that the failing part left.
4. What happened to a pod from outside counts as a free restart; one more than ``maxFreeRestarts`` ends the job with
   ``DisruptionLimitExceeded``.
5. All else, a hang included, is charged; one more than ``maxRestarts`` ends the job with ``BackoffLimitExceeded``.
6. A job that was suspended or resized continues with the next attempt, which counts against no budget.
7. A deadline that passed ends the job with ``DeadlineExceeded`` or ``PendingDeadlineExceeded``.
8. The first restart after a pod ran out of memory reserves some.
9. A failed job that its user edits continues with the next attempt, full budgets and no reserve.

If several outcomes are right (an evicted pod may be seen as evicted, as ended, or as gone), the model has them all. So
it maps a job to the *set* of its ends; an operator that ends anywhere else is wrong.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

USER_ERRORS = {64: "Usage", 65: "BadData", 78: "BadConfig"}
RECOVERABLE = {66: "NoInput", 77: "NoPermission"}
"""Codes that are final before the job's first step only; no fate has them before a step is committed."""
EXIT_REASONS = {**USER_ERRORS, **RECOVERABLE, 70: "Internal", 74: "Device", 75: "Temporary", 143: "Terminated"}


class Kind(enum.StrEnum):
    """Say what happens to a gang."""

    DONE = "succeeds, committed"
    UNCOMMITTED = "succeeds, last step not committed"
    CRASH = "a trainer ends with a code"
    OOM = "a trainer is killed for its memory"
    PEERS_LOST = "all trainers end with 75 or 143"
    EVICTED = "a pod is evicted"
    NODE_LOST = "a pod fails with its node"
    DELETED = "a user deletes a pod"
    VANISHED = "a user deletes a pod by force"
    NEVER_STARTED = "the kubelet refuses a pod"
    SUSPENDED = "the user suspends the job, and resumes it"
    RESIZED = "the user wants another number of pods"
    OVERDUE = "the user sets an active deadline that has passed"
    NOT_PULLED = "a pod waits for its image until the pending deadline"
    HUNG = "the gang stands still"
    SIDECAR_REFUSED = "the store refuses the checkpointer's credentials"


HALTS = frozenset({Kind.SUSPENDED, Kind.RESIZED, Kind.OVERDUE})
"""Stops of a healthy gang, from which a last cut is requested."""


class Stuck(enum.StrEnum):
    """Say what keeps a deleted pod; it does not change how the job ends."""

    NO = ""
    HELD = "held by a finalizer"
    SILENT = "its kubelet silent"
    BOTH = "held by a finalizer, its kubelet silent"


@dataclass(frozen=True, kw_only=True)
class Fate:
    """Say what happens to the gang of one attempt."""

    kind: Kind
    index: int = 0
    """The pod that it happens to."""
    code: int = 0
    reason: str = ""
    """The reason in the trainer's termination message; empty: it leaves none."""
    committed: int | None = None
    """Newest step that the checkpointers committed before; for a stop the step of its cut, None if there was none."""
    early: bool = False
    """Whether it happens as soon as that pod runs, even if others do not exist yet."""
    stuck: Stuck = Stuck.NO
    """Finalizers that keep that pod after its deletion."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Hold ``spec.lifecycle.restart``, as far as it decides how a job ends."""

    max_charged: int = 3
    max_free: int = 100
    resets: bool = True
    rules: tuple[tuple[int, str], ...] = ()
    """Exit code and action: fail, restart, restart-free."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Hold how a job ends, or where it is."""

    phase: str = ""
    """Succeeded or Failed; empty while it continues."""
    reason: str = ""
    """Reason of the condition Succeeded or Failed."""
    attempt: int = 1
    charged: int = 0
    free: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    """Restarts by reason."""
    newest: int = -1
    """Newest committed step."""
    reserve: bool = False
    """Whether memory is reserved."""


def ends(fates: Iterable[Fate], budget: Budget) -> set[End]:
    """Return all ends that such a job may have; those without a phase continue after the last fate."""
    states = {End()}
    for fate in fates:
        states = {after for state in states for after in _after(state, fate, budget)}
    return states


def over(fates: Iterable[Fate], budget: Budget) -> bool:
    """Return whether the job has finished after these fates in every case."""
    return all(end.phase for end in ends(fates, budget))


def _after(state: End, fate: Fate, budget: Budget) -> set[End]:
    if state.phase == "Succeeded":
        return {state}
    # Its user has edited it, or there would be no further fate.
    if state.phase == "Failed":
        state = _next(replace(state, phase="", reason="", charged=0, free=0, reserve=False), "SpecChanged")
    state = _restored(state, fate, budget)
    match fate.kind:
        case Kind.DONE:
            return {replace(state, phase="Succeeded", reason="Committed")}
        case Kind.SUSPENDED:
            return {_next(state, "Suspended")}
        case Kind.RESIZED:
            return {_next(state, "Resized")}
        case Kind.OVERDUE:
            return {replace(state, phase="Failed", reason="DeadlineExceeded")}
        case Kind.NOT_PULLED:
            return {replace(state, phase="Failed", reason="PendingDeadlineExceeded")}
    after = {_failed(state, what, reason, budget) for what, reason in _outcomes(fate, budget)}
    starved = fate.kind is Kind.OOM
    return {replace(end, reserve=end.reserve or (starved and not end.phase)) for end in after}


def _restored(state: End, fate: Fate, budget: Budget) -> End:
    if fate.committed is None or fate.committed <= state.newest:
        return state
    state = replace(state, newest=fate.committed)
    return replace(state, charged=0, free=0) if budget.resets else state


def _next(state: End, reason: str) -> End:
    counts = dict(state.reasons)
    counts[reason] = counts.get(reason, 0) + 1
    return replace(state, attempt=state.attempt + 1, reasons=tuple(sorted(counts.items())))


def _outcomes(fate: Fate, budget: Budget) -> set[tuple[str, str]]:
    """Return what may follow (fail, restart or restart-free) and the reason for it."""
    match fate.kind:
        case Kind.EVICTED | Kind.DELETED | Kind.VANISHED:
            seen = {"PodDeleted"}
            if fate.kind is Kind.EVICTED:
                seen.add("EvictionByEvictionAPI")
            if fate.stuck is Stuck.HELD:
                seen.add("Terminated")
            return {("restart-free", reason) for reason in seen}
        case Kind.NODE_LOST:
            return {("restart-free", "NodeLost")}
        case Kind.NEVER_STARTED:
            return {("restart-free", "UnexpectedAdmissionError")}
        case Kind.SIDECAR_REFUSED:
            return {("restart", "CheckpointerNoPermission")}
        case Kind.UNCOMMITTED:
            return {("restart", "SnapshotNotCommitted")}
        case Kind.HUNG:
            return {("restart", "HangDetected")}
    reason = "OOMKilled" if fate.kind is Kind.OOM else fate.reason or EXIT_REASONS.get(fate.code, f"Exit{fate.code}")
    wanted = dict(budget.rules).get(fate.code)
    return {(wanted or ("fail" if fate.code in USER_ERRORS else "restart"), reason)}


def _failed(before: End, what: str, reason: str, budget: Budget) -> End:
    if what == "fail":
        return replace(before, phase="Failed", reason=reason)
    if what == "restart":
        if before.charged >= budget.max_charged:
            return replace(before, phase="Failed", reason="BackoffLimitExceeded")
        return _next(replace(before, charged=before.charged + 1), reason)
    if before.free >= budget.max_free:
        return replace(before, phase="Failed", reason="DisruptionLimitExceeded")
    return _next(replace(before, free=before.free + 1), reason)
