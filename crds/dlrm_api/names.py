"""Names that cross process boundaries: labels, environment variables, paths, ports, exit codes."""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Final

GROUP: Final = "dlrm.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "dlrm.dev/v1alpha1"
FIELD_MANAGER = "dlrm-operator"


class ExitCode(enum.IntEnum):
    """Exit codes of trainer, checkpointer and dlrmctl (sysexits; 143 is 128 + SIGTERM)."""

    DONE = 0
    USAGE = 64
    BAD_DATA = 65
    NO_INPUT = 66
    INTERNAL = 70
    DEVICE = 74
    TEMPORARY = 75
    NO_PERMISSION = 77
    BAD_CONFIG = 78
    TERMINATED = 143


USER_ERROR_CODES = frozenset(
    {ExitCode.USAGE, ExitCode.BAD_DATA, ExitCode.NO_INPUT, ExitCode.NO_PERMISSION, ExitCode.BAD_CONFIG}
)
"""Exit codes of what only a user can correct."""
RECOVERABLE_CODES = frozenset({ExitCode.NO_INPUT, ExitCode.NO_PERMISSION})
"""Those that may also be transient: a role that propagates, a listing that lags, a node's wrong clock."""


class Label:
    """Labels of the objects that the operator creates."""

    JOB = f"{GROUP}/job"
    ATTEMPT = f"{GROUP}/attempt"
    INDEX = f"{GROUP}/index"
    ROLE = f"{GROUP}/role"
    MANAGED_BY = "app.kubernetes.io/managed-by"
    NAME = "app.kubernetes.io/name"
    INSTANCE = "app.kubernetes.io/instance"
    COMPONENT = "app.kubernetes.io/component"


class Annotation:
    """Annotations of trainer pods."""

    ASSIGNED_ATTEMPT = f"{GROUP}/assigned-attempt"
    """Attempt that trainers restarted in the pod run. Absent: the one that created the pod."""
    ASSIGNED_AFTER = f"{GROUP}/assigned-after"
    """How many instances of the trainer container had ended before that attempt."""


class Env:
    """Environment variables of trainer and checkpointer, set by the operator or dlrmctl."""

    JOB_NAME = "DLRM_JOB_NAME"
    ATTEMPT = "DLRM_ATTEMPT"
    """Attempt number of the operator, for logs and progress. The store has its own, which fences commits."""
    REPLICA = "DLRM_REPLICA"
    """Index of this pod in its gang, from 0. Its first rank is REPLICA * processesPerReplica."""
    MASTER_ADDR = "DLRM_MASTER_ADDR"
    MASTER_PORT = "DLRM_MASTER_PORT"
    RENDEZVOUS_TIMEOUT_S = "DLRM_RENDEZVOUS_TIMEOUT_S"
    COLLECTIVE_TIMEOUT_S = "DLRM_COLLECTIVE_TIMEOUT_S"
    """Timeout of one collective (s). Only users set it, in the pod template."""
    BIND = "DLRM_BIND"
    """Listen address of the HTTP endpoints: all interfaces in a pod, 127.0.0.1 under dlrmctl run."""
    TRAINER_PORT = "DLRM_TRAINER_PORT"
    CHECKPOINTER_PORT = "DLRM_CHECKPOINTER_PORT"
    TOKEN_SHA256 = "DLRM_TOKEN_SHA256"  # noqa: S105  a variable's name
    """``token_digest`` of the token that authorizes ``POST /cut``; unset: every request is rejected."""
    GANG_SECRET = "DLRM_GANG_SECRET"  # noqa: S105  a variable's name
    """Secret with which the ranks of one attempt sign rendezvous keys; unset: keys are not signed."""
    ASSIGNMENT = "DLRM_ASSIGNMENT"
    """File with the attempt that restarted trainers of this pod run; unset: they do not restart in their pod."""
    LAUNCHED = "DLRM_LAUNCHED"
    """File in which the launcher records the newest attempt that it ran; it outlives the container."""
    RESTARTS_IN_PLACE = "DLRM_RESTARTS_IN_PLACE"
    """1: the checkpointer serves trainers that restart beside it."""
    HANDOFF_DIR = "DLRM_HANDOFF_DIR"
    WORK_DIR = "DLRM_WORK_DIR"
    """Directory in which rank 0 writes ``progress.jsonl``; unset in pods."""
    LEDGER_DIR = "DLRM_LEDGER_DIR"
    """Directory in which each rank records the ids of its samples, for audits; usually unset."""
    PROFILE = "DLRM_PROFILE"
    """1: time the stages of each step and write ``profile.json`` at the end; the same in all pods of a gang."""
    COMMITTED_SNAPSHOT = "DLRM_COMMITTED_SNAPSHOT"
    """URI of the manifest of the newest snapshot that the job is known to have committed, if any."""
    TERMINATION_LOG = "DLRM_TERMINATION_LOG"
    GRACE_S = "DLRM_GRACE_S"
    """Seconds between SIGTERM and SIGKILL, in which the last cut must be handed over."""
    CREDENTIALS_DIR = "DLRM_CREDENTIALS_DIR"
    """Directory with ``accessKeyId``, ``secretAccessKey`` and optionally ``sessionToken``: a mounted Secret."""
    DATA_CREDENTIALS_DIR = "DLRM_DATA_CREDENTIALS_DIR"  # the same for training data
    TIER_DIR = "DLRM_TIER_DIR"
    """Directory with one subdirectory for each tier that needs a file system: ``scm``, ``cxl``, ``block``."""


ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104  a pod's own network; port-forward needs loopback too
"""All interfaces of both families (see ``process.listener``): pods of a cluster may have IPv6 addresses only."""


