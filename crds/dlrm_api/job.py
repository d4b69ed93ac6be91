"""``DLRMJob``: one training job as the user applies it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dlrm_api.base import WHOLE, ApiModel, Rule, read
from dlrm_api.checkpoint import CheckpointSpec
from dlrm_api.data import DataSpec
from dlrm_api.lifecycle import LifecycleSpec, SchedulingSpec
from dlrm_api.model import MAX_FEATURES, ModelSpec, TableSpec, has_sizes, has_unique
from dlrm_api.names import API_VERSION
from dlrm_api.row_optimizers import STATE_BYTES, state_values
from dlrm_api.status import DLRMJobStatus
from dlrm_api.trainer import TrainerSpec
from dlrm_api.training import RowCodecs, TrainingSpec

JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
JOB_NAME_LENGTH = 40

_NOT_OF_THE_MODEL = {
    "data": ("train", "eval", "newFiles", "virtualShards", "prefetchBytes", "credentialsSecret", "s3"),
    "training": ("evalEverySteps",),
}
"""Fields that change no trained value. Data, and its virtual shards, are compared with those of the snapshot."""

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_SPARSE = tuple(f"C{i}" for i in range(1, 27))


class ObjectMeta(ApiModel):
    """Metadata fields that this system reads; others pass through."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        min_length=1, max_length=253, description="Name of the job. Services and pods are named after it."
    )
    namespace: str | None = Field(None, max_length=63, description="Namespace.")

    rules = (
        Rule(
            cel=f"size(self.name) <= {JOB_NAME_LENGTH} && self.name.matches('{JOB_NAME_PATTERN}')",
            holds=lambda meta: len(meta.name) <= JOB_NAME_LENGTH and re.search(JOB_NAME_PATTERN, meta.name) is not None,
            message=f"name must be at most {JOB_NAME_LENGTH} lower-case letters, digits and dashes and start with a "
            "letter: Services and pods are named after it",
        ),
    )


