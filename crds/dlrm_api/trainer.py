"""``spec.trainer``: how many pods, of which hardware, with which budgets and which overlay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from dlrm_api.base import ApiModel, Rule
from dlrm_api.objects import ObjectName
from dlrm_api.pod_template import PodTemplateOverlay
from dlrm_api.quantities import Bytes, quantity_value

MAX_REPLICAS = 4_096
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
ResourceQuantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(min_length=1, max_length=32, pattern=QUANTITY),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minLength": 1,
            "maxLength": 32,
            "minimum": 0,
            "pattern": QUANTITY,
        }
    ),
]
"""An amount of a resource, as in a pod: 2, 500m, 16Gi."""


class AutoReplicas(ApiModel):
    """Lets the planner choose the number of replicas."""

    min: int = Field(1, ge=1, le=MAX_REPLICAS, description="Fewest replicas.")
    max: int = Field(ge=1, le=MAX_REPLICAS, description="Most replicas.")
    target_samples_per_second: float = Field(
        ge=0,
        le=1e12,
        description=(
            "Throughput that the plan must be predicted to reach (samples/s), by a HardwareProfile with measured "
            "rates; 0: the fewest replicas whose memory holds all tables."
        ),
    )

    rules = (
        Rule(
            cel="self.min <= self.max",
            holds=lambda auto: auto.min <= auto.max,
            message="min must not exceed max",
        ),
    )


class TierBudgets(ApiModel):
    """Bytes of each tier that one replica may use; by default what the hardware gives.

    A budget counts rows and their state, slots, maps and bookkeeping, the hand-off, and vectors of a batch that ranks
    with ranges of a table's rows pool. Memory that processes take by themselves, dense parameters and activations come
    beside it; in hbm they count too.
    """

    hbm: Bytes | None = Field(
        None,
        description=(
            "Memory of one replica's devices, a like part of each process's own: everything that lies there counts, "
            "dense parameters, activations and 2 GiB for CUDA among it (bytes). Without a HardwareProfile it also says "
            "that ranks compute on GPUs."
        ),
    )
    ddr: Bytes | None = Field(
        None,
        description=(
            "Host memory of one replica for tables, slots, maps of rows in slower tiers, and the hand-off (bytes); "
            "its processes' own memory comes beside it."
        ),
    )
    cxl: Bytes | None = Field(
        None, description="CXL memory of one replica for rows that its host memory does not hold (bytes)."
    )
    scm: Bytes | None = Field(
        None,
        description=(
            "Byte-addressable storage-class memory of one replica for rows that faster tiers do not hold (bytes)."
        ),
    )
    block: Bytes | None = Field(
        None,
        description=(
            "Block storage of one replica for rows that faster tiers do not hold, as allocated blocks of files (bytes)."
        ),
    )


class CacheSpec(ApiModel):
    """How the slots in fast memory are kept, for tables whose rows don't all fit there."""

    policy: Literal["auto", "lru", "lfu", "mixed"] = Field(
        "auto",
        description=(
            "Which row leaves the slots: least recently used, least frequently used, or both weighed; "
            "auto: the planner decides by the tables' traces."
        ),
    )
    ways: int = Field(
        0, ge=0, le=1_024, description="Slots of a set, to any of which a row may go; 0: fully associative."
    )
    lookahead: int = Field(
        1,
        ge=0,
        le=8,
        description="Batches whose rows are fetched into the slots ahead of the one that is computed.",
    )


class ResourcesSpec(ApiModel):
    """Requests and limits of one container, as in a pod."""

    requests: dict[str, ResourceQuantity] = Field({}, max_length=32, description="Requested resources.")
    limits: dict[str, ResourceQuantity] = Field({}, max_length=32, description="Limits.")

    rules = (
        Rule(
            cel=(
                "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
                "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)"
            ),
            holds=lambda resources: all(
                quantity_value(amount) <= quantity_value(resources.limits[name])
                for name, amount in resources.requests.items()
                if name in resources.limits
            ),
            message="requests must not exceed limits: raise the limit, or ask for less",
        ),
    )


class TrainerSpec(ApiModel):
    """``spec.trainer``."""

    replicas: int | None = Field(
        None,
        ge=1,
        le=MAX_REPLICAS,
        description="Trainer pods; by default 1, or what auto chooses. kubectl scale sets it.",
    )
    auto: AutoReplicas | None = Field(
        None, description="Bounds and target for a planned number of replicas, used where replicas is absent."
    )
    processes_per_replica: int = Field(1, ge=1, le=64, description="Ranks in one pod: one per GPU, or per CPU socket.")
    threads_per_process: int | None = Field(
        None,
        ge=1,
        le=1_024,
        description=(
            "Compute threads of one rank; by default the pod's CPUs divided by its ranks. The trainer asks for as many "
            "CPUs as its ranks have threads; without this field it asks for none unless resources do."
        ),
    )
    hardware: ObjectName | None = Field(
        None,
        description=(
            "Name of a HardwareProfile. By default any node; memory is checked only where tierBudgets.ddr or "
            "resources.limits.memory says how much there is."
        ),
    )
    tier_budgets: TierBudgets = Field(TierBudgets(), description="Bytes of each tier for a pod's tables and hand-off.")
    cache: CacheSpec = Field(CacheSpec(), description="Slots of tables whose rows don't all fit fast memory.")
    resources: ResourcesSpec = Field(ResourcesSpec(), description="Requests and limits of the trainer container.")
    pod_template: PodTemplateOverlay = Field(
        PodTemplateOverlay(),
        description=(
            "Additions to the pods. Unless the cluster's admin allows any (chart value jobs.podOverlay), what Pod "
            "Security's level restricted refuses is refused."
        ),
    )
    image: str | None = Field(
        None,
        min_length=1,
        max_length=1_024,
        description="Trainer image; by default the operator's own version's.",
    )
    checkpointer_image: str | None = Field(
        None,
        min_length=1,
        max_length=1_024,
        description="Checkpointer image; by default the operator's own version's.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="When images are pulled."
    )
