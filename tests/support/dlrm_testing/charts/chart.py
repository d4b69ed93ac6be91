"""The chart as helm renders it, and the identity that it gives the operator."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from dlrm_cluster.api import ApiError
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.rights_ledger import LEDGER, Right

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[4]
CHART = ROOT / "charts" / "dlrm-operator"
VARIANTS = sorted((CHART / "ci").glob("*-values.yaml"))
KUBE_VERSION = "1.35.0"
KUEUE_GROUP = "kueue.x-k8s.io"
ACCOUNTS = "/api/v1/namespaces/{}/serviceaccounts"
PLACES = {
    "ServiceAccount": ACCOUNTS,
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}
"""Where the API server keeps what makes up an identity."""


def variant(name: str) -> Path:
    """Return the values of one of the chart's variants."""
    return CHART / "ci" / f"{name}-values.yaml"


def helm_run(helm: Path, home: Path, *words: str | Path, kubeconfig: Path | None = None) -> str:
    """Run helm, with its own files in ``home``; return what it writes."""
    env = {**os.environ, "HELM_CACHE_HOME": str(home), "HELM_CONFIG_HOME": str(home), "HELM_DATA_HOME": str(home)}
    env["KUBECONFIG"] = str(kubeconfig or home / "none")
    argv = [str(helm), *(str(word) for word in words)]
    answer = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"helm {' '.join(argv[1:])}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


def render(
    helm: Path, home: Path, release: str, namespace: str, *values: str | Path, tests: bool = False
) -> list[Object]:
    """Render all objects of a release; ``values`` are files, or settings such as replicas=2."""
    words: list[str | Path] = ["template", release, CHART, "--namespace", namespace, "--kube-version", KUBE_VERSION]
    words += [] if tests else ["--skip-tests"]
    for value in values:
        words += ["--values" if isinstance(value, Path) else "--set", value]
    return [document for document in yaml.safe_load_all(helm_run(helm, home, *words)) if document]


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def only(objects: Iterable[Object], kind: str) -> Object:
    [found] = of_kind(objects, kind)
    return found


class Identity:
    """Make the operator's service account with exactly the rendered rights; a context manager."""

    def __init__(self, control_plane: ControlPlane, objects: list[Object], folder: Path) -> None:
        self._control_plane = control_plane
        self._objects = [each for each in objects if each["kind"] in PLACES]
        account = only(objects, "ServiceAccount")["metadata"]
        self.name: str = f"system:serviceaccount:{account['namespace']}:{account['name']}"
        self.kubeconfig = folder / "service-account.kubeconfig"
        self._token_path = f"{ACCOUNTS.format(account['namespace'])}/{account['name']}/token"
        self._namespace: str = account["namespace"]
        self._since = 0

    def __enter__(self) -> "Identity":
        api = self._control_plane.api
        self._since = self._control_plane.audit_log.stat().st_size
        for each in self._objects:
            place = PLACES[each["kind"]].format(each["metadata"].get("namespace", ""))
            api.call("POST", place, each)
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        token = api.call("POST", self._token_path, request)["status"]["token"]
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [
                {
                    "name": "it",
                    "cluster": {
                        "server": self._control_plane.server,
                        "certificate-authority": str(self._control_plane.ca),
                    },
                }
            ],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": self._namespace}}],
        }
        self.kubeconfig.write_text(json.dumps(document))
        return self

    def __exit__(self, *_: object) -> None:
        LEDGER.enter(self.granted(), self.asked())
        for each in reversed(self._objects):
            meta = each["metadata"]
            place = PLACES[each["kind"]].format(meta.get("namespace", ""))
            try:
                self._control_plane.api.call("DELETE", f"{place}/{meta['name']}")
            except ApiError as error:
                if error.code != 404:
                    raise

    def granted(self) -> set[Right]:
        """Return every right of every role that the account is bound to."""
        return {
            (group, resource, verb)
            for role in self._roles()
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    def calls(self) -> list[Object]:
        """Return the account's calls about objects, as the API server recorded them."""
        name, found = self.name.encode(), []
        with self._control_plane.audit_log.open("rb") as log:
            log.seek(self._since)
            for line in log:
                if name in line and line.endswith(b"\n"):
                    call = json.loads(line)
                    if call["user"]["username"] == self.name and "objectRef" in call:
                        found.append(call)
        return found

    def asked(self) -> set[Right]:
        """Return the rights that its calls needed, except those that were refused."""
        return {right for call in self.calls() if not _forbidden(call) for right in used(call)}

    def _roles(self) -> list[Object]:
        bound = {each["roleRef"]["name"] for each in self._objects if each["kind"].endswith("Binding")}
        return [each for each in self._objects if each["kind"].endswith("Role") and each["metadata"]["name"] in bound]


def used(call: Object) -> set[Right]:
    """Return the rights that one recorded call needed; server-side apply of a missing object creates it too."""
    about = call["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    verbs = {call["verb"]}
    if call["verb"] == "patch" and call["responseStatus"]["code"] == 201:
        verbs.add("create")
    return {(about.get("apiGroup", ""), resource, verb) for verb in verbs}


def refused(identity: Identity) -> list[Object]:
    """Return the account's calls without a right; a quota or a namespace's end forbids for other reasons.

    An install that was not told of Kueue may meet other tests' jobs that wait for it.
    """
    knows_kueue = any(group == KUEUE_GROUP for group, _, _ in identity.granted())
    found = [call for call in identity.calls() if _forbidden(call)]
    return [call for call in found if knows_kueue or call["objectRef"].get("apiGroup") != KUEUE_GROUP]


def _forbidden(call: Object) -> bool:
    by_role = call.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
    words = call["responseStatus"].get("message", "")
    return by_role or "cannot set blockOwnerDeletion" in words
