"""Read jobs and their pods from a cluster; each refusal says who can act."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from dlrm_api.errors import DLRMError, InvalidSpecError, NoInputError, NoPermissionError, TemporaryError
from dlrm_api.names import API_VERSION, Label, Port
from dlrm_cli.options import ClusterOptions
from dlrm_operator.api_client import (
    MERGE_PATCH,
    ClusterRefusedError,
    ClusterUnavailableError,
    GoneError,
    KubernetesApi,
    NotFoundError,
)
from dlrm_operator.login import DEFAULT_KUBECONFIG, ClusterAccount

Object = dict[str, Any]

INSTALL = "install the operator's chart (helm install dlrm-operator charts/dlrm-operator), or choose another --context"
INNERMOST = re.compile(r"(?:\[Errno -?\d+\] )?([^:'\"()\[\]]+?)['\")\s]*$")


def explain(error: DLRMError, verb: str, resource: str, server: str) -> DLRMError:
    """Return the error for what the API server answered to ``verb`` on ``resource``."""
    if isinstance(error, ClusterUnavailableError):
        return _unavailable(error, server)
    if not isinstance(error, ClusterRefusedError):
        return error
    words = str(error)
    if error.code == 403:
        return NoPermissionError(f"permission denied: {words}; ask for a Role that allows {verb} on {resource}")
    # 400: a log that does not exist.
    if isinstance(error, NotFoundError) or (error.code == 400 and verb == "get"):
        return NoInputError(words)
    if error.code in (400, 422):
        return InvalidSpecError(resource, f"refused by the API server: {words}")
    return TemporaryError(f"failed to {verb} {resource}: {words}")


def not_installed(server: str) -> NoInputError:
    """Return the error for a cluster without the DLRMJob resource."""
    return NoInputError(f"DLRMJob resource not found in the cluster at {server}; {INSTALL}")


def no_such_job(name: str, namespace: str, names: Collection[str], elsewhere: Collection[str]) -> NoInputError:
    """Return the error for an unknown job, with similar ``names`` and namespaces ``elsewhere`` with it."""
    problem = f"DLRMJob not found: {namespace}/{name}"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if elsewhere:
        return NoInputError(f"{problem}; choose --namespace {' or '.join(sorted(elsewhere))}")
    if near:
        return NoInputError(f"{problem}; did you mean {' or '.join(near)}?")
    if not names:
        return NoInputError(f"{problem}; the namespace has no jobs, see dlrmctl get --all-namespaces")
    return NoInputError(f"{problem}; see dlrmctl get --namespace {namespace}")


def _unavailable(error: ClusterUnavailableError, server: str) -> DLRMError:
    if error.code == 401:
        return NoPermissionError(f"credentials rejected by the API server at {server}; log in again")
    if error.code:
        return TemporaryError(f"API server unavailable: {server}: {error}")
    innermost = INNERMOST.search(str(error))
    why = innermost.group(1).strip() if innermost else str(error)
    return TemporaryError(f"API server not reachable: {server} ({why}); check --context and the network")


APPLY_PATCH = "application/apply-patch+yaml"
FIELD_MANAGER = "dlrm-client"
JOBS = "dlrmjobs (dlrm.dev)"
MAX_POLLED_PODS = 64
"""Pods that one look at metrics polls."""
METRICS_THREADS = 8
POD_TIMEOUT_S = 2.0
MAX_RESPONSE_BYTES = 4 * 2**20
"""Limit of a pod's answer: the metrics of 64 ranks with 60 classes of tables each take 2.6 MB."""
MAX_LINE_BYTES = 2**20
WATCH_TIMEOUT_S = 300
"""Time after which the server ends a watch."""


