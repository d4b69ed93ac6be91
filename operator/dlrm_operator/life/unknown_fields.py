"""Fields of a spec that this operator does not know, since its CustomResourceDefinition is newer: who says so, where.

What is known of such a spec is gone by: the gang that there is was made by a version that knew all of it, or before the
field was there. No gang is begun from it: a field that is passed over could make it train something else than is asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from dlrm_api.status import ConditionType, DLRMJobStatus
from dlrm_operator.facts.conditions import find_condition, first_few
from dlrm_operator.facts.reasons import Quoted
from dlrm_operator.life.phases import with_truth

GOES_ON = "the gang that is there goes on meanwhile"


def unknown_words(fields: Sequence[str]) -> str:
    """Which fields, why, and the mend; empty where there is none."""
    if not fields:
        return ""
    noun = "a field" if len(fields) == 1 else "fields"
    return (
        f"{first_few(fields)}: {noun} that this operator does not know, for it is older than the "
        "CustomResourceDefinition; no gang is begun before it is upgraded, or the spec is without"
    )


def beside_running(status: DLRMJobStatus, words: str, now: datetime) -> DLRMJobStatus:
    """The status of a job that has a gang, with what stands in the way of the next one told beside Running."""
    kind = ConditionType.RUNNING
    said = find_condition(status.conditions, kind)
    if said is None or not words or words in said.message:
        return status
    message = "; ".join(part for part in (said.message, words, GOES_ON) if part)
    return with_truth(status, kind, said.status, Quoted(said.reason), message, now=now)
