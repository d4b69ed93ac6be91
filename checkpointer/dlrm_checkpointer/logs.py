"""The sidecar's log: one line an event, with what the event says of itself as key=value."""

from __future__ import annotations

import logging
import sys

OURS = "dlrm_checkpointer"
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class EventFormatter(logging.Formatter):
    """Appends a record's ``extra`` to its line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = super().format(record)
        extra = [f"{name}={value}" for name, value in vars(record).items() if name not in _USUAL]
        return " ".join((line, *extra))


def log_to_stderr() -> None:
    """Log warnings of everyone and events of our own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter("%(asctime)s checkpointer %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(OURS).setLevel(logging.INFO)
