"""Jobs and their pods in one namespace of a cluster; every refusal is said so that the user can act."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dlrm_api.errors import DLRMError, InvalidSpecError, NoInputError, NoPermissionError, TemporaryError
from dlrm_api.names import API_VERSION, Label
from dlrm_operator.api_client import (
    ClusterRefusedError,
    ClusterUnavailableError,
    GoneError,
    KubernetesApi,
    NotFoundError,
)

INSTALL = "install the operator's chart (helm install dlrm-operator charts/dlrm-operator), or choose another --context"
INNERMOST = re.compile(r"(?:\[Errno -?\d+\] )?([^:'\"()\[\]]+?)['\")\s]*$")


def explain(error: DLRMError, verb: str, resource: str, server: str) -> DLRMError:
    """The error that the user reads for what the API server said to ``verb`` on ``resource``."""
    if isinstance(error, ClusterUnavailableError):
        return _unavailable(error, server)
    if not isinstance(error, ClusterRefusedError):
        return error
    words = str(error)
    if error.code == 403:
        return NoPermissionError(f"{words}: ask for a Role that allows the verb {verb} on {resource}")
    if isinstance(error, NotFoundError) or (error.code == 400 and verb == "get"):  # 400: a log that is not there
        return NoInputError(words)
    if error.code in (400, 422):
        return InvalidSpecError(resource, f"the API server refused it: {words}")
    return TemporaryError(f"{verb} of {resource}: {words}")


def not_installed(server: str) -> NoInputError:
    """The cluster has no DLRMJobs at all."""
    return NoInputError(f"the cluster at {server} knows no DLRMJobs: {INSTALL}")


def no_such_job(name: str, namespace: str, there: Collection[str], elsewhere: Collection[str]) -> NoInputError:
    """No job of that name; says which names come near, and where else there is one.

    Args:
        name: that was asked for.
        namespace: where it was looked for.
        there: names of the namespace's jobs.
        elsewhere: other namespaces that have a job of that name.
    """
    words = f"no DLRMJob {name} in namespace {namespace}"
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.5)
    if elsewhere:
        return NoInputError(f"{words}: there is one in {', '.join(sorted(elsewhere))}: choose it with --namespace")
    if near:
        return NoInputError(f"{words}: did you mean {' or '.join(near)}?")
    if not there:
        return NoInputError(f"{words}, nor any other: see dlrmctl get --all-namespaces")
    return NoInputError(f"{words}: see dlrmctl get --namespace {namespace}")


def _unavailable(error: ClusterUnavailableError, server: str) -> DLRMError:
    if error.code == 401:
        return NoPermissionError(f"the API server at {server} does not know these credentials: log in again")
    if error.code:
        return TemporaryError(f"the API server at {server} can't answer now: {error}")
    innermost = INNERMOST.search(str(error))
    why = innermost.group(1).strip() if innermost else str(error)
    return TemporaryError(f"the API server at {server} does not answer ({why}): check --context and the network")


USERS_OWN = "~/.kube/config"
MERGE = "application/merge-patch+json"
JOBS = "dlrmjobs (dlrm.dev)"
MOST_BYTES = 4 * 2**20
"""Of what a pod answers: metrics of 64 ranks with 60 classes of tables each take 2.6 MB, of 5,000 classes 3.1 MB."""
MOST_LINE_BYTES = 2**20
WATCH_S = 300
"""The server ends a watch then."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which cluster, and where in it."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None


