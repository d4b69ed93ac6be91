"""What the operator's own environment and flags say. Read here alone."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_api.names import ANY_ADDRESS, Port
from dlrm_operator.clients.references import ProfileSource
from dlrm_operator.leader import LeaseTimes
from dlrm_operator.manifests.manifests import Images
from dlrm_operator.manifests.restrictions import OVERLAY_LEVELS, OverlayLevel, OverlayLimits


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one operator process."""

    kubeconfig: str | None = None
    """File, or files with colons between; None: the pod's service account, else ``~/.kube/config``."""
    in_cluster: bool = False
    namespace: str | None = None
    """The only namespace to serve; None: all of them."""
    profiles: ProfileSource | None = None
    """The ConfigMap that holds HardwareProfiles; None: they are objects of the cluster, which have to be readable."""
    address: str = ANY_ADDRESS
    """Probes, Prometheus and the API server come from other hosts."""
    port: int = Port.OPERATOR_METRICS
    """Of /healthz, /readyz and /metrics."""
    resync_s: float = 45.0
    """Each job is woken so often without an event: a watch can fall silent, and deadlines pass without one."""
    poll_s: float = 2.0
    """Shortest time between two looks at one job's progress; with many jobs it grows."""
    passing_s: float = 2.0
    """A status on the way to Running that nothing rests on waits so long to be written; with many jobs longer."""
    plan_deadline_s: float = 300.0
    stale_s: float = 180.0
    """The pod watch counts as dead when the server has been silent for so long; it bookmarks each minute."""
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    lease_namespace: str | None = None
    """Where the Lease is; None: the namespace that is served, else the one that this process runs in."""
    identity: str = ""
    """Holder of the Lease: no two living processes may have the same, one that was killed may come back with it."""
    log_format: str = "json"
    webhook_certs: str | None = None
    """Folder with ``tls.crt`` and ``tls.key``; None: no admission webhook is served."""
    webhook_port: int = Port.OPERATOR_WEBHOOK
    webhook_deadline_s: float = 5.0
    """Within this a job is judged, or admitted with a warning; less than the timeout in the webhook's configuration."""
    images: Images = field(default_factory=Images)
    limits: OverlayLimits = field(default_factory=OverlayLimits)


def _profile_source(text: str) -> ProfileSource:
    namespace, _, config_map = text.partition("/")
    if not namespace or not config_map:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/CONFIGMAP")
    return ProfileSource(namespace, config_map)


def _overlay_level(text: str) -> OverlayLevel:
    for level in OVERLAY_LEVELS:
        if text == level:
            return level
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(OVERLAY_LEVELS)}")


def read_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Flags before environment before defaults."""
    known = Settings()
    parser = argparse.ArgumentParser(prog="dlrm_operator", description="Runs DLRMJobs.")
    parser.add_argument(
        "--namespace", default=environ.get("DLRM_NAMESPACE") or None, help="serve this namespace alone; by default all"
    )
    parser.add_argument(
        "--profiles",
        type=_profile_source,
        default=environ.get("DLRM_PROFILES") or None,
        metavar="NAMESPACE/CONFIGMAP",
        help="take HardwareProfiles from this ConfigMap; by default from the cluster's objects",
    )
    parser.add_argument(
        "--pod-overlay",
        type=_overlay_level,
        default=environ.get("DLRM_POD_OVERLAY", known.limits.level),
        metavar="|".join(OVERLAY_LEVELS),
        help="how far jobs may go with what they add to their pods; by default as far as Pod Security's restricted",
    )
    parser.add_argument("--address", default=environ.get("DLRM_ADDRESS", known.address), help="address to listen on")
    parser.add_argument("--port", type=int, default=environ.get("DLRM_PORT", known.port), help="port to listen on")
    parser.add_argument("--resync-s", type=float, default=environ.get("DLRM_RESYNC_S", known.resync_s))
    parser.add_argument("--poll-s", type=float, default=environ.get("DLRM_POLL_S", known.poll_s))
    parser.add_argument("--passing-s", type=float, default=environ.get("DLRM_PASSING_S", known.passing_s))
    parser.add_argument(
        "--plan-deadline-s", type=float, default=environ.get("DLRM_PLAN_DEADLINE_S", known.plan_deadline_s)
    )
    parser.add_argument(
        "--webhook-certs",
        default=environ.get("DLRM_WEBHOOK_CERTS") or None,
        metavar="FOLDER",
        help="serve the admission webhook with tls.crt and tls.key of this folder",
    )
    parser.add_argument("--webhook-port", type=int, default=environ.get("DLRM_WEBHOOK_PORT", known.webhook_port))
    parser.add_argument(
        "--webhook-deadline-s", type=float, default=environ.get("DLRM_WEBHOOK_DEADLINE_S", known.webhook_deadline_s)
    )
    parser.add_argument(
        "--lease-namespace",
        default=environ.get("DLRM_LEASE_NAMESPACE") or environ.get("POD_NAMESPACE") or None,
        help="namespace of the leader's Lease, where the whole cluster is served",
    )
    parser.add_argument("--identity", default=environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}")
    parser.add_argument("--lease-s", type=float, default=environ.get("DLRM_LEASE_S", known.lease.duration_s))
    parser.add_argument(
        "--renew-deadline-s", type=float, default=environ.get("DLRM_RENEW_DEADLINE_S", known.lease.renew_deadline_s)
    )
    parser.add_argument("--renew-every-s", type=float, default=environ.get("DLRM_RENEW_S", known.lease.renew_every_s))
    parser.add_argument("--log-format", choices=["json", "plain"], default=environ.get("DLRM_LOG_FORMAT", "json"))
    flags = vars(parser.parse_args(argv))
    lease = LeaseTimes(
        duration_s=flags.pop("lease_s"),
        renew_deadline_s=flags.pop("renew_deadline_s"),
        renew_every_s=flags.pop("renew_every_s"),
    )
    if not lease.duration_s > lease.renew_deadline_s > lease.renew_every_s > 0:
        parser.error("--lease-s must be longer than --renew-deadline-s, and that longer than --renew-every-s")
    images = Images(
        trainer=environ.get("DLRM_TRAINER_IMAGE") or known.images.trainer,
        trainer_cuda=environ.get("DLRM_TRAINER_CUDA_IMAGE") or known.images.trainer_cuda,
        checkpointer=environ.get("DLRM_CHECKPOINTER_IMAGE") or known.images.checkpointer,
    )
    namespace, account = environ.get("POD_NAMESPACE"), environ.get("POD_SERVICE_ACCOUNT")
    limits = OverlayLimits(
        level=flags.pop("pod_overlay"), own_account=(namespace, account) if namespace and account else None
    )
    return Settings(
        **flags,
        lease=lease,
        kubeconfig=environ.get("KUBECONFIG") or None,
        in_cluster="KUBERNETES_SERVICE_HOST" in environ,
        images=images,
        limits=limits,
    )
