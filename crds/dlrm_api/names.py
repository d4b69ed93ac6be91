"""Names that cross a boundary between rooms: labels, environment, paths, ports, exit codes."""

from __future__ import annotations

import enum
import hashlib
from typing import Final

GROUP: Final = "dlrm.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "dlrm.dev/v1alpha1"
FIELD_MANAGER = "dlrm-operator"


class ExitCode(enum.IntEnum):
    """What a trainer's, a checkpointer's or dlrmctl's exit code means (sysexits; 143 is 128 + SIGTERM)."""

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
"""Exit codes after which a retry would only fail again."""


class Label:
    """Labels of the operator's children."""

    JOB = f"{GROUP}/job"
    ATTEMPT = f"{GROUP}/attempt"
    INDEX = f"{GROUP}/index"
    ROLE = f"{GROUP}/role"
    MANAGED_BY = "app.kubernetes.io/managed-by"
    NAME = "app.kubernetes.io/name"
    INSTANCE = "app.kubernetes.io/instance"
    COMPONENT = "app.kubernetes.io/component"


class Env:
    """Environment variables that trainer or checkpointer reads; the operator or dlrmctl sets them, but for one."""

    JOB_NAME = "DLRM_JOB_NAME"
    ATTEMPT = "DLRM_ATTEMPT"
    """The operator's attempt number, for logs and progress; the store's own attempt number fences commits."""
    REPLICA = "DLRM_REPLICA"
    """Index of this pod in its gang, from 0; its ranks are REPLICA * processes per replica onwards."""
    MASTER_ADDR = "DLRM_MASTER_ADDR"
    MASTER_PORT = "DLRM_MASTER_PORT"
    RENDEZVOUS_TIMEOUT_S = "DLRM_RENDEZVOUS_TIMEOUT_S"
    COLLECTIVE_TIMEOUT_S = "DLRM_COLLECTIVE_TIMEOUT_S"
    """Longest wait of a rank for the others in one collective (s); nobody sets it but users, in the pod template."""
    BIND = "DLRM_BIND"
    """Address that the HTTP endpoints listen on; all interfaces in a pod, 127.0.0.1 on one machine."""
    TRAINER_PORT = "DLRM_TRAINER_PORT"
    CHECKPOINTER_PORT = "DLRM_CHECKPOINTER_PORT"
    TOKEN_SHA256 = "DLRM_TOKEN_SHA256"  # noqa: S105  a variable's name
    """``dlrm_api.names.token_digest`` of the token that asks this gang for a cut; without it nobody may."""
    GANG_SECRET = "DLRM_GANG_SECRET"  # noqa: S105  a variable's name
    """By which the ranks of one attempt know each other at rank 0's store; without it they take whoever comes."""
    HANDOFF_DIR = "DLRM_HANDOFF_DIR"
    WORK_DIR = "DLRM_WORK_DIR"
    """Where rank 0 writes ``progress.jsonl``; unset in pods."""
    LEDGER_DIR = "DLRM_LEDGER_DIR"
    """Where each rank writes the ids of the samples that it trained on, for audits; unset normally."""
    PROFILE = "DLRM_PROFILE"
    """1: time the stages of steps and write ``profile.json`` at the end; the same for all pods of a gang."""
    COMMITTED_SNAPSHOT = "DLRM_COMMITTED_SNAPSHOT"
    """URI of the manifest of the newest snapshot that the job is known to have committed; unset where none is known."""
    TERMINATION_LOG = "DLRM_TERMINATION_LOG"
    GRACE_S = "DLRM_GRACE_S"
    """Seconds between SIGTERM and SIGKILL, in which a cut must be handed over."""
    CREDENTIALS_DIR = "DLRM_CREDENTIALS_DIR"
    """Folder with ``accessKeyId``, ``secretAccessKey`` and optionally ``sessionToken``: a mounted Secret."""
    DATA_CREDENTIALS_DIR = "DLRM_DATA_CREDENTIALS_DIR"
    """The same for the data that is read."""
    TIER_DIR = "DLRM_TIER_DIR"
    """Folder with one folder a memory tier that needs a file system: ``scm``, ``cxl``, ``block``."""


ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104  a pod's own network; port-forward needs loopback too
"""All interfaces, of both families (``listening``): a cluster may give its pods IPv6 addresses alone."""


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
    PLAN = "/etc/dlrm/plan"
    """The folder of the plan's parts (``dlrm_api.plan.plan_from_parts``)."""
    CREDENTIALS = "/etc/dlrm-credentials"
    DATA_CREDENTIALS = "/etc/dlrm-data-credentials"
    HANDOFF = "/dev/dlrm-handoff"
    TIERS = "/var/lib/dlrm/tiers"
    """The volumes of the tiers that need a file system, each mounted at its tier's name."""
    SCRATCH = "/tmp"  # noqa: S108  an emptyDir in a pod with a read-only root
    SHARED_MEMORY = "/dev/shm"  # noqa: S108  an emptyDir in a pod's own memory
    TERMINATION_LOG = "/dev/termination-log"


class Container:
    """Container names in a trainer pod."""

    TRAINER = "trainer"
    CHECKPOINTER = "checkpointer"


TERMINATION_MESSAGE_BYTES = 4_096
"""The kubelet keeps no more of a termination message."""

TOKEN_HEADER = "X-DLRM-Token"  # noqa: S105  a header's name


def trainer_pod(job: str, attempt: int, index: int) -> str:
    """Name of one trainer pod: a function of the job, the attempt and the index alone."""
    return f"{job}-trainer-{attempt}-{index}"


def trainer_service(job: str) -> str:
    """Name of the headless Service by which ranks find rank 0."""
    return f"{job}-trainer"


def plan_config_map(job: str, attempt: int) -> str:
    """Name of the immutable ConfigMap that holds one attempt's job and plan."""
    return f"{job}-plan-{attempt}"


def pod_group(job: str, attempt: int) -> str:
    """Name under which a gang scheduler knows one attempt's pods."""
    return f"{job}-{attempt}"


def token_digest(token: str) -> str:
    """SHA-256 of a token in hexadecimal digits, as ``Env.TOKEN_SHA256`` gives it to the trainer."""
    return hashlib.sha256(token.encode()).hexdigest()