class DLRMJobSpec(ApiModel):
    """Configure the model, the data, the hardware and the snapshots of a job."""

    model: ModelSpec = Field(description="The model.", json_schema_extra=WHOLE)
    data: DataSpec = Field(description="The samples.", json_schema_extra=WHOLE)
    training: TrainingSpec = Field(TrainingSpec(), description="Optimizers and duration.", json_schema_extra=WHOLE)
    trainer: TrainerSpec = Field(TrainerSpec(), description="Trainer pods and hardware.")
    checkpoint: CheckpointSpec = Field(description="Snapshots.")
    lifecycle: LifecycleSpec = Field(LifecycleSpec(), description="Restarts, suspension and deadlines.")
    scheduling: SchedulingSpec = Field(SchedulingSpec(), description="Queue, priority and gang scheduling.")

    rules = (
        Rule(
            cel="(has(self.trainer.replicas) ? self.trainer.replicas : "
            "has(self.trainer.objective) ? self.trainer.objective.minReplicas : 1) * self.trainer.processesPerReplica "
            "<= (has(self.data.virtualShards) ? self.data.virtualShards : self.data.globalBatchSize)",
            holds=lambda spec: spec.world_size <= (spec.data.virtual_shards or spec.data.global_batch_size),
            message="data.virtualShards must be at least trainer.replicas (or objective.minReplicas) x "
            "processesPerReplica, the number of ranks, and so must data.globalBatchSize: raise it, or use fewer ranks",
        ),
        Rule(
            cel="!has(self.trainer.objective) || !has(self.trainer.objective.deadline) || "
            "self.data.format == 'synthetic' || has(self.training.maxSteps) || has(self.training.maxSamples)",
            holds=lambda spec: (
                spec.trainer.objective is None
                or spec.trainer.objective.deadline is None
                or spec.total_samples is not None
            ),
            message="trainer.objective.deadline needs to know the samples of the whole training: set "
            "training.maxSamples or training.maxSteps",
        ),
        Rule(
            cel=f"!self.checkpoint.partialRestore || !{has_unique('self.model')}",
            holds=lambda spec: not (spec.checkpoint.partial_restore and spec.model.has_unique),
            message="checkpoint.partialRestore does not work with embedding.hash unique, because a shard of an older "
            "step has other ids: remove it",
        ),
        Rule(
            cel="!has(self.training.rowRegularizer) || self.checkpoint.bits != 'auto'",
            holds=lambda spec: spec.training.row_regularizer is None or spec.checkpoint.bits != "auto",
            message="training.rowRegularizer needs to know the stored bits: set checkpoint.bits to rowRegularizer.bits "
            "instead of auto",
        ),
        Rule(
            cel="!has(self.training.rowRegularizer) || self.checkpoint.bits == 'auto' || "
            "self.checkpoint.bits == self.training.rowRegularizer.bits",
            holds=lambda spec: (
                spec.training.row_regularizer is None
                or spec.checkpoint.bits in ("auto", spec.training.row_regularizer.bits)
            ),
            message="training.rowRegularizer.bits must equal checkpoint.bits, because rows on another grid restore "
            "worse: change one of them",
        ),
        Rule(
            cel=f"self.training.rowOptimizer.kind != 'adam' || !{has_sizes('self.model')}",
            holds=lambda spec: spec.training.row_optimizer.kind != "adam" or not spec.model.has_sizes,
            message="training.rowOptimizer.kind adam does not work with embedding.dimension: use rowwise-adagrad or "
            "sgd",
        ),
        Rule(
            cel=f"!has(self.trainer.tierBudgets) || !has(self.trainer.tierBudgets.hbm) || !{has_sizes('self.model')}",
            holds=lambda spec: spec.trainer.tier_budgets.hbm is None or not spec.model.has_sizes,
            message="trainer.tierBudgets.hbm does not work with embedding.dimension, whose rows are in host memory: "
            "remove one of them",
        ),
    )

    @model_validator(mode="after")
    def _tables_agree(self) -> DLRMJobSpec:
        # Uniqueness over up to 5,000 tables would take quadratic time in CEL, so it is checked here and in the webhook.
        tables = self.model.all_tables()
        name, count = Counter(table.name for table in tables).most_common(1)[0]
        if count > 1:
            _refuse(f"model.tables: {count} tables have the name {name}: names must be unique")
        features = self.model.all_features()
        if len(features) > MAX_FEATURES:
            _refuse(f"model.tables: expected at most {MAX_FEATURES} features over all tables, got {len(features)}")
        for table in tables:
            column, count = Counter(table.sources).most_common(1)[0]
            if count > 1:
                _refuse(f"model.tables: table {table.name} lists feature {column} {count} times: list it once")
            _check_share(table, STATE_BYTES * state_values(self.training.row_optimizer.kind, table.dim))
        if self.data.format == "criteo-tsv":
            _refuse_unknown("model.denseFeatures", self.model.dense_features, CRITEO_DENSE)
            _refuse_unknown("model.tables", tuple(feature.column for feature in features), CRITEO_SPARSE)
            weighted = next((tables[feature.table] for feature in features if feature.weights), None)
            if weighted:
                _refuse(f"model.tables: criteo-tsv has no weight columns: remove weights from table {weighted.name}")
        return self

    @property
    def fixed_replicas(self) -> int | None:
        """Return the number of trainer pods that the user asks for, or None if the planner chooses it."""
        return None if self.trainer.replicas is None and self.trainer.objective is not None else self.replicas

    @property
    def replicas(self) -> int:
        """Return the number of trainer pods that the spec asks for: the minimum if the planner chooses."""
        return self.trainer.replicas or (1 if self.trainer.objective is None else self.trainer.objective.min_replicas)

    @property
    def world_size(self) -> int:
        """Return the number of ranks of ``replicas`` pods."""
        return self.replicas * self.trainer.processes_per_replica

    @property
    def virtual_shards(self) -> int:
        """Return ``data.virtualShards`` of a job that runs; ``with_virtual_shards`` has set it if the user has not."""
        assert self.data.virtual_shards is not None, "data.virtualShards is unset: it is the snapshot's, or the plan's"
        return self.data.virtual_shards

    @property
    def total_samples(self) -> int | None:
        """Return the samples of the whole training, as far as the spec bounds them; None if only data files do."""
        steps, samples = self.training.max_steps, self.training.max_samples
        bounds = [steps * self.data.global_batch_size if steps else None, samples]
        if self.data.format == "synthetic":
            bounds.append(self.data.epochs * self.data.synthetic.samples)
        return min((bound for bound in bounds if bound is not None), default=None)

    def with_replicas(self, replicas: int) -> DLRMJobSpec:
        """Return a copy with a fixed number of trainer pods."""
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"replicas": replicas})})

    def with_row_codecs(self, codecs: RowCodecs | None) -> DLRMJobSpec:
        """Return this spec with the wire formats of a plan; without any it stays as it is."""
        if codecs is None:
            return self
        communication = self.training.communication.with_codecs(codecs)
        return self.model_copy(update={"training": self.training.model_copy(update={"communication": communication})})

    def with_virtual_shards(self, virtual_shards: int) -> DLRMJobSpec:
        """Return a copy with a number of virtual shards, such as the plan's."""
        return self.model_copy(update={"data": self.data.model_copy(update={"virtual_shards": virtual_shards})})

    def settings(self) -> dict[str, Any]:
        """Return what decides how a model is trained; where its data lies and how it is read does not."""
        return settings_of(self.model_dump(mode="json", include={"model", "data", "training"}))

    @property
    def expected_restores(self) -> int:
        """Return the number of restores that ``checkpoint.bits: auto`` assumes: by default the restart budget."""
        given = self.checkpoint.expected_restores
        return self.lifecycle.restart.max_restarts if given is None else given


