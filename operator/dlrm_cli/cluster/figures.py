"""What a trainer's ``/metrics`` says of its pod, and how two looks at it make rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

PREFIX = "dlrm_trainer_"


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
    tier_rows: Mapping[str, float] = field(default_factory=dict)
    """Rows that came up from each slower tier."""
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
    """Read an exposition in Prometheus' text format; what it lacks is absent."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = defaultdict(float)
    tiers: dict[str, float] = defaultdict(float)
    stages: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if name == "tier_read_rows_total":
                tiers[sample.labels.get("tier", "")] += sample.value
            elif name == "stage_seconds_total":
                stages[sample.labels.get("stage", "")] += sample.value
            else:
                sums[name] += sample.value
    return PodFigures(
        step=int(sums["steps_total"]) if "steps_total" in sums else None,
        samples_per_second=sums.get("samples_per_second"),
        loss=sums.get("loss_nats"),
        ne=sums.get("eval_normalized_entropy_ratio"),
        accesses=sums["table_accesses_total"],
        hits=sums["table_hits_total"],
        tier_rows=dict(tiers),
        stage_seconds=dict(stages),
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
    shares = {tier: (rows - before.tier_rows.get(tier, 0.0)) / accesses for tier, rows in sorted(now.tier_rows.items())}
    return Rates(
        hit_rate=(now.hits - before.hits) / accesses,
        tier_shares=shares,
        stage=found.stage,
        stage_share=found.stage_share,
    )
