"""``history.jsonl``: what happened to a local run and what its processes counted, one JSON object a line, bounded.

Looks at counters are thinned as they become many: each second one goes, and the next ones come half as often, so that
the file covers the whole run at an even pace. Of all other lines the newest stay.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.errors import BadDataError, first_problem
from dlrm_api.progress import CheckpointerProgress, Progress, SnapshotInfo, UnixSeconds
from dlrm_api.status import MAX_EXACT, Count
from dlrm_cli.counters import Counted, Counts, PodFigures, counts_of, pod_figures, samples
from dlrm_cli.run.appdef import Ports

EVERY_S = 2.0
"""Time between two looks at counters, until the first thinning."""
MOST_LOOKS = 1_000
MOST_OTHERS = 1_000
MOST_WORDS = 1_024


MOST_LINE = 1 << 20
"""Characters of a line; a longer one is read in pieces, none of which is one."""
Then = Literal["gang restarted", "sidecar restarted", "no restart left", "job failed"]


class Started(ApiModel):
    """An attempt began."""

    event: Literal["started"] = "started"
    time: UnixSeconds = Field(description="When (Unix seconds).")
    attempt: int = Field(ge=1, le=MAX_EXACT, description="Its number.")


class Look(Counts):
    """One look at the counters of a running attempt."""

    event: Literal["look"] = "look"
    time: UnixSeconds = Field(description="When (Unix seconds).")
    attempt: int = Field(ge=1, le=MAX_EXACT, description="Attempt.")
    step: Count = Field(description="Steps done in the job's life.")


class Committed(ApiModel):
    """A snapshot was seen committed."""

    event: Literal["snapshot"] = "snapshot"
    time: UnixSeconds = Field(description="When it was committed (Unix seconds).")
    step: Count = Field(description="Step of the cut.")
    kind: str = Field(description="full or increment.")
    bits: Count = Field(description="Bits of one element.")
    bytes: Count = Field(description="Bytes of its own objects.")
    uri: str = Field(description="Its manifest.")
    chain: Count | None = Field(None, description="Snapshots that it goes over; None: not seen.")
    commit_s: Counted | None = Field(None, description="From hand-over to commit (s); None: not seen.")


class Failure(ApiModel):
    """A process ended as it should not have, and what was done about it."""

    event: Literal["failure"] = "failure"
    time: UnixSeconds = Field(description="When it was seen (Unix seconds).")
    attempt: Count = Field(description="Attempt.")
    process: str = Field(description="Such as trainer-0.")
    code: Annotated[int, Field(ge=-MAX_EXACT, le=MAX_EXACT)] | None = Field(
        description="Exit code; 128 + signal where a signal ended it; None: not known."
    )
    words: str = Field(description="What it said, or how it ended.")
    then: Then | None = Field(None, description="What followed; None: not known.")
    log: str = Field("", description="Its log.")


class Ended(ApiModel):
    """A command ended."""

    event: Literal["ended"] = "ended"
    time: UnixSeconds = Field(description="When (Unix seconds).")
    outcome: Literal["done", "stopped", "failed"] = Field(description="How.")
    words: str = Field("", description="The error of a job that failed.")


Line = Annotated[Started | Look | Committed | Failure | Ended, Field(discriminator="event")]
LINE: TypeAdapter[Line] = TypeAdapter(Line)
Kind = TypeVar("Kind", Started, Look, Committed, Failure, Ended)


class History:
    """Appends to the file; any thread may. A file that can't be written is given up, once: the run goes on.

    Args:
        path: the file; what is there already stays, but for lines that can't be read.
        most_looks: looks that are kept.
        most_others: lines of each other kind that are kept.
    """

    def __init__(self, path: Path, *, most_looks: int = MOST_LOOKS, most_others: int = MOST_OTHERS) -> None:
        self._path, self._most_looks, self._most_others = path, most_looks, most_others
        self._lock = threading.Lock()
        self._every_s = EVERY_S
        self.problem: OSError | None = None
        """Why nothing is written any more."""
        self._lines: list[Line] = []
        with contextlib.suppress(OSError):
            self._lines = [line for line in read_lines(path) if not isinstance(line, str)]
        self._guarded(self._rewrite)

    @property
    def every_s(self) -> float:
        """Time until the next look is wanted."""
        return self._every_s

    def note(self, line: Line) -> None:
        """Append a line."""
        with self._lock:
            self._lines.append(line)
            kept = self._bounded(line)
            if len(kept) < len(self._lines):
                self._lines = kept
                self._guarded(self._rewrite)
            else:
                self._guarded(lambda: self._append(line))

    def _bounded(self, newest: Line) -> list[Line]:
        """All lines, or fewer where there are too many of the newest one's kind."""
        alike = [i for i, line in enumerate(self._lines) if line.event == newest.event]
        looks = isinstance(newest, Look)
        if len(alike) <= (self._most_looks if looks else self._most_others):
            return self._lines
        if looks:
            self._every_s *= 2
        gone = set(alike[1::2] if looks else alike[: len(alike) // 4 + 1])
        return [line for i, line in enumerate(self._lines) if i not in gone]

    def _append(self, line: Line) -> None:
        with self._path.open("a") as file:
            file.write(_text(line))

    def _rewrite(self) -> None:
        draft = self._path.with_name(f".{self._path.name}.draft")
        draft.write_text("".join(map(_text, self._lines)))
        draft.replace(self._path)

    def _guarded(self, write: Callable[[], None]) -> None:
        if self.problem is None:
            try:
                write()
            except OSError as error:
                self.problem = error


def read_lines(path: Path) -> Iterator[Line | str]:
    """The lines of a file; for one that can't be read a sentence that names it, and the next ones follow.

    Raises:
        OSError: the file can't be read.
    """
    with path.open(errors="replace") as file:
        for number, text in enumerate(iter(lambda: file.readline(MOST_LINE), ""), 1):
            try:
                yield LINE.validate_json(text)
            except ValidationError as error:
                what = first_problem(error)
                yield f"{path.name}, line {number}: {what}: the line is left out"


def of_kind(kind: type[Kind], lines: Iterable[Line | str]) -> list[Kind]:
    """The lines of one kind."""
    return [line for line in lines if isinstance(line, kind)]


def _text(line: Line) -> str:
    return line.model_dump_json(exclude_defaults=False, exclude_none=True) + "\n"


PROGRESS_INTERVAL_S = 0.5
TIMEOUT_S = 2.0
MOST_BYTES = 4 * 2**20
"""Of an answer; what is longer is some other program's."""

Answer = TypeVar("Answer", Progress, CheckpointerProgress)


@dataclass(frozen=True)
class Seen:
    """The newest answers; None before the first."""

    trainer: Progress | None = None
    checkpointer: CheckpointerProgress | None = None


class Watch:
    """Asks the first trainer and the first checkpointer of a gang again and again, until closed."""

    def __init__(self, trainer_port: int, checkpointer_port: int) -> None:
        self._trainer_port = trainer_port
        self._checkpointer_port = checkpointer_port
        self._seen = Seen()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="watch", daemon=True)
        self._thread.start()

    @property
    def seen(self) -> Seen:
        """The newest answers."""
        return self._seen

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._thread.join(2 * TIMEOUT_S)

    def _ask(self) -> None:
        while not self._closed.wait(PROGRESS_INTERVAL_S):
            self._seen = Seen(
                progress_of(Progress, self._trainer_port) or self._seen.trainer,
                progress_of(CheckpointerProgress, self._checkpointer_port) or self._seen.checkpointer,
            )


def progress_of(kind: type[Answer], port: int) -> Answer | None:
    """``GET /progress`` of a process on this machine; None where nobody answers."""
    text = answer_of(port, "/progress")
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None


def answer_of(port: int, path: str) -> str | None:
    """What a process on this machine answers; None where nobody does, which at start and end is as it should be."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(MOST_BYTES + 1)
            whole = answer.status == http.client.OK and len(body) <= MOST_BYTES
            return body.decode(errors="replace") if whole else None
    except (OSError, http.client.HTTPException):
        return None


POLL_S = 0.5
"""Time between two questions to the checkpointer: snapshots may follow each other fast."""
MOST_SHARE = 0.02
"""Of the time that may go to looks at counters: those of many tables take long to read."""


class Recorder:
    """Asks from a thread of its own, until closed. Whoever does not answer is left out of that look.

    Args:
        history: where it is kept.
        attempt: number of the attempt.
        ports: of its processes.
        last_snapshots: what sidecars that ended said of their newest snapshot; asked at the close, since the last
            commit comes as a sidecar ends.
    """

    def __init__(
        self, history: History, attempt: int, ports: Ports, last_snapshots: Callable[[], Sequence[SnapshotInfo]]
    ) -> None:
        self._history, self._attempt, self._ports, self._last_snapshots = history, attempt, ports, last_snapshots
        self._committed: int | None = None
        self._commit_sum_s = 0.0
        self._counted = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._thread.join(2 * TIMEOUT_S)
        for newest in self._last_snapshots():
            self._note(newest, None, None)

    def _record(self) -> None:
        due = time.monotonic()
        while not self._closed.wait(POLL_S):
            self._look_at_snapshots()
            if (began := time.monotonic()) >= due:
                self._look_at_trainers()
                due = began + max(self._history.every_s, (time.monotonic() - began) / MOST_SHARE)

    def _look_at_trainers(self) -> None:
        pods: list[PodFigures] = []
        for port in self._ports.trainers:
            text = answer_of(port, "/metrics")
            if text is None:
                return  # sums over some of the pods would look like counters that fell
            try:
                pods.append(pod_figures(text))
            except BadDataError:
                return
        counts, step = counts_of(pods), pods[0].step
        if step is None or not any(counts.stages.values()):
            return  # not a step is done: the number of steps may still be that before the restore
        now = time.time()
        if not self._counted:
            progress = progress_of(Progress, self._ports.trainers[0])
            if progress is None:
                return
            self._counted = True
            zero = Counts(ranks=counts.ranks)
            self._history.note(Look(time=now, attempt=self._attempt, step=progress.restored_step or 0, **dict(zero)))
        self._history.note(Look(time=now, attempt=self._attempt, step=step, **dict(counts)))

    def _look_at_snapshots(self) -> None:
        port = self._ports.checkpointers[0]
        said = progress_of(CheckpointerProgress, port)
        newest = None if said is None else said.last_snapshot
        if newest is not None and newest.step != self._committed:
            chain, commit_sum_s = _of_commits(answer_of(port, "/metrics") or "")
            self._note(newest, chain, None if commit_sum_s is None else commit_sum_s - self._commit_sum_s)
            self._commit_sum_s = commit_sum_s or self._commit_sum_s

    def _note(self, newest: SnapshotInfo, chain: int | None, commit_s: float | None) -> None:
        if newest.step == self._committed:
            return
        self._committed = newest.step
        self._history.note(
            Committed(
                time=newest.time,
                step=newest.step,
                kind=newest.kind,
                bits=newest.bits,
                bytes=newest.bytes,
                uri=newest.uri,
                chain=chain,
                commit_s=commit_s,
            )
        )


def _of_commits(text: str) -> tuple[int | None, float | None]:
    """Length of the newest chain, and the time of all commits (s), as a checkpointer's ``/metrics`` says them."""
    found = {sample.name.removeprefix("dlrm_checkpointer_"): sample.value for sample in samples(text)}
    chain = found.get("chain_length")
    return None if chain is None else int(chain), found.get("commit_seconds_sum")
