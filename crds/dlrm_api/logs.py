"""How every process logs: one line an event, with what the event says of itself behind the message as key=value."""

from __future__ import annotations

import json
import logging

PACKAGES = ("dlrm_operator", "dlrm_trainer", "dlrm_checkpointer")
"""Whose changes of state are told, at level INFO; of others' packages warnings alone, for some tell pages."""

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "settings"}
"""What logging puts on every record, and kopf on its own: the settings of its operator."""
_KOPF = "k8s_"


class EventFormatter(logging.Formatter):
    """Puts a record's ``extra`` behind its message, before a traceback."""

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s {who} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging calls it so
        """The first line."""
        extra = [
            f"{name}={_quoted(value)}"
            for name, value in vars(record).items()
            if name not in _USUAL and not name.startswith(_KOPF)
        ]
        return " ".join((super().formatMessage(record), *extra))


def _quoted(value: object) -> str:
    """As it is where it has no space, so that each event stays on one line and its keys can be told from words."""
    text = str(value)
    plain = text and not any(character.isspace() or character == '"' for character in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def log_to_stderr(who: str) -> None:
    """Log this process's events, in place of what a forked process took over from its parent.

    Args:
        who: the process, such as ``rank 0``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter(who))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)
