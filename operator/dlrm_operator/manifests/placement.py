"""Where the pods of one attempt may go: the profile's nodes, the job's priority, one topology domain or many."""

from __future__ import annotations

from typing import Any, Final

from dlrm_api.hardware import HardwareProfile, HardwareProfileSpec
from dlrm_api.job import DLRMJob
from dlrm_api.names import Label
from dlrm_api.pod_template import REQUIRED
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.gang_scheduling import scheduler_name

HOSTNAME: Final = "kubernetes.io/hostname"


def placement(job: DLRMJob, profile: HardwareProfile | None, attempt: int) -> Manifest:
    """The fields of a pod's spec that say where it may go; the same for each pod of the attempt."""
    scheduling = job.spec.scheduling
    found: Manifest = {}
    if scheduling.priority_class:
        found["priorityClassName"] = scheduling.priority_class
    if scheduler := scheduler_name(scheduling):
        found["schedulerName"] = scheduler
    if profile is not None:
        found |= _on_nodes_of(profile.spec)
    if scheduling.topology == "spread":
        found["topologySpreadConstraints"] = [_spread(job, attempt)]
    if scheduling.topology == "pack":
        found["affinity"] = with_affinity(found.get("affinity", {}), {"podAffinity": {REQUIRED: [_pack(job, attempt)]}})
    return found


def with_affinity(ours: Manifest, additions: Manifest) -> Manifest:
    """An affinity that asks for what both ask for.

    Terms that pods must match add up, as preferences do. Of node selector terms a node must match one only: one of
    each side's, so each of ours is joined with each of theirs.
    """
    found: Manifest = {}
    for kind in sorted({*ours, *additions}):
        left, right = ours.get(kind) or {}, additions.get(kind) or {}
        found[kind] = _with_rules(left, right)
    return found


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


def _spread(job: DLRMJob, attempt: int) -> Manifest:
    """As evenly over the domains as their number allows. Nodes whose taints keep the pods out are no domain."""
    return {
        "maxSkew": 1,
        "topologyKey": job.spec.scheduling.topology_key or HOSTNAME,
        "whenUnsatisfiable": "DoNotSchedule",
        "nodeTaintsPolicy": "Honor",
        "labelSelector": _gang(job, attempt),
    }


def _pack(job: DLRMJob, attempt: int) -> Manifest:
    """All into the domain of the first that was placed."""
    return {"topologyKey": job.spec.scheduling.topology_key, "labelSelector": _gang(job, attempt)}


def _gang(job: DLRMJob, attempt: int) -> dict[str, Any]:
    return {"matchLabels": {Label.JOB: job.metadata.name, Label.ATTEMPT: str(attempt)}}
