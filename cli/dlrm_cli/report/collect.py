"""Read what is known of a run, from its work directory or the cluster. Absent means not recorded."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from dlrm_api.errors import BadDataError, DLRMError, NoInputError, NoPermissionError, first_problem
from dlrm_api.fields import Count, Figure
from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_api.progress import EvalMetrics, MeasuredSteps, PodReport, Progress, UnixSeconds
from dlrm_api.run_report import MaintenanceTimes, Profile, SizesUse, TierReport, UniqueUse
from dlrm_api.status import AccuracyStatus, StepFigures
from dlrm_cli.cluster.client import MAX_POLLED_PODS, METRICS_THREADS, JobClient, Object, dig
from dlrm_cli.cluster.get import JobFacts, event_time, is_running, job_facts, moment, one_line
from dlrm_cli.cluster.logs import PodChoice, choose_pods
from dlrm_cli.counters import Counts, PodFigures, pod_figures, sum_counts
from dlrm_cli.run.history import (
    MAX_LINE,
    Committed,
    Ended,
    Failure,
    Line,
    Look,
    Started,
    committed,
    read_lines,
    select_lines,
)
from dlrm_cli.run.workdir import Final, TrainerResult, WorkDir, is_held, read_environment, read_profile

MAX_SPANS = 600
"""Spans into which the steps of a run are summed."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Sum up consecutive steps."""

    last: int
    time: float
    """When the last one ended (Unix seconds)."""
    count: int
    """Recorded steps among these."""
    loss_sum: float
    samples: int
    """Samples of the job when the last one ended."""

    @property
    def loss(self) -> float:
        """Return the mean loss (nats)."""
        return self.loss_sum / self.count

    def joined(self, later: Steps) -> Steps:
        """Return these and the next ones as one."""
        return replace(later, count=self.count + later.count, loss_sum=self.loss_sum + later.loss_sum)


def sum_steps(steps: Iterable[Steps], max_spans: int = MAX_SPANS) -> list[Steps]:
    """Sum any number of steps into at most ``max_spans`` equal spans, in memory for twice as many."""
    spans: list[Steps] = []
    width = taken = 1
    for step in steps:
        if spans and taken < width:
            spans[-1], taken = spans[-1].joined(step), taken + 1
            continue
        if len(spans) == 2 * max_spans:
            spans, width = _in_pairs(spans), 2 * width
        spans.append(step)
        taken = 1
    return spans if len(spans) <= max_spans else _in_pairs(spans)


