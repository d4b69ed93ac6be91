"""The operator as a process."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import kopf

from dlrm_api.errors import DLRMError
from dlrm_api.process import EventFormatter
from dlrm_operator.api_client import KubernetesApi
from dlrm_operator.controller.engine import Engine
from dlrm_operator.controller.handlers import build_registry
from dlrm_operator.log_context import ObjectFilter
from dlrm_operator.settings import Settings, read_settings

logger = logging.getLogger(__name__)

YOUNG_OBJECTS = 10_000
"""Made between two looks of the garbage collector at them: one event makes hundreds that are gone by its end."""
AGAIN_S = 1.0
"""Pause between two lives of the watches."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    log_events(plain=settings.log_format == "plain")
    _spare_garbage_collection()
    try:
        asyncio.run(run(settings))
    except DLRMError as error:
        logger.error("%s", error)
        sys.exit(error.exit_code)


def log_events(*, plain: bool) -> None:
    """Log our events and kopf's warnings to stderr: JSON with the job that each is about, or lines for people."""
    kopf.configure(log_format=kopf.LogFormat.JSON)
    for handler in logging.getLogger().handlers:
        handler.addFilter(ObjectFilter())
        if plain:
            handler.setFormatter(EventFormatter("operator"))
    logging.getLogger("kopf").setLevel(logging.WARNING)


def _spare_garbage_collection() -> None:
    """Keep what was imported out of every later collection: it stays for ever, and is most of what there is."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


async def run(settings: Settings) -> None:
    """Serve one namespace or all; returns when it is told to stop.

    kopf ends, and raises, where a watch meets what it does not repeat: a definition that was removed, an answer that
    was cut off. Then all begins anew in this process, which is sooner than a kubelet would do it. So it does where a
    definition came back that kopf, in one namespace, would not look for again.
    """
    api, lease_api = (KubernetesApi(settings.kubeconfig, in_cluster=settings.in_cluster) for _ in range(2))
    namespaces = [settings.namespace] if settings.namespace else []
    while True:
        engine = Engine(settings, api, lease_api)
        try:
            await kopf.operator(
                registry=build_registry(engine),
                standalone=True,
                clusterwide=settings.namespace is None,
                namespaces=namespaces,
                stop_flag=engine.ending,
            )
        except Exception as error:
            if not engine.started:
                raise  # nothing that passes: a port that is taken, a right that lacks
            logger.warning("watching ended, all begins anew: %s", error)
        else:
            if not engine.redefined:
                return
            logger.warning("DLRMJobs are defined again: watching begins anew")
        if await _told_to_stop(within_s=AGAIN_S):
            return


async def _told_to_stop(within_s: float) -> bool:
    """Whether a signal comes in that time; between its lives kopf listens to none."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    with suppress(TimeoutError):
        await asyncio.wait_for(told.wait(), within_s)
    return told.is_set()
