"""``HardwareProfile``: the resources of one node of a pool, and how pods are scheduled there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from dlrm_api.base import ApiModel, Rule, exclusive, read
from dlrm_api.fields import Bytes, ClassName, Count, LocalPath, Rate, Seconds
from dlrm_api.model import Precision
from dlrm_api.names import API_VERSION
from dlrm_api.pod_template import NODE_TERM, OBJECT, Shaped
from dlrm_api.wire import Codec

CollectiveKind = Literal["all_to_all", "all_reduce"]

Iops = Annotated[float, Field(ge=0, le=1e12)]
NodeTerm = Annotated[dict[str, Any], Shaped(NODE_TERM)]
NcclValue = Annotated[str, Field(max_length=1_024)]
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
    row_processor_seconds: Seconds | None = Field(
        None, description="Processor time to move one row to its slot and another back, for tiers below ddr (s)."
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


class RdmaSpec(ApiModel):
    """Describe the RDMA devices that pods with GPUs get, by which NCCL connects nodes."""

    resource: str = Field(
        min_length=1, max_length=317, description="Extended resource of a device plugin, for example rdma/hca."
    )
    count: int = Field(1, ge=1, le=64, description="Number of these resources per pod.")
    ipc_lock: bool = Field(
        False,
        description="Add the capability IPC_LOCK to trainers, so that processes of root may pin memory beyond the "
        "container runtime's limit (memlock). It does not count for other users. Only Pod Security level privileged "
        "allows it.",
    )


class NetworkSpec(ApiModel):
    """Describe the network between ranks."""

    intra_node_bytes_per_second: Rate | None = Field(None, description="Bandwidth between ranks of one node (bytes/s).")
    inter_node_bytes_per_second: Rate | None = Field(None, description="Bandwidth between nodes (bytes/s).")
    object_request_seconds: Seconds | None = Field(
        None, description="Time of a read of a few kB from the object store of the data (s)."
    )
    rdma: RdmaSpec | None = Field(None, description="RDMA devices for pods with GPUs.")
    nccl_environment: dict[str, NcclValue] = Field(
        {}, max_length=64, description="Variables of NCCL for trainers with GPUs, for example NCCL_IB_HCA: mlx5."
    )

    rules = (
        Rule(
            cel="!has(self.ncclEnvironment) || self.ncclEnvironment.all(name, name.startsWith('NCCL_'))",
            holds=lambda network: all(name.startswith("NCCL_") for name in network.nccl_environment),
            message="ncclEnvironment has a name that does not start with NCCL_: remove it",
        ),
    )


ReaderFormat = Literal["criteo-tsv", "parquet", "synthetic"]
Spread = Annotated[float, Field(ge=0, le=1e6)]
SPREAD = Field(0.0, description="Half the range of the repeats over their median.")


class Measured(ApiModel):
    """Give the time of one unit of work."""

    seconds: Seconds = Field(description="Median of the repeats (s).")
    spread: Spread = SPREAD


class LayerTime(ApiModel):
    """Give the time of dense layers of one width, forward and backward."""

    width: int = Field(ge=1, le=1_000_000, description="Inputs, and outputs.")
    precision: Precision = Field(description="As in model.precision.")
    flop_seconds: Seconds = Field(description="Median time of one floating-point operation (s).")
    spread: Spread = SPREAD


class CollectiveTime(ApiModel):
    """Give the time of one collective of the ranks of a node."""

    kind: CollectiveKind = Field(description="Kind of collective.")
    bytes: Count = Field(description="Bytes that a rank sends to all others together, or that are summed.")
    seconds: Seconds = Field(description="Median time (s).")
    spread: Spread = SPREAD


class PackTime(ApiModel):
    """Give the time to put values into messages of one codec, and to take them out."""

    codec: Codec = Field(description="As in training.communication.")
    value_seconds: Seconds = Field(description="Median time of one value, packed and unpacked (s).")
    spread: Spread = SPREAD


class ReaderTime(ApiModel):
    """Give the time to make batches of one format, in a reader's thread."""

    format: ReaderFormat = Field(description="As in data.format; tables of Delta Lake and Iceberg are parquet.")
    column_seconds: Seconds = Field(description="Median time of a feature of a batch (s).")
    bag_seconds: Seconds = Field(description="Median time of a bag (s).")
    varying_bag_seconds: Seconds = Field(description="What a bag takes more if its number of ids varies (s).")
    id_seconds: Seconds = Field(description="Median time of an id (s).")
    dense_seconds: Seconds = Field(description="Median time of a dense value (s).")
    spread: Spread = SPREAD

    def batch_s(self, columns: float, bags: float, varying: float, ids: float, dense: float) -> float:
        """Return the seconds of a batch, some of its bags with a varying number of ids."""
        bags_s = bags * self.bag_seconds + varying * self.varying_bag_seconds
        return columns * self.column_seconds + bags_s + ids * self.id_seconds + dense * self.dense_seconds


