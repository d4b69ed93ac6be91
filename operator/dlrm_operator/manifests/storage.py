"""Volumes of the tiers whose rows lie in files: one a tier, mounted where the trainer looks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.names import Path
from dlrm_api.objects import is_s3
from dlrm_api.plan import Plan
from dlrm_api.tiers import claim_bytes
from dlrm_operator.manifests import Manifest

FILE_TIERS = ("cxl", "scm", "block")


def tier_bytes(plan: Plan) -> list[dict[str, int]]:
    """Bytes that each pod's ranks keep in files, by tier; only tiers that they use."""
    found: list[dict[str, int]] = [{} for _ in range(plan.nodes)]
    for rank in plan.ranks:
        for tier in FILE_TIERS:
            if rank.bytes_per_tier.get(tier):
                found[rank.node][tier] = found[rank.node].get(tier, 0) + rank.bytes_per_tier[tier]
    return found


def check_mounts(plan: Plan, profile: HardwareProfile | None) -> None:
    """Refuse a plan whose tiers nobody mounts, before a pod is made for it.

    Raises:
        InvalidSpecError: no profile is named, or it says of a tier neither hostPath nor storageClass.
    """
    for sizes in tier_bytes(plan):
        for tier in sizes:
            _mounted(tier, profile)


def tier_volumes(sizes: Mapping[str, int], profile: HardwareProfile | None) -> list[Manifest]:
    """The volumes of a pod that keeps so many bytes in files.

    Raises:
        InvalidSpecError: see :func:`check_mounts`.
    """
    return [_volume(tier, size, _mounted(tier, profile)) for tier, size in sizes.items()]


def tier_mounts(sizes: Mapping[str, int]) -> list[Manifest]:
    """Where the trainer's container sees them."""
    return [{"name": _name(tier), "mountPath": f"{Path.TIERS}/{tier}"} for tier in sizes]


def _name(tier: str) -> str:
    return f"tier-{tier}"


def _mounted(tier: str, profile: HardwareProfile | None) -> TierSpec:
    if profile is None:
        raise InvalidSpecError(
            "spec.trainer.hardware",
            f"rows are to lie in {tier}, and no hardware is named: name a HardwareProfile whose tiers.{tier} has "
            "hostPath or storageClass",
        )
    found: TierSpec | None = getattr(profile.spec.tiers, tier)
    if found is None or not (found.host_path or found.storage_class):
        raise InvalidSpecError(
            "spec.trainer.hardware",
            f"rows are to lie in {tier}, and HardwareProfile {profile.metadata.name} does not say what to mount: set "
            f"its tiers.{tier}.storageClass, or tiers.{tier}.hostPath",
        )
    return found


def _volume(tier: str, size: int, spec: TierSpec) -> Manifest:
    """A claim that lives as long as the pod; or the node's own folder, which has to be there and writable for us."""
    if spec.host_path:
        return {"name": _name(tier), "hostPath": {"path": spec.host_path, "type": "Directory"}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": spec.storage_class,
        "resources": {"requests": {"storage": str(claim_bytes(size))}},
    }
    return {"name": _name(tier), "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def passing_stores(spec: DLRMJobSpec) -> tuple[str, ...]:
    """A warning for each folder that the job writes to and that no volume of the pod overlay holds.

    No refusal: ``dlrmctl run`` takes the same manifest to a machine whose folders stay.
    """
    mounts = spec.trainer.pod_template.container.get("volumeMounts", ())
    points = [str(mount["mountPath"]) for mount in mounts if isinstance(mount, dict) and mount.get("mountPath")]
    return tuple(
        f"{field}: no volume is mounted at {folder}, so what is written there goes with the pod: use s3://, or mount a "
        "volume that all pods share by spec.trainer.podTemplate.spec.volumes and .container.volumeMounts"
        for field, folder in _folders(spec)
        if not any(f"{folder}/".startswith(f"{point.rstrip('/')}/") for point in points)
    )


def _folders(spec: DLRMJobSpec) -> Iterator[tuple[str, str]]:
    """Folders that the job writes to, by the field that names them."""
    checkpoint = spec.checkpoint
    places = {"spec.checkpoint.uri": checkpoint.uri}
    if checkpoint.publish is not None:
        places["spec.checkpoint.publish.uri"] = checkpoint.publish.uri
    for field, uri in places.items():
        if not is_s3(uri):
            yield field, unquote(urlsplit(uri).path).rstrip("/")