class DLRMJob(ApiModel):
    """A training job of a deep-learning recommendation model."""

    api_version: Literal["dlrm.dev/v1alpha1"] = Field(API_VERSION, description="Version of this API.")
    kind: Literal["DLRMJob"] = Field("DLRMJob", description="Kind of this object.")
    metadata: ObjectMeta = Field(description="Name and namespace.")
    spec: DLRMJobSpec = Field(description="What to train.")
    status: DLRMJobStatus | None = Field(None, description="Status, written by the operator.", json_schema_extra=WHOLE)

    def with_replicas(self, replicas: int) -> DLRMJob:
        """Return a copy with a fixed number of trainer pods, such as the plan's."""
        return self.model_copy(update={"spec": self.spec.with_replicas(replicas)})


def settings_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a document of settings, which an earlier version may have written with more fields."""
    return {
        section: {name: value for name, value in fields.items() if name not in _NOT_OF_THE_MODEL.get(section, ())}
        for section, fields in document.items()
    }


def parse_job(document: Any) -> DLRMJob:
    """Read a job from a decoded YAML or JSON document.

    Raises:
        InvalidSpecError: names the first invalid field as kubectl shows it, and how many more there are.
    """
    return read(DLRMJob, document)


def _refuse(message: str) -> None:
    raise PydanticCustomError("rule", "{message}", {"message": message})


def _check_share(table: TableSpec, state_bytes: int) -> None:
    """Refuse a share of bytes that a table exceeds even if no row holds more than it must."""
    sized = table.slab_bytes(state_bytes)
    # With 1 there is no budget.
    if sized is not None and sized.keep <= sized.min_keep and sized.keep < 1:
        # Rounded up to three digits, so that the share works.
        least = min(1, math.floor(sized.min_keep * 1_000 + 1) / 1_000)
        _refuse(
            f"model.tables: table {table.name}: embedding.dimension.keepBytes of {sized.keep:g} leaves nothing for "
            f"rows to grow, because each row of dim {table.dim} takes at least {sized.least_row} bytes: use at least "
            f"{least:g}, or a larger dim"
        )


def _refuse_unknown(path: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        _refuse(f"{path}: expected features {known[0]} to {known[-1]} for criteo-tsv, got {unknown[0]}")
