"""``dlrmctl suspend`` and ``resume``: the wish written down, and, where asked for, waited for.

A job that failed is started again by both in turn: the operator takes a failed job that it saw at rest, and that then
is wanted again, as one whose failure was looked into, whether or not its spec says anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dlrm_api.errors import DLRMError, TemporaryError, UsageError, visible
from dlrm_cli.cluster.client import Connection, Object, dig
from dlrm_cli.cluster.get import condition, job_facts, one_line
from dlrm_cli.views import tell

LOOK_EVERY_S = 1.0
REST_S = 60.0
"""For the operator to take note that a failed job is at rest."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How far a wish has come, in words; with an error where it never comes true."""

    words: str
    done: bool = False
    error: DLRMError | None = None


def suspend_verdict(job: Object) -> Verdict:
    """How far a job is on its way to Suspended."""
    facts, seen = job_facts(job), _seen(job)
    if facts.phase == "Suspended" and seen:
        step = facts.snapshot_step
        holds = f"holds step {step:,}" if step is not None else "holds no step: it had not trained yet"
        why = f" ({one_line(facts.reason)})" if facts.reason else ""
        return Verdict(words=f"{facts.name} is Suspended and {holds}{why}", done=True)
    if facts.finished:
        return Verdict(words=f"{facts.name} has {facts.phase}: there is nothing to suspend", done=True)
    if not dig(job, "spec", "lifecycle", "suspend"):
        return _overruled(f"{facts.name} was told to go on by someone else")
    return Verdict(words=_on_the_way(job))


def resume_verdict(job: Object) -> Verdict:
    """How far a job is on its way to Running."""
    facts = job_facts(job)
    if facts.phase == "Failed" and _seen(job):
        words = f"{facts.name} has Failed: {one_line(facts.reason)}".rstrip(": ")
        return Verdict(words=words, error=DLRMError(words))
    if facts.phase in ("Running", "Succeeded") and _seen(job):
        step = f" at step {facts.step:,}" if facts.step is not None else ""
        return Verdict(words=f"{facts.name} is {facts.phase}{step}", done=True)
    if dig(job, "spec", "lifecycle", "suspend"):
        return _overruled(f"{facts.name} was suspended by someone else")
    return Verdict(words=_on_the_way(job))


def set_suspend(connection: Connection, name: str, wanted: bool, timeout_s: float | None) -> None:
    """Ask for it, and with ``timeout_s`` wait until it is so.

    Raises:
        NoInputError: there is no such job.
        UsageError: the job has ended, so that nothing is there to suspend; or has succeeded, so that nothing is left.
        TemporaryError: it is not so yet when the time is up; the wish stays.
    """
    facts = job_facts(connection.job(name))
    if facts.phase == "Succeeded" or (facts.finished and wanted):
        raise UsageError(f"{name} has {facts.phase}: there is nothing to {'suspend' if wanted else 'resume'}")
    if facts.finished:
        _rest(connection, name)
    job = connection.set_suspend(name, wanted)
    if timeout_s is None:
        verb = "suspend: it cuts, commits, then gives its nodes back" if wanted else "resume"
        print(f"{name} is told to {verb}")
        return
    advice = "it goes on: dlrmctl describe says how far it is"
    try:
        print(visible(_wait(connection, job, suspend_verdict if wanted else resume_verdict, timeout_s, advice).words))
    except KeyboardInterrupt:
        tell(f"no longer waiting; {name} stays told to {'suspend' if wanted else 'resume'}")
        raise


def _rest(connection: Connection, name: str) -> None:
    """Have the operator see a failed job at rest.

    Raises:
        TemporaryError: it did not; the job stays at rest, and resuming it again goes on from there.
    """

    def verdict(job: Object) -> Verdict:
        return Verdict(
            words=f"{name} has Failed, and no operator took note yet that it is to start again", done=_seen(job)
        )

    advice = "is one running that serves this namespace? Then resume it once more"
    _wait(connection, connection.set_suspend(name, True), verdict, REST_S, advice)


def _wait(
    connection: Connection, job: Object, judge: Callable[[Object], Verdict], timeout_s: float, advice: str
) -> Verdict:
    """Look again and again until the judge says that it is done; say on stderr how it goes.

    Raises:
        TemporaryError: it is not so when the time is up, in the judge's last words and with the advice; or the judge
            says that it never will be.
    """
    deadline, said = time.monotonic() + timeout_s, ""
    while True:
        verdict = judge(job)
        if verdict.done:
            return verdict
        if verdict.error:
            raise verdict.error
        if verdict.words != said:
            said = verdict.words
            tell(said)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TemporaryError(f"after {timeout_s:g} s {said}; {advice}")
        time.sleep(min(LOOK_EVERY_S, left))
        try:
            job = connection.job(dig(job, "metadata", "name"))
        except TemporaryError as error:
            said = str(error)
            tell(said)


def _overruled(words: str) -> Verdict:
    return Verdict(words=words, error=TemporaryError(words))


def _seen(job: Object) -> bool:
    """Whether the status speaks of the spec as it is now."""
    return int(dig(job, "status", "observedGeneration") or 0) >= int(dig(job, "metadata", "generation") or 0)


def _on_the_way(job: Object) -> str:
    facts = job_facts(job)
    words = facts.reason or one_line(condition(job, "Suspended").get("message") or "")
    return f"{facts.name} is {facts.phase}" + (f": {one_line(words)}" if words else "")
