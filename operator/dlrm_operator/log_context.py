"""The job that a log line is about: set once per reconcile, added to every line that the reconcile writes."""

from __future__ import annotations

import logging
from contextvars import ContextVar

from dlrm_api import names
from dlrm_operator.reconcile.state import JobKey

_OBJECT: ContextVar[dict[str, str] | None] = ContextVar("object", default=None)


def set_log_context(key: JobKey, uid: str) -> None:
    """Add the job to all that this task logs from now on."""
    place = {"namespace": key.namespace, "name": key.name, "uid": uid}
    _OBJECT.set({"apiVersion": names.API_VERSION, "kind": "DLRMJob", **place})


class ObjectFilter(logging.Filter):
    """Set the object on a record where kopf's formatters look for it: the key ``object`` of a JSON line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        found = _OBJECT.get()
        if found is not None and not hasattr(record, "k8s_ref"):
            record.k8s_ref = found
        return True
