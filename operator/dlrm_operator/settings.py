"""Flags and environment of the operator. The environment is read here only."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_api.names import ANY_ADDRESS, Port
from dlrm_operator.clients.references import ProfileSource
from dlrm_operator.leader import LeaseTimes
from dlrm_operator.manifests.objects import Images
from dlrm_operator.manifests.pod_template import POLICY_LEVELS, PodTemplatePolicy


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Configure one operator process."""

    kubeconfig: str | None = None
    """One file, or several separated by colons; None: the pod's service account, else ``~/.kube/config``."""
    in_cluster: bool = False
    namespace: str | None = None
    """The only namespace to serve; None: all."""
    profiles: ProfileSource | None = None
    """The ConfigMap that holds HardwareProfiles; None: read the cluster's objects."""
    address: str = ANY_ADDRESS
    """Probes, Prometheus and the API server connect from other hosts."""
    port: int = Port.OPERATOR_METRICS
    """Port of /healthz, /readyz and /metrics."""
    resync_s: float = 45.0
    """Interval at which each job is reconciled without an event: watches can fall silent, deadlines pass."""
    poll_s: float = 2.0
    """Shortest time between two polls of one job's progress; with many jobs it grows."""
    status_debounce_s: float = 2.0
    """Time for which an intermediate status waits before it is written; with many jobs it grows."""
    plan_deadline_s: float = 300.0
    stale_s: float = 180.0
    """The pod watch counts as dead after this silence; the server sends a bookmark each minute."""
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    lease_namespace: str | None = None
    """Namespace of the Lease; None: the namespace that is served, else the one that this process runs in."""
    identity: str = ""
    """Holder of the Lease. Living processes must differ; one that was killed may return with the same."""
    log_format: str = "json"
    webhook_certs: str | None = None
    """Directory with ``tls.crt`` and ``tls.key``; None: serve no webhook."""
    webhook_port: int = Port.OPERATOR_WEBHOOK
    webhook_deadline_s: float = 5.0
    """Time to review a job; then it is admitted with a warning. Less than the webhook's configured timeout."""
    images: Images = field(default_factory=Images)
    limits: PodTemplatePolicy = field(default_factory=PodTemplatePolicy)


def _profile_source(text: str) -> ProfileSource:
    namespace, _, config_map = text.partition("/")
    if not namespace or not config_map:
        raise argparse.ArgumentTypeError(f"expected NAMESPACE/CONFIGMAP, got {text!r}")
    return ProfileSource(namespace, config_map)


