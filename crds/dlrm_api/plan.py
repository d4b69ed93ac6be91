"""The plan: which rows and columns of which table live on which rank, in which tier."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field, ValidationError

from dlrm_api.base import ApiModel, stopping_early
from dlrm_api.choice import Choice
from dlrm_api.data import MAX_VIRTUAL_SHARDS
from dlrm_api.errors import InvalidSpecError, invalid_spec
from dlrm_api.fields import Share
from dlrm_api.keys import MAX_BUCKETS
from dlrm_api.tiers import Tier
from dlrm_api.training import RowCodecs

Device = Literal["cpu", "cuda"]
ShardKind = Literal["table", "row", "column", "data", "table-row", "grid"]
StepStage = Literal["read", "tiers", "compute", "exchange", "update", "other"]
STEP_STAGES: Mapping[StepStage, tuple[str, ...]] = {
    "read": ("read",),
    "tiers": ("prefetch wait",),
    "compute": ("prepare", "forward", "backward", "device"),
    "exchange": ("exchange", "agreement"),
    "update": ("row update", "dense update"),
    "other": ("maintenance", "records"),
}
"""Stages of a predicted step, each with the trainer's stages that it stands for; cuts and evaluations are in none."""

PART_BYTES = 900_000
"""Size of one part: a ConfigMap holds 1 MiB, the rest of the object included."""
PART = re.compile(r"plan\.([0-9a-f]{16})\.([0-9]{1,4})-of-([0-9]{1,4})\.gz")
"""Key of a part: digest, number of the part, number of parts."""
MAX_RANGES = 2**16
"""Ranges of shards of all tables of a plan; with four levels each they take nearly MAX_PLAN_BYTES. An even split is one
range on any number of ranks."""
MAX_PLAN_BYTES = 2**25
"""JSON of a plan; no more is decompressed, whatever a ConfigMap claims to hold."""
MAX_SUMMARY_BYTES = 2**22
"""JSON of a plan without its tables; a rank takes about 60 bytes."""
TABLES, AFTER_TABLES = b'"tables":[', b'],"lookahead":'


class TierLevel(ApiModel):
    """Describe one level of a shard's tier stack."""

    tier: Tier = Field(description="Memory tier.")
    rows: int = Field(ge=1, description="Rows that the level may hold.")
    expected_hit_rate: Share | None = Field(
        None,
        description="Expected share of accesses (one per distinct row of a batch) that this level and those above "
        "serve. None: unknown.",
    )


class TierShare(ApiModel):
    """Describe where the rows of one shard live. Each column block has its own levels of these sizes."""

    levels: tuple[TierLevel, ...] = Field(
        (),
        max_length=4,
        description="Levels, fastest first. A row is in one level at a time. Kernels compute on the first level; the "
        "last has space for every row. A lone hbm level holds all rows. Empty: all rows are in host memory, those of "
        "data shards in the memory where ranks compute.",
    )
    policy: Literal["lru", "lfu", "mixed"] = Field("lru", description="Replacement policy of the first level.")
    ways: int = Field(0, ge=0, le=1_024, description="Slots per set of the first level. 0: fully associative.")

    @property
    def is_stack(self) -> bool:
        """Return whether rows move between levels."""
        return len(self.levels) > 1


