"""Decide what follows a failure: fail or restart, within which budget, after which wait."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace

from dlrm_api.lifecycle import RestartAction, RestartSpec
from dlrm_api.names import USER_ERROR_CODES

JITTER = 0.25
"""Largest share by which a wait is shortened: jobs that one node took down do not all return at once."""


def restart_action(
    code: int, spec: RestartSpec, *, disrupted: bool, fatal: Collection[int] = USER_ERROR_CODES
) -> RestartAction:
    """Return what follows a trainer's nonzero exit code: the job's rules, then its built-in meaning.

    ``disrupted``: the process was stopped from outside, for example by a node drain. After one of the ``fatal`` codes a
    restart would fail again.
    """
    for rule in spec.rules_by_exit_code:
        if code in rule.exit_codes:
            return rule.action
    if code in fatal:
        return "fail"
    return "restart-free" if disrupted else "restart"


def backoff_s(spec: RestartSpec, restarts: int, seed: str = "") -> float:
    """Return the seconds to wait before restart number ``restarts``: they double up to ``maxBackoff``.

    A ``seed`` shortens the wait by a jitter that is a function of it; without one there is no jitter.
    """
    full = min(spec.backoff * 2.0 ** min(restarts - 1, 60), spec.max_backoff)
    draw = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]) / 2**64 if seed else 0.0
    return full * (1 - JITTER * draw)


@dataclass(frozen=True, kw_only=True)
class RestartBudget:
    """Count the restarts since the last progress; those after disruptions have a budget of their own."""

    charged: int = 0
    free: int = 0

    def take(self, action: RestartAction, spec: RestartSpec) -> RestartBudget | None:
        """Return the budget after one more restart, or None if the spec allows no more."""
        if action == "restart-free":
            return replace(self, free=self.free + 1) if self.free < spec.max_free_restarts else None
        return replace(self, charged=self.charged + 1) if self.charged < spec.max_restarts else None
