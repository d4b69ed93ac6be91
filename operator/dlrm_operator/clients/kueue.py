"""Kueue's Workloads: in the version that the server serves, and why one makes a job's pods wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from dlrm_api import names
from dlrm_operator.api_client import API_ERRORS, METADATA_ONLY, Api, NotFoundError, Object
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
AnswerT = TypeVar("AnswerT")


class Workloads:
    """Reach Workloads in the newest version that the server serves and the operator knows.

    The version is looked up once, and again after a 404: Kueue may have been upgraded meanwhile.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._version = ""

    async def get(self, namespace: str, name: str) -> Object:
        """Return one Workload.

        Raises:
            NotFoundError: it does not exist, or the server serves no known version.
        """
        return await self._request(lambda version: self._api.call("GET", f"{KUEUE.path(namespace, version)}/{name}"))

    async def metadata(self, namespace: str, name: str) -> list[Object]:
        """Return the metadata of the Workload of that name, if it exists.

        Raises:
            NotFoundError: the server serves no known version.
        """
        query = {"fieldSelector": f"metadata.name={name}"}
        items, _ = await self._request(
            lambda version: self._api.list_all(KUEUE.path(namespace, version), query, METADATA_ONLY)
        )
        return items

    async def delete(self, namespace: str, name: str, options: Object) -> None:
        """Delete one Workload, see ``get``."""
        await self._request(
            lambda version: self._api.call("DELETE", f"{KUEUE.path(namespace, version)}/{name}", options)
        )

    async def _request(self, send: Callable[[str], Awaitable[AnswerT]]) -> AnswerT:
        known = self._version or await self._discover()
        try:
            return await send(known)
        except NotFoundError:
            if (served := await self._discover()) == known:
                raise
            return await send(served)

    async def _discover(self) -> str:
        self._version = ""
        group = await self._api.call("GET", f"/apis/{KUEUE.group}")
        served = {each["version"] for each in group["versions"]}
        self._version = next((version for version in KUEUE.versions if version in served), "")
        if not self._version:
            raise NotFoundError(404, f"this cluster serves no {KUEUE}")
        return self._version


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
        self.workloads = Workloads(api)
        self._wake = wake
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
            workload = await self.workloads.get(key.namespace, followed.workload)
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
