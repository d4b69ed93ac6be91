"""Build the CustomResourceDefinitions from the models; ``hack/generate.py`` writes them as YAML."""

from __future__ import annotations

from typing import Any

from dlrm_api.base import RULES, ApiModel
from dlrm_api.checkpoint import CheckpointSpec
from dlrm_api.errors import fields_of
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob, DLRMJobSpec, ObjectMeta
from dlrm_api.names import GROUP, VERSION
from dlrm_api.structural import Schema, structural
from dlrm_api.trainer import TrainerSpec

CHANGEABLE_PHASES = ("Pending", "Suspended", "Failed")
"""Phases without trainer pods, in which all of the spec may change."""
MUTABLE_CHECKPOINT = (
    "interval", "intervalSteps", "expectedRestores", "baseEvery", "maxChain", "maxRestoreTime", "restoreBandwidth",
    "retention",
)  # fmt: skip

JOB_COLUMNS = (
    ("Phase", "string", ".status.phase", "Phase of the job.", 0),
    ("Step", "integer", ".status.progress.step", "Steps done.", 0),
    ("Samples/s", "number", ".status.progress.samplesPerSecond", "Throughput.", 0),
    ("NE", "number", ".status.progress.ne", "Normalized entropy of the last evaluation.", 0),
    ("Snapshot", "date", ".status.lastSnapshot.time", "Age of the newest committed snapshot.", 0),
    ("Restarts", "integer", ".status.restarts", "Restarts over the job's lifetime.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Age of the job.", 0),
    ("Nodes", "integer", ".status.plan.nodes", "Trainer pods, one per node.", 1),
    ("Hardware", "string", ".status.plan.hardware", "HardwareProfile of the plan.", 1),
    ("ETA", "string", ".status.progress.eta", "Expected end of training.", 1),
)
PROFILE_COLUMNS = (
    ("DDR", "string", ".spec.tiers.ddr.bytes", "Host memory of one node.", 0),
    ("CPUs", "number", ".spec.cpus", "CPU cores of one node.", 0),
    ("Devices", "integer", ".spec.devices.count", "Accelerators of one node.", 0),
    ("Price", "number", ".spec.pricePerHour", "Price of one node per hour.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Age of the profile.", 0),
    ("Resource", "string", ".spec.devices.resource", "Extended resource of the accelerators.", 1),
    ("SCM", "string", ".spec.tiers.scm.bytes", "Byte-addressable storage-class memory of one node.", 1),
    ("Block", "string", ".spec.tiers.block.bytes", "Block storage of one node.", 1),
)


def definitions() -> dict[str, Schema]:
    """Return every CRD by the plural name of its kind."""
    job = _definition(DLRMJob, "dlrmjobs", "dlrm", "Namespaced", JOB_COLUMNS)
    version = job["spec"]["versions"][0]
    # The schema of metadata itself may not have rules, so they are attached to the root.
    of_metadata = [
        {"rule": rule.cel.replace("self.", "self.metadata."), "message": f"metadata.{rule.message}"}
        for rule in ObjectMeta.rules
    ]
    version["schema"]["openAPIV3Schema"][RULES] = [*of_metadata, immutability_rule()]
    scale = {"specReplicasPath": ".spec.trainer.replicas", "statusReplicasPath": ".status.replicas"}
    version["subresources"] = {"status": {}, "scale": {**scale, "labelSelectorPath": ".status.selector"}}
    profile = _definition(HardwareProfile, "hardwareprofiles", "hwp", "Cluster", PROFILE_COLUMNS)
    return {"dlrmjobs": job, "hardwareprofiles": profile}


def root_schema(model: type[ApiModel]) -> Schema:
    """Return a kind's structural schema; the API server itself defines its version, kind and metadata."""
    raw = model.model_json_schema(by_alias=True)
    raw["properties"]["metadata"] = {"type": "object"}
    schema = structural(raw, raw.get("$defs", {}))
    for name in ("apiVersion", "kind"):
        schema["properties"][name] = {"type": "string", "description": schema["properties"][name]["description"]}
    schema["required"] = ["spec"]
    return schema


def immutability_rule() -> Schema:
    """Return the rule that freezes all but mutable fields of a job that has pods or has succeeded.

    The API server evaluates the rule at status writes too, although these cannot change the spec. The rule therefore
    tests the phase first, then whether the status changed, and compares the spec field by field last: each field access
    costs the API server a copy of its parent object.
    """
    checkpoint, trainer = "spec.checkpoint", "spec.trainer"
    parts = [f"spec.{name}" for name in fields_of(DLRMJobSpec) if name not in ("checkpoint", "lifecycle", "trainer")]
    parts += [f"{checkpoint}.{name}" for name in fields_of(CheckpointSpec) if name not in MUTABLE_CHECKPOINT]
    parts += [f"{trainer}.{name}" for name in fields_of(TrainerSpec) if name != "replicas"]
    equal = " && ".join(_same(part) for part in parts)
    phases = ", ".join(f"'{phase}'" for phase in CHANGEABLE_PHASES)
    free = f"!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase in [{phases}]"
    mutable = ["spec.lifecycle", f"{trainer}.replicas", *(f"{checkpoint}.{name}" for name in MUTABLE_CHECKPOINT)]
    status_changed = "!has(self.status) || self.status.phase != oldSelf.status.phase || self.status != oldSelf.status"
    return {
        "rule": f"{free} || {status_changed} || ({equal})",
        "message": (
            f"spec can change only in phases {', '.join(CHANGEABLE_PHASES)}, except for {', '.join(mutable)}: "
            "suspend the job with spec.lifecycle.suspend, change the spec, and resume from the newest snapshot"
        ),
        "reason": "FieldValueForbidden",
        "fieldPath": ".spec",
    }


def frozen_part(spec: DLRMJobSpec) -> dict[str, Any]:
    """Return the part of a spec that the rule freezes."""
    found = spec.model_dump(mode="json")
    del found["lifecycle"], found["trainer"]["replicas"]
    for name in MUTABLE_CHECKPOINT:
        del found["checkpoint"][name]
    return found


def _same(path: str) -> str:
    # CEL's optional values would compare absent fields too, but their estimated cost is unbounded.
    new, old = f"self.{path}", f"oldSelf.{path}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _definition(
    model: type[ApiModel], plural: str, short: str, scope: str, columns: tuple[tuple[str, str, str, str, int], ...]
) -> Schema:
    kind = model.__name__
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), "shortNames": [short]}
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root_schema(model)},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text, "priority": priority}
            for name, kind, path, text, priority in columns
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "names": names, "scope": scope, "versions": [version]},
    }
