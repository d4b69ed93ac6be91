"""Scheduling of the pods of one attempt: affinity, topology, priority and gang schedulers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from dlrm_api import names
from dlrm_api.fields import quantity_value
from dlrm_api.hardware import HardwareProfile, HardwareProfileSpec
from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import SchedulingSpec
from dlrm_api.names import Label
from dlrm_api.pod_template import PREFERRED, REQUIRED
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.objects import Owner, metadata

HOSTNAME: Final = "kubernetes.io/hostname"
MAX_WEIGHT: Final = 100
"""Of a preferred term."""
KUEUE_FINALIZER: Final = "kueue.x-k8s.io/managed"
"""Kueue sets it on each pod of a group and removes it when the group has ended or its Workload is deleted."""
KUEUE_GATE: Final = "kueue.x-k8s.io/admission"
"""Kueue removes it from each pod when the whole group may start."""


@dataclass(frozen=True)
class GroupType:
    """Describe the kind of object that represents a group of pods in a gang scheduler."""

    group: str
    versions: tuple[str, ...]
    """Versions that the operator can use, newest first."""
    plural: str
    remedy: str
    """What to do where the API server serves none of them."""

    @property
    def api_version(self) -> str:
        """Return the API version of the objects that the operator creates."""
        return f"{self.group}/{self.versions[0]}"

    def path(self, namespace: str, version: str = "") -> str:
        """Return the path of the objects in a namespace, in the newest version by default."""
        return f"/apis/{self.group}/{version or self.versions[0]}/namespaces/{namespace}/{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural} of {self.group}/{' or '.join(self.versions)}"


KUEUE: Final = GroupType("kueue.x-k8s.io", ("v1beta2", "v1beta1"), "workloads", "install Kueue")
# Three API groups have podgroups.
POD_GROUPS: Final = {
    "volcano": GroupType("scheduling.volcano.sh", ("v1beta1",), "podgroups", "install Volcano"),
    "coscheduling": GroupType("scheduling.x-k8s.io", ("v1alpha1",), "podgroups", "install the coscheduling plugin"),
    "native": GroupType(
        "scheduling.k8s.io",
        ("v1beta1",),
        "podgroups",
        "use Kubernetes 1.37 or later with the feature gate GenericWorkload and --runtime-config="
        "scheduling.k8s.io/v1beta1=true (v1alpha1 of 1.35 and v1alpha2 of 1.36 are not supported)",
    ),
}
"""Kinds of which the operator creates one object per attempt; Kueue creates its Workloads itself."""
SCHEDULERS: Final = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}
"""Scheduler names, as their own installers set them."""


def group_type(scheduling: SchedulingSpec) -> GroupType | None:
    """Return the kind of group that the job's gang scheduler needs; None if pods are scheduled one by one."""
    return KUEUE if scheduling.gang == "kueue" else POD_GROUPS.get(scheduling.gang)


def scheduler_name(scheduling: SchedulingSpec) -> str | None:
    """Return the scheduler of the pods; None: the cluster's default."""
    return scheduling.scheduler_name or SCHEDULERS.get(scheduling.gang)


