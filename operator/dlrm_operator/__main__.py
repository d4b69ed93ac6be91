"""``python -m dlrm_operator``: the operator process."""

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
from dlrm_operator.controller.handlers import Engine, build_registry
from dlrm_operator.controller.reconciler import ObjectFilter
from dlrm_operator.login import ClusterAccount
from dlrm_operator.settings import Settings, read_settings

logger = logging.getLogger(__name__)

# One event creates hundreds of short-lived objects: the default threshold collects several times per event.
GC_THRESHOLD = 10_000
RESTART_PAUSE_S = 1.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    log_events(plain=settings.log_format == "plain")
    tune_collector()
    try:
        asyncio.run(run(settings))
    except DLRMError as error:
        logger.error("%s", error)
        sys.exit(error.exit_code)


def tune_collector() -> None:
    """Collect less garbage than Python does by default."""
    # Imported modules stay forever, and are most of all objects: no later collection looks at them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def log_events(*, plain: bool) -> None:
    """Log our events and kopf's warnings to stderr, as JSON or as text."""
    kopf.configure(log_format=kopf.LogFormat.JSON)
    for handler in logging.getLogger().handlers:
        handler.addFilter(ObjectFilter())
        if plain:
            handler.setFormatter(EventFormatter("operator"))
    logging.getLogger("kopf").setLevel(logging.WARNING)


async def run(settings: Settings) -> None:
    """Serve one namespace or all; return once asked to stop.

    kopf ends with an error if a watch meets what kopf does not retry: a removed CustomResourceDefinition, a truncated
    response. Then everything is restarted within this process, which is faster than the kubelet. So it is when a
    definition was restored that kopf, limited to one namespace, would not discover.
    """
    account = ClusterAccount(settings.kubeconfig, in_cluster=settings.in_cluster)
    api, lease_api = KubernetesApi(account), KubernetesApi(account)
    while True:
        engine = Engine(settings, api, lease_api)
        try:
            await kopf.operator(
                registry=build_registry(engine, account),
                standalone=True,
                clusterwide=settings.namespace is None,
                namespaces=[settings.namespace] if settings.namespace else [],
                stop_flag=engine.ending,
            )
        except Exception as error:
            # A port in use or a missing permission does not pass.
            if not engine.started:
                raise
            logger.warning("watch terminated, restarting the operator loop", extra={"error": str(error)})
        else:
            if not engine.crd_restored:
                return
            logger.warning("CustomResourceDefinition restored, restarting the operator loop")
        if await _told_to_stop(within_s=RESTART_PAUSE_S):
            return


async def _told_to_stop(within_s: float) -> bool:
    """Return whether a signal arrives within this time; between two loops kopf handles none."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), within_s)
    return stop.is_set()


if __name__ == "__main__":
    main()
