"""Run a real Kueue on a test's control plane: CRDs, webhooks for chosen namespaces, controller."""

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dlrm_cluster.api import Api, ApiError
from dlrm_cluster.build import binaries, module_folder
from dlrm_cluster.certificates import write_certificates
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_cluster.process import Server
from dlrm_testing.operator.definitions import DEFINITIONS, delete_crd
from dlrm_testing.operator.operator_cluster import eventually

Object = dict[str, Any]
GROUP = "kueue.x-k8s.io"
OLDEST_KUEUE = "kueue-0.10"
"""Recipe of the oldest tested version."""
CHOSEN = {"kueue-test": "true"}
"""Label of the namespaces in which Kueue manages pods."""
RACKS = {"pool": "racks"}
"""Labels of the nodes of the flavor ``racks``."""
PATHS = ("v1-pod", "kueue-x-k8s-io")
"""Webhooks of pods and of Kueue's objects; the others are for kinds that this control plane lacks."""
SYSTEM = "kueue-system"
SERVICE = f"kueue-webhook-service.{SYSTEM}.svc"
AUTHORITY = "kueue-ca"
"""Name of the certificate authority that Kueue accepts in its Secret."""


class Kueue:
    """Run Kueue while the context lasts. Its CRDs stay, its webhooks are deleted."""

    def __init__(self, control_plane: ControlPlane, folder: Path, recipe: str = "kueue") -> None:
        self._control_plane = control_plane
        self._api: Api = control_plane.api
        self._folder = folder
        self._port = free_port()
        self._certificates = write_certificates(folder, [LOOPBACK, SERVICE], AUTHORITY)
        shutil.copyfile(self._certificates.server_cert, folder / "tls.crt")
        shutil.copyfile(self._certificates.server_key, folder / "tls.key")
        self._use(recipe)

    def __enter__(self) -> "Kueue":
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}}
        self._apply("/api/v1/namespaces", namespace)
        self._apply(f"/api/v1/namespaces/{SYSTEM}/secrets", self._secret())
        self._install()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for configuration in self._webhooks():
            self._api.call("DELETE", f"{_path(configuration)}/{configuration['metadata']['name']}")
        self.server.stop()

    def upgrade(self, recipe: str) -> None:
        """Replace the running release in place: its CRDs and webhooks, then its process.

        CRDs whose stored version the new release lacks are deleted before, as Kueue's release notes ask.
        """
        old, stored = self.server, {crd["metadata"]["name"]: _stored(crd) for crd in self._crds}
        self._use(recipe)
        for crd in self._crds:
            if stored[crd["metadata"]["name"]] not in _versions(crd):
                delete_crd(self._api, crd)
        self._install()
        old.stop()
        self._start()

    @contextmanager
    def without_v1beta1(self) -> Iterator[None]:
        """Stop serving ``v1beta1`` while the context lasts, as Kueue 0.20 does."""
        self._apply_crds(served=[self.version])
        eventually(lambda: not self._api.found(f"/apis/{GROUP}/v1beta1"))
        try:
            yield
        finally:
            self._apply_crds()

    def racks(self) -> str:
        """Create a flavor of the nodes with the labels ``RACKS``, placed by their label ``rack``; return its name."""
        levels = [{"nodeLabel": "rack"}, {"nodeLabel": "kubernetes.io/hostname"}]
        topology = {"kind": "Topology", "metadata": {"name": "racks"}, "spec": {"levels": levels}}
        placed = {"nodeLabels": RACKS, "topologyName": "racks"}
        flavor = {"kind": "ResourceFlavor", "metadata": {"name": "racks"}, "spec": placed}
        for plural, document in (("topologies", topology), ("resourceflavors", flavor)):
            self._api.ensure(f"/apis/{self._api_version}/{plural}", {"apiVersion": self._api_version, **document})
        return "racks"

    def queue(self, namespace: str, cpus: int, flavor: str = "any") -> None:
        """Create a LocalQueue ``ads`` in the namespace, with its own ClusterQueue of ``cpus`` cores."""
        label = {"metadata": {"labels": CHOSEN}}
        self._api.call("PATCH", f"/api/v1/namespaces/{namespace}", label)
        quota = [{"name": "cpu", "nominalQuota": cpus}, {"name": "memory", "nominalQuota": "1Ti"}]
        group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": flavor, "resources": quota}]}
        cluster_queue = {
            "apiVersion": self._api_version,
            "kind": "ClusterQueue",
            "metadata": {"name": namespace},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [group],
                "preemption": {"withinClusterQueue": "LowerPriority"},
            },
        }
        self._api.ensure(f"/apis/{self._api_version}/clusterqueues", cluster_queue)
        local_queue = {
            "apiVersion": self._api_version,
            "kind": "LocalQueue",
            "metadata": {"name": "ads"},
            "spec": {"clusterQueue": namespace},
        }
        self._api.ensure(f"/apis/{self._api_version}/namespaces/{namespace}/localqueues", local_queue)

    def workloads(self, namespace: str) -> dict[str, dict[str, str]]:
        """Return the reason of each true condition, by Workload and condition type."""
        items = self._api.call("GET", f"/apis/{self._api_version}/namespaces/{namespace}/workloads")["items"]
        return {
            item["metadata"]["name"]: {
                condition["type"]: condition["reason"]
                for condition in item.get("status", {}).get("conditions", [])
                if condition["status"] == "True"
            }
            for item in items
        }

    def why_pending(self, namespace: str, workload: str) -> str:
        """Return Kueue's message on a Workload without quota."""
        path = f"/apis/{self._api_version}/namespaces/{namespace}/workloads/{workload}"
        conditions = self._api.call("GET", path)["status"]["conditions"]
        return str({each["type"]: each["message"] for each in conditions if each["status"] == "False"}["QuotaReserved"])

    def _use(self, recipe: str) -> None:
        """Read the release's manifests and prepare its process."""
        self._manifests = module_folder(recipe, "sigs.k8s.io/kueue") / "config/components"
        self._crds = self._read_crds()
        self.version = _stored(self._crds[0])
        self._api_version = f"{GROUP}/{self.version}"
        config = {
            "apiVersion": f"config.kueue.x-k8s.io/{self.version}",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"{LOOPBACK}:{free_port()}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": LOOPBACK, "port": self._port, "certDir": str(self._folder)},
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"qps": 1_000, "burst": 2_000},
            # v1beta1: certificates of its own would lie in one folder of the machine.
            # v1beta2: without, it exits unless such a folder holds certificates. The Secret has all that it looks for.
            "internalCertManagement": {"enable": self.version != "v1beta1"},
            "managedJobsNamespaceSelector": {"matchLabels": CHOSEN},
            "integrations": {"frameworks": ["pod"]},
        }
        file = self._folder / f"{recipe}.json"
        file.write_text(json.dumps(config))
        # The visibility server listens beyond loopback.
        gates = "--feature-gates=VisibilityOnDemand=false"
        argv: list[str | Path] = [binaries(recipe) / "kueue", f"--config={file}", gates]
        self.server = Server(recipe, argv, self._folder, env={"KUBECONFIG": str(self._control_plane.kubeconfig)})

    def _install(self) -> None:
        self._apply_crds()
        for configuration in self._webhooks():
            self._apply(_path(configuration), configuration)

    def _start(self) -> None:
        try:
            eventually(self._answers, 60, self.server.log_tail)
        except AssertionError:
            self.server.stop()
            raise

    def _answers(self) -> bool:
        """Return whether the webhooks answer: without them a flavor is refused.

        Kueue is started again if it ended because the API server's discovery did not have its CRDs yet.
        """
        self.server.start()
        flavor = {"apiVersion": self._api_version, "kind": "ResourceFlavor", "metadata": {"name": "any"}}
        self._api.ensure(f"/apis/{self._api_version}/resourceflavors", flavor)
        return True

    def _apply_crds(self, served: list[str] | None = None) -> None:
        """Create or replace the CRDs, and wait until those of the release's version are served."""
        kinds = set()
        for crd in self._crds:
            versions = [
                {**each, "served": served is None or each["name"] in served} for each in crd["spec"]["versions"]
            ]
            self._apply(DEFINITIONS, {**crd, "spec": {**crd["spec"], "versions": versions}})
            if self.version in _versions(crd):
                kinds.add(crd["spec"]["names"]["plural"])

        def are_served() -> bool:
            resources = self._api.call("GET", f"/apis/{self._api_version}")["resources"]
            return kinds <= {each["name"] for each in resources}

        eventually(are_served)

    def _apply(self, path: str, document: Object) -> None:
        """Create an object, or change the one that is there."""
        try:
            self._api.call("POST", path, document)
        except ApiError as error:
            if error.code != 409:
                raise
            self._api.call("PATCH", f"{path}/{document['metadata']['name']}", document)

    def _read_crds(self) -> list[Object]:
        """Return the release's CRDs, with its conversion webhook where its kustomization patches one in."""
        kustomization = _load(self._manifests / "crd/kustomization.yaml")
        crds = [_undescribed(_load(self._manifests / "crd" / name)) for name in kustomization["resources"]]
        patches = [_load(self._manifests / "crd" / patch["path"]) for patch in kustomization["patches"]]
        conversions = {patch["metadata"]["name"]: patch["spec"]["conversion"] for patch in patches if "spec" in patch}
        for crd in crds:
            if conversion := conversions.get(crd["metadata"]["name"]):
                conversion["webhook"]["clientConfig"] = self._client_config("/convert")
                crd["spec"]["conversion"] = conversion
        return crds

    def _webhooks(self) -> list[Object]:
        """Return Kueue's webhook configurations with this server's address and namespaces."""
        found = []
        for document in yaml.safe_load_all((self._manifests / "webhook/manifests.yaml").read_text()):
            document["metadata"]["name"] = f"kueue-{document['metadata']['name']}"
            document["webhooks"] = [hook for hook in document["webhooks"] if _is_ours(hook)]
            for hook in document["webhooks"]:
                path = hook["clientConfig"]["service"]["path"]
                hook["clientConfig"] = self._client_config(path)
                if path.endswith("v1-pod"):
                    hook["namespaceSelector"] = {"matchLabels": CHOSEN}
            found.append(document)
        return found

    def _client_config(self, path: str) -> Object:
        return {"url": f"https://{LOOPBACK}:{self._port}{path}", "caBundle": _encoded(self._certificates.ca)}

    def _secret(self) -> Object:
        """Return the Secret in which Kueue looks for its certificates: it makes none if these are valid."""
        files = {"ca.crt": self._certificates.ca, "ca.key": self._certificates.ca_key}
        files |= {"tls.crt": self._certificates.server_cert, "tls.key": self._certificates.server_key}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "kueue-webhook-server-cert"},
            "data": {name: _encoded(file) for name, file in files.items()},
        }


def _versions(crd: Object) -> set[str]:
    return {each["name"] for each in crd["spec"]["versions"]}


def _stored(crd: Object) -> str:
    return next(str(each["name"]) for each in crd["spec"]["versions"] if each["storage"])


def _path(configuration: Object) -> str:
    return f"/apis/admissionregistration.k8s.io/v1/{configuration['kind'].lower()}s"


def _load(file: Path) -> Object:
    # The Workload's CRD has 1.4 MB: 3.2 s without libyaml, 0.3 s with it.
    found: Object = yaml.load(file.read_text(), yaml.CSafeLoader)
    return found


def _undescribed(schema: Any) -> Any:
    """Return the CRD without its descriptions, which are most of it and which the API server reads at every change."""
    if isinstance(schema, list):
        return [_undescribed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "description" or not isinstance(value, str)}
    return {key: _undescribed(value) for key, value in kept.items()}


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _is_ours(hook: Object) -> bool:
    path: str = hook["clientConfig"]["service"]["path"]
    return any(part in path for part in PATHS)
