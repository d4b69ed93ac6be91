"""What a job's life must come to: a small model, written from the documented rules and not from the operator's code.

A life is a list of fates, one for the gang of each attempt. Attempts are numbered from 1; each ends by its fate, and
the next begins with the next fate. The rules (``docs/design/operator.md``, "How an attempt ends" and "How a
gang that is well comes to its end"):

1. A step committed that is newer than any before makes both budgets whole (unless ``progressResets`` is off).
2. The user's rules by exit code come first, for a trainer's code.
3. What only the user can mend ends the job at once, under the word that the failing part left.
4. What befell a pod from outside counts as a free restart; one more than ``maxFreeRestarts`` ends the job with
   ``DisruptionLimitExceeded``.
5. All else, a gang that hung too, is charged; one more than ``maxRestarts`` ends the job with ``BackoffLimitExceeded``.
6. A job that was suspended, or is to have another size, goes on with the next attempt, which counts against no budget.
7. A deadline that passed ends the job with ``DeadlineExceeded`` or ``PendingDeadlineExceeded``.
8. The first restart after a want of memory sets some aside.
9. A failed job that its user edits goes on with the next attempt, with whole budgets and no memory set aside.

Where two ways are right (an evicted pod may be seen as evicted, as ended, or as gone), the model has them all. So it
maps a life to the *set* of its ends; an operator that ends anywhere else is wrong.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

USER_ERRORS = {64: "Usage", 65: "BadData", 66: "NoInput", 77: "NoPermission", 78: "BadConfig"}
WORDS = {**USER_ERRORS, 70: "Internal", 74: "Device", 75: "Temporary", 143: "Terminated"}


class Kind(enum.StrEnum):
    """What befalls a gang."""

    DONE = "ends well, committed"
    UNCOMMITTED = "ends well, last step not committed"
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
"""Ends of a gang that is well: it is asked for a last cut."""


class Stuck(enum.StrEnum):
    """What keeps a deleted pod; it changes nothing of how the life ends."""

    NO = ""
    HELD = "held by a finalizer"
    SILENT = "its kubelet silent"
    BOTH = "held by a finalizer, its kubelet silent"


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What befalls the gang of one attempt."""

    kind: Kind
    index: int = 0
    """The pod that it befalls."""
    code: int = 0
    word: str = ""
    """The reason in the trainer's termination message; empty: it leaves none."""
    committed: int | None = None
    """Newest step that the checkpointers committed before; for a halt the step of its cut, None where none was made."""
    early: bool = False
    """Whether it comes as soon as that pod runs, though the others may not be there."""
    stuck: Stuck = Stuck.NO
    """What keeps the pod that it befalls, once that is deleted."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """``spec.lifecycle.restart``, as far as it decides how a life ends."""

    most: int = 3
    most_free: int = 100
    heals: bool = True
    rules: tuple[tuple[int, str], ...] = ()
    """Exit code and what the user wants then: fail, restart, restart-free."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How a life ends, or where it is."""

    phase: str = ""
    """Succeeded or Failed; empty while it goes on."""
    reason: str = ""
    """Of the condition that says so."""
    attempt: int = 1
    charged: int = 0
    free: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    """Restarts by reason."""
    newest: int = -1
    """Newest committed step."""
    reserve: bool = False
    """Whether memory is set aside."""


def ends(fates: Iterable[Fate], budget: Budget) -> set[End]:
    """All ends that such a life may have; those without a phase were not over when the fates were."""
    states = {End()}
    for fate in fates:
        states = {after for state in states for after in _after(state, fate, budget)}
    return states


def over(fates: Iterable[Fate], budget: Budget) -> bool:
    """Whether the job is finished after these fates, whichever way it came."""
    return all(end.phase for end in ends(fates, budget))


def _after(state: End, fate: Fate, budget: Budget) -> set[End]:
    if state.phase == "Succeeded":
        return {state}
    if state.phase == "Failed":  # its user has edited it, or there would be no further fate
        state = _next(replace(state, phase="", reason="", charged=0, free=0, reserve=False), "SpecChanged")
    state = _healed(state, fate, budget)
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
    after = {_failed(state, what, word, budget) for what, word in _verdicts(fate, budget)}
    starved = fate.kind is Kind.OOM
    return {replace(end, reserve=end.reserve or (starved and not end.phase)) for end in after}


def _healed(state: End, fate: Fate, budget: Budget) -> End:
    if fate.committed is None or fate.committed <= state.newest:
        return state
    state = replace(state, newest=fate.committed)
    return replace(state, charged=0, free=0) if budget.heals else state


def _next(state: End, word: str) -> End:
    counts = dict(state.reasons)
    counts[word] = counts.get(word, 0) + 1
    return replace(state, attempt=state.attempt + 1, reasons=tuple(sorted(counts.items())))


def _verdicts(fate: Fate, budget: Budget) -> set[tuple[str, str]]:
    """(fail, restart or restart-free; the word for it)."""
    match fate.kind:
        case Kind.EVICTED | Kind.DELETED | Kind.VANISHED:
            seen = {"PodDeleted"}
            if fate.kind is Kind.EVICTED:
                seen.add("EvictionByEvictionAPI")
            if fate.stuck is Stuck.HELD:
                seen.add("Terminated")
            return {("restart-free", word) for word in seen}
        case Kind.NODE_LOST:
            return {("restart-free", "NodeLost")}
        case Kind.NEVER_STARTED:
            return {("restart-free", "UnexpectedAdmissionError")}
        case Kind.SIDECAR_REFUSED:
            return {("fail", "CheckpointerNoPermission")}
        case Kind.UNCOMMITTED:
            return {("restart", "SnapshotNotCommitted")}
        case Kind.HUNG:
            return {("restart", "HangDetected")}
    word = "OOMKilled" if fate.kind is Kind.OOM else fate.word or WORDS.get(fate.code, f"Exit{fate.code}")
    wanted = dict(budget.rules).get(fate.code)
    return {(wanted or ("fail" if fate.code in USER_ERRORS else "restart"), word)}


def _failed(before: End, what: str, word: str, budget: Budget) -> End:
    if what == "fail":
        return replace(before, phase="Failed", reason=word)
    if what == "restart":
        if before.charged >= budget.most:
            return replace(before, phase="Failed", reason="BackoffLimitExceeded")
        return _next(replace(before, charged=before.charged + 1), word)
    if before.free >= budget.most_free:
        return replace(before, phase="Failed", reason="DisruptionLimitExceeded")
    return _next(replace(before, free=before.free + 1), word)
