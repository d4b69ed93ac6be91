"""``history.jsonl``: what happened to a local run and what its processes counted, one JSON object a line, bounded.

Looks at counters are thinned as they become many: each second one goes, and the next ones come half as often, so that
the file covers the whole run at an even pace. Of all other lines the newest stay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.errors import first_problem
from dlrm_api.progress import Moment
from dlrm_api.status import MOST, Count

EVERY_S = 2.0
"""Time between two looks at counters, until the first thinning."""
MOST_LOOKS = 1_000
MOST_OTHERS = 1_000
MOST_WORDS = 1_024


MOST_LINE = 1 << 20
"""Characters of a line; a longer one is read in pieces, none of which is one."""
Counted = Annotated[float, Field(ge=-1e24, le=1e24)]
Then = Literal["gang restarted", "sidecar restarted", "no restart left", "job failed"]


class Started(ApiModel):
    """An attempt began."""

    event: Literal["started"] = "started"
    time: Moment = Field(description="When (Unix seconds).")
    attempt: int = Field(ge=1, le=MOST, description="Its number.")


class TierCounts(ApiModel):
    """What went through one tier since the attempt began, over all ranks."""

    read_rows: Counted = Field(0, description="Rows that came up from it to slots.")
    written_rows: Counted = Field(0, description="Rows that went down to it.")
    read_bytes: Counted = Field(0, description="Bytes of the first.")
    written_bytes: Counted = Field(0, description="Bytes of the second.")
    kept_bytes: Counted = Field(0, description="Bytes really taken.")
    planned_bytes: Counted = Field(0, description="Bytes that the plan's rows take when every level is full.")


class Counts(ApiModel):
    """Counters of an attempt over all its ranks, as far as they were seen at one time."""

    ranks: Count = Field(0, description="Ranks that counted.")
    stages: dict[str, Counted] = Field({}, description="Time of the training threads by stage, all ranks added up (s).")
    accesses: Counted = Field(0, description="Distinct rows of batches asked of tables with levels.")
    hits: Counted = Field(0, description="Those found in a slot.")
    created_rows: Counted = Field(0, description="Rows looked up for the first time.")
    evicted_rows: Counted = Field(0, description="Rows that left a slot for another.")
    prefetch_wait_s: Counted = Field(0, description="Time for which lookups waited for rows, all ranks added up (s).")
    tiers: dict[str, TierCounts] = Field({}, description="By tier.")


class Look(Counts):
    """One look at the counters of a running attempt."""

    event: Literal["look"] = "look"
    time: Moment = Field(description="When (Unix seconds).")
    attempt: int = Field(ge=1, le=MOST, description="Attempt.")
    step: Count = Field(description="Steps done in the job's life.")


class Committed(ApiModel):
    """A snapshot was seen committed."""

    event: Literal["snapshot"] = "snapshot"
    time: Moment = Field(description="When it was committed (Unix seconds).")
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
    time: Moment = Field(description="When it was seen (Unix seconds).")
    attempt: Count = Field(description="Attempt.")
    process: str = Field(description="Such as trainer-0.")
    code: Annotated[int, Field(ge=-MOST, le=MOST)] | None = Field(
        description="Exit code; 128 + signal where a signal ended it; None: not known."
    )
    words: str = Field(description="What it said, or how it ended.")
    then: Then | None = Field(None, description="What followed; None: not known.")
    log: str = Field("", description="Its log.")


class Ended(ApiModel):
    """A command ended."""

    event: Literal["ended"] = "ended"
    time: Moment = Field(description="When (Unix seconds).")
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
