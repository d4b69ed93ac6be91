"""Jobs with unique tables."""

from __future__ import annotations

from collections.abc import Mapping

from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import EmbeddingOptions, ModelSpec


def with_unique(model: ModelSpec, buckets: Mapping[str, int | None]) -> ModelSpec:
    """Return the model with unique ids in the tables named; None: the default number of buckets."""
    tables = tuple(
        table
        if table.name not in buckets
        else table.model_copy(
            update={
                "embedding": EmbeddingOptions().model_copy(update={"hash": "unique", "buckets": buckets[table.name]})
            }
        )
        for table in model.tables
    )
    return model.model_copy(update={"tables": tables})


def spec_with_unique(spec: DLRMJobSpec, buckets: Mapping[str, int | None]) -> DLRMJobSpec:
    """Return the job with unique ids in the tables named."""
    return spec.model_copy(update={"model": with_unique(spec.model, buckets)})
