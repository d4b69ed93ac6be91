"""``dlrmctl suspend``, ``resume`` and ``wait``: set ``spec.lifecycle.suspend``, and wait for a job's phase.

``suspend`` and then ``resume`` restart a failed job: the operator retries a failed job that it has seen suspended and
that is then resumed, whether or not the rest of its spec changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dlrm_api.errors import DLRMError, TemporaryError, UsageError, visible
from dlrm_cli.cluster.client import JobClient, Object, dig
from dlrm_cli.cluster.get import condition, job_facts, one_line
from dlrm_cli.views import print_stderr

POLL_INTERVAL_S = 1.0
ACKNOWLEDGE_TIMEOUT_S = 60.0
"""Time for the operator to observe that a failed job is suspended."""


Progress = tuple[bool, str]
"""Whether a job has followed a request, and its state in words."""


def suspend_progress(job: Object) -> Progress:
    """Return how far a job is on its way to Suspended; TemporaryError if someone has resumed it."""
    facts = job_facts(job)
    if facts.phase == "Suspended" and _is_observed(job):
        step = facts.snapshot_step
        holds = f"at step {step:,}" if step is not None else "before its first step"
        why = f" ({one_line(facts.reason)})" if facts.reason else ""
        return True, f"{facts.name} is Suspended {holds}{why}"
    if facts.finished:
        return True, f"{facts.name} has {facts.phase}, nothing to suspend"
    if not dig(job, "spec", "lifecycle", "suspend"):
        raise TemporaryError(f"{facts.name} was resumed by someone else")
    return False, _describe_phase(job)


def resume_progress(job: Object) -> Progress:
    """Return how far a job is on its way to Running; raise if it failed or was suspended meanwhile."""
    facts = job_facts(job)
    if facts.phase == "Failed" and _is_observed(job):
        raise DLRMError(f"{facts.name} has Failed: {one_line(facts.reason)}".rstrip(": "))
    if facts.phase in ("Running", "Succeeded") and _is_observed(job):
        step = f" at step {facts.step:,}" if facts.step is not None else ""
        return True, f"{facts.name} is {facts.phase}{step}"
    if dig(job, "spec", "lifecycle", "suspend"):
        raise TemporaryError(f"{facts.name} was suspended by someone else")
    return False, _describe_phase(job)


def wait_progress(job: Object, state: str) -> Progress:
    """Return how far a job is on its way to a phase, or to its end if ``state`` is ``Finished``; raise if it ends."""
    facts = job_facts(job)
    words = _describe_phase(job)
    if not _is_observed(job):
        return False, words
    if facts.phase == state or (state == "Finished" and facts.phase == "Succeeded"):
        return True, words
    if facts.finished:
        raise DLRMError(f"{facts.name} has {facts.phase}: {one_line(facts.reason)}".rstrip(": "))
    return False, words


def wait_for(client: JobClient, name: str, state: str, timeout_s: float) -> None:
    """Wait until a job has reached a state, and print what it is then.

    Raises:
        NoInputError: no such job.
        DLRMError: the job ended in another way.
        TemporaryError: time is up.
    """
    advice = f"see dlrmctl describe {name}"
    print(visible(_wait(client, client.job(name), lambda job: wait_progress(job, state), timeout_s, advice)))


def set_suspend(client: JobClient, name: str, wanted: bool, timeout_s: float | None) -> None:
    """Request it, and with ``timeout_s`` wait until the job has followed.

    Raises:
        NoInputError: no such job.
        UsageError: the job has ended, or has succeeded and cannot be resumed.
        TemporaryError: time is up; the request stays, or a failed job stays suspended until it is resumed again.
    """
    facts = job_facts(client.job(name))
    if facts.phase == "Succeeded" or (facts.finished and wanted):
        raise UsageError(f"cannot {'suspend' if wanted else 'resume'} {name}: it has {facts.phase}")
    if facts.finished:
        words = f"{name} has Failed, waiting for the operator to observe the retry"
        advice = "check that an operator serves this namespace, then resume again"
        job = client.set_suspend(name, True)
        _wait(client, job, lambda seen: (_is_observed(seen), words), ACKNOWLEDGE_TIMEOUT_S, advice)
    job = client.set_suspend(name, wanted)
    if timeout_s is None:
        what = "suspended: it saves a checkpoint, then releases its nodes" if wanted else "resumed"
        print(f"{name} is being {what}")
        return
    advice = "the request stays; see dlrmctl describe"
    try:
        print(visible(_wait(client, job, suspend_progress if wanted else resume_progress, timeout_s, advice)))
    except KeyboardInterrupt:
        print_stderr(f"no longer waiting; the request to {'suspend' if wanted else 'resume'} {name} stays")
        raise


def _wait(client: JobClient, job: Object, judge: Callable[[Object], Progress], timeout_s: float, advice: str) -> str:
    """Poll until ``judge`` says that it is done, and return its words; print each change on stderr."""
    deadline, shown = time.monotonic() + timeout_s, ""
    while True:
        done, words = judge(job)
        if done:
            return words
        if words != shown:
            shown = words
            print_stderr(shown)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TemporaryError(f"timed out after {timeout_s:g} s: {shown}; {advice}")
        time.sleep(min(POLL_INTERVAL_S, left))
        try:
            job = client.job(dig(job, "metadata", "name"))
        except TemporaryError as error:
            shown = str(error)
            print_stderr(shown)


def _is_observed(job: Object) -> bool:
    """Return whether the status reflects the current spec."""
    return int(dig(job, "status", "observedGeneration") or 0) >= int(dig(job, "metadata", "generation") or 0)


def _describe_phase(job: Object) -> str:
    facts = job_facts(job)
    words = facts.reason or one_line(condition(job, "Suspended").get("message") or "")
    return f"{facts.name} is {facts.phase}" + (f": {one_line(words)}" if words else "")
