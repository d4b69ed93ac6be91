"""Read the sidecar's settings from the job's document and the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from dlrm_api.checkpoint import CheckpointSpec
from dlrm_api.errors import BadDataError, InvalidSpecError, NoInputError, UsageError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import Env, Port
from dlrm_stores import ObjectStore, StoreOptions, open_store
from dlrm_stores.base import FieldNames

PUBLISH_FIELDS = FieldNames(uri="spec.checkpoint.publish.uri")

DEFAULT_GRACE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Configure a sidecar."""

    options: StoreOptions
    handoff: Path
    ranks: range
    """Global ranks of this pod."""
    pods: int
    """Pods of the gang."""
    checkpoint: CheckpointSpec
    expected_restores: int
    """Expected number of restores over the whole job, from which ``bits: auto`` is chosen."""
    grace_s: float
    """Seconds for the last upload after the trainers have ended."""
    trainers_restart: bool
    """Whether trainers that failed restart beside this sidecar."""
    bind: str
    port: int
    termination_log: Path | None


def read_settings(job_file: Path, env: Mapping[str, str]) -> Settings:
    """Read the job and the environment.

    Raises:
        NoInputError: the job's file does not exist.
        BadDataError: it is neither JSON nor YAML.
        InvalidSpecError: names the field.
        UsageError: names the environment variable.
    """
    job = read_job(job_file)
    spec, per_pod = job.spec, job.spec.trainer.processes_per_replica
    first = int(_number(env, Env.REPLICA, 0)) * per_pod
    if Env.HANDOFF_DIR not in env:
        raise UsageError(f"{Env.HANDOFF_DIR} is not set: give the pod's hand-off folder")
    log = env.get(Env.TERMINATION_LOG)
    return Settings(
        options=store_options(job, env),
        handoff=Path(env[Env.HANDOFF_DIR]),
        ranks=range(first, first + per_pod),
        pods=spec.replicas,
        checkpoint=spec.checkpoint,
        expected_restores=spec.expected_restores,
        grace_s=_number(env, Env.GRACE_S, DEFAULT_GRACE_S),
        trainers_restart=env.get(Env.RESTARTS_IN_PLACE) == "1",
        bind=env.get(Env.BIND, "127.0.0.1"),
        port=int(_number(env, Env.CHECKPOINTER_PORT, 0)) or Port.CHECKPOINTER,
        termination_log=Path(log) if log else None,
    )


def store_options(job: DLRMJob, env: Mapping[str, str]) -> StoreOptions:
    """Return how a process of the job reaches its store."""
    folder = env.get(Env.CREDENTIALS_DIR)
    return StoreOptions(s3=job.spec.checkpoint.s3, credentials_dir=Path(folder) if folder else None)


def read_job(path: Path) -> DLRMJob:
    """Read a job's document, JSON or YAML; the trainer uses it too.

    Raises:
        NoInputError: the file cannot be read.
        BadDataError: it is neither JSON nor YAML.
        InvalidSpecError: it is not a valid job.
    """
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise NoInputError(f"{path}: the job's file cannot be read: {error.strerror}") from error
    # In a pod the job is JSON, which is read faster.
    try:
        document = json.loads(text)
    except ValueError:
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            problem = " ".join(str(error).split())
            raise BadDataError(f"{path}: neither JSON nor YAML: {problem}") from error
    return parse_job(document)


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name) or default)
    except ValueError as error:
        raise UsageError(f"{name}={env[name]!r}: not a number") from error


def open_publish_store(uri: str, options: StoreOptions, snapshots: ObjectStore) -> ObjectStore:
    """Open the store that deltas go to, ``spec.checkpoint.publish.uri``, as the job's store is reached.

    Raises:
        InvalidSpecError: the URI is invalid, or names the store of the snapshots.
    """
    target = open_store(uri, replace(options, fields=replace(options.fields, uri=PUBLISH_FIELDS.uri)))
    if target.uri == snapshots.uri:
        problem = f"expected another location than {target.uri}: the retention of snapshots there would delete deltas"
        raise InvalidSpecError(PUBLISH_FIELDS.uri, problem)
    return target
