"""Leader election by a Lease (coordination.k8s.io), and the fence that keeps followers from writing.

A follower takes over once the record has not changed for its whole duration by the follower's clock, so no clocks are
compared. The leader counts from the moment at which it *sent* its last renewal: it begins no write after
``renew_deadline_s``, and abandons writes in flight when the duration is over. A renewal is one request, based on the
response to the one before, and is sent ``renew_interval_s`` after it: even a server that takes as long as that for each
request is led without a gap.
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

from dlrm_operator.api_client import (
    API_ERRORS,
    JSON,
    Api,
    ClusterUnavailableError,
    ConflictError,
    NotFoundError,
    Object,
    Query,
)
from dlrm_operator.metrics import LEASE_HELD

logger = logging.getLogger(__name__)

LEASE_NAME = "dlrm-operator"
POLL_INTERVAL_S = 1.0
"""Interval at which a follower reads the Lease, and a leader retries a failed renewal."""
MICROSECONDS = "%Y-%m-%dT%H:%M:%S.%fZ"


@dataclass(frozen=True, kw_only=True)
class LeaseTimes:
    """Configure the election. Each time is shorter than the one before it."""

    duration_s: float = 12.0
    """A follower takes over when the Lease has not changed for this time."""
    renew_deadline_s: float = 8.0
    """The leader begins no write if its last renewal is older; a write in flight has the rest of the duration."""
    renew_interval_s: float = 4.0
    """Time from one renewal to the next, and the timeout of each."""


class Leader:
    """Hold or follow the Lease. One instance per process; ``run`` is a task."""

    def __init__(self, api: Api, namespace: str, identity: str, times: LeaseTimes, changed: Callable[[], None]) -> None:
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._identity, self._times, self._changed = identity, times, changed
        self._renewed_at = float("-inf")
        self._written: Object | None = None
        """The record as this process wrote it last; None if another process may have written since."""
        self._seen: tuple[str, float] = ("", float("-inf"))
        """The record's version as last read, and since when it is unchanged; an empty version if it is absent."""
        self._other_holds_s = 0.0
        """Seconds for which another holder may act without renewing; 0 if nobody else holds the Lease."""
        self._read_at = float("-inf")
        self._was_held = False

    @property
    def held(self) -> bool:
        """Return whether a write may begin now."""
        return time.monotonic() < self._renewed_at + self._times.renew_deadline_s

    @property
    def write_until(self) -> float:
        """Return the monotonic time at which writes must be abandoned: another process may lead from then on."""
        return self._renewed_at + self._times.duration_s

    @property
    def known(self) -> bool:
        """Return whether the Lease is held here, or was read recently."""
        return self.held or time.monotonic() - self._read_at < self._times.duration_s

    async def run(self) -> None:
        """Hold or follow the Lease, forever."""
        while True:
            await self.step()
            await asyncio.sleep(self._pause_s(random.uniform(0.8, 1.0)))  # noqa: S311

    async def step(self) -> None:
        """Renew the Lease or try to acquire it, and publish the result."""
        try:
            await self._acquire_or_renew()
        except ConflictError:
            # Another process was first.
            pass
        except API_ERRORS as error:
            logger.warning("failed to read or renew lease", extra={"lease": LEASE_NAME, "error": str(error)})
        self._publish()

    async def release(self) -> None:
        """Let another process lead at once. This process writes nothing from here on."""
        held, self._renewed_at = self.held, float("-inf")
        self._publish()
        if not held:
            return
        try:
            record = await self._call("GET", f"/{LEASE_NAME}")
            if record["spec"].get("holderIdentity") == self._identity:
                await self._write(record, holder="", duration_s=1.0)
        except API_ERRORS as error:
            extra = {"lease": LEASE_NAME, "error": str(error)}
            logger.warning("failed to release lease; the next leader waits for it to expire", extra=extra)

    def _pause_s(self, part: float) -> float:
        due_s = self._renewed_at + self._times.renew_interval_s * part - time.monotonic()
        return POLL_INTERVAL_S * part if self._written is None else max(due_s, 0.0)

    def _hold(self, since: float) -> None:
        # If the last renewal has expired, this process was no leader for a moment and skipped work: publish that
        # first, so that the change back to leader wakes all jobs.
        self._publish()
        self._renewed_at = since

    def _publish(self) -> None:
        held = self.held
        LEASE_HELD.set(held)
        if held != self._was_held:
            self._was_held = held
            logger.info("leader election won" if held else "leader election lost")
            self._changed()

    async def _acquire_or_renew(self) -> None:
        """Renew the Lease, take it if it is free or expired, or note that its holder has renewed it.

        A deleted Lease is created again by its holder; others wait as if it were unchanged.
        """
        record, self._written = self._written, None
        if record is not None:
            # Somebody wrote to it, or deleted it.
            with suppress(ConflictError, NotFoundError):
                await self._renew(record)
                return
        try:
            record = await self._call("GET", f"/{LEASE_NAME}")
        except NotFoundError:
            if self._unchanged_s("") >= self._other_holds_s:
                await self._renew(None)
            return
        spec = record.get("spec") or {}
        unchanged_s, holder = self._unchanged_s(record["metadata"]["resourceVersion"]), spec.get("holderIdentity") or ""
        self._other_holds_s = 0.0 if holder in ("", self._identity) else float(spec.get("leaseDurationSeconds") or 0)
        if unchanged_s >= self._other_holds_s:
            await self._renew(record)
        else:
            self._renewed_at = float("-inf")

    def _unchanged_s(self, version: str) -> float:
        """Return the seconds for which the record has had this version, which was read just now."""
        self._read_at = time.monotonic()
        if self._seen[0] != version:
            self._seen = version, self._read_at
        return self._read_at - self._seen[1]

    async def _renew(self, record: Object | None) -> None:
        """Write the Lease as its holder; create it without a record."""
        sent = time.monotonic()
        self._written = await self._write(record, holder=self._identity, duration_s=self._times.duration_s)
        self._hold(sent)

    async def _write(self, record: Object | None, *, holder: str, duration_s: float) -> Object:
        new: Object = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE_NAME}}
        # The resource version of the record guards the update: of two concurrent ones, one is refused.
        body = record or new
        body = {**body, "spec": self._spec(body.get("spec") or {}, holder, duration_s)}
        return await self._call("PUT" if record else "POST", f"/{LEASE_NAME}" if record else "", body)

    async def _call(self, method: str, path: str, body: Object | None = None) -> Object:
        # This leaves time for another try before the last renewal expires.
        done_by = time.monotonic() + self._times.renew_interval_s
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
    """Send reads always, writes only while the Lease is held."""

    def __init__(self, api: Api, leader: Leader) -> None:
        self._api, self._leader = api, leader

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Query | None = None,
        accept: str = JSON,
        done_by: float = math.inf,
    ) -> Object:
        """Send a request, see ``api_client.Api``; a write also fails if this process is not the leader.

        Raises:
            ClusterUnavailableError: another process may lead by now, so nothing was sent.
        """
        if method == "GET":
            return await self._api.call(method, path, body, query, accept, done_by)
        if not self._leader.held:
            raise ClusterUnavailableError(f"{method} {path}: not sent: this process is not the leader")
        return await self._api.call(method, path, body, query, accept, min(done_by, self._leader.write_until))

    async def list_all(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """List a collection, see ``api_client.Api``."""
        return await self._api.list_all(path, query, accept)