def _in_pairs(spans: Sequence[Steps]) -> list[Steps]:
    pairs = [spans[i : i + 2] for i in range(0, len(spans), 2)]
    return [pair[0].joined(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Hold what is known of one run."""

    name: str
    place: str
    state: str
    """Outcome in a word or two."""
    tone: Literal["good", "bad", "open"]
    words: str = ""
    """Why it is so."""
    plan: Plan | None = None
    plan_status: Mapping[str, Any] = field(default_factory=dict)
    """The plan's summary in a job's status, if the plan itself is not available."""
    accuracy: AccuracyStatus = field(default_factory=AccuracyStatus)
    """Steps as predicted, and as measured at the end."""
    step: int | None = None
    total_steps: int | None = None
    samples: int | None = None
    skipped_rows: int = 0
    truncated_rows: int = 0
    samples_per_s: float | None = None
    """Speed of the last steps."""
    loss: float | None = None
    eval_loss: float | None = None
    """Log loss of the last evaluation; the next two are of it too."""
    ne: float | None = None
    auc: float | None = None
    restarts: int = 0
    restarts_by_reason: Mapping[str, int] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    steps: Sequence[Steps] = ()
    evaluations: Sequence[EvalMetrics] = ()
    attempts: Sequence[Started] = ()
    looks: Sequence[Look] = ()
    snapshots: Sequence[Committed] = ()
    failures: Sequence[Failure] = ()
    events: Sequence[tuple[float, str, str]] = ()
    """Time, reason and sentence of a cluster's Events, oldest first."""
    tiers: TierReport | None = None
    unique_tables: Sequence[UniqueUse] = ()
    row_sizes: Sequence[SizesUse] = ()
    maintenance: Sequence[MaintenanceTimes] = ()
    profile: Profile | None = None
    notes: Sequence[str] = ()
    """What is missing, was not readable, or should be known."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Each field of the spec that is set, by its path."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Versions of the software, and the machine."""

    @property
    def predicted_samples_per_s(self) -> float | None:
        """Return the speed that the plan predicts, or None."""
        if self.plan is not None:
            return self.plan.predicted.samples_per_second
        return self.plan_status.get("predictedSamplesPerSecond")

    @property
    def mean_samples_per_s(self) -> float | None:
        """Return samples/s from the first recorded step to the last, pauses included; None for fewer than two."""
        if len(self.steps) < 2 or self.steps[-1].time <= self.steps[0].time:
            return None
        return (self.steps[-1].samples - self.steps[0].samples) / (self.steps[-1].time - self.steps[0].time)


MAX_SHOWN = 200
"""Characters of a list that is shown whole."""
MAX_NAMED = 5
"""Damaged lines of a file that are named one by one."""

Document = TypeVar("Document", bound=BaseModel)
State = tuple[str, Literal["good", "bad", "open"], str]


def read_work_folder(root: Path) -> Record:
    """Read a work directory of ``dlrmctl run``.

    Raises:
        NoInputError: no such folder, or ``dlrmctl run`` has not worked in it.
        BadDataError: its job is not readable.
        NoPermissionError: a file may not be read.
    """
    workdir = WorkDir(root)
    if not root.is_dir():
        raise NoInputError(f"folder not found: {root}; give a work directory of dlrmctl run, or the name of a job")
    if not workdir.job.is_file():
        raise NoInputError(f"not a work directory of dlrmctl run: {root} has no {workdir.job.name}")
    try:
        return _read(workdir)
    except PermissionError as error:
        raise NoPermissionError(f"cannot read {error.filename}: {error.strerror}") from error


def _read(workdir: WorkDir) -> Record:
    notes: list[str] = []
    job = _document(DLRMJob, workdir.job, notes)
    if job is None:
        raise BadDataError(f"invalid {workdir.job}: {notes[0]}")
    journal = _Journal(workdir.progress)
    steps = sum_steps(journal.steps())
    notes += _named(journal.damaged)
    history = _history(workdir.history, notes)
    result = _document(TrainerResult, workdir.result, notes)
    final = _document(Final, workdir.final, notes)
    failures, attempts = select_lines(Failure, history), select_lines(Started, history)
    state, tone, words = _state(workdir, history, finished=final is not None)
    evaluations = journal.evaluations
    newest = result.eval if result is not None and result.eval is not None else next(reversed(evaluations), None)
    last = result or journal.last
    plan, looks = _document(Plan, workdir.plan, notes), select_lines(Look, history)
    predicted = AccuracyStatus(predicted=StepFigures.of(plan.predicted)) if plan else AccuracyStatus()
    seconds = [each.time for each in attempts] + [each.time for each in select_lines(Ended, history)]
    seconds += [steps[0].time, steps[-1].time] if steps else []
    return Record(
        name=job.metadata.name,
        place=f"run on one machine, work directory {workdir.root.absolute()}",
        state=state,
        tone=tone,
        words=words,
        plan=plan,
        accuracy=_with_measured(predicted, looks[-1].measured if looks else None),
        step=last.step if last else None,
        samples=last.samples if last else None,
        skipped_rows=result.skipped_rows if result else 0,
        truncated_rows=result.truncated_rows if result else 0,
        samples_per_s=last.samples_per_s if last else None,
        loss=result.train_loss if result else journal.last.loss if journal.last else None,
        eval_loss=newest.log_loss if newest else None,
        ne=newest.ne if newest else None,
        auc=newest.auc if newest else None,
        restarts=sum(failure.then == "gang restarted" for failure in failures),
        started=min(seconds, default=None),
        ended=max(seconds, default=None),
        steps=steps,
        evaluations=evaluations,
        attempts=attempts,
        looks=looks,
        snapshots=_snapshots(select_lines(Committed, history), final),
        failures=failures,
        tiers=result.tiers if result else None,
        unique_tables=result.unique_tables if result else (),
        row_sizes=result.row_sizes if result else (),
        maintenance=result.maintenance if result else (),
        profile=read_profile(workdir),
        notes=[*notes, *(result.notes if result else ())],
        settings=flat_settings(job.spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)),
        environment=read_environment(workdir),
    )


def _with_measured(known: AccuracyStatus, measured: MeasuredSteps | None) -> AccuracyStatus:
    return known if measured is None else known.model_copy(update={"measured": StepFigures.of(measured)})


def flat_settings(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return each field that a spec sets, by its path; long lists, such as tables, by their number."""
    found: dict[str, str] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, below in value.items():
                add(f"{path}.{key}" if path else key, below)
        elif isinstance(value, list) and len(str(value)) > MAX_SHOWN:
            found[path] = f"{len(value)} entries"
        else:
            found[path] = str(value)

    add("", spec)
    return found


def _state(workdir: WorkDir, history: Sequence[Line], *, finished: bool) -> State:
    if is_held(workdir.lock, fcntl.LOCK_SH):
        return "running", "open", "still running when the report was made"
    if not history:
        return ("done", "good", "") if finished else ("unknown", "open", "no history of how it ended")
    newest = [line for line in history if isinstance(line, Started | Ended)][-1:]
    if not newest or isinstance(newest[0], Started):
        return "interrupted", "bad", "dlrmctl ended before the run did; run the same command again to resume"
    outcome, words = newest[0].outcome, newest[0].words
    if outcome == "failed":
        return "failed", "bad", words
    return ("done", "good", "") if outcome == "done" else ("stopped", "open", "stopped by the user")


def _history(path: Path, notes: list[str]) -> list[Line]:
    if not path.is_file():
        notes.append(f"{path.name} not found: stages, tiers, attempts and failures were not recorded.")
        return []
    lines = list(read_lines(path))
    notes += _named([line for line in lines if isinstance(line, str)])
    return [line for line in lines if not isinstance(line, str)]


def _named(damaged: Sequence[str]) -> list[str]:
    more = len(damaged) - MAX_NAMED
    return [*damaged[:MAX_NAMED], *([f"and {more} more damaged lines of that file"] if more > 0 else [])]


def _snapshots(seen: Sequence[Committed], final: Final | None) -> list[Committed]:
    """Return those recorded while it ran, and those that existed at its end."""
    known = {each.step: each for each in seen}
    for each in final.result.snapshots if final is not None else ():
        known.setdefault(each.step, committed(each))
    return [known[step] for step in sorted(known)]


def _document(kind: type[Document], path: Path, notes: list[str]) -> Document | None:
    """Read a file as a model; None if it does not exist, or is damaged, which is noted."""
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        first = first_problem(error) if isinstance(error, ValidationError) else "not UTF-8"
        notes.append(f"invalid {path.name}: {first}; the file is ignored")
        return None


class _StepLine(PodReport):
    """Hold one step, as rank 0 wrote it."""

    step: Count
    loss: Figure
    time: UnixSeconds
    samples: Count
    samples_per_s: float | None = Field(None, ge=0, le=1e18)


@dataclass
class _Journal:
    """Read ``progress.jsonl`` once from front to back."""

    path: Path
    last: _StepLine | None = None
    """The newest line of a step."""
    evaluations: list[EvalMetrics] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def steps(self) -> Iterator[Steps]:
        """Yield its steps."""
        if not self.path.is_file():
            return
        with self.path.open(errors="replace") as file:
            for number, text in enumerate(iter(lambda: file.readline(MAX_LINE), ""), 1):
                try:
                    line = from_json(text)
                    if isinstance(line, dict) and "eval" in line:
                        self.evaluations.append(EvalMetrics.model_validate(line["eval"]))
                    else:
                        self.last = last = _StepLine.model_validate(line)
                        yield Steps(last=last.step, time=last.time, count=1, loss_sum=last.loss, samples=last.samples)
                except ValueError:
                    # The last line of a running job may be half written.
                    if text.endswith("\n"):
                        self.damaged.append(f"{self.path.name}, line {number}: not a step; the line is ignored")


NO_HISTORY = (
    "The job has no history of loss, throughput and counters: see Prometheus and the chart's dashboards. Below are the "
    "newest figures."
)
TONES: Mapping[str, Any] = {"Succeeded": "good", "Failed": "bad"}


def read_cluster_job(client: JobClient, name: str) -> Record:
    """Read a job of the cluster, and its pods while they run."""
    job = client.job(name)
    notes = [NO_HISTORY]
    pods = _allowed(lambda: client.pods(name), "pods", notes)
    events = _allowed(lambda: client.events(name), "Events", notes)
    facts = job_facts(job)
    running = [pod for pod in choose_pods(facts, pods, PodChoice(everyone=True)) if is_running(pod)]
    progress, looks = _asked(client, facts, running, notes) if running else (None, [])
    return cluster_record(job, events, progress, looks, notes)


def cluster_record(
    job: Object, events: Sequence[Object], progress: Progress | None, looks: Sequence[Look], notes: Sequence[str]
) -> Record:
    """Return the record of a job; what its pods answer precedes its status."""
    facts, status = job_facts(job), job.get("status") or {}
    reported = status.get("progress") or {}
    quality: EvalMetrics | None = progress.evaluation if progress else None
    return Record(
        name=facts.name,
        place=f"job of the cluster, namespace {facts.namespace}",
        state=facts.phase,
        tone=TONES.get(facts.phase, "open"),
        words=facts.reason,
        plan_status=status.get("plan") or {},
        accuracy=_with_measured(facts.accuracy, progress.measured if progress else None),
        step=progress.step if progress else facts.step,
        total_steps=progress.total_steps if progress else facts.total_steps,
        samples=progress.samples if progress else reported.get("samples"),
        skipped_rows=progress.skipped_rows if progress else reported.get("skippedRows", 0),
        truncated_rows=progress.truncated_rows if progress else reported.get("truncatedRows", 0),
        samples_per_s=progress.samples_per_second if progress else facts.samples_per_second,
        loss=progress.loss if progress else facts.loss,
        eval_loss=quality.log_loss if quality else None,
        ne=quality.ne if quality else facts.ne,
        auc=quality.auc if quality else reported.get("auc"),
        restarts=facts.restarts,
        restarts_by_reason=status.get("restartsByReason") or {},
        started=_seconds(status.get("startTime")),
        ended=_seconds(status.get("completionTime")),
        evaluations=[quality] if quality else [],
        looks=looks,
        settings=flat_settings(job.get("spec") or {}),
        snapshots=_newest_snapshot(status.get("lastSnapshot")),
        failures=_failures(status),
        events=sorted(_event(each) for each in events),
        notes=notes,
    )


def _asked(
    client: JobClient, facts: JobFacts, pods: Sequence[Object], notes: list[str]
) -> tuple[Progress | None, list[Look]]:
    """Return pod 0's progress, and the counters of all pods since they started; refusals are noted."""
    names = [str(dig(pod, "metadata", "name")) for pod in pods[:MAX_POLLED_PODS]]

    def read(pod: str) -> PodFigures | str:
        try:
            return pod_figures(client.pod_endpoint(pod, facts.namespace, "metrics"))
        except DLRMError as error:
            return f"Counters of pod {pod} are missing: {one_line(str(error))}"

    try:
        progress = Progress.model_validate_json(client.pod_endpoint(names[0], facts.namespace, "progress"))
    except (DLRMError, ValidationError) as error:
        words = first_problem(error) if isinstance(error, ValidationError) else one_line(str(error))
        notes.append(f"The pods did not answer, so figures are from the status: {words}")
        return None, []
    with ThreadPoolExecutor(METRICS_THREADS, thread_name_prefix="metrics") as threads:
        found = list(threads.map(read, names))
    notes += [each for each in found if isinstance(each, str)]
    counts = sum_counts([each for each in found if not isinstance(each, str)])
    now, attempt = time.time(), max(1, facts.attempt)
    zero = Counts(ranks=counts.ranks)
    return progress, [
        Look(time=now, attempt=attempt, step=progress.restored_step or 0, **dict(zero)),
        Look(time=now, attempt=attempt, step=progress.step, **dict(counts)),
    ]


def _allowed(look: Callable[[], list[Object]], what: str, notes: list[str]) -> list[Object]:
    """Return what is found, or nothing with a note."""
    try:
        return look()
    except DLRMError as error:
        notes.append(f"{what} are not available: {one_line(str(error))}")
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
    """Return the evidence of the last failures, oldest first."""
    known = filter(None, [*(status.get("earlierFailures") or ())[::-1], status.get("lastFailure")])
    return [
        Failure(
            time=_seconds(each.get("time")) or 0.0,
            attempt=int(each.get("attempt") or 0),
            process=" on ".join(filter(None, (each.get("pod"), each.get("node")))),
            code=each.get("exitCode"),
            words=": ".join(filter(None, (each.get("reason"), one_line(each.get("message") or "")))),
            then=None,
        )
        for each in known
    ]


def _event(event: Object) -> tuple[float, str, str]:
    times = int(event.get("count") or 1)
    words = one_line(event.get("message") or "") + (f" ({times} times)" if times > 1 else "")
    return _seconds(event_time(event)) or 0.0, str(event.get("reason") or ""), words


def _seconds(text: str | None) -> float | None:
    found = moment(text)
    return found.timestamp() if found else None


def throughput(steps: Sequence[Steps], attempts: Sequence[Started], max_points: int) -> list[list[tuple[float, float]]]:
    """Return (time, samples/s) over at most ``max_points`` equal spans; each attempt begins a new list.

    A span is long enough that single steps do not show, and a pause is within one.
    """
    if len(steps) < 2:
        return []
    runs: list[list[tuple[float, float]]] = [[]]
    starts = sorted(attempt.time for attempt in attempts)
    min_span_s = (steps[-1].time - steps[0].time) / max_points
    before = steps[0]
    for now in steps[1:]:
        if any(before.time < start <= now.time for start in starts):
            runs.append([])
            before = now
        elif now.time - before.time >= max(min_span_s, 1e-3):
            runs[-1].append((now.time, (now.samples - before.samples) / (now.time - before.time)))
            before = now
    return [run for run in runs if run]