class JobClient:
    """Read and patch one namespace's jobs as one user; NoInputError without a usable kubeconfig."""

    def __init__(self, where: ClusterOptions) -> None:
        kubeconfig = where.kubeconfig or os.environ.get("KUBECONFIG") or _user_kubeconfig()
        in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
        self._account = ClusterAccount(kubeconfig, in_cluster=in_cluster, context=where.context)
        self._api = KubernetesApi(self._account)
        self.namespace = where.namespace or self._account.namespace

    def job(self, name: str) -> Object:
        """Return one job, or raise NoInputError if none has that name."""
        with self._explained("get", JOBS, missing=lambda: self._not_found(name)):
            return self._api.call_now("GET", self._job_path(name))

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> tuple[list[Object], str]:
        """Return all jobs by namespace and name, and the resource version to watch from."""
        path = self._jobs_path(None if everywhere else self.namespace)
        try:
            with self._explained("list", JOBS, missing=lambda: not_installed(self._account.server)):
                found, version = self._api.list_now(path, {"labelSelector": selector} if selector else {})
        except GoneError as error:
            raise TemporaryError(f"the list of jobs expired while it was read: {error}; try again") from None
        return sorted(found, key=lambda job: (job["metadata"]["namespace"], job["metadata"]["name"])), version

    def watch_jobs(self, version: str, *, everywhere: bool, selector: str | None) -> Iterator[Object]:
        """Yield jobs as they change until the server ends the watch; a deleted one has ``deletionTimestamp``."""
        query = {"resourceVersion": version, "timeoutSeconds": str(WATCH_TIMEOUT_S)}
        query |= {"labelSelector": selector} if selector else {}
        path = self._jobs_path(None if everywhere else self.namespace)
        with self._explained("watch", JOBS), suppress(GoneError):
            for event in self._api.watch(path, query, 2 * WATCH_TIMEOUT_S):
                yield event["object"]

    def set_suspend(self, name: str, wanted: bool) -> Object:
        """Patch ``spec.lifecycle.suspend`` and return the job."""
        body = {"spec": {"lifecycle": {"suspend": wanted}}}
        with self._explained("patch", JOBS, missing=lambda: self._not_found(name)):
            return self._api.call_now("PATCH", self._job_path(name), body, kind=MERGE_PATCH)

    def apply(self, document: Object) -> Object:
        """Create or update a job by server-side apply, as its user, and return it."""
        path, query = self._job_path(document["metadata"]["name"]), {"fieldManager": FIELD_MANAGER}
        body = {**document, "metadata": {**document["metadata"], "namespace": self.namespace}}
        with self._explained("patch", JOBS, missing=lambda: not_installed(self._account.server)):
            return self._api.call_now("PATCH", path, body, query, kind=APPLY_PATCH)

    def pods(self, name: str) -> list[Object]:
        """Return the trainer pods of all attempts of a job."""
        with self._explained("list", "pods"):
            return self._api.list_now(self._path("pods"), {"labelSelector": f"{Label.JOB}={name}"})[0]

    def events(self, name: str) -> list[Object]:
        """Return the Events about a job itself."""
        about = f"involvedObject.kind=DLRMJob,involvedObject.name={name}"
        with self._explained("list", "events"):
            return self._api.list_now(self._path("events"), {"fieldSelector": about})[0]

    def log(self, pod: str, query: dict[str, str]) -> Iterator[bytes]:
        """Yield the lines of a container's log, each cut after ``MAX_LINE_BYTES``."""
        with self._explained("get", "pods/log"):
            yield from self._api.lines(self._path(f"pods/{quote(pod)}/log"), query, None, MAX_LINE_BYTES)

    def pod_endpoint(self, pod: str, namespace: str, path: str) -> str:
        """Return a pod's answer through the API server's proxy; BadDataError if it is too large or slow."""
        whole = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}:{Port.TRAINER}/proxy/{path}"
        with self._explained("get", "pods/proxy"):
            return self._api.answer_of_pod(whole, POD_TIMEOUT_S, MAX_RESPONSE_BYTES).decode(errors="replace")

    def _not_found(self, name: str) -> DLRMError:
        names = {job["metadata"]["name"] for job in self.jobs()[0]}
        elsewhere: set[str] = set()
        with suppress(DLRMError):
            everywhere = self.jobs(everywhere=True)[0]
            elsewhere = {job["metadata"]["namespace"] for job in everywhere if job["metadata"]["name"] == name}
        return no_such_job(name, self.namespace, names, elsewhere)

    @contextmanager
    def _explained(self, verb: str, resource: str, missing: Callable[[], DLRMError] | None = None) -> Iterator[None]:
        """Raise errors as ``explain`` returns them; for a 404 what ``missing`` returns, if given."""
        try:
            yield
        except GoneError:
            raise
        except DLRMError as error:
            if missing is not None and isinstance(error, NotFoundError):
                raise missing() from None
            raise explain(error, verb, resource, self._account.server) from error

    def _path(self, resource: str) -> str:
        return f"/api/v1/namespaces/{quote(self.namespace)}/{resource}"

    def _jobs_path(self, namespace: str | None) -> str:
        where = f"namespaces/{quote(namespace)}/" if namespace else ""
        return f"/apis/{API_VERSION}/{where}dlrmjobs"

    def _job_path(self, name: str) -> str:
        return f"{self._jobs_path(self.namespace)}/{quote(name)}"


def _user_kubeconfig() -> str | None:
    """Return the user's kubeconfig, which comes before the service account of a pod that dlrmctl runs in."""
    # pathlib raises if the home is unknown or may not be read.
    file = os.path.expanduser(DEFAULT_KUBECONFIG)  # noqa: PTH111
    return file if os.path.isfile(file) else None  # noqa: PTH113


def dig(where: Any, *path: str | int) -> Any:
    """Return the value at ``path``, or None if a step of it is missing."""
    for step in path:
        try:
            where = where[step]
        except (KeyError, IndexError, TypeError):
            return None
    return where
