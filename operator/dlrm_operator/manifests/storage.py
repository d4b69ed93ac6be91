"""Volumes of tiers with rows in files, and which ``file://`` stores outlive a pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

from dlrm_api.errors import InvalidSpecError
from dlrm_api.fields import is_s3
from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.names import Path
from dlrm_api.plan import Plan
from dlrm_api.tiers import FILE_TIERS, claim_bytes
from dlrm_operator.manifests import Manifest


def tier_bytes(plan: Plan) -> list[dict[str, int]]:
    """Return the bytes in files of each pod, by tier, without unused tiers."""
    found: list[dict[str, int]] = [{} for _ in range(plan.nodes)]
    for rank in plan.ranks:
        for tier in FILE_TIERS:
            if rank.bytes_per_tier.get(tier):
                found[rank.node][tier] = found[rank.node].get(tier, 0) + rank.bytes_per_tier[tier]
    return found


def check_mounts(plan: Plan, profile: HardwareProfile | None) -> None:
    """Check that each tier of the plan can be mounted.

    Raises:
        InvalidSpecError: no profile is set, or it sets neither hostPath nor storageClass of a tier.
    """
    for sizes in tier_bytes(plan):
        for tier in sizes:
            _mounted(tier, profile)


def tier_volumes(sizes: Mapping[str, int], profile: HardwareProfile | None) -> list[Manifest]:
    """Build the volumes of a pod with these bytes in files. Raises like :func:`check_mounts`."""
    return [_volume(tier, size, _mounted(tier, profile)) for tier, size in sizes.items()]


def tier_mounts(sizes: Mapping[str, int]) -> list[Manifest]:
    """Build the mounts of these volumes in the trainer's container."""
    return [{"name": _name(tier), "mountPath": f"{Path.TIERS}/{tier}"} for tier in sizes]


def _name(tier: str) -> str:
    return f"tier-{tier}"


def _mounted(tier: str, profile: HardwareProfile | None) -> TierSpec:
    if profile is None:
        raise InvalidSpecError(
            "spec.trainer.hardware",
            f"the plan uses {tier}, but no hardware is set: name a HardwareProfile with hostPath or storageClass of "
            f"tiers.{tier}",
        )
    found: TierSpec | None = getattr(profile.spec.tiers, tier)
    if found is None or not (found.host_path or found.storage_class):
        raise InvalidSpecError(
            "spec.trainer.hardware",
            f"the plan uses {tier}, and HardwareProfile {profile.metadata.name} does not say what to mount: set its "
            f"tiers.{tier}.storageClass or tiers.{tier}.hostPath",
        )
    return found


def _volume(tier: str, size: int, spec: TierSpec) -> Manifest:
    """Build a claim that lives as long as the pod, or mount a writable directory of the node."""
    if spec.host_path:
        return {"name": _name(tier), "hostPath": {"path": spec.host_path, "type": "Directory"}}
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": spec.storage_class,
        "resources": {"requests": {"storage": str(claim_bytes(size))}},
    }
    return {"name": _name(tier), "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def ephemeral_store_warnings(spec: DLRMJobSpec) -> tuple[str, ...]:
    """Warn about each ``file://`` store that is on no volume of the pod template.

    This is not an error: ``dlrmctl run`` uses the same manifest on a machine with persistent directories.
    """
    mounts = spec.trainer.pod_template.container.get("volumeMounts", ())
    points = [str(mount["mountPath"]) for mount in mounts if isinstance(mount, dict) and mount.get("mountPath")]
    return tuple(
        f"{field}: no volume is mounted at {folder}, so its data is lost with the pod: use s3://, or mount a volume "
        "that all pods share with spec.trainer.podTemplate.spec.volumes and .container.volumeMounts"
        for field, folder in _folders(spec)
        if not any(f"{folder}/".startswith(f"{point.rstrip('/')}/") for point in points)
    )


def _folders(spec: DLRMJobSpec) -> Iterator[tuple[str, str]]:
    uris = {"spec.checkpoint.uri": spec.checkpoint.uri}
    if spec.checkpoint.publish is not None:
        uris["spec.checkpoint.publish.uri"] = spec.checkpoint.publish.uri
    for field, uri in uris.items():
        if not is_s3(uri):
            yield field, unquote(urlsplit(uri).path).rstrip("/")
