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
                _progress(Progress, self._trainer_port) or self._seen.trainer,
                _progress(CheckpointerProgress, self._checkpointer_port) or self._seen.checkpointer,
            )


def _progress(kind: type[Answer], port: int) -> Answer | None:
    """``GET /progress``; None where nobody answers, which at start and end is as it should be."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", "/progress")
            return kind.model_validate_json(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValidationError):
        return None
