"""Record a local run's events and counters in ``history.jsonl``: one JSON object a line.

The file is bounded. When there are too many readings of counters, every second one is dropped and the next ones come
half as often, so that the file covers the whole run evenly. Of all other lines the newest stay.
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
from dlrm_api.fields import MAX_EXACT, Count
from dlrm_api.progress import CheckpointerProgress, MeasuredSteps, Progress, SnapshotInfo, UnixSeconds
from dlrm_cli.counters import Counted, Counts, PodFigures, metric_samples, pod_figures, sum_counts
from dlrm_cli.run.appdef import LOOPBACK, Ports
from dlrm_cli.run.workdir import replace_file

READING_INTERVAL_S = 2.0
"""Time between two readings of counters, until the first thinning."""
MAX_READINGS = 1_000
MAX_OTHER_LINES = 1_000
MAX_WORDS = 1_024
MAX_LINE = 1 << 20
"""Characters of a line when the file is read; a longer one comes in pieces, each of which is refused."""
POLL_INTERVAL_S = 0.5
"""Time between two ``GET /progress``: snapshots may follow each other fast."""
REQUEST_TIMEOUT_S = 2.0
MAX_RESPONSE_BYTES = 4 * 2**20
MAX_READING_SHARE = 0.02
"""Share of the time that readings of counters may take: those of many tables take long to parse."""

Then = Literal["gang restarted", "sidecar restarted", "no restart left", "job failed"]


class Started(ApiModel):
    """Record that an attempt began."""

    event: Literal["started"] = "started"
    time: UnixSeconds = Field(description="When (Unix seconds).")
    attempt: int = Field(ge=1, le=MAX_EXACT, description="Its number.")


class Look(Counts):
    """Record one reading of the counters of a running attempt."""

    event: Literal["look"] = "look"
    time: UnixSeconds = Field(description="When (Unix seconds).")
    attempt: int = Field(ge=1, le=MAX_EXACT, description="Attempt.")
    step: Count = Field(description="Steps done by the job.")
    measured: MeasuredSteps | None = Field(None, description="The newest steps, without cuts, evaluations and start.")


class Committed(ApiModel):
    """Record a committed snapshot."""

    event: Literal["snapshot"] = "snapshot"
    time: UnixSeconds = Field(description="When it was committed (Unix seconds).")
    step: Count = Field(description="Step of the cut.")
    kind: str = Field(description="full or increment.")
    bits: Count = Field(description="Bits of one element.")
    bytes: Count = Field(description="Bytes of its own objects.")
    uri: str = Field(description="Its manifest.")
    chain: Count | None = Field(None, description="Snapshots that it depends on; None: not observed.")
    commit_s: Counted | None = Field(None, description="From hand-over to commit (s); None: not observed.")


class Failure(ApiModel):
    """Record that a process failed, and what followed."""

    event: Literal["failure"] = "failure"
    time: UnixSeconds = Field(description="When it was observed (Unix seconds).")
    attempt: Count = Field(description="Attempt.")
    process: str = Field(description="Such as trainer-0.")
    code: Annotated[int, Field(ge=-MAX_EXACT, le=MAX_EXACT)] | None = Field(
        description="Exit code, or 128 + n after signal n; None: not known."
    )
    words: str = Field(description="Its message, or how it ended.")
    then: Then | None = Field(None, description="What followed; None: not known.")
    log: str = Field("", description="Its log.")


class Ended(ApiModel):
    """Record that a command ended."""

    event: Literal["ended"] = "ended"
    time: UnixSeconds = Field(description="When (Unix seconds).")
    outcome: Literal["done", "stopped", "failed"] = Field(description="How.")
    words: str = Field("", description="The error of a job that failed.")


Line = Annotated[Started | Look | Committed | Failure | Ended, Field(discriminator="event")]
LINE: TypeAdapter[Line] = TypeAdapter(Line)
LineKind = TypeVar("LineKind", Started, Look, Committed, Failure, Ended)
Answer = TypeVar("Answer", Progress, CheckpointerProgress)


class History:
    """Append to the file, from any thread. If that fails, recording ends and the run continues.

    The file's readable lines are kept. ``max_others`` is for each kind of line that is not a reading.
    """

    def __init__(self, path: Path, *, max_readings: int = MAX_READINGS, max_others: int = MAX_OTHER_LINES) -> None:
        self._path, self._max_readings, self._max_others = path, max_readings, max_others
        self._lock = threading.Lock()
        self.interval_s = READING_INTERVAL_S
        """Time between two readings."""
        self.problem: OSError | None = None
        """Why nothing is written any more."""
        self._lines: list[Line] = []
        with contextlib.suppress(OSError):
            self._lines = [line for line in read_lines(path) if not isinstance(line, str)]
        self._write()

    def add(self, line: Line) -> None:
        """Append a line."""
        with self._lock:
            self._lines.append(line)
            kept = self._bounded(line)
            if len(kept) == len(self._lines):
                self._write(line)
            else:
                self._lines = kept
                self._write()

    def _bounded(self, newest: Line) -> list[Line]:
        """Return all lines, or fewer if there are too many of the newest one's kind."""
        alike = [i for i, line in enumerate(self._lines) if line.event == newest.event]
        is_reading = isinstance(newest, Look)
        if len(alike) <= (self._max_readings if is_reading else self._max_others):
            return self._lines
        if is_reading:
            self.interval_s *= 2
        dropped = set(alike[1::2] if is_reading else alike[: len(alike) // 4 + 1])
        return [line for i, line in enumerate(self._lines) if i not in dropped]

    def _write(self, line: Line | None = None) -> None:
        """Append a line, or write the whole file."""
        if self.problem is not None:
            return
        try:
            if line is None:
                replace_file(self._path, "".join(map(_json_line, self._lines)))
            else:
                with self._path.open("a") as file:
                    file.write(_json_line(line))
        except OSError as error:
            self.problem = error


def read_lines(path: Path) -> Iterator[Line | str]:
    """Yield the lines of a file, or raise OSError; a damaged line becomes a sentence that names it."""
    with path.open(errors="replace") as file:
        for number, text in enumerate(iter(lambda: file.readline(MAX_LINE), ""), 1):
            try:
                yield LINE.validate_json(text)
            except ValidationError as error:
                yield f"{path.name}, line {number}: {first_problem(error)}; the line is ignored"


def select_lines(kind: type[LineKind], lines: Iterable[Line | str]) -> list[LineKind]:
    """Return the lines of one kind."""
    return [line for line in lines if isinstance(line, kind)]


def _json_line(line: Line) -> str:
    return line.model_dump_json(exclude_none=True) + "\n"


@dataclass(frozen=True)
class Seen:
    """Hold the newest progress of trainer and checkpointer; None before the first answer."""

    trainer: Progress | None = None
    checkpointer: CheckpointerProgress | None = None


class Watch:
    """Poll the first trainer and the first checkpointer of a gang from a thread, until closed."""

    def __init__(self, trainer_port: int, checkpointer_port: int) -> None:
        self._trainer_port, self._checkpointer_port = trainer_port, checkpointer_port
        self.seen = Seen()
        """The newest answers."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()
        self._thread.join(2 * REQUEST_TIMEOUT_S)

    def _poll(self) -> None:
        while not self._closed.wait(POLL_INTERVAL_S):
            self.seen = Seen(
                get_progress(Progress, self._trainer_port) or self.seen.trainer,
                get_progress(CheckpointerProgress, self._checkpointer_port) or self.seen.checkpointer,
            )


def get_progress(kind: type[Answer], port: int) -> Answer | None:
    """Return the answer to ``GET /progress`` of a process on this machine, or None."""
    text = get_text(port, "/progress")
    try:
        return None if text is None else kind.model_validate_json(text)
    except ValidationError:
        return None


def get_text(port: int, path: str) -> str | None:
    """Return what a process on this machine answers, or None: at start and end nobody does."""
    try:
        with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=REQUEST_TIMEOUT_S)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(MAX_RESPONSE_BYTES + 1)
            is_complete = response.status == http.client.OK and len(body) <= MAX_RESPONSE_BYTES
            return body.decode(errors="replace") if is_complete else None
    except (OSError, http.client.HTTPException):
        return None


class Recorder:
    """Record counters and snapshots of an attempt from a thread, until closed.

    ``last_snapshots`` returns the newest snapshots of sidecars that ended. It is called on close, because the last
    commit comes as a sidecar ends.
    """

    def __init__(
        self, history: History, attempt: int, ports: Ports, last_snapshots: Callable[[], Sequence[SnapshotInfo]]
    ) -> None:
        self._history, self._attempt, self._ports, self._last_snapshots = history, attempt, ports, last_snapshots
        self._committed: int | None = None
        self._commit_sum_s = 0.0
        self._has_first_reading = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop recording."""
        self._closed.set()
        self._thread.join(2 * REQUEST_TIMEOUT_S)
        for newest in self._last_snapshots():
            self._add_snapshot(newest, None, None)

    def _record(self) -> None:
        due = time.monotonic()
        while not self._closed.wait(POLL_INTERVAL_S):
            self._read_snapshots()
            if (began := time.monotonic()) >= due:
                self._read_counters()
                due = began + max(self._history.interval_s, (time.monotonic() - began) / MAX_READING_SHARE)

    def _read_counters(self) -> None:
        pods: list[PodFigures] = []
        for port in self._ports.trainers:
            text = get_text(port, "/metrics")
            # Sums over some of the pods would look like counters that fell.
            if text is None:
                return
            try:
                pods.append(pod_figures(text))
            except BadDataError:
                return
        counts, step = sum_counts(pods), pods[0].step
        # Until the first step is done, the number of steps may still be that before the restore.
        if step is None or not any(counts.stages.values()):
            return
        now, progress = time.time(), get_progress(Progress, self._ports.trainers[0])
        if progress is None:
            return
        if not self._has_first_reading:
            self._has_first_reading = True
            zero, first = Counts(ranks=counts.ranks), progress.restored_step or 0
            self._history.add(Look(time=now, attempt=self._attempt, step=first, **dict(zero)))
        look = Look(time=now, attempt=self._attempt, step=step, measured=progress.measured, **dict(counts))
        self._history.add(look)

    def _read_snapshots(self) -> None:
        port = self._ports.checkpointers[0]
        progress = get_progress(CheckpointerProgress, port)
        newest = None if progress is None else progress.last_snapshot
        if newest is not None and newest.step != self._committed:
            chain, commit_sum_s = _commit_figures(get_text(port, "/metrics") or "")
            self._add_snapshot(newest, chain, None if commit_sum_s is None else commit_sum_s - self._commit_sum_s)
            self._commit_sum_s = commit_sum_s or self._commit_sum_s

    def _add_snapshot(self, newest: SnapshotInfo, chain: int | None, commit_s: float | None) -> None:
        if newest.step == self._committed:
            return
        self._committed = newest.step
        self._history.add(committed(newest, chain, commit_s))


def committed(snapshot: SnapshotInfo, chain: int | None = None, commit_s: float | None = None) -> Committed:
    """Return the line of a snapshot, with its chain and the time of its commit if they were observed."""
    return Committed(**dict(snapshot), chain=chain, commit_s=commit_s)


def _commit_figures(text: str) -> tuple[int | None, float | None]:
    """Return the newest chain's length and the time of all commits (s), from a checkpointer's metrics."""
    try:
        found = {each.name.removeprefix("dlrm_checkpointer_"): each.value for each in metric_samples(text)}
    except BadDataError:
        return None, None
    chain = found.get("chain_length")
    return None if chain is None else int(chain), found.get("commit_seconds_sum")
