"""Attempts are numbered, and each new number is written with the reason for it."""

from __future__ import annotations

from dlrm_api.status import DLRMJobStatus

MOST_REASONS = 16


def with_next_attempt(status: DLRMJobStatus, reason: str) -> DLRMJobStatus:
    """The status of the attempt that follows one which ended for ``reason``: charged for nothing, waiting for nothing.

    All that belongs to the old attempt alone is left behind.
    """
    numbers = {
        "attempt": status.attempt + 1,
        "restarts": status.restarts + 1,
        "restarts_by_reason": _counted(status.restarts_by_reason, reason),
        "restart_not_before": None,
        "pending_since": None,
        "plan": None,
        "halt": None,
    }
    return status.model_copy(update=numbers)


def _counted(counts: dict[str, int], reason: str) -> dict[str, int]:
    """One more restart for ``reason``; new reasons beyond a bound count as Other."""
    key = reason if reason in counts or len(counts) < MOST_REASONS else "Other"
    return {**counts, key: counts.get(key, 0) + 1}
