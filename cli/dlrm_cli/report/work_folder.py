"""Reads what ``dlrmctl run`` kept in its work directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError, first_problem
from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_api.progress import EvalMetrics, Figure, Moment, Told
from dlrm_api.status import Count
from dlrm_cli.history import MOST_LINE, Committed, Ended, Failure, Line, Look, Started, of_kind, read_lines
from dlrm_cli.report.record import Record, Steps, summed_up
from dlrm_cli.result import Final, TrainerResult, read_profile
from dlrm_cli.workdir import WorkDir, is_held

MOST_NAMED = 5
"""Damaged lines of a file that are named one by one."""

Document = TypeVar("Document", bound=BaseModel)
State = tuple[str, Literal["good", "bad", "open"], str]


def read_work_folder(root: Path) -> Record:
    """What is known of the run.

    Raises:
        NoInputError: there is no such folder, or ``dlrmctl run`` has not worked in it.
        BadDataError: its job can't be read.
        NoPermissionError: a file of it may not be read.
    """
    workdir = WorkDir(root)
    if not root.is_dir():
        raise NoInputError(f"{root}: no such folder: give the work directory of dlrmctl run, or the name of a job")
    if not workdir.job.is_file():
        raise NoInputError(f"{root}: not a work directory of dlrmctl run: there is no {workdir.job.name} in it")
    try:
        return _read(workdir)
    except PermissionError as error:
        raise NoPermissionError(f"{error.filename}: {error.strerror}") from error


def _read(workdir: WorkDir) -> Record:
    notes: list[str] = []
    job = _document(DLRMJob, workdir.job, notes)
    if job is None:
        raise BadDataError(f"{workdir.job}: it can't be read as a job: {notes[0]}")
    journal = _Journal(workdir.progress)
    steps = summed_up(journal.steps())
    notes += _named(journal.damaged)
    history = _history(workdir.history, notes)
    result = _document(TrainerResult, workdir.result, notes)
    final = _document(Final, workdir.final, notes)
    failures, attempts = of_kind(Failure, history), of_kind(Started, history)
    state, tone, words = _state(workdir, history, finished=final is not None)
    evaluations = journal.evaluations
    newest = result.eval if result is not None and result.eval is not None else next(reversed(evaluations), None)
    last = result or journal.last
    seconds = [each.time for each in attempts] + [each.time for each in of_kind(Ended, history)]
    seconds += [steps[0].time, steps[-1].time] if steps else []
    return Record(
        name=job.metadata.name,
        place=f"run on one machine, work directory {workdir.root.absolute()}",
        state=state,
        tone=tone,
        words=words,
        plan=_document(Plan, workdir.plan, notes),
        step=last.step if last else None,
        samples=last.samples if last else None,
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
        looks=of_kind(Look, history),
        snapshots=_snapshots(of_kind(Committed, history), final),
        failures=failures,
        tiers=result.tiers if result else None,
        profile=read_profile(workdir),
        notes=notes,
    )


def _state(workdir: WorkDir, history: Sequence[Line], *, finished: bool) -> State:
    if is_held(workdir.root / "lock", fcntl.LOCK_SH):
        return "running", "open", "it still goes on; this is how far it was when the report was made"
    if not history:
        return ("done", "good", "") if finished else ("unknown", "open", "it kept no history of how it ended")
    newest = [line for line in history if isinstance(line, Started | Ended)][-1:]
    if not newest or isinstance(newest[0], Started):
        return "interrupted", "bad", "dlrmctl ended before the run did: the same command again resumes it"
    outcome, words = newest[0].outcome, newest[0].words
    if outcome == "failed":
        return "failed", "bad", words
    return ("done", "good", "") if outcome == "done" else ("stopped", "open", "the user stopped it")


def _history(path: Path, notes: list[str]) -> list[Line]:
    if not path.is_file():
        notes.append(f"{path.name} is not there: times of stages, tiers, attempts and failures were not kept.")
        return []
    lines = list(read_lines(path))
    notes += _named([line for line in lines if isinstance(line, str)])
    return [line for line in lines if not isinstance(line, str)]


def _named(damaged: Sequence[str]) -> list[str]:
    more = len(damaged) - MOST_NAMED
    return [*damaged[:MOST_NAMED], *([f"and {more} more lines of that file that can't be read"] if more > 0 else [])]


def _snapshots(seen: Sequence[Committed], final: Final | None) -> list[Committed]:
    """Those seen while it ran, and those that were there at its end."""
    known = {each.step: each for each in seen}
    for each in final.result.snapshots if final is not None else ():
        if each.step not in known:
            known[each.step] = Committed(
                time=each.time, step=each.step, kind=each.kind, bits=each.bits, bytes=each.bytes, uri=each.uri
            )
    return [known[step] for step in sorted(known)]


def _document(kind: type[Document], path: Path, notes: list[str]) -> Document | None:
    """A file as a model; None where it is not there, or can't be read, which is noted."""
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        first = first_problem(error) if isinstance(error, ValidationError) else "it is no text"
        notes.append(f"{path.name} can't be read: {first}: it is left out")
        return None


class _StepLine(Told):
    """One step, as rank 0 wrote it."""

    step: Count
    loss: Figure
    time: Moment
    samples: Count
    samples_per_s: float | None = Field(None, ge=0, le=1e18)


@dataclass
class _Journal:
    """``progress.jsonl``, read once from front to back."""

    path: Path
    last: _StepLine | None = None
    """The newest line of a step."""
    evaluations: list[EvalMetrics] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def steps(self) -> Iterator[Steps]:
        """Its steps, one by one."""
        if not self.path.is_file():
            return
        with self.path.open(errors="replace") as file:
            for number, text in enumerate(iter(lambda: file.readline(MOST_LINE), ""), 1):
                try:
                    line = from_json(text)
                    if isinstance(line, dict) and "eval" in line:
                        self.evaluations.append(EvalMetrics.model_validate(line["eval"]))
                    else:
                        yield self._step(_StepLine.model_validate(line))
                except ValueError:  # a ValidationError is one
                    if text.endswith("\n"):  # the last line of a run that goes on may be half written
                        self.damaged.append(f"{self.path.name}, line {number}: it is no step: the line is left out")

    def _step(self, line: _StepLine) -> Steps:
        self.last = line
        return Steps(
            first=line.step,
            last=line.step,
            time=line.time,
            count=1,
            loss_sum=line.loss,
            lowest=line.loss,
            highest=line.loss,
            samples=line.samples,
        )
