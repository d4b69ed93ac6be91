"""The operator as a process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import kopf

from dlrm_api.errors import DLRMError
from dlrm_operator.cluster import KubernetesApi
from dlrm_operator.engine import Engine
from dlrm_operator.handlers import build_registry
from dlrm_operator.settings import Settings, read_settings

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    settings = read_settings(sys.argv[1:] if argv is None else argv)
    log_format = kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.PLAIN
    kopf.configure(log_format=log_format)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(run(settings))
    except DLRMError as error:
        logger.error("%s", error)
        sys.exit(error.exit_code)


async def run(settings: Settings) -> None:
    """Serve one namespace or all; returns when it is told to stop."""
    engine = Engine(settings, KubernetesApi(settings.kubeconfig, in_cluster=settings.in_cluster))
    namespaces = [settings.namespace] if settings.namespace else []
    await kopf.operator(
        registry=build_registry(engine),
        standalone=True,
        clusterwide=settings.namespace is None,
        namespaces=namespaces,
    )
