"""``dlrmctl suspend`` and ``resume``: the wish written down, and, where asked for, waited for.

A job that failed is started again by both in turn: the operator takes a failed job that it saw at rest, and that then
is wanted again, as one whose failure was looked into, whether or not its spec says anything else.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from dlrm_api.errors import DLRMError, TemporaryError, UsageError
from dlrm_cli.cluster.connection import Connection
from dlrm_cli.cluster.facts import Object, condition, dig, job_facts
from dlrm_cli.cluster.listing import one_line

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
    try:
        print(_wait(connection, job, wanted, timeout_s).words)
    except KeyboardInterrupt:
        print(f"no longer waiting; {name} stays told to {'suspend' if wanted else 'resume'}", file=sys.stderr)
        raise


def _rest(connection: Connection, name: str) -> None:
    """Have the operator see a failed job at rest.

    Raises:
        TemporaryError: it did not; the job stays at rest, and resuming it again goes on from there.
    """
    job, deadline = connection.set_suspend(name, True), time.monotonic() + REST_S
    while not _seen(job):
        if time.monotonic() > deadline:
            words = f"{name} has Failed, and no operator took note within {REST_S:g} s that it is to start again"
            raise TemporaryError(f"{words}: is one running that serves this namespace? Then resume it once more")
        time.sleep(LOOK_EVERY_S)
        job = connection.job(name)


def _wait(connection: Connection, job: Object, wanted: bool, timeout_s: float) -> Verdict:
    """Look again and again; say on stderr how it goes."""
    judge, deadline, said = (suspend_verdict if wanted else resume_verdict), time.monotonic() + timeout_s, ""
    while True:
        verdict = judge(job)
        if verdict.done:
            return verdict
        if verdict.error:
            raise verdict.error
        if verdict.words != said:
            said = verdict.words
            print(said, file=sys.stderr)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TemporaryError(f"after {timeout_s:g} s {said}; it goes on: dlrmctl describe says how far it is")
        time.sleep(min(LOOK_EVERY_S, left))
        try:
            job = connection.job(dig(job, "metadata", "name"))
        except TemporaryError as error:
            said = str(error)
            print(said, file=sys.stderr)


def _overruled(words: str) -> Verdict:
    return Verdict(words=words, error=TemporaryError(words))


def _seen(job: Object) -> bool:
    """Whether the status speaks of the spec as it is now."""
    return int(dig(job, "status", "observedGeneration") or 0) >= int(dig(job, "metadata", "generation") or 0)


def _on_the_way(job: Object) -> str:
    facts = job_facts(job)
    words = facts.reason or one_line(condition(job, "Suspended").get("message") or "")
    return f"{facts.name} is {facts.phase}" + (f": {one_line(words)}" if words else "")
