"""Report specs that this version of the operator cannot read in full."""

from __future__ import annotations

from datetime import datetime

from dlrm_api.status import ConditionType, DLRMJobStatus
from dlrm_operator.reconcile.findings import Quoted, find_condition, with_truth

GOES_ON = "the gang that is there goes on meanwhile"


def beside_running(status: DLRMJobStatus, words: str, now: datetime) -> DLRMJobStatus:
    """The status of a job that has a gang, with what stands in the way of the next one told beside Running."""
    kind = ConditionType.RUNNING
    said = find_condition(status.conditions, kind)
    if said is None or not words or words in said.message:
        return status
    message = "; ".join(part for part in (said.message, words, GOES_ON) if part)
    return with_truth(status, kind, said.status, Quoted(said.reason), message, now=now)
