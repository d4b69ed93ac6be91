"""Run a real Kueue on a test's control plane: CRDs, webhooks for chosen namespaces, controller."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from dlrm_cluster.api import Api
from dlrm_cluster.build import binaries, module_folder
from dlrm_cluster.certificates import write_certificates
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_cluster.process import Server
from dlrm_testing.operator.definitions import install_crds
from dlrm_testing.operator.operator_cluster import eventually

Object = dict[str, Any]
KUEUE = "/apis/kueue.x-k8s.io/v1beta1"
CHOSEN = {"kueue-test": "true"}
"""Label of the namespaces in which Kueue manages pods."""
PATHS = ("v1-pod", "kueue-x-k8s-io")
"""Webhooks of pods and of Kueue's objects; the others are for kinds that this control plane lacks."""


class Kueue:
    """Run Kueue while the context lasts. Its CRDs stay, its webhooks are deleted."""

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self._api: Api = control_plane.api
        self._sources = module_folder("kueue", "sigs.k8s.io/kueue")
        certificates = write_certificates(folder, [LOOPBACK])
        self._ca = certificates.ca
        self._port, health = free_port(), free_port()
        for written, wanted in ((certificates.server_cert, "tls.crt"), (certificates.server_key, "tls.key")):
            shutil.copyfile(written, folder / wanted)
        config = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": LOOPBACK, "port": self._port, "certDir": str(folder)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["pod"], "podOptions": {"namespaceSelector": {"matchLabels": CHOSEN}}},
        }
        (folder / "kueue.yaml").write_text(json.dumps(config))
        argv = [binaries("kueue") / "kueue", f"--config={folder / 'kueue.yaml'}"]
        argv.append("--feature-gates=VisibilityOnDemand=false")  # its server listens beyond loopback
        self.server = Server("kueue", argv, folder, env={"KUBECONFIG": str(control_plane.kubeconfig)})

    def __enter__(self) -> "Kueue":
        crds = (self._sources / "config/components/crd/bases").glob("*.yaml")
        install_crds(self._api, *(yaml.safe_load(crd.read_text()) for crd in crds))
        for configuration in self._webhooks():
            kind = configuration["kind"].lower() + "s"
            self._api.ensure(f"/apis/admissionregistration.k8s.io/v1/{kind}", configuration)
        try:
            eventually(self._answers, 60, self.server.log_tail)
        except AssertionError:
            self.server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for configuration in self._webhooks():
            path = f"/apis/admissionregistration.k8s.io/v1/{configuration['kind'].lower()}s"
            self._api.call("DELETE", f"{path}/{configuration['metadata']['name']}")
        self.server.stop()

    def queue(self, namespace: str, cpus: int) -> None:
        """Create a LocalQueue ``ads`` in the namespace, with its own ClusterQueue of ``cpus`` cores."""
        label = {"metadata": {"labels": CHOSEN}}
        self._api.call("PATCH", f"/api/v1/namespaces/{namespace}", label)
        flavor = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "ResourceFlavor", "metadata": {"name": "any"}}
        self._api.ensure(f"{KUEUE}/resourceflavors", flavor)
        quota = [{"name": "cpu", "nominalQuota": cpus}, {"name": "memory", "nominalQuota": "1Ti"}]
        group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "any", "resources": quota}]}
        cluster_queue = {
            "apiVersion": "kueue.x-k8s.io/v1beta1",
            "kind": "ClusterQueue",
            "metadata": {"name": namespace},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [group],
                "preemption": {"withinClusterQueue": "LowerPriority"},
            },
        }
        self._api.ensure(f"{KUEUE}/clusterqueues", cluster_queue)
        local_queue = {
            "apiVersion": "kueue.x-k8s.io/v1beta1",
            "kind": "LocalQueue",
            "metadata": {"name": "ads"},
            "spec": {"clusterQueue": namespace},
        }
        self._api.ensure(f"{KUEUE}/namespaces/{namespace}/localqueues", local_queue)

    def workloads(self, namespace: str) -> dict[str, dict[str, str]]:
        """Return the reason of each true condition, by Workload and condition type."""
        items = self._api.call("GET", f"{KUEUE}/namespaces/{namespace}/workloads")["items"]
        return {
            item["metadata"]["name"]: {
                condition["type"]: condition["reason"]
                for condition in item.get("status", {}).get("conditions", [])
                if condition["status"] == "True"
            }
            for item in items
        }

    def _webhooks(self) -> list[Object]:
        """Return Kueue's webhook configurations with this server's address and namespaces."""
        found = []
        for document in yaml.safe_load_all((self._sources / "config/components/webhook/manifests.yaml").read_text()):
            document["metadata"]["name"] = f"kueue-{document['metadata']['name']}"
            document["webhooks"] = [hook for hook in document["webhooks"] if _is_ours(hook)]
            for hook in document["webhooks"]:
                path = hook["clientConfig"]["service"]["path"]
                ca = base64.b64encode(self._ca.read_bytes()).decode()
                hook["clientConfig"] = {"url": f"https://{LOOPBACK}:{self._port}{path}", "caBundle": ca}
                if path.endswith("v1-pod"):
                    hook["namespaceSelector"] = {"matchLabels": CHOSEN}
            found.append(document)
        return found

    def _answers(self) -> bool:
        """Return whether the webhooks answer: without them a flavor is refused.

        Kueue is started again if it ended because the API server's discovery did not have its CRDs yet.
        """
        self.server.start()
        flavor = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "ResourceFlavor", "metadata": {"name": "any"}}
        self._api.ensure(f"{KUEUE}/resourceflavors", flavor)
        return True


def _is_ours(hook: Object) -> bool:
    path: str = hook["clientConfig"]["service"]["path"]
    return any(part in path for part in PATHS)
