"""``spec.trainer``: replicas, hardware, memory budgets and pod template."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dlrm_api.base import ApiModel, Rule, exclusive, positive
from dlrm_api.fields import Bytes, Duration, ImageName, ObjectName, ResourceQuantity, quantity_value
from dlrm_api.pod_template import PodTemplateOverlay

MAX_REPLICAS = 4_096
MAX_PROFILES = 16
"""Kinds of hardware that one job may choose from: each is planned with up to two dozen numbers of replicas."""
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$")]


class ObjectiveSpec(ApiModel):
    """Let the planner choose the number of replicas, and the hardware where several kinds are given.

    At most one target is set. Without any, the fewest replicas that hold all tables are taken.
    """

    min_replicas: int = Field(1, ge=1, le=MAX_REPLICAS, description="Minimum number of replicas.")
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS, description="Maximum number of replicas.")
    samples_per_second: float | None = Field(
        None,
        ge=1,
        le=1e12,
        description="Predicted throughput to reach with the fewest replicas (samples/s); of several kinds of hardware "
        "with the lowest price per hour. Needs HardwareProfiles with measured rates. If nothing reaches it, the "
        "highest throughput is taken.",
    )
    deadline: Duration | None = Field(
        None,
        description="Run time of the job, as in lifecycle.activeDeadline, within which the samples left are predicted "
        "to be trained on, by the fewest replicas; of several kinds of hardware at the lowest price of these samples. "
        "It is planned for at the start of each attempt with new pods. If nothing is fast enough, the highest "
        "throughput is taken.",
    )
    max_price_per_billion_samples: float | None = Field(
        None,
        ge=0,
        le=1e12,
        description="Highest predicted price of 1e9 samples, in the currency of pricePerHour: the highest throughput "
        "within it is taken. If everything costs more, the job fails.",
    )

    rules = (
        Rule(
            cel="self.minReplicas <= self.maxReplicas",
            holds=lambda objective: objective.min_replicas <= objective.max_replicas,
            message="minReplicas must not exceed maxReplicas",
        ),
        exclusive("samplesPerSecond", "deadline"),
        exclusive("samplesPerSecond", "maxPricePerBillionSamples"),
        exclusive("deadline", "maxPricePerBillionSamples"),
        positive("deadline", "to leave the time of training open"),
    )


class TierBudgets(ApiModel):
    """Limit the bytes of each tier that one replica may use. Default: what the hardware has.

    A budget counts rows and their optimizer state, slots, row maps, the hand-off, and partial pooled vectors of
    row-sharded tables. It does not count the memory of the processes themselves, dense parameters and activations,
    except in hbm.
    """

    hbm: Bytes | None = Field(
        None,
        description="GPU memory of one replica, divided evenly over its processes (bytes). Everything in it counts: "
        "dense parameters, activations and 2 GiB for CUDA too. Without a HardwareProfile, setting it makes ranks "
        "compute on GPUs.",
    )
    ddr: Bytes | None = Field(
        None,
        description="Host memory of one replica for tables, slots, row maps of slower tiers, and the hand-off (bytes), "
        "on top of the memory of its processes.",
    )
    cxl: Bytes | None = Field(
        None, description="CXL memory of one replica for rows that do not fit host memory (bytes)."
    )
    scm: Bytes | None = Field(
        None,
        description="Byte-addressable storage-class memory of one replica for rows that do not fit faster tiers "
        "(bytes).",
    )
    block: Bytes | None = Field(
        None,
        description="Block storage of one replica for rows that do not fit faster tiers, counted in allocated "
        "blocks (bytes).",
    )


class CacheSpec(ApiModel):
    """Configure the slots in fast memory of tables that do not fit there."""

    policy: Literal["auto", "lru", "lfu", "mixed"] = Field(
        "auto",
        description="Replacement policy of the slots: least recently used, least frequently used, or a mix of both. "
        "auto: the planner decides by the tables' traces.",
    )
    ways: int = Field(0, ge=0, le=1_024, description="Associativity: slots per set. 0: fully associative.")
    lookahead: int = Field(
        1, ge=0, le=8, description="Batches ahead of the current one with rows prefetched into slots."
    )


class ResourcesSpec(ApiModel):
    """Set requests and limits of one container, as in a pod."""

    requests: dict[str, ResourceQuantity] = Field({}, max_length=32, description="Requested resources.")
    limits: dict[str, ResourceQuantity] = Field({}, max_length=32, description="Limits.")

    rules = (
        Rule(
            cel="!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
            "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
            holds=lambda resources: all(
                quantity_value(amount) <= quantity_value(resources.limits[name])
                for name, amount in resources.requests.items()
                if name in resources.limits
            ),
            message="requests must not exceed limits: raise the limit or lower the request",
        ),
    )


class TrainerSpec(ApiModel):
    """Configure the trainer pods and their hardware."""

    replicas: int | None = Field(
        None,
        ge=1,
        le=MAX_REPLICAS,
        description="Trainer pods. Default: 1, or the planner's choice if objective is set. kubectl scale sets it.",
    )
    objective: ObjectiveSpec | None = Field(
        None,
        description="What the planner chooses the number of replicas by if replicas is absent, and the hardware of "
        "hardwareProfiles or hardwareSelector.",
    )
    processes_per_replica: int = Field(1, ge=1, le=64, description="Ranks in one pod: one per GPU or CPU socket.")
    threads_per_process: int | None = Field(
        None,
        ge=1,
        le=1_024,
        description="Compute threads of one rank. Default: the pod's CPUs divided by its ranks. If set, the trainer "
        "container requests as many CPUs as its ranks have threads; otherwise it requests none unless resources does.",
    )
    hardware: ObjectName | None = Field(
        None,
        description="Name of a HardwareProfile. Default: any node; memory is then checked only if tierBudgets.ddr or "
        "resources.limits.memory is set.",
    )
    hardware_profiles: tuple[ObjectName, ...] | None = Field(
        None,
        min_length=1,
        max_length=MAX_PROFILES,
        description="Names of HardwareProfiles from which objective chooses one. All pods run on the chosen hardware, "
        "and so do those of later attempts.",
    )
    hardware_selector: dict[str, LabelValue] | None = Field(
        None,
        min_length=1,
        max_length=8,
        description=f"Labels of the HardwareProfiles, at most {MAX_PROFILES}, from which objective chooses one.",
    )
    tier_budgets: TierBudgets = Field(TierBudgets(), description="Memory budgets of a pod by tier.")
    cache: CacheSpec = Field(CacheSpec(), description="Slots of tables that do not fit in fast memory.")
    resources: ResourcesSpec = Field(ResourcesSpec(), description="Requests and limits of the trainer container.")
    pod_template: PodTemplateOverlay = Field(
        PodTemplateOverlay(),
        description="Overrides for the pods. Unless the cluster admin sets the chart value jobs.podTemplatePolicy to "
        "any, only what Pod Security level restricted allows is allowed.",
    )
    image: ImageName | None = Field(None, description="Trainer image. Default: the image of the operator's version.")
    checkpointer_image: ImageName | None = Field(
        None, description="Checkpointer image. Default: the image of the operator's version."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Image pull policy."
    )

    rules = (
        exclusive("hardware", "hardwareProfiles"),
        exclusive("hardware", "hardwareSelector"),
        exclusive("hardwareProfiles", "hardwareSelector"),
        Rule(
            cel="has(self.objective) || !(has(self.hardwareProfiles) || has(self.hardwareSelector))",
            holds=lambda trainer: trainer.objective is not None or not trainer.chooses_hardware,
            message="hardwareProfiles and hardwareSelector need objective: say what to choose by, or set hardware",
        ),
        Rule(
            cel="!has(self.hardwareProfiles) || self.hardwareProfiles.all(name, "
            "self.hardwareProfiles.exists_one(other, other == name))",
            holds=lambda trainer: len(set(trainer.hardware_profiles or ())) == len(trainer.hardware_profiles or ()),
            message="hardwareProfiles must be unique: remove names that are listed twice",
        ),
    )

    @property
    def chooses_hardware(self) -> bool:
        """Return whether the hardware is chosen from several HardwareProfiles."""
        return self.hardware_profiles is not None or self.hardware_selector is not None
