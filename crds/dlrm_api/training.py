"""``spec.training``: optimizers, learning rate, length, seed, and the precision of communication."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlrm_api.base import ApiModel, Rule
from dlrm_api.row_optimizers import RowOptimizerKind
from dlrm_api.wire import Codec

LEAST_EPS = 1e-20
"""Where gradients were all zero, or too small for their squares to be float32, the state is 0, and a step is divided by
this alone."""


class RowOptimizerSpec(ApiModel):
    """The optimizer of embedding rows; every row is updated once per global batch, exactly."""

    kind: RowOptimizerKind = Field(
        "rowwise-adagrad",
        description=(
            "rowwise-adagrad keeps one fp32 scalar per row and column block, sgd keeps nothing, adam keeps two fp32 "
            "moments per element and counts each row's updates, by which it corrects them."
        ),
    )
    learning_rate: float = Field(0.02, ge=0, le=1_000, description="Learning rate at referenceBatchSize.")
    eps: float = Field(1e-8, ge=LEAST_EPS, le=1, description="Added to the root of the state (rowwise-adagrad, adam).")
    beta1: float = Field(0.9, ge=0, le=0.9999, description="Decay of adam's first moment.")
    beta2: float = Field(0.999, ge=0, le=0.999999, description="Decay of adam's second moment.")


class DenseOptimizerSpec(ApiModel):
    """The optimizer of the MLPs and the interaction."""

    kind: Literal["adagrad", "sgd", "adam"] = Field("adagrad", description="Kind of optimizer.")
    learning_rate: float = Field(0.01, ge=0, le=1_000, description="Learning rate at referenceBatchSize.")
    eps: float = Field(1e-8, ge=LEAST_EPS, le=1, description="Added to the root of the state (adagrad, adam).")
    beta1: float = Field(0.9, ge=0, le=0.9999, description="Decay of adam's first moment.")
    beta2: float = Field(0.999, ge=0, le=0.999999, description="Decay of adam's second moment.")


class CommunicationSpec(ApiModel):
    """Number formats on the wire, per direction."""

    forward: Codec = Field("fp32", description="Pooled rows.")
    backward: Codec = Field("fp32", description="Gradients of pooled rows.")
    dense: Codec = Field("fp32", description="Gradients of dense parameters.")


class TrainingSpec(ApiModel):
    """``spec.training``."""

    row_optimizer: RowOptimizerSpec = Field(RowOptimizerSpec(), description="Optimizer of embedding rows.")
    dense_optimizer: DenseOptimizerSpec = Field(DenseOptimizerSpec(), description="Optimizer of dense parameters.")
    reference_batch_size: int | None = Field(
        None,
        ge=1,
        le=2**26,
        description="Batch size that the learning rates were tuned at; they scale by globalBatchSize over it.",
    )
    warmup_steps: int = Field(
        0, ge=0, le=10_000_000, description="Steps in which the learning rates grow linearly to full."
    )
    max_steps: int | None = Field(None, ge=1, le=2**40, description="Stop after this many steps, if data lasts.")
    max_samples: int | None = Field(
        None, ge=1, le=2**50, description="Stop at the first step that reaches this many samples."
    )
    eval_every_steps: int | None = Field(
        None, ge=1, le=2**40, description="Evaluate after every so many steps; always at the end."
    )
    seed: int = Field(0, ge=0, le=2**53, description="Seed of initial values, sample order and synthetic data.")
    deterministic: bool = Field(
        False,
        description="Bit-reproducible runs on GPUs, at some cost; CPU runs always are bit-reproducible.",
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        le=2**26,
        description=(
            "Samples of a rank whose activations are held at a time; the gradients of a global batch are summed and "
            "applied once all the same. By default the rank's whole share."
        ),
    )
    communication: CommunicationSpec = Field(CommunicationSpec(), description="Number formats on the wire.")

    rules = (
        Rule(
            cel="!(has(self.maxSteps) && has(self.maxSamples))",
            holds=lambda training: training.max_steps is None or training.max_samples is None,
            message="maxSteps and maxSamples are two ways to say one thing: give one of them",
        ),
    )
