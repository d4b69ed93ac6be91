"""``GET /stacks`` of every pod of a job that seems to hang; a later reconcile sees the answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from dlrm_api.names import Port
from dlrm_operator.clients.pod_requests import POD_ERRORS, PendingRequests, pod_session, pod_url, read_body
from dlrm_operator.reconcile.state import JobKey, RequestStacks, StacksSeen, TrainingPosition

logger = logging.getLogger(__name__)

PARALLEL_REQUESTS = 16
# A pod takes up to a few seconds if one of its ranks keeps the GIL.
TIMEOUT_S = 10.0
MAX_POD_BYTES = 262_144
# All answers of a job are held at once, so its pods share this budget.
MAX_JOB_BYTES = 32 * 2**20
MAX_LOGGED_CHARACTERS = 16_384
KEEP_S = 600.0
"""The reconcile that the answers wake decides by them; if it cannot, the pods are asked again after this time."""


class StackClient(PendingRequests[TrainingPosition, StacksSeen]):
    """Fetch and log the stacks of all ranks, at most ``PARALLEL_REQUESTS`` pods at once."""

    def __init__(self, wake: Callable[[JobKey], None]) -> None:
        super().__init__(wake, keep_s=lambda _: KEEP_S)
        self._slots = asyncio.Semaphore(PARALLEL_REQUESTS)

    def request(self, action: RequestStacks) -> None:
        """Fetch the stacks unless the same request is running."""
        self.ask(action.key, action.place, lambda: self._fetch(action))

    async def _fetch(self, action: RequestStacks) -> StacksSeen:
        max_bytes = min(MAX_POD_BYTES, MAX_JOB_BYTES // max(1, len(action.ips)))
        async with pod_session(TIMEOUT_S) as session:
            texts = await asyncio.gather(*(self._fetch_pod(session, ip, max_bytes) for ip in action.ips.values()))
        seen = StacksSeen(place=action.place, texts=dict(zip(action.ips, texts, strict=True)))
        # The pods are about to be restarted: the log is all that is left of their stacks.
        for pod, text in seen.texts.items():
            extra = {"job": str(action.key), "step": action.place.step, "pod": pod}
            logger.warning("no progress, stacks of pod", extra={**extra, "stacks": text[:MAX_LOGGED_CHARACTERS]})
        return seen

    async def _fetch_pod(self, session: aiohttp.ClientSession, ip: str, max_bytes: int) -> str:
        try:
            url = pod_url(ip, Port.TRAINER, "/stacks")
            async with self._slots, session.get(url, allow_redirects=False) as response:
                response.raise_for_status()
                return (await read_body(response, max_bytes)).decode(errors="replace")
        except POD_ERRORS:
            return ""
