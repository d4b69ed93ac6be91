"""One leader by a Lease (coordination.k8s.io), and the fence that keeps everybody else from writing.

A follower takes over once it has watched the same record for its whole duration on its own clock, so no clocks are
compared. The leader trusts itself for less long than that: it counts from the moment at which it *sent* its last
renewal, stops to begin writes after ``renew_deadline_s``, and cuts off a write in flight when the duration is over.
A renewal is one request, on top of the record that the last one was answered with, and is sent ``renew_every_s`` after
it was: so a server that takes as long as that to answer each request is led without a gap.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dlrm_operator.api_client import (
    JSON,
    Api,
    ClusterRefusedError,
    ClusterUnavailableError,
    ConflictError,
    NotFoundError,
    Object,
    Query,
)
from dlrm_operator.metrics import LEASE_HELD

logger = logging.getLogger(__name__)

NAME = "dlrm-operator"
LOOK_S = 1.0
"""A follower looks at the Lease so often, and a leader that could not renew it tries again after this."""
MICROSECONDS = "%Y-%m-%dT%H:%M:%S.%fZ"


@dataclass(frozen=True, kw_only=True)
class LeaseTimes:
    """Seconds. Each is shorter than the one before it."""

    duration_s: float = 12.0
    """A follower takes over when the Lease stood still for so long."""
    renew_deadline_s: float = 8.0
    """The leader begins no write when its renewal is older; one in flight then has the rest of the duration."""
    renew_every_s: float = 4.0
    """From one renewal to the next, as they are sent; each is given up after so long."""


class Leader:
    """Whether this process leads. One instance a process; ``run`` is a task."""

    def __init__(self, api: Api, namespace: str, identity: str, times: LeaseTimes, changed: Callable[[], None]) -> None:
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._identity = identity
        self._times = times
        self._changed = changed
        self._renewed_at = float("-inf")
        self._written: Object | None = None
        """The record as this process wrote it last; None where another may have written since, or nobody knows."""
        self._seen: tuple[str, float] = ("", float("-inf"))
        """The record's version as last read, and since when it has stood still; no version where it was not there."""
        self._holds_for_s = 0.0
        """How long whoever held it when it was last read may go on without it; 0 where that is nobody else."""
        self._looked_at = float("-inf")
        self._was_held = False

    @property
    def held(self) -> bool:
        """Whether a write may begin now."""
        return time.monotonic() < self._renewed_at + self._times.renew_deadline_s

    @property
    def write_until(self) -> float:
        """Monotonic moment at which a write must be answered, or given up: another may lead from then on."""
        return self._renewed_at + self._times.duration_s

    @property
    def known(self) -> bool:
        """Whether the Lease is held, or its holder was seen lately."""
        return self.held or time.monotonic() - self._looked_at < self._times.duration_s

    async def run(self) -> None:
        """Hold or follow, for ever."""
        while True:
            try:
                await self._look()
            except ConflictError:
                pass  # another one was first
            except (ClusterUnavailableError, ClusterRefusedError):
                logger.warning("the Lease could not be looked at", exc_info=True)
            self._tell()
            await asyncio.sleep(self._rest_s(random.uniform(0.8, 1.0)))  # noqa: S311

    async def release(self) -> None:
        """Let the next one lead at once. Nothing is written by this process from here on."""
        held, self._renewed_at = self.held, float("-inf")
        self._tell()
        if not held:
            return
        try:
            record = await self._call("GET", f"/{NAME}")
            if record["spec"].get("holderIdentity") == self._identity:
                await self._write(record, holder="", duration_s=1.0)
        except (ClusterUnavailableError, ClusterRefusedError):
            logger.warning("the Lease was not released: the next leader waits for its end", exc_info=True)

    def _rest_s(self, part: float) -> float:
        """Until the next look: of a Lease that was renewed just now, until that is due again."""
        if self._written is None:
            return LOOK_S * part
        return max(self._renewed_at + self._times.renew_every_s * part - time.monotonic(), 0.0)

    def _hold(self, since: float) -> None:
        """Lead since then. That the last renewal had run out before is told first: work was passed over meanwhile."""
        self._tell()
        self._renewed_at = since

    def _tell(self) -> None:
        held = self.held
        LEASE_HELD.set(held)
        if held != self._was_held:
            self._was_held = held
            logger.info("this process leads" if held else "this process does not lead any more")
            self._changed()

    async def _look(self) -> None:
        """Renew the Lease, take it where it is free or stood still for long enough, or remember that it moved.

        One that somebody deleted is made again by who held it; others wait as if it stood still.
        """
        record, self._written = self._written, None
        if record is not None:
            with suppress(ConflictError, NotFoundError):  # somebody wrote to it, or deleted it
                await self._renew(record)
                return
        try:
            record = await self._call("GET", f"/{NAME}")
        except NotFoundError:
            if self._still_s("") >= self._holds_for_s:
                await self._create()
            return
        spec = record.get("spec") or {}
        still_s, holder = self._still_s(record["metadata"]["resourceVersion"]), spec.get("holderIdentity") or ""
        self._holds_for_s = 0.0 if holder in ("", self._identity) else float(spec.get("leaseDurationSeconds") or 0)
        if still_s >= self._holds_for_s:
            await self._renew(record)
        else:
            self._renewed_at = float("-inf")

    def _still_s(self, version: str) -> float:
        """Seconds for which the record has been of this version, which was read just now."""
        self._looked_at = time.monotonic()
        if self._seen[0] != version:
            self._seen = version, self._looked_at
        return self._looked_at - self._seen[1]

    async def _create(self) -> None:
        sent = time.monotonic()
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME},
            "spec": self._spec({}, self._identity, self._times.duration_s),
        }
        self._written = await self._call("POST", "", body)
        self._hold(sent)

    async def _renew(self, record: Object) -> None:
        """Hold it, unless another was first."""
        sent = time.monotonic()
        self._written = await self._write(record, holder=self._identity, duration_s=self._times.duration_s)
        self._hold(sent)

    async def _write(self, record: Object, *, holder: str, duration_s: float) -> Object:
        """Guarded by the resource version that was read: of two who try, one is refused."""
        body = {**record, "spec": self._spec(record.get("spec") or {}, holder, duration_s)}
        return await self._call("PUT", f"/{NAME}", body)

    async def _call(self, method: str, path: str, body: Object | None = None) -> Object:
        """Given up early enough for another try before what was renewed last runs out."""
        done_by = time.monotonic() + self._times.renew_every_s
        return await self._api.call(method, self._path + path, body, done_by=done_by)

    def _spec(self, before: Object, holder: str, duration_s: float) -> Object:
        now = datetime.now(UTC).strftime(MICROSECONDS)
        changed = before.get("holderIdentity") != holder
        return {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(duration_s)),
            "acquireTime": now if changed else before.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (changed and bool(holder)),
        }


class FencedApi:
    """The API as the leader uses it: reads always go, a write only while the Lease is held."""

    def __init__(self, api: Api, leader: Leader) -> None:
        self._api = api
        self._leader = leader

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Query | None = None,
        accept: str = JSON,
        done_by: float = math.inf,
    ) -> Object:
        """See ``api_client.Api``; a write also fails where this process does not lead.

        Raises:
            ClusterUnavailableError: another one may lead by now, so nothing was sent.
        """
        if method == "GET":
            return await self._api.call(method, path, body, query, accept, done_by)
        if not self._leader.held:
            raise ClusterUnavailableError(f"{method} {path}: not sent, since this process does not hold the Lease")
        return await self._api.call(method, path, body, query, accept, min(done_by, self._leader.write_until))

    async def list_all(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """See ``api_client.Api``."""
        return await self._api.list_all(path, query, accept)

    def watch(self, path: str, query: Query, silence_s: float) -> Any:
        """See ``api_client.Api``."""
        return self._api.watch(path, query, silence_s)
