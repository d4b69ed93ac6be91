"""Measurements that a run made of itself: use of tiers by table, and time by stage of a step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dlrm_api.base import ApiModel
from dlrm_api.fields import Share
from dlrm_api.tiers import Tier

Total = Annotated[int, Field(ge=0, le=2**63 - 1)]  # a 64-bit counter


class TableUse(ApiModel):
    """Count the accesses to one table with tier levels since its rank started."""

    table: str = Field(description="Name.")
    rows: Total = Field(description="Rows of the table.")
    lookups: Total = Field(0, description="Lookups, duplicates included.")
    accesses: Total = Field(0, description="Accesses, one per distinct row of a batch.")
    hits: Total = Field(0, description="Accesses with their row in a slot when the batch was prepared.")
    created_rows: Total = Field(0, description="Rows created by their first lookup.")
    evicted_rows: Total = Field(0, description="Rows evicted from a slot.")
    scratch_rows: Total = Field(
        0, description="Rows served from scratch slots because the batches in flight needed more than all slots."
    )
    expected_hit_rate: Share | None = Field(None, description="Hit rate that the plan expects of the slots.")

    @property
    def hit_rate(self) -> float | None:
        """Return hits / accesses, or None before the first access."""
        return self.hits / self.accesses if self.accesses else None

    @property
    def repeat_hit_rate(self) -> float | None:
        """Return the hit rate among accesses to rows seen before, or None without any."""
        repeats = self.accesses - self.created_rows
        return self.hits / repeats if repeats else None


class LevelUse(ApiModel):
    """Count the transfers of one level below the slots, for the tables of a rank that share levels."""

    group: Total = Field(description="Index of the class on its rank.")
    level: Total = Field(ge=1, description="1 is the first below the slots.")
    tier: Tier = Field(description="Memory tier.")
    read_rows: Total = Field(0, description="Records moved from the level to slots.")
    written_rows: Total = Field(0, description="Records moved down to the level.")
    read_bytes: Total = Field(0, description="Bytes read. For block storage: bytes requested from the device.")
    written_bytes: Total = Field(0, description="Bytes written. For block storage: bytes sent to the device.")
    device_reads: Total = Field(0, description="Page reads that reached the block device.")
    device_writes: Total = Field(0, description="Segments written to the block device.")
    cleaned_rows: Total = Field(0, description="Records moved within block storage by segment cleaning.")


class TierBytes(ApiModel):
    """Count the bytes of one rank's stacks in one tier."""

    tier: Tier = Field(description="Memory tier.")
    kept_bytes: Total = Field(description="Bytes in use: slots ever filled, maps, touched memory, file blocks.")
    planned_bytes: Total = Field(description="Bytes in use when every level of the plan is full.")


class RankUse(ApiModel):
    """Report the tier use of one rank."""

    rank: Total = Field(description="Rank.")
    prefetch_wait_seconds: float = Field(0, ge=0, description="Time that lookups waited for rows (s).")
    missing_lookups: Total = Field(
        0, description="Lookups of rows without a slot at the start of their batch. Always 0."
    )
    tables: tuple[TableUse, ...] = Field((), description="Tables with levels.")
    levels: tuple[LevelUse, ...] = Field((), description="Levels below the slots.")
    tiers: tuple[TierBytes, ...] = Field((), description="Bytes by tier.")


class TierReport(ApiModel):
    """Report the tier use of all ranks that have tables with levels."""

    ranks: tuple[RankUse, ...] = Field(description="Ranks, in order.")


class UniqueUse(ApiModel):
    """Report how full a table of unique ids is, and count its lookups since the attempt started."""

    table: str = Field(description="Name.")
    rows: Total = Field(description="Rows in use.")
    capacity_rows: Total = Field(description="Most rows at a time.")
    fullest_bucket_ratio: Share = Field(description="Share of its rows that the fullest bucket uses.")
    directory_bytes: Total = Field(description="Bytes of the directory from ids to rows.")
    lookups: Total = Field(0, description="Lookups, duplicates included.")
    lookups_without_row: Total = Field(0, description="Lookups of ids that got no row: their bucket was full.")
    lookups_declined: Total = Field(0, description="Lookups of ids that got no row: admission declined.")
    admitted_rows: Total = Field(0, description="Rows given to ids that had none.")
    readmitted_rows: Total = Field(
        0, description="Rows given to ids that a full bucket lost within the last one or two half-lives."
    )
    evicted_rows: Total = Field(0, description="Rows taken from ids of buckets that were nearly full.")
    expired_rows: Total = Field(0, description="Rows taken from ids because of eviction.maxAgeSamples.")

    @property
    def fill(self) -> float:
        """Return rows / capacity."""
        return self.rows / self.capacity_rows

    @property
    def share_without_row(self) -> float | None:
        """Return the share of lookups of ids without a row, or None before the first lookup."""
        return (self.lookups_without_row + self.lookups_declined) / self.lookups if self.lookups else None


class SizesUse(ApiModel):
    """Report how many columns rows with ``embedding.dimension`` have, for all tables of one dim."""

    dim: Total = Field(description="Columns of the tables.")
    rows: dict[int, Total] = Field(description="Rows that have so many columns, by that number; others have none.")
    kept_bytes: Total = Field(description="Bytes of the rows, with all that is counted.")
    full_bytes: Total = Field(description="Bytes that they would take with all columns.")
    grown_rows: Total = Field(0, description="Rows that gained columns since the attempt started.")
    shrunk_rows: Total = Field(0, description="Rows that lost columns.")

    @property
    def kept_share(self) -> float:
        """Return kept / full bytes."""
        return self.kept_bytes / self.full_bytes


class MaintenanceTimes(ApiModel):
    """Report the time of maintenances of unique tables on one rank."""

    rank: Total = Field(description="Rank.")
    longest_seconds: float = Field(ge=0, description="Longest of the attempt (s).")
    last_seconds: float = Field(ge=0, description="Last one (s).")


class StageTimes(ApiModel):
    """Report the time of one stage on one rank, over the steps that had it."""

    rank: Total = Field(description="Rank.")
    stage: str = Field(description="Stage of a step. step: their sum; '... at the end': after the last step.")
    steps: Total = Field(ge=1, description="Steps that had the stage.")
    mean_seconds: float = Field(ge=0, description="Mean over all these steps (s).")
    median_seconds: float = Field(ge=0, description="Median over the newest 20,000 (s).")
    p99_seconds: float = Field(ge=0, description="99th percentile over the newest 20,000 (s).")
    longest_seconds: float = Field(ge=0, description="Longest of all these steps (s).")


class HitRate(ApiModel):
    """Report the hit rate of one rank's tables with levels since the previous report."""

    rank: Total = Field(description="Rank.")
    step: Total = Field(description="Steps done.")
    accesses: Total = Field(ge=1, description="Accesses since the previous report.")
    hit_rate: Share = Field(description="Share of these accesses with their row in a slot.")


class Profile(ApiModel):
    """Contents of ``profile.json``: step time of the last attempt by stage."""

    stages: tuple[StageTimes, ...] = Field(description="Times by rank, then in the order of a step.")
    hit_rates: tuple[HitRate, ...] = Field((), description="Hit rates by rank, then by step.")