def group_metadata(job: DLRMJob, attempt: int, size: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations that assign a pod to the group of its attempt.

    A group of Kueue ends with its pods, and none is replaced: the next attempt is another group.
    """
    scheduling, group = job.spec.scheduling, names.pod_group(job.metadata.name, attempt)
    if scheduling.gang == "kueue":
        labels = {"kueue.x-k8s.io/queue-name": scheduling.queue or "", "kueue.x-k8s.io/pod-group-name": group}
        counted = {"kueue.x-k8s.io/pod-group-total-count": str(size), "kueue.x-k8s.io/retriable-in-group": "false"}
        return labels, {**counted, **_kueue_topology(scheduling)}
    if scheduling.gang == "volcano":
        return {}, {"scheduling.k8s.io/group-name": group}
    return {"scheduling.x-k8s.io/pod-group": group} if scheduling.gang == "coscheduling" else {}, {}


def _kueue_topology(scheduling: SchedulingSpec) -> dict[str, str]:
    """Return the annotations by which Kueue chooses the domain of a packed group, and neighbours for its ranks."""
    wish = {"pack": "required", "preferPack": "preferred"}.get(scheduling.topology)
    if wish is None or scheduling.topology_key is None:
        return {}
    return {
        f"kueue.x-k8s.io/podset-{wish}-topology": scheduling.topology_key,
        "kueue.x-k8s.io/pod-group-pod-index-label": Label.INDEX,
    }


def group_gates(scheduling: SchedulingSpec) -> list[Manifest]:
    """Return the scheduling gates of the pods. They hold the pods back even if Kueue does not manage pods."""
    return [{"name": KUEUE_GATE}] if scheduling.gang == "kueue" else []


def pod_groups(job: DLRMJob, attempt: int, pods: list[Manifest], owner: Owner) -> list[Manifest]:
    """Build the attempt's PodGroup if its gang scheduler needs one."""
    scheduling = job.spec.scheduling
    kind = POD_GROUPS.get(scheduling.gang)
    if kind is None:
        return []
    spec: Manifest
    if scheduling.gang == "native":
        # Preemption takes all pods or none: the others of a gang that lost one would end anyway.
        spec = {"schedulingPolicy": {"gang": {"minCount": len(pods)}}, "disruptionMode": {"all": {}}}
    else:
        spec = {"minMember": len(pods), "minResources": requests_of_all(pods)}
    if scheduling.gang == "volcano" and scheduling.queue:
        spec["queue"] = scheduling.queue
    # kube-scheduler refuses pods of another priority than their group's.
    if scheduling.gang in ("volcano", "native") and scheduling.priority_class:
        spec["priorityClassName"] = scheduling.priority_class
    meta = metadata(job, names.pod_group(job.metadata.name, attempt), owner, attempt)
    return [{"apiVersion": kind.api_version, "kind": "PodGroup", "metadata": meta, "spec": spec}]


def requests_of_all(pods: list[Manifest]) -> dict[str, str]:
    """Return the sum of all requests; a limit without a request counts, as in Kubernetes."""
    found: dict[str, Decimal] = {}
    for pod in pods:
        for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
            resources = container.get("resources", {})
            for name, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
                found[name] = found.get(name, Decimal()) + quantity_value(amount)
    return {name: _quantity(total) for name, total in sorted(found.items())}


def _quantity(amount: Decimal) -> str:
    """Format an integer, or thousandths rounded up: Kubernetes counts nothing finer."""
    return f"{amount:.0f}" if amount == int(amount) else f"{math.ceil(amount * 1000)}m"


def placement(
    job: DLRMJob, profile: HardwareProfile | None, attempt: int, avoided_nodes: Sequence[str] = ()
) -> Manifest:
    """Return the scheduling fields of a pod's spec; they are the same for all pods of an attempt."""
    scheduling = job.spec.scheduling
    found: Manifest = {}
    if scheduling.priority_class:
        found["priorityClassName"] = scheduling.priority_class
    if scheduler := scheduler_name(scheduling):
        found["schedulerName"] = scheduler
    if scheduling.gang == "native":
        found["schedulingGroup"] = {"podGroupName": names.pod_group(job.metadata.name, attempt)}
    if profile is not None:
        found |= _on_nodes_of(profile.spec)
    if avoided_nodes:
        found["affinity"] = with_affinity(found.get("affinity", {}), _not_on(avoided_nodes))
    if scheduling.topology == "spread":
        found["topologySpreadConstraints"] = [_spread(job, attempt)]
    if together := _together(job, attempt):
        found["affinity"] = with_affinity(found.get("affinity", {}), {"podAffinity": together})
    return found


def with_affinity(ours: Manifest, additions: Manifest) -> Manifest:
    """Combine two affinities so that both hold.

    Pod terms and preferences are concatenated. A node has to match only one of the node selector terms, so each of ours
    is combined with each of theirs.
    """
    return {kind: _with_rules(ours.get(kind) or {}, additions.get(kind) or {}) for kind in sorted({*ours, *additions})}


def _with_rules(left: Manifest, right: Manifest) -> Manifest:
    found: Manifest = {**left, **right}
    for rule in set(left) & set(right):
        if isinstance(left[rule], dict):
            terms = _joined_terms(left[rule].get("nodeSelectorTerms", []), right[rule].get("nodeSelectorTerms", []))
            found[rule] = {"nodeSelectorTerms": terms}
        else:
            found[rule] = [*left[rule], *right[rule]]
    return found


def _joined_terms(left: list[Manifest], right: list[Manifest]) -> list[Manifest]:
    return [
        {key: [*one.get(key, []), *other.get(key, [])] for key in sorted({*one, *other})}
        for one in left
        for other in right
    ]


def _on_nodes_of(hardware: HardwareProfileSpec) -> Manifest:
    found: Manifest = {}
    if hardware.node_affinity_terms:
        terms = {"nodeSelectorTerms": [dict(term) for term in hardware.node_affinity_terms]}
        found["affinity"] = {"nodeAffinity": {REQUIRED: terms}}
    if hardware.tolerations:
        found["tolerations"] = [dict(toleration) for toleration in hardware.tolerations]
    if hardware.runtime_class:
        found["runtimeClassName"] = hardware.runtime_class
    return found


def _not_on(nodes: Sequence[str]) -> Manifest:
    """Exclude nodes by name: a node's label kubernetes.io/hostname may differ from it."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": fields}]}}}


def _spread(job: DLRMJob, attempt: int) -> Manifest:
    """Spread the pods evenly over the domains; nodes with taints that exclude the pods do not count."""
    return {
        "maxSkew": 1,
        "topologyKey": job.spec.scheduling.topology_key or HOSTNAME,
        "whenUnsatisfiable": "DoNotSchedule",
        "nodeTaintsPolicy": "Honor",
        "labelSelector": _gang(job, attempt),
    }


def _together(job: DLRMJob, attempt: int) -> Manifest:
    """Return the pod affinity of a packed gang, also under Kueue: before 0.14 it did not place groups by itself."""
    scheduling = job.spec.scheduling
    term = {"topologyKey": scheduling.topology_key, "labelSelector": _gang(job, attempt)}
    if scheduling.topology == "pack":
        return {REQUIRED: [term]}
    if scheduling.topology == "preferPack":
        return {PREFERRED: [{"weight": MAX_WEIGHT, "podAffinityTerm": term}]}
    return {}


def _gang(job: DLRMJob, attempt: int) -> dict[str, Any]:
    return {"matchLabels": {Label.JOB: job.metadata.name, Label.ATTEMPT: str(attempt)}}