class ShardRange(ApiModel):
    """Describe a rectangle of one table: of one rank, or shared evenly by consecutive ranks.

    The k-th of n ranks holds rows [k * rows // n, (k + 1) * rows // n) of the rectangle and all of its columns; of kind
    ``column`` columns and rows change places. A ``data`` range is the table, on every rank.
    """

    rank: int = Field(ge=0, description="First rank; 0 for a data range, which every rank holds.")
    ranks: int = Field(1, ge=1, description="Consecutive ranks that share the rectangle; 1 for a data range.")
    kind: ShardKind = Field(description="Sharding of the table.")
    row_start: int = Field(ge=0, description="First global row; of a table with buckets, first bucket.")
    row_end: int = Field(ge=0, description="One past the last global row, or bucket.")
    column_start: int = Field(ge=0, description="First column.")
    column_end: int = Field(ge=0, description="One past the last column.")
    tiers: TierShare = Field(
        TierShare(), description="Tiers of each rank's rows; of ranks whose rows differ by one, for the most rows."
    )

    def shard(self, place: int) -> ShardRange:
        """Return the shard of one rank, counted from the range's first, as a range of one rank."""
        first, last = ("column_start", "column_end") if self.kind == "column" else ("row_start", "row_end")
        start, count = getattr(self, first), getattr(self, last) - getattr(self, first)
        edges = {first: start + place * count // self.ranks, last: start + (place + 1) * count // self.ranks}
        return self.model_copy(update={"rank": self.rank + place, "ranks": 1, **edges})

    @property
    def row_counts(self) -> dict[int, int]:
        """Return how many ranks hold how many rows: two numbers that differ by one, or a single one."""
        rows = self.row_end - self.row_start
        if self.kind == "column":
            return {rows: self.ranks}
        more = rows % self.ranks
        counts = {rows // self.ranks: self.ranks - more, rows // self.ranks + 1: more}
        return {each: count for each, count in counts.items() if count}


class TablePlan(ApiModel):
    """List the shards of one table."""

    name: str = Field(description="Table.")
    column_blocks: tuple[int, ...] = Field(
        description="Edges of the column blocks, each with its own optimizer state: (0, dim) for one block."
    )
    buckets: int = Field(
        0,
        ge=0,
        le=MAX_BUCKETS,
        description="Buckets of a unique table, which its shards name in place of rows; else 0.",
    )
    ranges: tuple[ShardRange, ...] = Field(min_length=1, description="Shards, by ranges of like ranks.")

    def on(self, rank: int) -> Iterator[ShardRange]:
        """Yield the shards of one rank but those of data ranges, each as a range of one rank."""
        for each in self.ranges:
            if each.kind != "data" and each.rank <= rank < each.rank + each.ranks:
                yield each.shard(rank - each.rank)

    @property
    def shards(self) -> tuple[ShardRange, ...]:
        """Return the shards of all ranks, of which a large table has thousands, as ranges of one rank."""
        return tuple(each.shard(place) for each in self.ranges for place in range(each.ranks))


class RankPlan(ApiModel):
    """Describe one rank: its node and the bytes that it holds."""

    rank: int = Field(ge=0, description="Rank.")
    node: int = Field(ge=0, description="Index of its pod in the gang.")
    bytes_per_tier: dict[str, int] = Field(
        description="Bytes of rows, optimizer state, row maps, partial pooled vectors and hand-off, by tier. In hbm: "
        "all of the rank's GPU memory."
    )


class Prediction(ApiModel):
    """Predict one step by the cost model."""

    compute_seconds: float | None = Field(None, ge=0, description="Dense compute of the slowest rank (s).")
    lookup_seconds: dict[str, float] = Field({}, description="Lookups and updates of the slowest rank, by tier (s).")
    communication_seconds: float | None = Field(None, ge=0, description="Communication, if nothing overlaps it (s).")
    exposed_communication_seconds: float | None = Field(
        None, ge=0, description="Time for which a step waits for communication (s)."
    )
    exposed_tier_seconds: dict[str, float] = Field(
        {}, description="Time for which a step waits for rows of a tier, by tier (s)."
    )
    step_seconds: float | None = Field(None, ge=0, description="One step (s).")
    stage_seconds: dict[str, float] = Field(
        {},
        description="Time of the training thread, by stage: read (waits for the reader), tiers (waits for rows of "
        "slower tiers), compute (lookups, forward and backward), exchange (waits for ranks), update (rows and dense "
        "parameters), other.",
    )
    hit_rates: dict[str, Share] = Field(
        {}, description="Share of accesses to tables with levels that each tier serves, first accesses left out."
    )
    bound: str = Field(
        "",
        description="What bounds a step: compute, python, link, reader, files (waits for an object store), or a tier.",
    )
    samples_per_second: float | None = Field(None, ge=0, description="Throughput (samples/s).")
    price_per_billion_samples: float | None = Field(None, ge=0, description="Price of 1e9 samples.")
    imbalance: float = Field(1.0, ge=0, description="Cost of the slowest rank over the mean.")
    defaults: tuple[str, ...] = Field((), description="Fields of the HardwareProfile for which defaults stand.")
    uncalibrated: tuple[str, ...] = Field(
        (),
        description="Fields of the HardwareProfile that a plan for GPUs lacks: without them its times, throughput and "
        "price are not calibrated.",
    )


class Plan(ApiModel):
    """Describe the placement of all tables for one attempt."""

    format_version: Literal[1] = Field(1, description="Version of this document.")
    world_size: int = Field(ge=1, description="Ranks.")
    processes_per_node: int = Field(ge=1, description="Ranks of one pod.")
    hardware: str = Field("", description="HardwareProfile of the plan.")
    device: Device = Field(
        "cpu", description="Where ranks compute. cuda: on one GPU per process, which hbm needs; cpu: on the host."
    )
    virtual_shards: int = Field(
        64,
        ge=1,
        le=MAX_VIRTUAL_SHARDS,
        description="Virtual shards of the data: data.virtualShards, or chosen. Plans of earlier versions lack it.",
    )
    ranks: tuple[RankPlan, ...] = Field(description="Ranks, in order.")
    row_codecs: RowCodecs | None = Field(
        None,
        description="Wire formats of rows: those of training.communication, or chosen. Plans of earlier versions lack "
        "them.",
    )
    tables: tuple[TablePlan, ...] = Field(description="Tables, in the model's order.")
    lookahead: int = Field(0, ge=0, le=8, description="Batches ahead of the current one with prefetched rows.")
    handoff_bytes: tuple[int, ...] = Field(description="Shared-memory budget for cuts of each pod (bytes).")
    predicted: Prediction = Field(Prediction(), description="Prediction of the cost model.")
    choice: Choice | None = Field(None, description="Choice of replicas and hardware, if trainer.objective made it.")
    replanned: str = Field("", description="Why the attempt could not keep the plan of the one before it.")
    reasons: tuple[str, ...] = Field((), description="Reasons for the plan's decisions.")

    @property
    def nodes(self) -> int:
        """Return the number of trainer pods."""
        return self.world_size // self.processes_per_node


def parse_plan(text: str | bytes) -> Plan:
    """Read a plan.

    Raises:
        InvalidSpecError: the text is not a plan of this version; names the field.
    """
    try:
        plan: Plan = stopping_early(Plan).validate_json(text)
    except ValidationError as error:
        raise invalid_spec(error, "plan") from error
    return plan


def plan_to_parts(plan: Plan) -> dict[str, bytes]:
    """Compress a plan and split it into parts ``plan.<sha256>.<i>-of-<n>.gz`` that fit a ConfigMap.

    Equal plans give equal bytes, so a repeated reconcile writes what already exists.

    Raises:
        InvalidSpecError: the plan exceeds the size limit of the reader.
    """
    text = plan.model_dump_json(exclude_defaults=False).encode()
    for size, limit, what in (
        (len(text), MAX_PLAN_BYTES, f"the plan of {sum(len(table.ranges) for table in plan.tables)} ranges of shards"),
        (len(_without_tables(text)), MAX_SUMMARY_BYTES, f"the plan's list of {plan.world_size} ranks"),
    ):
        if size > limit:
            raise InvalidSpecError("spec.trainer", f"{what} takes {size} bytes, the limit is {limit}: use fewer ranks")
    body = gzip.compress(text, mtime=0)
    digest = hashlib.sha256(body).hexdigest()[:16]
    pieces = [body[i : i + PART_BYTES] for i in range(0, len(body), PART_BYTES)]
    return {f"plan.{digest}.{i}-of-{len(pieces)}.gz": piece for i, piece in enumerate(pieces)}


def plan_from_parts(parts: Mapping[str, bytes]) -> Plan:
    """Join the parts of :func:`plan_to_parts`.

    Raises:
        InvalidSpecError: a part is missing or damaged, or the parts do not hold a plan.
    """
    return parse_plan(_joined(parts))


def plan_without_tables(parts: Mapping[str, bytes]) -> Plan:
    """Join the parts without the tables, in a fraction of the time and memory: all the operator needs.

    Raises:
        InvalidSpecError: as for :func:`plan_from_parts`.
    """
    text = _without_tables(_joined(parts))
    if len(text) > MAX_SUMMARY_BYTES:
        raise _damaged(f"it takes {len(text)} bytes without its tables, the limit is {MAX_SUMMARY_BYTES}")
    return parse_plan(text)


def _joined(parts: Mapping[str, bytes]) -> bytes:
    if not parts:
        raise InvalidSpecError("plan", "no part of the plan found: mount all of its ConfigMaps")
    found: dict[int, str] = {}
    kinds = set[tuple[str, int]]()
    for name in parts:
        key = PART.fullmatch(name)
        if key is None:
            raise _damaged(f"unexpected key {name[:100]!r}")
        found[int(key[2])] = name
        kinds.add((key[1], int(key[3])))
    digest, total = min(kinds)
    body = b"".join(parts[found[number]] for number in sorted(found))
    whole = len(kinds) == 1 and sorted(found) == list(range(total)) and len(parts) == total
    if not whole or hashlib.sha256(body).hexdigest()[:16] != digest:
        raise InvalidSpecError("plan", f"found {len(parts)} of {total} parts, or one is damaged: write them again")
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = decompressor.decompress(body, MAX_PLAN_BYTES + 1)
    except zlib.error as error:
        raise _damaged(f"cannot decompress its parts ({error})") from error
    if len(text) > MAX_PLAN_BYTES:
        raise _damaged(f"it takes more than {MAX_PLAN_BYTES} bytes")
    if not decompressor.eof:
        raise _damaged("its parts are truncated")
    return text


def _without_tables(text: bytes) -> bytes:
    # The marks cannot occur inside a JSON string: its quotes would be escaped.
    start, end = text.find(TABLES), text.rfind(AFTER_TABLES)
    return text[: start + len(TABLES)] + text[end:] if 0 <= start < end else text


def _damaged(how: str) -> InvalidSpecError:
    return InvalidSpecError("plan", f"the plan is damaged: {how}: delete its ConfigMaps, then the operator replans")
