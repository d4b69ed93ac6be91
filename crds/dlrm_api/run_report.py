"""What a run measured of itself: how tables used their tiers, and how long the stages of a step took. Plain data."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dlrm_api.base import ApiModel
from dlrm_api.tiers import Tier

Total = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""What was counted, in the 64 bits that it was counted in."""


class TableUse(ApiModel):
    """One table whose rows live in levels, since its rank started."""

    table: str = Field(description="Name.")
    rows: Total = Field(description="Its rows.")
    lookups: Total = Field(0, description="Lookups, duplicates included.")
    accesses: Total = Field(0, description="Accesses: one for each distinct row of a batch.")
    hits: Total = Field(0, description="Accesses whose row was in a slot when the batch was looked at.")
    created_rows: Total = Field(0, description="Rows that were looked up for the first time, and made.")
    evicted_rows: Total = Field(0, description="Rows that left a slot for another row.")
    scratch_rows: Total = Field(0, description="Rows served from extra slots: the batches needed more than all.")
    expected_hit_rate: float | None = Field(None, ge=0, le=1, description="What the plan expects of the slots.")

    @property
    def hit_rate(self) -> float | None:
        """Share of accesses that were hits; None before the first."""
        return self.hits / self.accesses if self.accesses else None

    @property
    def repeat_hit_rate(self) -> float | None:
        """Share of hits among accesses of rows that were looked up before; None where there are none."""
        repeats = self.accesses - self.created_rows
        return self.hits / repeats if repeats else None


class LevelUse(ApiModel):
    """One level below the slots, of one class of tables: those of a rank that share levels."""

    group: Total = Field(description="Number of the class on its rank.")
    level: Total = Field(ge=1, description="1 is the first below the slots.")
    tier: Tier = Field(description="Memory that it lies in.")
    read_rows: Total = Field(0, description="Records that came up from it to slots.")
    written_rows: Total = Field(0, description="Records that went down to it.")
    read_bytes: Total = Field(0, description="Bytes read; for block storage those that the device was asked for.")
    written_bytes: Total = Field(0, description="Bytes written; likewise.")
    device_reads: Total = Field(0, description="Reads of single pages that reached the block device.")
    device_writes: Total = Field(0, description="Segments written to the block device.")
    cleaned_rows: Total = Field(0, description="Records moved within block storage to free a segment.")


class TierBytes(ApiModel):
    """Bytes of one rank's stacks in one tier."""

    tier: Tier = Field(description="Memory.")
    kept_bytes: Total = Field(description="Really taken: slots ever filled, maps, touched memory, file blocks.")
    planned_bytes: Total = Field(description="What the plan's rows take in it when every level is full.")


class RankUse(ApiModel):
    """One rank."""

    rank: Total = Field(description="Rank.")
    prefetch_wait_seconds: float = Field(0, ge=0, description="Time for which lookups waited for rows (s).")
    missing_lookups: Total = Field(0, description="Lookups whose row was in no slot at the batch's start: 0.")
    tables: tuple[TableUse, ...] = Field((), description="Tables with levels.")
    levels: tuple[LevelUse, ...] = Field((), description="Levels below the slots.")
    tiers: tuple[TierBytes, ...] = Field((), description="Bytes by tier.")


class TierReport(ApiModel):
    """All ranks whose tables have levels."""

    ranks: tuple[RankUse, ...] = Field(description="Ranks, in order.")


class StageTimes(ApiModel):
    """One stage of a step on one rank, over the steps that had it."""

    rank: Total = Field(description="Rank.")
    stage: str = Field(description="Stage of a step; step: their sum; '... at the end': after the last step.")
    steps: Total = Field(ge=1, description="Steps that had it.")
    mean_seconds: float = Field(ge=0, description="Mean over all of them (s).")
    median_seconds: float = Field(ge=0, description="Median over the newest 20,000 (s).")
    p99_seconds: float = Field(ge=0, description="99th percentile over the newest 20,000 (s).")


class HitRate(ApiModel):
    """Hit rate of one rank's tables with levels, over the steps since the one before."""

    rank: Total = Field(description="Rank.")
    step: Total = Field(description="Steps done.")
    accesses: Total = Field(ge=1, description="Accesses since the one before.")
    hit_rate: float = Field(ge=0, le=1, description="Share of them whose row was in a slot.")


class Profile(ApiModel):
    """``profile.json``: where the time of the last attempt's steps went."""

    stages: tuple[StageTimes, ...] = Field(description="By rank, then in the order of a step.")
    hit_rates: tuple[HitRate, ...] = Field((), description="By rank, then by step.")