class Connection:
    """One user's view of a cluster.

    Raises:
        NoInputError: there is no usable kubeconfig.
    """

    def __init__(self, place: Place) -> None:
        kubeconfig = place.kubeconfig or os.environ.get("KUBECONFIG") or _of_the_user()
        in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
        self._api = KubernetesApi(kubeconfig, in_cluster=in_cluster, context=place.context)
        self.namespace = place.namespace or self._api.namespace

    def job(self, name: str) -> Object:
        """One job.

        Raises:
            NoInputError: there is none of that name; says which come near.
        """
        try:
            with self._told("get", JOBS, missing=False):
                return self._api.call_now("GET", self._job_path(name))
        except NotFoundError:
            raise self._missing(name) from None

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> tuple[list[Object], str]:
        """All jobs, by namespace and name, and the version to watch from."""
        path = self._jobs_path(None if everywhere else self.namespace)
        try:
            with self._told("list", JOBS, missing=False):
                found, version = self._api.list_now(path, {"labelSelector": selector} if selector else {})
        except NotFoundError:
            raise not_installed(self._api.host) from None
        except GoneError as error:
            raise TemporaryError(f"the list of jobs changed too much while it was read ({error}): try again") from None
        return sorted(found, key=lambda job: (job["metadata"]["namespace"], job["metadata"]["name"])), version

    def watch_jobs(self, version: str, *, everywhere: bool, selector: str | None) -> Iterator[Object]:
        """Jobs as they change, until the server ends the watch; one that is gone comes with ``deletionTimestamp``."""
        query = {"resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        path = self._jobs_path(None if everywhere else self.namespace)
        with self._told("watch", JOBS), suppress(GoneError):
            for event in self._api.watch(
                path, {**query, **({"labelSelector": selector} if selector else {})}, 2 * WATCH_S
            ):
                yield event["object"]

    def set_suspend(self, name: str, wanted: bool) -> Object:
        """Ask for the job to be suspended, or to go on; the job as it is then."""
        body = {"spec": {"lifecycle": {"suspend": wanted}}}
        try:
            with self._told("patch", JOBS, missing=False):
                return self._api.call_now("PATCH", self._job_path(name), body, kind=MERGE)
        except NotFoundError:
            raise self._missing(name) from None

    def pods(self, name: str) -> list[Object]:
        """The trainer pods of a job, of all attempts."""
        path = f"/api/v1/namespaces/{quote(self.namespace)}/pods"
        with self._told("list", "pods"):
            return self._api.list_now(path, {"labelSelector": f"{Label.JOB}={name}"})[0]

    def events(self, name: str) -> list[Object]:
        """The Events about a job itself."""
        path = f"/api/v1/namespaces/{quote(self.namespace)}/events"
        about = f"involvedObject.kind=DLRMJob,involvedObject.name={name}"
        with self._told("list", "events"):
            return self._api.list_now(path, {"fieldSelector": about})[0]

    def log(self, pod: str, query: dict[str, str], silence_s: float | None) -> Iterator[bytes]:
        """Lines of a container's log, each cut after ``MOST_LINE_BYTES``; with ``follow`` as they come."""
        path = f"/api/v1/namespaces/{quote(self.namespace)}/pods/{quote(pod)}/log"
        with self._told("get", "pods/log"):
            yield from self._api.lines(path, query, silence_s, MOST_LINE_BYTES)

    def pod_endpoint(self, pod: str, namespace: str, port: int, path: str, timeout_s: float) -> str:
        """What a pod answers on a port, by way of the API server's proxy.

        Raises:
            BadDataError: it answers too much, or too slowly.
        """
        whole = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}:{port}/proxy/{path}"
        with self._told("get", "pods/proxy"):
            return self._api.answer_of_pod(whole, timeout_s, MOST_BYTES).decode(errors="replace")

    def _missing(self, name: str) -> DLRMError:
        """Why a job is not found; looks whether there are jobs at all, and which come near."""
        there = {job["metadata"]["name"] for job in self.jobs()[0]}
        elsewhere: set[str] = set()
        with suppress(DLRMError):
            everywhere = self.jobs(everywhere=True)[0]
            elsewhere = {job["metadata"]["namespace"] for job in everywhere if job["metadata"]["name"] == name}
        return no_such_job(name, self.namespace, there, elsewhere)

    @contextmanager
    def _told(self, verb: str, resource: str, *, missing: bool = True) -> Iterator[None]:
        """Errors as :func:`explain` says them; 404 as it is where the caller knows better."""
        try:
            yield
        except NotFoundError as error:
            if not missing:
                raise
            raise explain(error, verb, resource, self._api.host) from error
        except GoneError:
            raise
        except DLRMError as error:
            raise explain(error, verb, resource, self._api.host) from error

    def _jobs_path(self, namespace: str | None) -> str:
        where = f"namespaces/{quote(namespace)}/" if namespace else ""
        return f"/apis/{API_VERSION}/{where}dlrmjobs"

    def _job_path(self, name: str) -> str:
        return f"{self._jobs_path(self.namespace)}/{quote(name)}"


def _of_the_user() -> str | None:
    """The user's own kubeconfig, which goes before the account of a pod that dlrmctl runs in; None without one."""
    file = os.path.expanduser(USERS_OWN)  # noqa: PTH111  pathlib raises where no home is known
    return file if os.path.isfile(file) else None  # noqa: PTH113  and where that may not be looked into


Object = dict[str, Any]


def dig(where: Any, *path: str | int) -> Any:
    """What lies at ``path``; None where a step of it leads nowhere."""
    for step in path:
        try:
            where = where[step]
        except (KeyError, IndexError, TypeError):
            return None
    return where
