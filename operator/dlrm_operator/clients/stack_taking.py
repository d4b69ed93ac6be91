"""Stacks of gangs that seem to hang: ``GET /stacks`` of every pod, beside the turns; a later turn sees the answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from dlrm_api.names import Port
from dlrm_operator.clients.addresses import pod_url
from dlrm_operator.clients.questions import Questions
from dlrm_operator.reconcile.state import JobKey, Place, RequestStacks, StacksSeen

logger = logging.getLogger(__name__)

PARALLEL = 16
TIMEOUT_S = 10.0
"""A pod takes up to a few seconds where a rank of it keeps the GIL."""
MOST_BYTES = 262_144
"""Of one pod."""
BUDGET_BYTES = 32 * 2**20
"""Of all pods of a gang, each of which gets an equal share: they are held at once."""
LOGGED_CHARACTERS = 16_384
"""Of one pod: what a hung gang's pods said goes to the log, for the pods are restarted."""
KEEP_S = 600.0
"""The turn that the answers wake judges by them; where it could not, they are asked for again after this."""


class StackTaker(Questions[Place, StacksSeen]):
    """Asks for stacks, at most ``PARALLEL`` pods at once."""

    def __init__(self, wake: Callable[[JobKey], None]) -> None:
        super().__init__(wake, keep_s=lambda _: KEEP_S)
        self._slots = asyncio.Semaphore(PARALLEL)

    def request(self, action: RequestStacks) -> None:
        """Ask, unless these pods are being asked already at this very place."""
        self.ask(action.key, action.place, lambda: self._take(action))

    async def _take(self, action: RequestStacks) -> StacksSeen:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        share = min(MOST_BYTES, BUDGET_BYTES // max(1, len(action.ips)))
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            texts = await asyncio.gather(*(self._pod(session, ip, share) for ip in action.ips.values()))
        seen = StacksSeen(place=action.place, texts=dict(zip(action.ips, texts, strict=True)))
        for pod, text in seen.texts.items():
            job = f"{action.key.namespace}/{action.key.name}"
            extra = {"job": job, "pod": pod, "stacks": text[:LOGGED_CHARACTERS]}
            logger.warning("no step after step %d: stacks of %s", action.place.step, pod, extra=extra)
        return seen

    async def _pod(self, session: aiohttp.ClientSession, ip: str, most_bytes: int) -> str:
        """One pod's answer, or the beginning of a longer one; empty where it gives none."""
        url, body = pod_url(ip, Port.TRAINER, "/stacks"), bytearray()
        try:
            async with self._slots, session.get(url, allow_redirects=False) as response:
                response.raise_for_status()
                async for chunk in response.content.iter_chunked(16_384):
                    body += chunk
                    if len(body) >= most_bytes:
                        break
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""
        return bytes(body[:most_bytes]).decode(errors="replace")
