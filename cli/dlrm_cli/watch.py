"""What the running processes say of themselves: their ``/progress`` endpoints, asked in a thread of their own."""

from __future__ import annotations

import http.client
import threading
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from dlrm_api.progress import CheckpointerProgress, Progress

EVERY_S = 0.5
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
        while not self._closed.wait(EVERY_S):
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
