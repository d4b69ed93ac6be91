"""Flags and environment of the operator. The environment is read here only."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dlrm_api.names import ANY_ADDRESS, Port
from dlrm_operator.clients.references import ProfileSource
from dlrm_operator.leader import LeaseTimes
from dlrm_operator.manifests.objects import USER_ID, Images, PodDefaults
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
    pod_defaults: PodDefaults = field(default_factory=PodDefaults)
    limits: PodTemplatePolicy = field(default_factory=PodTemplatePolicy)


def _profile_source(text: str) -> ProfileSource:
    namespace, _, config_map = text.partition("/")
    if not namespace or not config_map:
        raise argparse.ArgumentTypeError(f"expected NAMESPACE/CONFIGMAP, got {text!r}")
    return ProfileSource(namespace, config_map)


def _pod_defaults(environ: Mapping[str, str]) -> PodDefaults:
    """Read what all trainer pods get; an empty user or architecture is left to the cluster."""
    images, user = Images(), environ.get("DLRM_RUN_AS_USER", str(USER_ID))
    if user and not (user.isdecimal() and int(user)):
        raise ValueError(user)
    return PodDefaults(
        images=Images(
            trainer=environ.get("DLRM_TRAINER_IMAGE") or images.trainer,
            trainer_cuda=environ.get("DLRM_TRAINER_CUDA_IMAGE") or images.trainer_cuda,
            checkpointer=environ.get("DLRM_CHECKPOINTER_IMAGE") or images.checkpointer,
        ),
        run_as_user=int(user) if user else None,
        architecture=environ.get("DLRM_ARCHITECTURE", PodDefaults.architecture),
        pull_secrets=tuple(filter(None, environ.get("DLRM_IMAGE_PULL_SECRETS", "").split(","))),
    )


def read_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings: flags override the environment, which overrides the defaults."""
    known = Settings(
        lease_namespace=environ.get("DLRM_LEASE_NAMESPACE") or environ.get("POD_NAMESPACE") or None,
        identity=environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
    )
    parser = argparse.ArgumentParser(prog="dlrm_operator", description="Run DLRMJobs.")

    def add(field: str, flag: str, variable: str | None, text: str, of: object = known, **options: Any) -> None:
        default = getattr(of, field)
        value = environ.get(variable, default) if variable else default
        value = (value or None) if default is None else value
        parser.add_argument(flag, dest=field, default=value, help=text, **options)

    def add_seconds(field: str, flag: str, variable: str, text: str, of: object = known) -> None:
        text = f"{text} (default: {getattr(of, field):g})"
        add(field, flag, variable, text, of, type=float, metavar="SECONDS")

    add("namespace", "--namespace", "DLRM_NAMESPACE", "serve this namespace only (default: all)")
    text = "read HardwareProfiles from this ConfigMap (default: the cluster's objects)"
    add("profiles", "--profiles", "DLRM_PROFILES", text, type=_profile_source, metavar="NAMESPACE/CONFIGMAP")
    text = "policy for podTemplate overrides (default: restricted, as in Pod Security)"
    add("level", "--pod-template-policy", "DLRM_POD_OVERLAY", text, known.limits, metavar="|".join(POLICY_LEVELS))
    add("address", "--address", "DLRM_ADDRESS", "address to listen on")
    add("port", "--port", "DLRM_PORT", "port to listen on", type=int)
    add_seconds("resync_s", "--resync-seconds", "DLRM_RESYNC_S", "reconcile each job at least this often")
    add_seconds("poll_s", "--poll-seconds", "DLRM_POLL_S", "poll the progress of a job at most this often")
    text = "delay the write of an intermediate status by this time"
    add_seconds("status_debounce_s", "--status-debounce-seconds", "DLRM_PASSING_S", text)
    add_seconds("plan_deadline_s", "--plan-deadline-seconds", "DLRM_PLAN_DEADLINE_S", "time limit of one plan")
    text = "serve the admission webhook with tls.crt and tls.key of this directory (default: no webhook)"
    add("webhook_certs", "--webhook-certs", "DLRM_WEBHOOK_CERTS", text, metavar="DIRECTORY")
    add("webhook_port", "--webhook-port", "DLRM_WEBHOOK_PORT", "port of the admission webhook", type=int)
    text = "time limit of one review"
    add_seconds("webhook_deadline_s", "--webhook-deadline-seconds", "DLRM_WEBHOOK_DEADLINE_S", text)
    text = "namespace of the Lease if all namespaces are served (default: the operator's)"
    add("lease_namespace", "--lease-namespace", None, text)
    add("identity", "--identity", None, "name of this process in the Lease (default: the pod's name)")
    text = "followers take over after this time"
    add_seconds("duration_s", "--lease-duration-seconds", "DLRM_LEASE_S", text, known.lease)
    text = "the leader begins no write if its renewal is older"
    add_seconds("renew_deadline_s", "--lease-renew-deadline-seconds", "DLRM_RENEW_DEADLINE_S", text, known.lease)
    add_seconds("renew_interval_s", "--lease-renew-seconds", "DLRM_RENEW_S", "interval of renewals", known.lease)
    text = "log as JSON lines or as text"
    add("log_format", "--log-format", "DLRM_LOG_FORMAT", text, choices=["json", "plain"])

    flags = vars(parser.parse_args(argv))
    lease = LeaseTimes(**{each.name: flags.pop(each.name) for each in fields(LeaseTimes)})
    if not lease.duration_s > lease.renew_deadline_s > lease.renew_interval_s > 0:
        parser.error(
            "invalid --lease-duration-seconds: expected more than --lease-renew-deadline-seconds, and that more than "
            "--lease-renew-seconds"
        )
    if (level := flags.pop("level")) not in POLICY_LEVELS:
        parser.error(f"invalid --pod-template-policy: expected {' or '.join(POLICY_LEVELS)}, got {level!r}")
    try:
        pod_defaults = _pod_defaults(environ)
    except ValueError:
        parser.error(f"invalid DLRM_RUN_AS_USER: expected a user ID above 0, got {environ['DLRM_RUN_AS_USER']!r}")
    namespace, account = environ.get("POD_NAMESPACE"), environ.get("POD_SERVICE_ACCOUNT")
    own_account = (namespace, account) if namespace and account else None
    return Settings(
        kubeconfig=environ.get("KUBECONFIG") or None,
        in_cluster="KUBERNETES_SERVICE_HOST" in environ,
        lease=lease,
        pod_defaults=pod_defaults,
        limits=PodTemplatePolicy(level=level, own_account=own_account),
        **flags,
    )
