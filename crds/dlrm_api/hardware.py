"""``HardwareProfile``: what one node of a pool gives, and how pods get there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from dlrm_api.base import ApiModel, Rule, read
from dlrm_api.names import API_VERSION
from dlrm_api.pod_template import NODE_TERM, OBJECT, Shaped
from dlrm_api.quantities import Bytes

BytesPerSecond = Annotated[float, Field(ge=0, le=1e18)]
NodeTerm = Annotated[dict[str, Any], Shaped(NODE_TERM)]
PodObject = Annotated[dict[str, Any], WithJsonSchema(OBJECT)]
"""A part of a pod as Kubernetes defines it, which the API server checks when a pod is made."""


class TierSpec(ApiModel):
    """One memory tier of a node."""

    bytes: Bytes = Field(description="Capacity (bytes).")
    read_bytes_per_second: BytesPerSecond | None = Field(None, description="Sequential reads (bytes/s).")
    write_bytes_per_second: BytesPerSecond | None = Field(None, description="Sequential writes (bytes/s).")
    read_iops: float | None = Field(
        None, ge=0, le=1e12, description="Random reads of one row or page (1/s), of tiers below ddr."
    )
    write_iops: float | None = Field(
        None,
        ge=0,
        le=1e12,
        description="Random writes of one row (1/s), of cxl and scm; block storage is written in sequence.",
    )
    host_path: str | None = Field(
        None, min_length=1, max_length=1_024, description="Folder of the node to mount, of tiers below ddr."
    )
    storage_class: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="Class of an ephemeral volume claim to mount, of tiers below ddr.",
    )

    rules = (
        Rule(
            cel="!(has(self.hostPath) && has(self.storageClass))",
            holds=lambda tier: tier.host_path is None or tier.storage_class is None,
            message="hostPath and storageClass are two ways to say one thing: give one of them",
        ),
    )


class TiersSpec(ApiModel):
    """The memory tiers of a node."""

    ddr: TierSpec = Field(description="Host memory.")
    cxl: TierSpec | None = Field(None, description="CXL-attached memory.")
    scm: TierSpec | None = Field(None, description="Byte-addressable storage-class memory.")
    block: TierSpec | None = Field(None, description="Block storage.")


class DeviceSpec(ApiModel):
    """The accelerators of a node. Where there are some, ranks compute on them: each process on one of its own."""

    resource: str = Field(min_length=1, max_length=317, description="Extended resource, such as nvidia.com/gpu.")
    count: int = Field(ge=1, le=64, description="Devices of one node.")
    hbm: TierSpec = Field(description="Memory of one device.")
    flops_per_second: float | None = Field(
        None, ge=0, le=1e18, description="Measured compute of one device (flop/s), by which plans predict."
    )
    host_bytes_per_second: BytesPerSecond | None = Field(
        None, description="Between one device and host memory, each way (bytes/s)."
    )


class NetworkSpec(ApiModel):
    """Bandwidth between ranks."""

    intra_node_bytes_per_second: BytesPerSecond | None = Field(None, description="Between ranks of a node (bytes/s).")
    inter_node_bytes_per_second: BytesPerSecond | None = Field(None, description="Between nodes (bytes/s).")


class HardwareProfileSpec(ApiModel):
    """What one node of a pool gives."""

    node_affinity_terms: tuple[NodeTerm, ...] = Field(
        (),
        max_length=16,
        description="nodeSelectorTerms that find the pool's nodes; a node must match one of them.",
    )
    tolerations: tuple[PodObject, ...] = Field((), max_length=32, description="Tolerations of the pool's taints.")
    runtime_class: str | None = Field(None, min_length=1, max_length=253, description="RuntimeClass of the pods.")
    cpus: float | None = Field(
        None, ge=0, le=4_096, description="Allocatable CPU cores of one node. Shown by kubectl, not used yet."
    )
    flops_per_second: float | None = Field(
        None, ge=0, le=1e18, description="Measured compute of the CPUs (flop/s), by which plans predict."
    )
    devices: DeviceSpec | None = Field(None, description="Accelerators.")
    tiers: TiersSpec = Field(description="Memory tiers.")
    network: NetworkSpec = Field(NetworkSpec(), description="Bandwidth between ranks.")
    price_per_hour: float | None = Field(None, ge=0, le=1e6, description="Price of one node for an hour.")


class ProfileMeta(ApiModel):
    """The part of Kubernetes' metadata that this system reads."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=253, description="Name of the profile.")


class HardwareProfile(ApiModel):
    """What one node of a pool gives, and how pods get there."""

    api_version: Literal["dlrm.dev/v1alpha1"] = Field(API_VERSION, description="Version of this API.")
    kind: Literal["HardwareProfile"] = Field("HardwareProfile", description="Kind of this object.")
    metadata: ProfileMeta = Field(description="Name.")
    spec: HardwareProfileSpec = Field(description="What one node gives.")


def parse_profile(document: Any) -> HardwareProfile:
    """Read a profile from a decoded YAML or JSON document.

    Raises:
        InvalidSpecError: names the first refused field as kubectl shows it.
    """
    return read(HardwareProfile, document)
