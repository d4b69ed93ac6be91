"""``HardwareProfile``: the resources of one node of a pool, and how pods are scheduled there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from dlrm_api.base import ApiModel, exclusive, read
from dlrm_api.fields import Bytes, ClassName, LocalPath, Rate
from dlrm_api.names import API_VERSION
from dlrm_api.pod_template import NODE_TERM, OBJECT, Shaped

Iops = Annotated[float, Field(ge=0, le=1e12)]
NodeTerm = Annotated[dict[str, Any], Shaped(NODE_TERM)]
PodObject = Annotated[dict[str, Any], WithJsonSchema(OBJECT)]
"""A part of a pod as Kubernetes defines it. The API server validates it when a pod is created."""


class TierSpec(ApiModel):
    """Describe one memory tier of a node."""

    bytes: Bytes = Field(description="Capacity (bytes).")
    read_bytes_per_second: Rate | None = Field(None, description="Sequential reads (bytes/s).")
    write_bytes_per_second: Rate | None = Field(None, description="Sequential writes (bytes/s).")
    read_iops: Iops | None = Field(None, description="Random reads of one row or page, for tiers below ddr (1/s).")
    write_iops: Iops | None = Field(
        None, description="Random writes of one row, for cxl and scm (1/s). Block storage is written sequentially."
    )
    host_path: LocalPath | None = Field(None, description="Directory of the node to mount, for tiers below ddr.")
    storage_class: ClassName | None = Field(
        None, description="Storage class of an ephemeral volume claim to mount, for tiers below ddr."
    )

    rules = (exclusive("hostPath", "storageClass"),)


class TiersSpec(ApiModel):
    """Describe the memory tiers of a node."""

    ddr: TierSpec = Field(description="Host memory.")
    cxl: TierSpec | None = Field(None, description="CXL-attached memory.")
    scm: TierSpec | None = Field(None, description="Byte-addressable storage-class memory.")
    block: TierSpec | None = Field(None, description="Block storage.")


class DeviceSpec(ApiModel):
    """Describe the accelerators of a node. If it has any, each process computes on one of its own."""

    resource: str = Field(min_length=1, max_length=317, description="Extended resource, for example nvidia.com/gpu.")
    count: int = Field(ge=1, le=64, description="Number of devices per node.")
    hbm: TierSpec = Field(description="Memory of one device.")
    flops_per_second: Rate | None = Field(
        None, description="Measured compute rate of one device, used for predictions (flop/s)."
    )
    host_bytes_per_second: Rate | None = Field(
        None, description="Bandwidth between one device and host memory, per direction (bytes/s)."
    )


class NetworkSpec(ApiModel):
    """Describe the bandwidth between ranks."""

    intra_node_bytes_per_second: Rate | None = Field(None, description="Bandwidth between ranks of one node (bytes/s).")
    inter_node_bytes_per_second: Rate | None = Field(None, description="Bandwidth between nodes (bytes/s).")


class HardwareProfileSpec(ApiModel):
    """Describe one node of a pool."""

    node_affinity_terms: tuple[NodeTerm, ...] = Field(
        (), max_length=16, description="nodeSelectorTerms that select the pool's nodes. A node must match one of them."
    )
    tolerations: tuple[PodObject, ...] = Field((), max_length=32, description="Tolerations for the pool's taints.")
    runtime_class: ClassName | None = Field(None, description="RuntimeClass of the pods.")
    cpus: float | None = Field(
        None, ge=0, le=4_096, description="Allocatable CPU cores of one node. Shown by kubectl; plans do not use it."
    )
    flops_per_second: Rate | None = Field(
        None, description="Measured compute rate of the CPUs, used for predictions (flop/s)."
    )
    devices: DeviceSpec | None = Field(None, description="Accelerators.")
    tiers: TiersSpec = Field(description="Memory tiers.")
    network: NetworkSpec = Field(NetworkSpec(), description="Bandwidth between ranks.")
    price_per_hour: float | None = Field(None, ge=0, le=1e6, description="Price of one node per hour.")


class ProfileMeta(ApiModel):
    """Metadata fields that this system reads; others pass through."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=253, description="Name of the profile.")


class HardwareProfile(ApiModel):
    """A node pool: the resources of one node, and how pods are scheduled there."""

    api_version: Literal["dlrm.dev/v1alpha1"] = Field(API_VERSION, description="Version of this API.")
    kind: Literal["HardwareProfile"] = Field("HardwareProfile", description="Kind of this object.")
    metadata: ProfileMeta = Field(description="Name.")
    spec: HardwareProfileSpec = Field(description="Resources of one node.")


def parse_profile(document: Any) -> HardwareProfile:
    """Read a profile from a decoded YAML or JSON document.

    Raises:
        InvalidSpecError: names the first invalid field as kubectl shows it.
    """
    return read(HardwareProfile, document)
