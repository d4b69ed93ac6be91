"""Train from Python: the same jobs and results as ``dlrmctl``, on this machine or on a cluster.

Errors are those of ``dlrm_api.errors``; each names who can act.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dlrm_api.errors import NoInputError
from dlrm_api.fields import S3Spec
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.progress import SnapshotInfo
from dlrm_cli.cluster.client import JobClient, dig
from dlrm_cli.cluster.get import job_facts
from dlrm_cli.cluster.lifecycle import wait_for
from dlrm_cli.cluster.logs import PodChoice, choose_pods
from dlrm_cli.manifests import read_job
from dlrm_cli.options import ClusterOptions, RunOptions
from dlrm_cli.run.command import RunDisplay, run_here
from dlrm_cli.run.supervisor import Stop
from dlrm_cli.run.workdir import RunResult
from dlrm_cli.snapshots import list_usable, split_target
from dlrm_stores import StoreOptions, open_existing_store

__all__ = [
    "ClusterOptions", "DLRMJob", "RunResult", "SnapshotInfo", "apply", "load", "logs", "run", "snapshots", "wait",
]  # fmt: skip

State = Literal["Finished", "Running", "Suspended", "Succeeded", "Failed"]
CURRENT = ClusterOptions()
"""The current context of the kubeconfig, and its namespace."""
AWS = S3Spec()


def load(path: Path | str) -> DLRMJob:
    """Read the job of a YAML or JSON file, as ``dlrmctl`` does; errors name the file and the field."""
    return read_job(Path(path), (), None)


def run(job: DLRMJob, *, workdir: Path | str | None = None, digest: bool = False) -> RunResult:
    """Train a job on this machine, from its newest snapshot if it has one, and return the result.

    Progress is shown on stderr. Call it on the main thread: Ctrl-C saves a checkpoint, commits it and raises
    KeyboardInterrupt. ``digest`` adds the SHA-256 of the final state.

    Raises:
        DLRMError: with the exit code and message of the process that failed.
    """
    folder = None if workdir is None else Path(workdir)
    options = RunOptions(file=Path(job.metadata.name), workdir=folder, digest=digest)
    with RunDisplay() as display:
        done = run_here(job, options, display, Stop())
    if done.result is None:
        raise KeyboardInterrupt
    return done.result


def apply(job: DLRMJob, cluster: ClusterOptions = CURRENT) -> DLRMJob:
    """Create or update a job in a cluster, as ``kubectl apply --server-side`` does, and return it as stored."""
    document = job.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"status"})
    document |= {"apiVersion": job.api_version, "kind": job.kind}
    return _parsed(JobClient(cluster).apply(document))


def wait(name: str, state: State = "Finished", timeout_s: float = 3_600, cluster: ClusterOptions = CURRENT) -> DLRMJob:
    """Wait until a job of a cluster reaches a phase, by default until it succeeds, and return it.

    Raises:
        DLRMError: it ended in another way.
        TemporaryError: time is up.
    """
    client = JobClient(cluster)
    wait_for(client, name, state, timeout_s)
    return _parsed(client.job(name))


def logs(
    name: str, *, replica: int = 0, container: str = "trainer", cluster: ClusterOptions = CURRENT
) -> Iterator[str]:
    """Yield the lines of a pod's log.

    Raises:
        NoInputError: there is no such job or pod, or it has no log yet.
    """
    client = JobClient(cluster)
    pods = choose_pods(job_facts(client.job(name)), client.pods(name), PodChoice(replica=replica))
    if not pods:
        raise NoInputError(f"job {name} has no pod {replica}; see dlrmctl describe {name}")
    for line in client.log(str(dig(pods[0], "metadata", "name")), {"container": container}):
        yield line.decode(errors="replace").removesuffix("\n")


def snapshots(store: str, *, s3: S3Spec = AWS, credentials_dir: Path | None = None) -> tuple[SnapshotInfo, ...]:
    """Return the usable snapshots of a store, oldest first; ``store`` is a URI or a path.

    Raises:
        NoInputError: the store does not exist.
    """
    options = StoreOptions(s3=s3, credentials_dir=credentials_dir)
    return list_usable(open_existing_store(split_target(store)[0], options))


def _parsed(document: Mapping[str, Any]) -> DLRMJob:
    meta = {key: value for key, value in document["metadata"].items() if key in ("name", "namespace", "uid")}
    return parse_job({**document, "metadata": meta})
