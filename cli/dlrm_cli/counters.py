"""What a trainer's ``/metrics`` says of its pod, and how two looks at it make rates."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from dlrm_api.base import ApiModel
from dlrm_api.errors import BadDataError
from dlrm_api.status import Count

_SAMPLE = re.compile(r'([A-Za-z_]\w*)(?:\{((?:\w+="[^"\\]*",?)*)\})? (\S+)', re.ASCII)
_LABEL = re.compile(r'(\w+)="([^"\\]*)"', re.ASCII)
MOST_LINE = 1_024
LARGEST = 1e18
"""No figure of ours comes near; sums of larger ones would soon be infinite."""


@dataclass(frozen=True)
class Sample:
    """One figure: finite, and at most ``LARGEST``."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The figures of an exposition. Lines of another form, and figures that are none, are passed over.

    A broken or hostile pod may write anything, so no line is looked at for longer than it is long.
    """
    for line in text.splitlines():
        found = _SAMPLE.match(line) if len(line) <= MOST_LINE else None
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value) and abs(value) <= LARGEST:
            yield Sample(found[1], dict(_LABEL.findall(found[2] or "")), value)


PREFIX = "dlrm_trainer_"
MOST_TIERS = 8
MOST_STAGES = 64
"""Of a pod, and more than there are: what comes after them is some other program's."""


@dataclass(frozen=True, kw_only=True)
class PodFigures:
    """One look; counters are those of the pod's life, over all its ranks."""

    step: int | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    ne: float | None = None
    accesses: float = 0.0
    """Distinct rows asked of tables with levels."""
    hits: float = 0.0
    """Those found in a slot."""
    created_rows: float = 0.0
    evicted_rows: float = 0.0
    prefetch_wait_s: float = 0.0
    tiers: Mapping[str, TierCounts] = field(default_factory=dict)
    """What went through each tier with levels, and lies in it."""
    ranks: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of the training threads by stage."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Where rows were found and time went, of all in this span; None where nothing happened in it."""

    hit_rate: float | None = None
    tier_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of accesses that each slower tier served."""
    stage: str = ""
    """The stage that took most of the time."""
    stage_share: float | None = None


def pod_figures(text: str) -> PodFigures:
    """Read an exposition in Prometheus' text format; what it lacks is absent.

    Raises:
        BadDataError: there is not one metric of a trainer in it.
    """
    sums: dict[str, float] = defaultdict(float)
    tiers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    stages: dict[str, float] = defaultdict(float)
    ranks = set()
    for sample in samples(text):
        if not sample.name.startswith(PREFIX):
            continue
        name = sample.name.removeprefix(PREFIX)
        part = name.removeprefix("tier_").removesuffix("_total")
        tier, stage = sample.labels.get("tier", ""), sample.labels.get("stage", "")
        if part in TierCounts.model_fields and tier:
            if tier in tiers or len(tiers) < MOST_TIERS:
                tiers[tier][part] += sample.value
        elif name == "stage_seconds_total":
            if stage in stages or len(stages) < MOST_STAGES:
                stages[stage] += sample.value
            ranks.add(sample.labels.get("rank"))
        else:
            sums[name] += sample.value
    if not (sums or tiers or stages):
        raise BadDataError("its answer holds no metrics of a trainer")
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
        tiers={tier: TierCounts.model_validate(counts) for tier, counts in tiers.items()},
        ranks=len(ranks),
        stage_seconds=dict(stages),
    )


def counts_of(pods: Sequence[PodFigures]) -> Counts:
    """The counters of all pods together."""
    stages: dict[str, float] = defaultdict(float)
    tiers: dict[str, TierCounts] = {}
    for pod in pods:
        for stage, seconds in pod.stage_seconds.items():
            stages[stage] += seconds
        for tier, counts in pod.tiers.items():
            before = tiers.get(tier, TierCounts())
            sums = {name: getattr(before, name) + getattr(counts, name) for name in TierCounts.model_fields}
            tiers[tier] = TierCounts.model_validate(sums)
    return Counts(
        ranks=sum(pod.ranks for pod in pods),
        stages={stage: round(seconds, 6) for stage, seconds in stages.items()},
        accesses=sum(pod.accesses for pod in pods),
        hits=sum(pod.hits for pod in pods),
        created_rows=sum(pod.created_rows for pod in pods),
        evicted_rows=sum(pod.evicted_rows for pod in pods),
        prefetch_wait_s=sum(pod.prefetch_wait_s for pod in pods),
        tiers=tiers,
    )


def rates(now: PodFigures, before: PodFigures | None) -> Rates:
    """What happened between two looks; since the pod began where there is no earlier look, or it is of another life."""
    if before is None or now.accesses < before.accesses or (now.step or 0) < (before.step or 0):
        before = PodFigures()
    accesses = now.accesses - before.accesses
    stages = {name: spent - before.stage_seconds.get(name, 0.0) for name, spent in now.stage_seconds.items()}
    total, stage = sum(stages.values()), max(stages, key=lambda name: stages[name], default="")
    found = Rates(stage=stage if total > 0 else "", stage_share=stages[stage] / total if total > 0 else None)
    if accesses <= 0:
        return found
    shares = {
        tier: (counts.read_rows - before.tiers.get(tier, TierCounts()).read_rows) / accesses
        for tier, counts in sorted(now.tiers.items())
        if counts.read_rows
    }
    return Rates(
        hit_rate=(now.hits - before.hits) / accesses,
        tier_shares=shares,
        stage=found.stage,
        stage_share=found.stage_share,
    )


Counted = Annotated[float, Field(ge=-1e24, le=1e24)]


class TierCounts(ApiModel):
    """What went through one tier since the attempt began, over all ranks."""

    read_rows: Counted = Field(0, description="Rows that came up from it to slots.")
    written_rows: Counted = Field(0, description="Rows that went down to it.")
    read_bytes: Counted = Field(0, description="Bytes of the first.")
    written_bytes: Counted = Field(0, description="Bytes of the second.")
    kept_bytes: Counted = Field(0, description="Bytes really taken.")
    planned_bytes: Counted = Field(0, description="Bytes that the plan's rows take when every level is full.")


class Counts(ApiModel):
    """Counters of an attempt over all its ranks, as far as they were seen at one time."""

    ranks: Count = Field(0, description="Ranks that counted.")
    stages: dict[str, Counted] = Field({}, description="Time of the training threads by stage, all ranks added up (s).")
    accesses: Counted = Field(0, description="Distinct rows of batches asked of tables with levels.")
    hits: Counted = Field(0, description="Those found in a slot.")
    created_rows: Counted = Field(0, description="Rows looked up for the first time.")
    evicted_rows: Counted = Field(0, description="Rows that left a slot for another.")
    prefetch_wait_s: Counted = Field(0, description="Time for which lookups waited for rows, all ranks added up (s).")
    tiers: dict[str, TierCounts] = Field({}, description="By tier.")
