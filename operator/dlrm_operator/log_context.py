"""Which object a line of log is about: said once a turn, and put on every line that the turn writes."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from dlrm_api import names
from dlrm_operator.reconcile.state import JobKey

_OBJECT: ContextVar[dict[str, str] | None] = ContextVar("object", default=None)


def speak_of(key: JobKey, uid: str) -> None:
    """All that this task logs from now on is about the job."""
    _OBJECT.set(
        {
            "apiVersion": names.API_VERSION,
            "kind": "DLRMJob",
            "namespace": key.namespace,
            "name": key.name,
            "uid": uid,
        }
    )


class ObjectFilter(logging.Filter):
    """Puts the object on a record, where kopf's formatters look for it: the key ``object`` of a JSON line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        found = _OBJECT.get()
        if found is not None and not hasattr(record, "k8s_ref"):
            record.k8s_ref = found
        return True
