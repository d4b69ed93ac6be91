"""Why Kueue makes a job's pods wait, read from its Workload every now and then while they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from dlrm_api import names
from dlrm_operator.api_client import API_ERRORS, Api, Object
from dlrm_operator.manifests.scheduling import KUEUE
from dlrm_operator.reconcile.findings import shorten
from dlrm_operator.reconcile.health import waits_for_kueue
from dlrm_operator.reconcile.state import JobKey, Observed

# Also the delay of the first read: Kueue needs a moment to set its conditions.
SCHEDULE_INTERVAL_S = 1.0
POLL_INTERVAL_S = 15.0
# All jobs together: with more waiting jobs each Workload is read less often.
READS_PER_S = 5.0
MAX_MESSAGE_CHARACTERS = 1_024


@dataclass
class _Followed:
    workload: str
    due: float
    message: str = ""


def waiting_group(observed: Observed) -> str:
    """Return the pod group of the job that Kueue holds back; empty without one."""
    job = observed.job
    held = (pod for pod in observed.pods if pod.owner_uid == job.uid and waits_for_kueue(pod))
    return next((names.pod_group(job.key.name, pod.attempt) for pod in held), "")


class KueueClient:
    """Hold Kueue's last message for each waiting job."""

    def __init__(self, api: Api, wake: Callable[[JobKey], None]) -> None:
        self._api, self._wake = api, wake
        self._followed: dict[JobKey, _Followed] = {}

    def follow(self, key: JobKey, workload: str) -> None:
        """Read this Workload from now on; none if empty."""
        known = self._followed.get(key)
        if not workload:
            self.forget(key)
        elif known is None or known.workload != workload:
            self._followed[key] = _Followed(workload, time.monotonic() + SCHEDULE_INTERVAL_S)

    def forget(self, key: JobKey) -> None:
        """Stop reading the Workload of a job that no longer waits."""
        self._followed.pop(key, None)

    def message(self, key: JobKey) -> str:
        """Return Kueue's last message; empty until there is one."""
        return self._followed[key].message if key in self._followed else ""

    async def run(self) -> None:
        """Read each Workload when it is due, forever."""
        while True:
            await asyncio.sleep(SCHEDULE_INTERVAL_S)
            now = time.monotonic()
            for key, followed in list(self._followed.items()):
                if followed.due <= now:
                    followed.due = now + max(POLL_INTERVAL_S, len(self._followed) / READS_PER_S)
                    await self._read(key, followed)

    async def _read(self, key: JobKey, followed: _Followed) -> None:
        try:
            workload = await self._api.call("GET", f"{KUEUE.path(key.namespace)}/{followed.workload}")
        except API_ERRORS:
            # The last message stays. That the pods are admitted shows on the pods themselves.
            return
        message = shorten(quota_message(workload), MAX_MESSAGE_CHARACTERS)
        if message != followed.message:
            followed.message = message
            self._wake(key)


def quota_message(workload: Object) -> str:
    """Return why a Workload has no quota; empty if it has, or if Kueue has not decided yet."""
    conditions = {each["type"]: each for each in workload.get("status", {}).get("conditions", ())}
    reserved = conditions.get("QuotaReserved", {})
    if reserved.get("status") == "False":
        return str(reserved.get("message", ""))
    return str(conditions.get("Admitted", {}).get("message", "")) if reserved else ""
