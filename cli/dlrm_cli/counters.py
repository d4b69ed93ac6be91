"""Read what a trainer pod counts on ``/metrics``, and turn two readings into rates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import Field

from dlrm_api.base import ApiModel
from dlrm_api.errors import BadDataError
from dlrm_api.fields import Count

PREFIX = "dlrm_trainer_"
MAX_VALUE = 1e18
"""No figure of ours comes near; sums of larger ones would soon be infinite."""

Counted = Annotated[float, Field(ge=-1e24, le=1e24)]


class TierCounts(ApiModel):
    """Count what went through one tier since the attempt began, over all ranks."""

    read_rows: Counted = Field(0, description="Rows that came up from it to slots.")
    written_rows: Counted = Field(0, description="Rows that went down to it.")
    read_bytes: Counted = Field(0, description="Bytes of the rows read.")
    written_bytes: Counted = Field(0, description="Bytes of the rows written.")
    kept_bytes: Counted = Field(0, description="Bytes in use.")
    planned_bytes: Counted = Field(0, description="Bytes that the plan's rows take when every level is full.")


class Counts(ApiModel):
    """Hold the counters of an attempt at one time, over all its ranks."""

    ranks: Count = Field(0, description="Ranks that counted.")
    stages: dict[str, Counted] = Field({}, description="Time of the training threads by stage, summed over ranks (s).")
    accesses: Counted = Field(0, description="Distinct rows of batches looked up in tables with levels.")
    hits: Counted = Field(0, description="Accesses found in a slot.")
    created_rows: Counted = Field(0, description="Rows looked up for the first time.")
    evicted_rows: Counted = Field(0, description="Rows that left a slot for another.")
    prefetch_wait_s: Counted = Field(0, description="Time that lookups waited for rows, summed over ranks (s).")
    tiers: dict[str, TierCounts] = Field({}, description="By tier.")
    unique_rows: Counted = Field(0, description="Rows in use in unique tables.")
    unique_capacity_rows: Counted = Field(0, description="Most rows of unique tables at a time.")
    unique_lookups: Counted = Field(0, description="Lookups of unique tables.")
    unique_lookups_without_row: Counted = Field(0, description="Lookups of ids without a row.")

    sized_kept_bytes: Counted = Field(0, description="Bytes of rows of several sizes.")
    sized_full_bytes: Counted = Field(0, description="Bytes that they would take with all columns.")

    @property
    def kept_share(self) -> float | None:
        """Return the share of the bytes of rows of several sizes that is kept, or None without such rows."""
        return self.sized_kept_bytes / self.sized_full_bytes if self.sized_full_bytes > 0 else None

    @property
    def unique_fill(self) -> float | None:
        """Return the share of the rows of unique tables that are in use, or None without such tables."""
        return self.unique_rows / self.unique_capacity_rows if self.unique_capacity_rows > 0 else None


class PodFigures(Counts):
    """Hold one reading of a pod; its counters start with the pod and cover all its ranks."""

    step: int | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    ne: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Say where rows were found and time went between two readings; None if nothing happened."""

    hit_rate: float | None = None
    tier_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of accesses that each slower tier served."""
    stage: str = ""
    """The stage that took the most time."""
    stage_share: float | None = None
    without_row: float | None = None
    """Share of lookups of unique tables whose ids had no row."""


def metric_samples(text: str) -> Iterator[Sample]:
    """Yield the finite figures of a text in Prometheus' format, or raise BadDataError."""
    try:
        for family in text_string_to_metric_families(text):
            yield from (each for each in family.samples if math.isfinite(each.value) and abs(each.value) <= MAX_VALUE)
    except (ValueError, KeyError, IndexError) as error:
        raise BadDataError(f"invalid metrics: expected Prometheus' text format, got {error}") from error


