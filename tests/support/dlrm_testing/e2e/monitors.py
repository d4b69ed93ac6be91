"""What the Prometheus Operator makes of the chart's monitors: scrape configurations of a Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from dlrm_cluster.build import module_folder
from dlrm_cluster.real_cluster import Object, RealCluster

KINDS = ("podmonitors", "prometheusrules", "servicemonitors")
ROLE = {"PodMonitor": "pod", "ServiceMonitor": "endpoints"}
OWNER = {"PodMonitor": "pod", "ServiceMonitor": "service"}
PORT = {"PodMonitor": "pod_container_port_name", "ServiceMonitor": "endpoint_port_name"}
SETTINGS = {"interval": "scrape_interval", "scrapeTimeout": "scrape_timeout", "honorLabels": "honor_labels"}


def define(cluster: RealCluster) -> None:
    """Teach the API server the kinds that the chart's monitors and rules are of."""
    folder = module_folder("prometheus-operator", "github.com/prometheus-operator/prometheus-operator")
    names = [f"monitoring.coreos.com_{kind}.yaml" for kind in KINDS]
    cluster.apply(*(yaml.safe_load((folder / "example/prometheus-operator-crd" / name).read_text()) for name in names))
    for kind in KINDS:
        name = f"{kind}.monitoring.coreos.com"
        cluster.eventually(lambda name=name: cluster.get(name, "--all-namespaces"), 60, f"{name} is served")


def discover(cluster: RealCluster, folder: Path) -> None:
    """Write what Prometheus' own discovery finds, a file for each role: Debian builds it without Kubernetes'."""
    for role, found in (("pod", _pods(cluster)), ("endpoints", _endpoints(cluster))):
        draft = folder / f".{role}.json"
        draft.write_text(json.dumps(list(found)))
        draft.replace(folder / f"{role}.json")


def _pods(cluster: RealCluster) -> Iterator[Object]:
    """Yield each port of each container, init containers included."""
    for pod in cluster.get("pods", "--all-namespaces")["items"]:
        meta, status = pod["metadata"], pod["status"]
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            for port in container.get("ports", ()):
                if "podIP" in status:
                    own = {"pod_phase": status["phase"], "pod_container_port_name": port.get("name", "")}
                    own |= {"pod_name": meta["name"], **_labels("pod", meta)}
                    yield _target(meta["namespace"], status["podIP"], port["containerPort"], own)


def _endpoints(cluster: RealCluster) -> Iterator[Object]:
    """Yield each ready address and port of each Service."""
    services = {_place(each): each for each in cluster.get("services", "--all-namespaces")["items"]}
    for endpoints in cluster.get("endpoints", "--all-namespaces")["items"]:
        service = services.get(_place(endpoints), {"metadata": {}})
        for subset in endpoints.get("subsets", ()):
            for address in subset.get("addresses", ()):
                for port in subset.get("ports", ()):
                    own = {"endpoint_port_name": port.get("name", ""), **_labels("service", service["metadata"])}
                    own |= {"pod_name": address.get("targetRef", {}).get("name", "")}
                    yield _target(endpoints["metadata"]["namespace"], address["ip"], port["port"], own)


def _place(each: Object) -> tuple[str, str]:
    return each["metadata"]["namespace"], each["metadata"]["name"]


def _labels(owner: str, meta: Object) -> dict[str, str]:
    return {f"{owner}_label_{_sanitized(name)}": value for name, value in meta.get("labels", {}).items()}


def _target(namespace: str, address: str, port: int, own: dict[str, str]) -> Object:
    labels = {f"__meta_kubernetes_{name}": value for name, value in {"namespace": namespace, **own}.items()}
    return {"targets": [f"{address}:{port}"], "labels": labels}


def scrape_configs(cluster: RealCluster, folder: Path) -> list[Object]:
    """One for each endpoint of each monitor in the cluster, over what ``discover`` writes into ``folder``."""
    found = cluster.get("servicemonitors,podmonitors", "--all-namespaces")["items"]
    return [
        _scrape_config(monitor, number, endpoint, folder)
        for monitor in found
        for number, endpoint in enumerate(monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"])
    ]


def _scrape_config(monitor: Object, number: int, endpoint: Object, folder: Path) -> Object:
    assert endpoint.keys() <= {*SETTINGS, "port", "relabelings"}, f"nobody translates all of {endpoint}"
    kind, spec = monitor["kind"], monitor["spec"]
    kept = {f"{OWNER[kind]}_label_{_sanitized(name)}": value for name, value in spec["selector"]["matchLabels"].items()}
    kept |= {PORT[kind]: endpoint["port"]}
    if not spec["namespaceSelector"].get("any"):
        kept |= {"namespace": "|".join(spec["namespaceSelector"]["matchNames"])}
    relabelings = [
        {"source_labels": [f"__meta_kubernetes_{name}"], "regex": value, "action": "keep"}
        for name, value in kept.items()
    ]
    relabelings += [
        {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Failed|Succeeded", "action": "drop"},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
    ]
    relabelings += [{_snake(key): value for key, value in own.items()} for own in endpoint.get("relabelings", ())]
    settings = {word: endpoint[name] for name, word in SETTINGS.items() if name in endpoint}
    return {
        "job_name": f"{kind}/{monitor['metadata']['name']}/{number}",
        "file_sd_configs": [{"files": [str(folder / f"{ROLE[kind]}.json")], "refresh_interval": "1s"}],
        "relabel_configs": relabelings,
        **settings,
    }


def _sanitized(label: str) -> str:
    """Return a label's name as Prometheus' discovery writes it."""
    return re.sub(r"\W", "_", label)


def _snake(key: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key)
