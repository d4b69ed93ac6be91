"""Service and ConfigMaps of a job as plain data, with the labels, owner and images of all its objects."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version

from dlrm_api import names
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.names import Label
from dlrm_api.plan import Device, Plan
from dlrm_operator.manifests import Manifest

JOB_FILE = "job.json"
# A ConfigMap may hold 1 MiB, keys included.
MAX_CONFIG_MAP_BYTES = 1_000_000
ROLE = "trainer"
USER_ID = 65_532
"""User of the images."""
OS_LABEL = "kubernetes.io/os"
ARCHITECTURE_LABEL = "kubernetes.io/arch"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Name the job that owns the objects; without a uid (``dlrmctl render``) they have no owner."""

    name: str
    uid: str = ""

    def references(self) -> list[Manifest]:
        """Return ``metadata.ownerReferences``: the garbage collector removes objects of deleted jobs."""
        if not self.uid:
            return []
        job = {"apiVersion": names.API_VERSION, "kind": "DLRMJob", "name": self.name, "uid": self.uid}
        return [{**job, "controller": True, "blockOwnerDeletion": True}]


def labels(job: str, attempt: int | None = None, index: int | None = None) -> dict[str, str]:
    """Return the labels of an object; without ``attempt`` or ``index`` if attempts or pods share it."""
    found = {Label.JOB: job, Label.ROLE: ROLE, Label.MANAGED_BY: names.FIELD_MANAGER}
    found |= {Label.NAME: "dlrm", Label.INSTANCE: job, Label.COMPONENT: ROLE}
    numbers = {Label.ATTEMPT: attempt, Label.INDEX: index}
    return found | {label: str(number) for label, number in numbers.items() if number is not None}


def metadata(job: DLRMJob, name: str, owner: Owner, attempt: int | None = None, index: int | None = None) -> Manifest:
    """Return the ``metadata`` of an object."""
    found: Manifest = {"name": name, "labels": labels(job.metadata.name, attempt, index)}
    if job.metadata.namespace:
        found["namespace"] = job.metadata.namespace
    if references := owner.references():
        found["ownerReferences"] = references
    return found


def gang_service(job: DLRMJob, owner: Owner) -> Manifest:
    """Build the headless Service that gives pods DNS names before they are ready: ranks find rank 0 by it."""
    port = names.Port
    ports = {"rendezvous": port.RENDEZVOUS, "trainer": port.TRAINER, "checkpointer": port.CHECKPOINTER}
    spec = {
        "clusterIP": "None",
        # Pods may have addresses of either family, or of both.
        "ipFamilyPolicy": "PreferDualStack",
        "publishNotReadyAddresses": True,
        "selector": {Label.JOB: job.metadata.name, Label.ROLE: ROLE},
        "ports": [{"name": name, "port": number, "protocol": "TCP"} for name, number in ports.items()],
    }
    meta = metadata(job, names.trainer_service(job.metadata.name), owner)
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def job_document(job: DLRMJob, plan: Plan, uid: str = "") -> str:
    """Return the job as its trainers read it: canonical JSON of what the user set, without status.

    If the user did not set the number of replicas, it is the plan's.
    """
    spec = job.spec if job.spec.fixed_replicas is not None else job.spec.with_replicas(plan.nodes)
    meta = {"name": job.metadata.name, "namespace": job.metadata.namespace or "default"}
    document = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": meta | ({"uid": uid} if uid else {}),
        "spec": spec.model_dump(mode="json", exclude_unset=True, exclude_none=True),
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def plan_config_maps(
    job: DLRMJob, attempt: int, plan: Plan, parts: Mapping[str, bytes], owner: Owner
) -> list[Manifest]:
    """Build the immutable ConfigMaps of one attempt, each below 1 MiB: first the job, then the plan.

    The tables are in ``parts`` (:func:`dlrm_api.plan.plan_to_parts`); ``plan`` may lack them.

    Raises:
        InvalidSpecError: the job's document does not fit into one ConfigMap.
    """
    document = job_document(job, plan, owner.uid)
    size = len(document.encode())
    if size > MAX_CONFIG_MAP_BYTES:
        problem = f"the job takes {size} bytes, the limit is {MAX_CONFIG_MAP_BYTES}: write tables as tableGroups"
        raise InvalidSpecError("spec.model", problem)
    first = names.plan_config_map(job.metadata.name, attempt)
    found = [_config_map(job, first, attempt, owner)]
    found[0]["data"] = {JOB_FILE: document}
    for key, part in parts.items():
        if size + len(part) > MAX_CONFIG_MAP_BYTES:
            found.append(_config_map(job, f"{first}-{len(found)}", attempt, owner))
            size = 0
        found[-1].setdefault("binaryData", {})[key] = base64.b64encode(part).decode()
        size += len(part)
    return found


def config_volume(config_maps: list[Manifest]) -> Manifest:
    """Build the projected volume of all ConfigMaps: ``job.json`` and the directory of the plan's parts."""
    plan_folder = names.Path.PLAN.removeprefix(names.Path.CONFIG + "/")
    sources = []
    for config_map in config_maps:
        items = [{"key": JOB_FILE, "path": JOB_FILE}] if "data" in config_map else []
        items += [{"key": key, "path": f"{plan_folder}/{key}"} for key in config_map.get("binaryData", {})]
        sources.append({"configMap": {"name": config_map["metadata"]["name"], "items": items}})
    return {"name": "config", "projected": {"sources": sources}}


def _config_map(job: DLRMJob, name: str, attempt: int, owner: Owner) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, name, owner, attempt), "immutable": True}


@cache
def _own(name: str) -> str:
    """Return this version's image. Its version is in a file, which takes milliseconds: read once, and not at import."""
    return f"{name}:{version('dlrm-operator')}"


@dataclass(frozen=True, kw_only=True)
class Images:
    """Hold the default images: this version's own unless the operator's settings name others."""

    trainer: str = field(default_factory=lambda: _own("dlrm-trainer"))
    trainer_cuda: str = field(default_factory=lambda: _own("dlrm-trainer-cuda"))
    """Image of trainers on GPUs."""
    checkpointer: str = field(default_factory=lambda: _own("dlrm-checkpointer"))

    def trainer_on(self, device: Device) -> str:
        """Return the trainer's image for a device."""
        return self.trainer_cuda if device == "cuda" else self.trainer


@dataclass(frozen=True, kw_only=True)
class PodDefaults:
    """Hold what the operator's settings say about the pods of all jobs."""

    images: Images = field(default_factory=Images)
    run_as_user: int | None = USER_ID
    """User, group and group of volumes; None: the cluster assigns them, or the images' own user applies."""
    architecture: str = "amd64"
    """Architecture of the images; empty: any."""
    pull_secrets: tuple[str, ...] = ()
    """Image pull Secrets in the namespaces of jobs."""

    @property
    def identity(self) -> Manifest:
        """Return the part of a pod's security context that OpenShift would rather assign itself."""
        user = self.run_as_user
        return {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}

    @property
    def node_selector(self) -> dict[str, str]:
        """Return the labels of nodes on which the images run; kubelets set them."""
        return {OS_LABEL: "linux", **({ARCHITECTURE_LABEL: self.architecture} if self.architecture else {})}