def pod_figures(text: str) -> PodFigures:
    """Read a trainer's metrics, or raise BadDataError; figures that are not in the text stay absent."""
    sums: dict[str, float] = defaultdict(float)
    tiers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    stages: dict[str, float] = defaultdict(float)
    ranks = set()
    for sample in metric_samples(text):
        if not sample.name.startswith(PREFIX):
            continue
        name = sample.name.removeprefix(PREFIX)
        count = name.removeprefix("tier_").removesuffix("_total")
        tier = sample.labels.get("tier", "")
        if count in TierCounts.model_fields and tier:
            tiers[tier][count] += sample.value
        elif name == "stage_seconds_total":
            stages[sample.labels.get("stage", "")] += sample.value
            ranks.add(sample.labels.get("rank"))
        else:
            sums[name] += sample.value
    if not (sums or tiers or stages):
        raise BadDataError("the answer has no metrics of a trainer")
    return PodFigures(
        step=int(sums["steps_total"]) if "steps_total" in sums else None,
        samples_per_second=sums.get("samples_per_second"),
        loss=sums.get("loss_nats"),
        ne=sums.get("eval_normalized_entropy_ratio"),
        accesses=sums["table_accesses_total"],
        hits=sums["table_hits_total"],
        created_rows=sums["table_created_rows_total"],
        evicted_rows=sums["table_evicted_rows_total"],
        prefetch_wait_s=sums["tier_prefetch_wait_seconds_total"],
        unique_rows=sums["unique_rows"],
        unique_capacity_rows=sums["unique_capacity_rows"],
        unique_lookups=sums["unique_lookups_total"],
        unique_lookups_without_row=sums["unique_lookups_without_row_total"],
        sized_kept_bytes=sums["sized_kept_bytes"],
        sized_full_bytes=sums["sized_full_bytes"],
        tiers=tiers,
        ranks=len(ranks),
        stages=dict(stages),
    )


def sum_counts(pods: Sequence[PodFigures]) -> Counts:
    """Add up the counters of all pods."""
    stages: dict[str, float] = defaultdict(float)
    tiers: dict[str, TierCounts] = {}
    for pod in pods:
        for stage, seconds in pod.stages.items():
            stages[stage] += seconds
        for tier, counts in pod.tiers.items():
            before = tiers.get(tier, TierCounts())
            sums = {name: getattr(before, name) + getattr(counts, name) for name in TierCounts.model_fields}
            tiers[tier] = TierCounts.model_validate(sums)
    names = [name for name in Counts.model_fields if name not in ("stages", "tiers")]
    counted = {name: sum(getattr(pod, name) for pod in pods) for name in names}
    return Counts(stages={stage: round(seconds, 6) for stage, seconds in stages.items()}, tiers=tiers, **counted)


def hit_rate(now: Counts, before: Counts) -> float | None:
    """Return the share of the accesses between two readings that were hits, or None without accesses."""
    accesses = now.accesses - before.accesses
    return (now.hits - before.hits) / accesses if accesses > 0 else None


def share_without_row(now: Counts, before: Counts) -> float | None:
    """Return the share of lookups of unique tables between two readings whose ids had no row; None without lookups."""
    lookups = now.unique_lookups - before.unique_lookups
    return (now.unique_lookups_without_row - before.unique_lookups_without_row) / lookups if lookups > 0 else None


def rates(now: PodFigures, before: PodFigures | None) -> Rates:
    """Return what happened between two readings; since the pod began without an earlier one of it."""
    if before is None or now.accesses < before.accesses or (now.step or 0) < (before.step or 0):
        before = PodFigures()
    accesses = now.accesses - before.accesses
    stages = {name: spent - before.stages.get(name, 0.0) for name, spent in now.stages.items()}
    total, stage = sum(stages.values()), max(stages, key=lambda name: stages[name], default="")
    shares = {
        tier: (counts.read_rows - before.tiers.get(tier, TierCounts()).read_rows) / accesses
        for tier, counts in sorted(now.tiers.items())
        if counts.read_rows and accesses > 0
    }
    return Rates(
        hit_rate=hit_rate(now, before),
        tier_shares=shares,
        stage=stage if total > 0 else "",
        stage_share=stages[stage] / total if total > 0 else None,
        without_row=share_without_row(now, before),
    )