class RankLoops(ApiModel):
    """Give the times of the trainer's loops, as dlrmctl profile measure finds them.

    All ranks of a node run the same loop at the same time, each on its part of the CPUs, or on a device of its own.
    """

    processes: int = Field(ge=1, le=64, description="Ranks of the node, which share its CPUs.")
    is_reading: bool = Field(description="Whether each rank's reader makes batches all the time.")
    step: Measured = Field(description="A step of next to no arithmetic, with its collectives.")
    part: Measured = Field(description="What a step takes more for each table, or part of one, of a rank.")
    lookup: Measured = Field(description="Looking up one id, whatever its columns.")
    lookup_value: Measured = Field(description="Adding up one column of a row that is looked up.")
    lookup_bag: Measured = Field(description="Pooling one bag, however many ids it has.")
    update: Measured = Field(description="Updating the row of one id, whatever its columns.")
    update_value: Measured = Field(description="Updating one column of the row of one id.")
    update_bag: Measured = Field(description="Giving the gradient of one bag to its ids, however many they are.")
    sent_id: Measured = Field(description="Sending one id to the owner of its row, in a thread of its own.")
    layer: Measured = Field(description="A dense layer, forward and backward, without its products.")
    pair_value: Measured = Field(description="One column of a pair of the dot interaction, both ways.")
    parameter: Measured = Field(description="Updating one dense parameter.")
    moved_row: Measured | None = Field(
        None, description="Moving one row to its slot on a device, and another one back to ddr. Devices only."
    )
    packs: tuple[PackTime, ...] = Field((), max_length=8, description="Messages, by codec.")
    layers: tuple[LayerTime, ...] = Field(min_length=1, max_length=32, description="Layers by width and precision.")
    collectives: tuple[CollectiveTime, ...] = Field((), max_length=64, description="Collectives by bytes.")
    readers: tuple[ReaderTime, ...] = Field((), max_length=8, description="Readers, by format.")

    def reader(self, data_format: str) -> ReaderTime | None:
        """Return the time of the reader of a ``data.format``, if it was measured."""
        wanted = "parquet" if data_format in ("delta", "iceberg") else data_format
        return next((each for each in self.readers if each.format == wanted), None)


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
    loops: tuple[RankLoops, ...] = Field(
        (),
        max_length=16,
        description="Measured times of the trainer's loops on such devices, by ranks of a node. Without them plans are "
        "not calibrated: trainer.objective does not choose by their samples/s and price.",
    )


class HardwareProfileSpec(ApiModel):
    """Describe one node of a pool."""

    node_affinity_terms: tuple[NodeTerm, ...] = Field(
        (), max_length=16, description="nodeSelectorTerms that select the pool's nodes. A node must match one of them."
    )
    tolerations: tuple[PodObject, ...] = Field((), max_length=32, description="Tolerations for the pool's taints.")
    runtime_class: ClassName | None = Field(None, description="RuntimeClass of the pods.")
    cpus: float | None = Field(
        None,
        ge=0,
        le=4_096,
        description="Allocatable CPU cores of one node. Measured loops are for ranks that share all of them.",
    )
    flops_per_second: Rate | None = Field(
        None, description="Measured compute rate of the CPUs, used for predictions (flop/s)."
    )
    devices: DeviceSpec | None = Field(None, description="Accelerators.")
    tiers: TiersSpec = Field(description="Memory tiers.")
    network: NetworkSpec = Field(NetworkSpec(), description="Network between ranks.")
    loops: tuple[RankLoops, ...] = Field(
        (), max_length=16, description="Measured times of the trainer's loops on the CPUs, by ranks of a node."
    )
    price_per_hour: float | None = Field(None, ge=0, le=1e6, description="Price of one node per hour.")


class ProfileMeta(ApiModel):
    """Metadata fields that this system reads; others pass through."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=253, description="Name of the profile.")
    labels: dict[str, Any] = Field({}, description="Labels, by which trainer.hardwareSelector selects.")


class HardwareProfile(ApiModel):
    """A node pool: the resources of one node, and how pods are scheduled there."""

    api_version: Literal["dlrm.dev/v1alpha1"] = Field(API_VERSION, description="Version of this API.")
    kind: Literal["HardwareProfile"] = Field("HardwareProfile", description="Kind of this object.")
    metadata: ProfileMeta = Field(description="Name and labels.")
    spec: HardwareProfileSpec = Field(description="Resources of one node.")


def parse_profile(document: Any) -> HardwareProfile:
    """Read a profile from a decoded YAML or JSON document.

    Raises:
        InvalidSpecError: names the first invalid field as kubectl shows it.
    """
    return read(HardwareProfile, document)