class Port:
    """Ports inside a pod."""

    RENDEZVOUS = 29_500
    TRAINER = 9_400
    CHECKPOINTER = 9_401
    OPERATOR_METRICS = 9_402
    OPERATOR_WEBHOOK = 9_443


class Path:
    """Paths inside a pod."""

    CONFIG = "/etc/dlrm"
    JOB = "/etc/dlrm/job.json"
    PLAN = "/etc/dlrm/plan"  # directory; see dlrm_api.plan.plan_from_parts
    CREDENTIALS = "/etc/dlrm-credentials"
    DATA_CREDENTIALS = "/etc/dlrm-data-credentials"
    HANDOFF = "/dev/dlrm-handoff"
    TIERS = "/var/lib/dlrm/tiers"
    """Volumes of the tiers that need a file system, each mounted under its tier's name."""
    SCRATCH = "/tmp"  # noqa: S108  an emptyDir in a pod with a read-only root
    SHARED_MEMORY = "/dev/shm"  # noqa: S108  an emptyDir in a pod's own memory
    ASSIGNMENT = "/etc/dlrm-assignment"
    """Directory with the file ``attempt``: a downward API volume, which follows the pod's annotation."""
    LAUNCHED = "/tmp/dlrm-launched"  # noqa: S108  on the emptyDir above: it outlives a reboot, as memory does not
    TERMINATION_LOG = "/dev/termination-log"


class Container:
    """Container names in a trainer pod."""

    TRAINER = "trainer"
    CHECKPOINTER = "checkpointer"


TERMINATION_MESSAGE_BYTES = 4_096
"""The kubelet truncates termination messages to this size."""

TOKEN_HEADER = "X-DLRM-Token"  # noqa: S105  a header's name


def trainer_pod(job: str, attempt: int, index: int) -> str:
    """Return the name of a trainer pod, a function of job, attempt and index alone."""
    return f"{job}-trainer-{attempt}-{index}"


def trainer_service(job: str) -> str:
    """Return the name of the headless Service through which ranks find rank 0."""
    return f"{job}-trainer"


def plan_config_map(job: str, attempt: int) -> str:
    """Return the name of the immutable ConfigMap with the job and plan of one attempt."""
    return f"{job}-plan-{attempt}"


def pod_group(job: str, attempt: int) -> str:
    """Return the name of the pod group of one attempt."""
    return f"{job}-{attempt}"


def secret_of_attempt(secret: str, attempt: int) -> str:
    """Return the gang secret of an attempt in pods that an earlier attempt with ``secret`` created."""
    return hmac.digest(secret.encode(), f"attempt {attempt}".encode(), hashlib.sha256).hex() if secret else ""


def token_digest(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal digits, as ``Env.TOKEN_SHA256`` holds it."""
    return hashlib.sha256(token.encode()).hexdigest()
