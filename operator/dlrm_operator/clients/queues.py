"""Why Kueue lets a gang wait, in its own words: asked of the API server now and then, while one waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from dlrm_api import names
from dlrm_operator.api_client import Api, ClusterRefusedError, ClusterUnavailableError, NotFoundError, Object
from dlrm_operator.manifests.gang_scheduling import KUEUE
from dlrm_operator.reconcile.attempts import waits_for_kueue
from dlrm_operator.reconcile.findings import shorten
from dlrm_operator.reconcile.state import JobKey, Observed

LOOK_S = 1.0
"""Between two looks at who is to be asked for; the first answer would come before Kueue has spoken."""
EVERY_S = 15.0
ASKS_PER_S = 5.0
"""All gangs together; where more wait each is asked for less often."""
MOST_WORDS = 1_024


@dataclass
class _Asked:
    group: str
    due: float
    """Monotonic seconds."""
    words: str = ""


def waiting_group(observed: Observed) -> str:
    """The group of the job that Kueue has taken over and not admitted; empty where there is none."""
    job = observed.job
    held = (pod for pod in observed.pods if pod.owner_uid == job.uid and waits_for_kueue(pod))
    return next((names.pod_group(job.key.name, pod.attempt) for pod in held), "")


class Queues:
    """The last words by job."""

    def __init__(self, api: Api, wake: Callable[[JobKey], None]) -> None:
        self._api = api
        self._wake = wake
        self._asked: dict[JobKey, _Asked] = {}

    def follow(self, key: JobKey, group: str) -> None:
        """Ask for this group from now on; empty: for none."""
        known = self._asked.get(key)
        if not group:
            self.forget(key)
        elif known is None or known.group != group:
            self._asked[key] = _Asked(group, time.monotonic() + LOOK_S)

    def forget(self, key: JobKey) -> None:
        """The job waits no longer."""
        self._asked.pop(key, None)

    def words(self, key: JobKey) -> str:
        """What Kueue said last; empty until it has."""
        known = self._asked.get(key)
        return known.words if known else ""

    async def run(self) -> None:
        """Ask for each group in its turn, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for key, asked in list(self._asked.items()):
                if asked.due <= now:
                    asked.due = now + max(EVERY_S, len(self._asked) / ASKS_PER_S)
                    await self._ask(key, asked)

    async def _ask(self, key: JobKey, asked: _Asked) -> None:
        try:
            workload = await self._api.call("GET", f"{KUEUE.path(key.namespace)}/{asked.group}")
        except (ClusterUnavailableError, ClusterRefusedError, NotFoundError):
            return  # what was said last stands; the pods themselves say when they are admitted
        words = shorten(quota_words(workload), MOST_WORDS)
        if words != asked.words:
            asked.words = words
            self._wake(key)


def quota_words(workload: Object) -> str:
    """Why a Workload has no quota; empty where it has, or nobody has looked yet."""
    found = workload.get("status", {}).get("conditions", ())
    said = {condition["type"]: condition for condition in found}
    reserved = said.get("QuotaReserved", {})
    if reserved.get("status") == "False":
        return str(reserved.get("message", ""))
    return str(said.get("Admitted", {}).get("message", "")) if reserved else ""
