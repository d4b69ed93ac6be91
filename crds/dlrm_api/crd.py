"""The CustomResourceDefinitions as plain data, made from the models; ``hack/generate.py`` writes them as YAML."""

from __future__ import annotations

from typing import Any

from dlrm_api.base import RULES, ApiModel
from dlrm_api.checkpoint import CheckpointSpec
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob, DLRMJobSpec, ObjectMeta
from dlrm_api.names import GROUP, VERSION
from dlrm_api.structural import Schema, structural
from dlrm_api.trainer import TrainerSpec

CHANGEABLE_PHASES = ("Pending", "Suspended", "Failed")
"""Phases in which there is no gang that a change of the spec could surprise."""
MUTABLE_CHECKPOINT = (
    "interval",
    "intervalSteps",
    "expectedRestores",
    "baseEvery",
    "maxChain",
    "maxRestoreTime",
    "restoreBandwidth",
    "retention",
)

JOB_COLUMNS = (
    ("Phase", "string", ".status.phase", "Where the job is in its life.", 0),
    ("Step", "integer", ".status.progress.step", "Steps done.", 0),
    ("Samples/s", "number", ".status.progress.samplesPerSecond", "Throughput.", 0),
    ("NE", "number", ".status.progress.ne", "Normalized entropy of the last evaluation.", 0),
    ("Snapshot", "date", ".status.lastSnapshot.time", "Age of the newest committed snapshot.", 0),
    ("Restarts", "integer", ".status.restarts", "Gangs that were replaced.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Age of the job.", 0),
    ("Nodes", "integer", ".status.plan.nodes", "Pods of the gang, one a node.", 1),
    ("Hardware", "string", ".status.plan.hardware", "HardwareProfile that the plan is for.", 1),
    ("ETA", "string", ".status.progress.eta", "When the job should end.", 1),
)
PROFILE_COLUMNS = (
    ("DDR", "string", ".spec.tiers.ddr.bytes", "Host memory of one node.", 0),
    ("CPUs", "number", ".spec.cpus", "CPU cores of one node.", 0),
    ("Devices", "integer", ".spec.devices.count", "Accelerators of one node.", 0),
    ("Price", "number", ".spec.pricePerHour", "Price of one node for an hour.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Age of the profile.", 0),
    ("Resource", "string", ".spec.devices.resource", "Extended resource of the accelerators.", 1),
    ("SCM", "string", ".spec.tiers.scm.bytes", "Byte-addressable storage-class memory of one node.", 1),
    ("Block", "string", ".spec.tiers.block.bytes", "Block storage of one node.", 1),
)


def definitions() -> dict[str, Schema]:
    """Every definition by the plural of its kind."""
    return {"dlrmjobs": job_definition(), "hardwareprofiles": profile_definition()}


def job_definition() -> Schema:
    """The definition of DLRMJob."""
    schema = root_schema(DLRMJob)
    schema[RULES] = [*_metadata_rules(), immutability_rule()]
    subresources = {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.trainer.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    return _definition(DLRMJob, "dlrmjobs", "dlrm", "Namespaced", schema, JOB_COLUMNS, subresources)


def profile_definition() -> Schema:
    """The definition of HardwareProfile."""
    return _definition(
        HardwareProfile, "hardwareprofiles", "hwp", "Cluster", root_schema(HardwareProfile), PROFILE_COLUMNS, {}
    )


def root_schema(model: type[ApiModel]) -> Schema:
    """A kind's structural schema; the API server itself keeps ``apiVersion``, ``kind`` and ``metadata``."""
    raw = model.model_json_schema(by_alias=True)
    raw["properties"]["metadata"] = {"type": "object"}
    schema = structural(raw, raw.get("$defs", {}))
    for name in ("apiVersion", "kind"):
        schema["properties"][name] = {"type": "string", "description": schema["properties"][name]["description"]}
    schema["required"] = ["spec"]
    return schema


def immutability_rule() -> Schema:
    """Freeze the spec while the job has a gang or has succeeded, but for what the operator can act on.

    The API server judges every write of the status by this rule too, though such a write can't change the spec, nor a
    write of the spec the status: where the status differs there is nothing to compare. That is asked by the phase
    first, and the spec field by field last, since to read a field costs the API server a copy of all beside it.
    """
    checkpoint, trainer = "spec.checkpoint", "spec.trainer"
    parts = [f"spec.{name}" for name in _fields(DLRMJobSpec) if name not in ("checkpoint", "lifecycle", "trainer")]
    parts += [f"{checkpoint}.{name}" for name in _fields(CheckpointSpec) if name not in MUTABLE_CHECKPOINT]
    parts += [f"{trainer}.{name}" for name in _fields(TrainerSpec) if name != "replicas"]
    equal = " && ".join(_same(part) for part in parts)
    phases = ", ".join(f"'{phase}'" for phase in CHANGEABLE_PHASES)
    free = f"!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase in [{phases}]"
    mutable = ["spec.lifecycle", f"{trainer}.replicas", *(f"{checkpoint}.{name}" for name in MUTABLE_CHECKPOINT)]
    told = "!has(self.status) || self.status.phase != oldSelf.status.phase || self.status != oldSelf.status"
    return {
        "rule": f"{free} || {told} || ({equal})",
        "message": (
            f"spec changes only in phases {', '.join(CHANGEABLE_PHASES)}, but for {', '.join(mutable)}: "
            "set spec.lifecycle.suspend, change it, and resume: the job goes on from its newest snapshot"
        ),
        "reason": "FieldValueForbidden",
        "fieldPath": ".spec",
    }


def frozen_part(spec: DLRMJobSpec) -> dict[str, Any]:
    """What of a spec the rule freezes. Two that are equal in it may follow each other in any phase."""
    found = spec.model_dump(mode="json")
    del found["lifecycle"], found["trainer"]["replicas"]
    for name in MUTABLE_CHECKPOINT:
        del found["checkpoint"][name]
    return found


def _same(path: str) -> str:
    """Equality of a field that may be absent; CEL's optional values would have an unbounded estimated cost."""
    new, old = f"self.{path}", f"oldSelf.{path}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _fields(model: type[ApiModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _metadata_rules() -> list[Schema]:
    """The rules of metadata, said at the root: metadata's own schema may hold none."""
    return [
        {"rule": rule.cel.replace("self.", "self.metadata."), "message": f"metadata.{rule.message}"}
        for rule in ObjectMeta.rules
    ]


def _definition(
    model: type[ApiModel],
    plural: str,
    short: str,
    scope: str,
    schema: Schema,
    columns: tuple[tuple[str, str, str, str, int], ...],
    subresources: Schema,
) -> Schema:
    kind = model.__name__
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), "shortNames": [short]}
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text, "priority": priority}
            for name, kind, path, text, priority in columns
        ],
    }
    if subresources:
        version["subresources"] = subresources
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": scope,
            "versions": [version],
        },
    }
