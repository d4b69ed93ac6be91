"""Stores that are folders: which of them outlive a pod."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from dlrm_api.job import DLRMJobSpec
from dlrm_api.objects import is_s3


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
