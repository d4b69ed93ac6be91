"""Asks a cluster what it knows of a job: its status and Events, and its pods while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import ValidationError

from dlrm_api.errors import DLRMError, first_problem
from dlrm_api.names import Port
from dlrm_api.progress import EvalMetrics, Progress
from dlrm_cli.cluster.ages import moment
from dlrm_cli.cluster.connection import Connection
from dlrm_cli.cluster.facts import JobFacts, Object, dig, job_facts
from dlrm_cli.cluster.figures import PodFigures, counts_of, pod_figures
from dlrm_cli.cluster.listing import one_line
from dlrm_cli.cluster.pod_choice import Choice, chosen_pods
from dlrm_cli.history import Committed, Counts, Failure, Look
from dlrm_cli.report.record import Record

TIMEOUT_S = 2.0
PARALLEL = 8
MOST_ASKED = 64
"""Pods that are asked, as ``dlrmctl top`` does."""
LACKS = (
    "A cluster keeps no history of losses, throughput and counters in the job: Prometheus has it, and the chart's "
    "dashboards show it. Below are the newest figures."
)
TONES: Mapping[str, Any] = {"Succeeded": "good", "Failed": "bad"}

Found = TypeVar("Found")


def read_cluster_job(connection: Connection, name: str) -> Record:
    """What is known of a job.

    Raises:
        NoInputError: there is no such job.
        NoPermissionError: the user may not look at it.
    """
    job = connection.job(name)
    notes = [LACKS]
    pods = _allowed(lambda: connection.pods(name), "pods", notes)
    events = _allowed(lambda: connection.events(name), "Events", notes)
    facts = job_facts(job)
    running = [pod for pod in chosen_pods(facts, pods, Choice(everyone=True)) if _runs(pod)]
    progress, looks = _asked(connection, facts, running, notes) if running else (None, [])
    return cluster_record(job, events, progress, looks, notes)


def cluster_record(
    job: Object, events: Sequence[Object], progress: Progress | None, looks: Sequence[Look], notes: Sequence[str]
) -> Record:
    """The record of a job; what its pods say now goes before what its status last said."""
    facts, status = job_facts(job), job.get("status") or {}
    told = status.get("progress") or {}
    quality: EvalMetrics | None = progress.evaluation if progress else None
    return Record(
        name=facts.name,
        place=f"job of the cluster, namespace {facts.namespace}",
        state=facts.phase,
        tone=TONES.get(facts.phase, "open"),
        words=facts.reason,
        plan_status=status.get("plan") or {},
        step=progress.step if progress else facts.step,
        total_steps=progress.total_steps if progress else facts.total_steps,
        samples=progress.samples if progress else told.get("samples"),
        samples_per_s=progress.samples_per_second if progress else facts.samples_per_second,
        loss=progress.loss if progress else facts.loss,
        eval_loss=quality.log_loss if quality else None,
        ne=quality.ne if quality else facts.ne,
        auc=quality.auc if quality else told.get("auc"),
        restarts=facts.restarts,
        restarts_by_reason=status.get("restartsByReason") or {},
        started=_seconds(status.get("startTime")),
        ended=_seconds(status.get("completionTime")),
        evaluations=[quality] if quality else [],
        looks=looks,
        snapshots=_newest_snapshot(status.get("lastSnapshot")),
        failures=_failures(status),
        events=sorted(_event(each) for each in events),
        notes=notes,
    )


def _asked(
    connection: Connection, facts: JobFacts, pods: Sequence[Object], notes: list[str]
) -> tuple[Progress | None, list[Look]]:
    """What pod 0 says of progress, and the counters of all pods since they began; refusals are noted."""
    names = [str(dig(pod, "metadata", "name")) for pod in pods[:MOST_ASKED]]

    def look(pod: str) -> PodFigures | str:
        try:
            return pod_figures(_ask(connection, facts, pod, "metrics"))
        except DLRMError as error:
            return f"Counters lack those of pod {pod}: {one_line(str(error))}"

    try:
        progress = Progress.model_validate_json(_ask(connection, facts, names[0], "progress"))
    except (DLRMError, ValidationError) as error:
        words = first_problem(error) if isinstance(error, ValidationError) else one_line(str(error))
        notes.append(f"The pods could not be asked, so figures are those of the status: {words}")
        return None, []
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="metrics") as threads:
        found = list(threads.map(look, names))
    notes += [each for each in found if isinstance(each, str)]
    counts = counts_of([each for each in found if not isinstance(each, str)])
    now, attempt = time.time(), max(1, facts.attempt)
    zero = Counts(ranks=counts.ranks)
    return progress, [
        Look(time=now, attempt=attempt, step=progress.restored_step or 0, **dict(zero)),
        Look(time=now, attempt=attempt, step=progress.step, **dict(counts)),
    ]


def _ask(connection: Connection, facts: JobFacts, pod: str, path: str) -> str:
    return connection.pod_endpoint(pod, facts.namespace, Port.TRAINER, path, TIMEOUT_S)


def _allowed(look: Callable[[], list[Object]], what: str, notes: list[str]) -> list[Object]:
    """What is found; where that is refused a note says so."""
    try:
        return look()
    except DLRMError as error:
        notes.append(f"{what} are not shown: {one_line(str(error))}")
        return []


def _newest_snapshot(found: Object | None) -> list[Committed]:
    if not found:
        return []
    return [
        Committed(
            time=_seconds(found.get("time")) or 0.0,
            step=int(found.get("step") or 0),
            kind=str(found.get("kind") or ""),
            bits=int(found.get("bits") or 32),
            bytes=int(found.get("bytes") or 0),
            uri=str(found.get("uri") or ""),
        )
    ]


def _failures(status: Object) -> list[Failure]:
    """Evidence of the last failures, oldest first."""
    known = [*(status.get("earlierFailures") or ())[::-1], *([last] if (last := status.get("lastFailure")) else [])]
    return [
        Failure(
            time=_seconds(each.get("time")) or 0.0,
            attempt=int(each.get("attempt") or 0),
            process=" on ".join(word for word in (each.get("pod"), each.get("node")) if word),
            code=each.get("exitCode"),
            words=": ".join(word for word in (each.get("reason"), one_line(each.get("message") or "")) if word),
            then=None,
        )
        for each in known
    ]


def _event(event: Object) -> tuple[float, str, str]:
    at = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    times = int(event.get("count") or 1)
    words = one_line(event.get("message") or "") + (f" ({times} times)" if times > 1 else "")
    return _seconds(at) or 0.0, str(event.get("reason") or ""), words


def _seconds(text: str | None) -> float | None:
    found = moment(text)
    return found.timestamp() if found else None


def _runs(pod: Object) -> bool:
    return dig(pod, "status", "phase") == "Running" and not dig(pod, "metadata", "deletionTimestamp")
