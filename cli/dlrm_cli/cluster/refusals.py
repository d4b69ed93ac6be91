"""What a cluster's answer means to the user: who can act, and how."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from dlrm_api.errors import DLRMError, InvalidSpecError, NoInputError, NoPermissionError, TemporaryError
from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError, NotFoundError

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