def read_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings: flags override the environment, which overrides the defaults."""
    known = Settings()
    parser = argparse.ArgumentParser(prog="dlrm_operator", description="Run DLRMJobs.")

    def add_seconds(flag: str, variable: str, default: float, text: str) -> None:
        value = environ.get(variable, default)
        parser.add_argument(flag, type=float, default=value, metavar="SECONDS", help=f"{text} (default: {default:g})")

    parser.add_argument(
        "--namespace", default=environ.get("DLRM_NAMESPACE") or None, help="serve this namespace only (default: all)"
    )
    parser.add_argument(
        "--profiles",
        type=_profile_source,
        default=environ.get("DLRM_PROFILES") or None,
        metavar="NAMESPACE/CONFIGMAP",
        help="read HardwareProfiles from this ConfigMap (default: the cluster's objects)",
    )
    parser.add_argument(
        "--pod-template-policy",
        default=environ.get("DLRM_POD_OVERLAY", known.limits.level),
        metavar="|".join(POLICY_LEVELS),
        help="policy for podTemplate overrides (default: restricted, as in Pod Security)",
    )
    parser.add_argument("--address", default=environ.get("DLRM_ADDRESS", known.address), help="address to listen on")
    parser.add_argument("--port", type=int, default=environ.get("DLRM_PORT", known.port), help="port to listen on")
    add_seconds("--resync-seconds", "DLRM_RESYNC_S", known.resync_s, "reconcile each job at least this often")
    add_seconds("--poll-seconds", "DLRM_POLL_S", known.poll_s, "poll the progress of a job at most this often")
    add_seconds(
        "--status-debounce-seconds",
        "DLRM_PASSING_S",
        known.status_debounce_s,
        "delay the write of an intermediate status by this time",
    )
    add_seconds("--plan-deadline-seconds", "DLRM_PLAN_DEADLINE_S", known.plan_deadline_s, "time limit of one plan")
    parser.add_argument(
        "--webhook-certs",
        default=environ.get("DLRM_WEBHOOK_CERTS") or None,
        metavar="DIRECTORY",
        help="serve the admission webhook with tls.crt and tls.key of this directory (default: no webhook)",
    )
    parser.add_argument(
        "--webhook-port",
        type=int,
        default=environ.get("DLRM_WEBHOOK_PORT", known.webhook_port),
        help="port of the admission webhook",
    )
    add_seconds(
        "--webhook-deadline-seconds", "DLRM_WEBHOOK_DEADLINE_S", known.webhook_deadline_s, "time limit of one review"
    )
    parser.add_argument(
        "--lease-namespace",
        default=environ.get("DLRM_LEASE_NAMESPACE") or environ.get("POD_NAMESPACE") or None,
        help="namespace of the Lease if all namespaces are served (default: the operator's)",
    )
    parser.add_argument(
        "--identity",
        default=environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        help="name of this process in the Lease (default: the pod's name)",
    )
    lease = known.lease
    add_seconds("--lease-duration-seconds", "DLRM_LEASE_S", lease.duration_s, "followers take over after this time")
    add_seconds(
        "--lease-renew-deadline-seconds",
        "DLRM_RENEW_DEADLINE_S",
        lease.renew_deadline_s,
        "the leader begins no write if its renewal is older",
    )
    add_seconds("--lease-renew-seconds", "DLRM_RENEW_S", lease.renew_interval_s, "interval of renewals")
    parser.add_argument(
        "--log-format",
        choices=["json", "plain"],
        default=environ.get("DLRM_LOG_FORMAT", "json"),
        help="log as JSON lines or as text",
    )
    flags = parser.parse_args(argv)
    lease = LeaseTimes(
        duration_s=flags.lease_duration_seconds,
        renew_deadline_s=flags.lease_renew_deadline_seconds,
        renew_interval_s=flags.lease_renew_seconds,
    )
    if not lease.duration_s > lease.renew_deadline_s > lease.renew_interval_s > 0:
        parser.error(
            "invalid --lease-duration-seconds: expected more than --lease-renew-deadline-seconds, and that more than "
            "--lease-renew-seconds"
        )
    level = next((level for level in POLICY_LEVELS if level == flags.pod_template_policy), None)
    if level is None:
        expected = " or ".join(POLICY_LEVELS)
        parser.error(f"invalid --pod-template-policy: expected {expected}, got {flags.pod_template_policy!r}")
    images = Images(
        trainer=environ.get("DLRM_TRAINER_IMAGE") or known.images.trainer,
        trainer_cuda=environ.get("DLRM_TRAINER_CUDA_IMAGE") or known.images.trainer_cuda,
        checkpointer=environ.get("DLRM_CHECKPOINTER_IMAGE") or known.images.checkpointer,
    )
    namespace, account = environ.get("POD_NAMESPACE"), environ.get("POD_SERVICE_ACCOUNT")
    own_account = (namespace, account) if namespace and account else None
    return Settings(
        kubeconfig=environ.get("KUBECONFIG") or None,
        in_cluster="KUBERNETES_SERVICE_HOST" in environ,
        namespace=flags.namespace,
        profiles=flags.profiles,
        address=flags.address,
        port=flags.port,
        resync_s=flags.resync_seconds,
        poll_s=flags.poll_seconds,
        status_debounce_s=flags.status_debounce_seconds,
        plan_deadline_s=flags.plan_deadline_seconds,
        lease=lease,
        lease_namespace=flags.lease_namespace,
        identity=flags.identity,
        log_format=flags.log_format,
        webhook_certs=flags.webhook_certs,
        webhook_port=flags.webhook_port,
        webhook_deadline_s=flags.webhook_deadline_seconds,
        images=images,
        limits=PodTemplatePolicy(level=level, own_account=own_account),
    )
