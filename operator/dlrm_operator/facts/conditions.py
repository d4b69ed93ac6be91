"""Conditions by the Kubernetes conventions: a pure change of one keeps the others and its own history."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from dlrm_api.errors import visible
from dlrm_api.status import Condition, ConditionType
from dlrm_operator.facts.reasons import Word

Truth = Literal["True", "False", "Unknown"]
MESSAGE_LENGTH = 4_096
REASON_LENGTH = 128
MOST_NAMED = 3
Conditions = tuple[Condition, ...]


def timestamp(moment: datetime) -> str:
    """A moment as Kubernetes writes it, in whole seconds of UTC."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """The moment that :func:`timestamp`, or the API server, wrote."""
    return datetime.fromisoformat(text)


def shorten(text: str, length: int) -> str:
    """The text, made visible (pods say some of it), and cut in its middle where it is longer than ``length``."""
    text = visible(text)
    if len(text) <= length:
        return text
    mark = " [...] "
    head = (length - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (length - len(mark) - head) :]


def first_few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def find_condition(conditions: Conditions, kind: ConditionType) -> Condition | None:
    """The condition of that type, where there is one."""
    return next((condition for condition in conditions if condition.type == kind), None)


def with_condition(
    conditions: Conditions,
    kind: ConditionType,
    truth: Truth,
    reason: Word,
    message: str = "",
    *,
    now: datetime,
    generation: int,
) -> Conditions:
    """Set one condition; ``lastTransitionTime`` moves only with ``status``. A new one goes last."""
    old = find_condition(conditions, kind)
    why, message = reason[:REASON_LENGTH] or "Unknown", shorten(message, MESSAGE_LENGTH)
    if old and (old.status, old.reason, old.message, old.observed_generation) == (truth, why, message, generation):
        return conditions
    new = Condition(
        type=kind,
        status=truth,
        reason=why,
        message=message,
        last_transition_time=old.last_transition_time if old and old.status == truth else timestamp(now),
        observed_generation=generation,
    )
    if old is None:
        return (*conditions, new)
    return tuple(new if condition.type == kind else condition for condition in conditions)


def with_old_times(conditions: Conditions, before: Conditions) -> Conditions:
    """The conditions with ``before``'s transition times where the status is the same after all."""
    kept = []
    for condition in conditions:
        old = find_condition(before, condition.type)
        if old is not None and old.status == condition.status:
            condition = condition.model_copy(update={"last_transition_time": old.last_transition_time})
        kept.append(condition)
    return tuple(kept)
