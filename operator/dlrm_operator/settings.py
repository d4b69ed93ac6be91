"""What the operator's own environment and flags say. Read here alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_api.names import Port
from dlrm_operator.images import Images


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one operator process."""

    kubeconfig: str | None = None
    """File, or files with colons between; None: the pod's service account, else ``~/.kube/config``."""
    in_cluster: bool = False
    namespace: str | None = None
    """The only namespace to serve; None: all of them."""
    address: str = "0.0.0.0"  # noqa: S104  probes and Prometheus come from other hosts
    port: int = Port.OPERATOR_METRICS
    """Of /healthz, /readyz and /metrics."""
    resync_s: float = 45.0
    """Each job is woken so often without an event: a watch can fall silent, and deadlines pass without one."""
    poll_s: float = 2.0
    """Shortest time between two looks at one job's progress; with many jobs it grows."""
    plan_deadline_s: float = 300.0
    stale_s: float = 180.0
    """The pod watch counts as dead when the server has been silent for so long; it bookmarks each minute."""
    log_format: str = "json"
    images: Images = field(default_factory=Images)


def read_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Flags before environment before defaults."""
    known = Settings()
    parser = argparse.ArgumentParser(prog="dlrm_operator", description="Runs DLRMJobs.")
    parser.add_argument(
        "--namespace", default=environ.get("DLRM_NAMESPACE") or None, help="serve this namespace alone; by default all"
    )
    parser.add_argument("--address", default=environ.get("DLRM_ADDRESS", known.address), help="address to listen on")
    parser.add_argument("--port", type=int, default=environ.get("DLRM_PORT", known.port), help="port to listen on")
    parser.add_argument("--resync-s", type=float, default=environ.get("DLRM_RESYNC_S", known.resync_s))
    parser.add_argument("--poll-s", type=float, default=environ.get("DLRM_POLL_S", known.poll_s))
    parser.add_argument(
        "--plan-deadline-s", type=float, default=environ.get("DLRM_PLAN_DEADLINE_S", known.plan_deadline_s)
    )
    parser.add_argument("--log-format", choices=["json", "plain"], default=environ.get("DLRM_LOG_FORMAT", "json"))
    flags = parser.parse_args(argv)
    images = Images(
        trainer=environ.get("DLRM_TRAINER_IMAGE") or known.images.trainer,
        checkpointer=environ.get("DLRM_CHECKPOINTER_IMAGE") or known.images.checkpointer,
    )
    return Settings(
        **vars(flags),
        kubeconfig=environ.get("KUBECONFIG") or None,
        in_cluster="KUBERNETES_SERVICE_HOST" in environ,
        images=images,
    )
