"""``spec.training``: optimizers, learning rate, duration, seed, and wire formats."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlrm_api.base import ApiModel, exclusive
from dlrm_api.fields import BatchSize, Steps
from dlrm_api.row_optimizers import RowOptimizerKind
from dlrm_api.wire import CODECS, DIRECTIONS, LINK_CLASSES, Codec, CodecChoice, Direction, LinkClass

MIN_EPS = 1e-20
"""The state is 0 if all gradients were zero or their squares underflow fp32; then a step is divided by eps alone."""


class RowOptimizerSpec(ApiModel):
    """Configure the row optimizer. Every row is updated exactly once per global batch."""

    kind: RowOptimizerKind = Field(
        "rowwise-adagrad",
        description="rowwise-adagrad keeps one fp32 value per row and column block, sgd none, adam two fp32 moments "
        "per element and one update count per row for bias correction.",
    )
    learning_rate: float = Field(0.02, ge=0, le=1_000, description="Learning rate at referenceBatchSize.")
    eps: float = Field(
        1e-8, ge=MIN_EPS, le=1, description="Added to the square root of the state (rowwise-adagrad, adam)."
    )
    beta1: float = Field(0.9, ge=0, le=0.9999, description="Decay of adam's first moment.")
    beta2: float = Field(0.999, ge=0, le=0.999999, description="Decay of adam's second moment.")


class DenseOptimizerSpec(ApiModel):
    """Configure the optimizer of the MLPs and the interaction."""

    kind: Literal["adagrad", "sgd", "adam"] = Field("adagrad", description="Kind of optimizer.")
    learning_rate: float = Field(0.01, ge=0, le=1_000, description="Learning rate at referenceBatchSize.")
    eps: float = Field(1e-8, ge=MIN_EPS, le=1, description="Added to the square root of the state (adagrad, adam).")
    beta1: float = Field(0.9, ge=0, le=0.9999, description="Decay of adam's first moment.")
    beta2: float = Field(0.999, ge=0, le=0.999999, description="Decay of adam's second moment.")


class RowRegularizerSpec(ApiModel):
    """Move rows toward the values that a snapshot of few bits can store, in the last steps of training."""

    bits: Literal[2, 3, 4, 8] = Field(description="Bits per stored element, as in checkpoint.bits.")
    strength: float = Field(
        0.1,
        ge=1e-6,
        le=1,
        description="How far an update moves an element near a stored value toward it, as a share of the distance.",
    )
    last_steps: Steps = Field(
        description="Number of last training steps in which rows move; all of them if training has fewer. Much more "
        "than a third of training costs quality."
    )


class LinkCodecs(ApiModel):
    """Give the wire format of each direction on links of one class."""

    forward: Codec = Field("fp32", description="Pooled rows.")
    backward: Codec = Field("fp32", description="Gradients of pooled rows.")


class RowCodecs(ApiModel):
    """Give the wire formats of rows by class of link."""

    intra_node: LinkCodecs | None = Field(
        None, description="Between ranks of one node. Absent if each rank has a node of its own."
    )
    inter_node: LinkCodecs | None = Field(None, description="Between nodes. Absent if there is one node.")

    def of(self, link: LinkClass) -> LinkCodecs | None:
        """Return the formats on links of a class."""
        return self.intra_node if link == "intra_node" else self.inter_node


_LOSSES = ", ".join(f"{name} {form.quality_loss:g}" for name, form in CODECS.items() if form.quality_loss is not None)


class InterNodeSpec(ApiModel):
    """Configure the wire formats of rows between nodes, where they differ from those inside a node."""

    forward: CodecChoice | None = Field(None, description="Pooled rows. Default: as communication.forward.")
    backward: CodecChoice | None = Field(
        None, description="Gradients of pooled rows. Default: as communication.backward."
    )


class CommunicationSpec(ApiModel):
    """Configure the wire format of each direction."""

    forward: CodecChoice = Field(
        "fp32",
        description="Pooled rows. auto: the plan takes the format with which it predicts the shortest step, one for "
        "links inside a node and one for links between nodes, and keeps both for the job's life.",
    )
    backward: CodecChoice = Field("fp32", description="Gradients of pooled rows; auto as in forward.")
    dense: Codec = Field("fp32", description="Gradients of dense parameters.")
    inter_node: InterNodeSpec = Field(
        InterNodeSpec(), description="Wire formats of rows between nodes, where they differ from those inside a node."
    )
    max_quality_loss: float = Field(
        0.001,
        ge=0,
        le=1,
        description="auto takes only formats whose measured rise of normalized entropy over fp32 is at most this "
        f"({_LOSSES}).",
    )

    def choice(self, link: LinkClass, direction: Direction) -> CodecChoice:
        """Return what is set for a direction on links of a class."""
        own: CodecChoice | None = getattr(self.inter_node, direction) if link == "inter_node" else None
        common: CodecChoice = getattr(self, direction)
        return own or common

    @property
    def is_open(self) -> bool:
        """Return whether any format is left to the plan."""
        return any(self.choice(link, direction) == "auto" for link in LINK_CLASSES for direction in DIRECTIONS)

    def codecs(self, link: LinkClass) -> tuple[Codec, Codec]:
        """Return the formats on links of a class, forward and backward; none may be left to the plan."""
        forward, backward = (self.choice(link, direction) for direction in DIRECTIONS)
        assert forward != "auto", "the plan chooses the format: see with_codecs"
        assert backward != "auto", "the plan chooses the format: see with_codecs"
        return forward, backward

    def with_codecs(self, codecs: RowCodecs) -> CommunicationSpec:
        """Return it with the formats of a plan. Where a class of links is absent, its formats do not matter."""
        inside = codecs.intra_node or codecs.inter_node or LinkCodecs()
        between = codecs.inter_node or inside
        inter_node = InterNodeSpec(forward=between.forward, backward=between.backward)
        return self.model_copy(
            update={"forward": inside.forward, "backward": inside.backward, "inter_node": inter_node}
        )


class TrainingSpec(ApiModel):
    """Configure the optimizers and the duration of training."""

    row_optimizer: RowOptimizerSpec = Field(RowOptimizerSpec(), description="Optimizer of embedding rows.")
    dense_optimizer: DenseOptimizerSpec = Field(DenseOptimizerSpec(), description="Optimizer of dense parameters.")
    row_regularizer: RowRegularizerSpec | None = Field(
        None,
        description="Moves rows toward what checkpoint.bits can store, so that a restore changes them less. Default: "
        "none.",
    )
    reference_batch_size: BatchSize | None = Field(
        None,
        description="Batch size for which the learning rates were tuned; they are scaled by globalBatchSize / "
        "referenceBatchSize. Default: no scaling.",
    )
    warmup_steps: int = Field(0, ge=0, le=10_000_000, description="Steps of linear learning-rate warm-up.")
    max_steps: Steps | None = Field(None, description="Stop after this many steps, or earlier at the end of the data.")
    max_samples: int | None = Field(
        None, ge=1, le=2**50, description="Stop after the first step that reaches this many samples."
    )
    eval_every_steps: Steps | None = Field(
        None, description="Steps between two evaluations. Default: evaluate at the end only."
    )
    seed: int = Field(0, ge=0, le=2**53, description="Seed of initial values, sample order and synthetic data.")
    deterministic: bool = Field(False, description="Make GPU runs bit-reproducible, at some cost. CPU runs always are.")
    micro_batch_size: BatchSize | None = Field(
        None,
        description="Samples of a rank with activations in memory at a time. Gradients are still summed over the "
        "global batch and applied once. Default: the rank's whole share.",
    )
    communication: CommunicationSpec = Field(CommunicationSpec(), description="Wire formats.")

    rules = (exclusive("maxSteps", "maxSamples"),)
