"""kopf's part: events wake jobs, and decide nothing.

``on.event`` alone patches nothing onto an object: no finalizer that could hold a deletion up while the operator is
away, no annotation. Timers, daemons and ``on.create`` do patch (kopf 1.45.2), so none is used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

import kopf

from dlrm_api.names import GROUP, VERSION
from dlrm_operator.controller.engine import Engine
from dlrm_operator.controller.kopf_storage import NoEssence, NoProgress
from dlrm_operator.reconcile.state import JobKey


def build_registry(engine: Engine) -> kopf.OperatorRegistry:
    """The handlers of one engine; what they return would be stored in the status, so it is None."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry, retries=5)
    async def logged_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return await asyncio.to_thread(partial(kopf.login_via_client, **kwargs))

    @kopf.on.startup(registry=registry)
    async def started(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, engine)
        await engine.start()

    @kopf.on.cleanup(registry=registry)
    async def stopped(**_: Any) -> None:
        await engine.stop()

    @kopf.on.event(GROUP, VERSION, "dlrmjobs", registry=registry)
    async def job_changed(body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002  kopf's name
        key = JobKey(body["metadata"]["namespace"], body["metadata"]["name"])
        known = engine.jobs.get(key)
        engine.jobs.heard_at = time.monotonic()
        if type == "DELETED":
            engine.jobs.forget(key)
        elif engine.jobs.saw(dict(body)) is known:
            return  # what a turn has seen, or has written
        engine.wakeups.add(key)

    if engine.settings.profiles is None:  # else no right beyond one namespace is asked for

        @kopf.on.event(GROUP, VERSION, "hardwareprofiles", registry=registry)
        async def profile_changed(**_: Any) -> None:
            engine.wake_all()

    return registry


def configure(settings: kopf.OperatorSettings, engine: Engine) -> None:
    """Short timeouts, no Event for each line of log, and in one namespace no look at the whole cluster."""
    settings.persistence.diffbase_storage = NoEssence()
    settings.persistence.progress_storage = NoProgress()
    settings.posting.level = logging.WARNING
    settings.process.ultimate_exiting_timeout = None  # else kopf kills the process so long after its watches ended
    settings.networking.error_backoffs = (0.5, 1, 2, 4)
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 15
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 300
    settings.watching.chunk_size = 500
    settings.scanning.disabled = engine.settings.namespace is not None
