"""What a gang's stacks tell: which ranks wait for others, and where those are that do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_RANK = re.compile(r"^rank (\d{1,9}), process \d{1,9}$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
MEETING_PLACES = ("dlrm_trainer/distributed/collectives.py", "dlrm_trainer/distributed/rendezvous.py")
"""Where a rank waits for others."""
MOST_FRAMES = 6
FOLDERS = 2
"""Of a file's path, its last names are shown."""


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """One rank's stacks."""

    rank: int
    waits: bool
    """Whether a thread of it is in a collective; the rank to blame is in none."""
    place: str
    """The innermost calls of its main thread, the newest first; empty where it said nothing."""


def read_stacks(text: str) -> list[RankStack]:
    """The ranks of one pod from what its ``/stacks`` answered; whatever stands there, reading never raises."""
    parts = _RANK.split(text)
    return [_rank(int(number), body) for number, body in zip(parts[1::2], parts[2::2], strict=True)]


def _rank(number: int, body: str) -> RankStack:
    threads = _THREAD.split(body)[1:]
    waits = any(frame["file"].endswith(MEETING_PLACES) for thread in threads for frame in _FRAME.finditer(thread))
    return RankStack(rank=number, waits=waits, place=" < ".join(_calls(threads[-1])) if threads else "")


def _calls(thread: str) -> Iterator[str]:
    """A thread's innermost calls; Python writes the main thread's last."""
    for count, frame in enumerate(_FRAME.finditer(thread)):
        if count == MOST_FRAMES:
            return
        file = "/".join(frame["file"].split("/")[-FOLDERS:])
        yield f"{frame['function']} ({file}:{frame['line']})"
